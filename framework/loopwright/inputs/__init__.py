"""Data sources, batches and their order."""
