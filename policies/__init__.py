"""Policies: independent subscribers that turn what harness and engine say into controls."""
