"""What a method is: the bases that methods derive from."""
