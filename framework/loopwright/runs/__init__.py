"""The course of a run: from its options to its last line."""
