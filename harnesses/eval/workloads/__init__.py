"""Workloads to serve: recorded, generated, or read from traces."""
