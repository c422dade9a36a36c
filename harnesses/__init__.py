"""Harnesses: those who run workflows and speak for them."""
