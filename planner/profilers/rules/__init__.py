"""How the operators of a model can be split, found out by running them on parts."""

from planner.profilers.rules.discover import split_rules, with_rules

__all__ = ["split_rules", "with_rules"]
