"""How far two gradients are apart."""

from torch import Tensor

TOLERANCE = 1e-6
"""Largest difference of two gradients, of the largest magnitude of the module's: attributes of
ONNX, such as the epsilon of a normalization, are float32."""
FLOOR = 1e-6
"""A gradient whose largest magnitude is less than this part of the largest of all gradients is
compared as if it had that much: those that are zero but for rounding have no magnitude."""


def largest(gradient: Tensor | None) -> float:
    """The largest magnitude; 0 where there is no gradient."""
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().nan_to_num(nan=0.0).max())


def apart(own: Tensor | None, made: Tensor | None, floor: float) -> float:
    """The largest difference, of the largest magnitude of the first.

    Args:
        own: None is zero.
        made: None is zero.
        floor: the least magnitude to compare with.
    """
    if own is None or made is None:
        lone = largest(own if made is None else made)
        return lone / max(lone, floor) if lone > TOLERANCE * floor else 0.0
    if not own.numel():
        return 0.0
    difference = (made - own).abs()
    difference = difference.masked_fill((made == own) | (made.isnan() & own.isnan()), 0.0)
    scale = max(largest(own), floor)
    most = float(difference.max())
    return most / scale if scale else most
