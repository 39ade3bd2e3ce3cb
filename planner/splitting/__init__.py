"""Operators split over the devices of a mesh: what follows from a stage's rules, without torch."""

from planner.splitting.conversion import Kind, Step, conversion
from planner.splitting.gradients import gradient_spec
from planner.splitting.pieces import Piece, pieces
from planner.splitting.reshardings import Resharding, reshardings

__all__ = [
    "Kind",
    "Piece",
    "Resharding",
    "Step",
    "conversion",
    "gradient_spec",
    "pieces",
    "reshardings",
]
