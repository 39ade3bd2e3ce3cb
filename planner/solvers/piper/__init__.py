"""Piper's cost model and its solvers."""
