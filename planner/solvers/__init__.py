"""The solvers. What they find is judged by `judging`."""

from planner.solvers.registry import SOLVERS

__all__ = ["SOLVERS"]
