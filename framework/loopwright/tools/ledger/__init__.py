"""Records which examples each step consumed, and proves that none was skipped or repeated."""
