"""Tests of `planner.discovery` and of `planner.operators.parts`."""
