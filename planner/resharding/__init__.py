"""Operators split over the devices of a mesh: what follows from a stage's rules, without torch."""

from planner.resharding.conversion import Collective, Step, conversion
from planner.resharding.gradients import gradient_spec
from planner.resharding.pieces import Piece, pieces
from planner.resharding.reshardings import Resharding, reshardings

__all__ = [
    "Collective",
    "Piece",
    "Resharding",
    "Step",
    "conversion",
    "gradient_spec",
    "pieces",
    "reshardings",
]
