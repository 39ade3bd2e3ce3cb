"""Measured times between devices -> a topology."""
