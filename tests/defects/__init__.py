"""Broken tasks: mistakes that people make, each of which verification must find and name."""
