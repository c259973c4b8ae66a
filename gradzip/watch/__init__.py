"""What is watched while training runs: reports of the compression, equality of the replicas."""
