"""Watching a bus: ``hear tap`` as lines or as a screen, and ``hear status``, one look."""
