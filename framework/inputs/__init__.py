"""What is read, and in which order."""
