"""What models are made of: attention."""
