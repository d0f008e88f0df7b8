"""The tools of the checks."""
