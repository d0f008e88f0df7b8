"""Devices, and communication between replicas and processes."""
