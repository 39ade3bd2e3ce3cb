"""Which engine solves a model."""

from enum import StrEnum


class Engine(StrEnum):
    """An engine that the user can ask for."""

    CP_SAT = "cp-sat"
    GUROBI = "gurobi"
