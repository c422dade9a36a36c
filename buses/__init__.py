"""Buses: the ways in which HEAR's messages travel. Each implements ``hear.interfaces.Bus``."""
