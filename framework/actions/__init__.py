"""What happens between loops."""
