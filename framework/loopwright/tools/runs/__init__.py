"""Run folders, listed and compared."""
