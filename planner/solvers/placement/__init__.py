"""Placements of single operators on devices: their problem, their times, their solvers."""
