"""The groups of checks, one module each."""
