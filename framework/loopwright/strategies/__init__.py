"""Devices, and communication between replicas."""
