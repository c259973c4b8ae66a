"""What runs collectives."""
