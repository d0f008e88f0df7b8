"""Processes, files, signals and output of a host."""
