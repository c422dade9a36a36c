"""Engines: the worker that serves every engine, and the backends behind it."""
