"""What methods remember between steps."""
