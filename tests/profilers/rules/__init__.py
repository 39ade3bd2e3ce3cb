"""Tests of `planner.profilers.rules` and of `planner.operators.parts`."""
