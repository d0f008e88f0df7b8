"""What the checks are made of."""
