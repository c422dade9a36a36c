"""The worker that joins any engine to a bus: its loop, its tenants, and what it remembers."""
