"""Asynchronous training: workers compute, servers store the variables, one chief coordinates."""
