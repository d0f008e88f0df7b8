"""The proof of what was read."""
