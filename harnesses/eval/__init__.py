"""Policies compared: workloads, replays, runs on real engines, and reports."""
