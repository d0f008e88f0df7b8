"""Example tasks, one per file, each usable from a gin file."""
