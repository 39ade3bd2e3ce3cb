"""The solvers; `planning` prices and simulates their strategies."""

from planner.solvers.registry import SOLVERS

__all__ = ["SOLVERS"]
