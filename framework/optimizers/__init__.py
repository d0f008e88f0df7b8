"""What an update changes, and what takes it back."""
