"""What the trainer and the step consist of."""
