"""Worked examples: one file a task, each ready to be named in a gin file."""
