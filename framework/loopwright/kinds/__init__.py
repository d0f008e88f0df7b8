"""Strategies beyond one process: loaded when named, never by the core."""
