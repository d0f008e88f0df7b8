"""What runs between training loops and after evaluations."""
