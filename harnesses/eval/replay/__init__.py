"""Replaying recorded or generated workloads through the whole loop, on the virtual clock."""
