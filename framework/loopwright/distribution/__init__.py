"""What the framework asks of a strategy, and the one reduction."""
