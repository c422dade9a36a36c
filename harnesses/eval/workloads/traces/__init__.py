"""Traces that people have; ``formats.read`` finds out in which format a file is."""
