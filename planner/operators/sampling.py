"""Operators that draw random numbers; `randomness.py` says which."""

import torch
from torch import Tensor

from planner.operators import randomness
from planner.operators.running import evaluates
from planner.support.errors import OperatorError


def dropout(
    data: Tensor,
    ratio: float = 0.5,
    training_mode: float = 0,
    is_test: int = 1,
    seed: int | None = None,
    always: int = 0,
    *,
    node: str,
    version: int,
    num_outputs: int,
    read_outputs: tuple[bool, ...],
) -> Tensor | tuple[Tensor | None, ...]:
    """Elements dropped with probability `ratio`, the others divided by 1 - ratio; then the mask.

    It trains where the input `training_mode` says so (from version 12 on), or where `is_test` is 0
    (before version 7). All other versions have no training mode. A Dropout that does not train
    keeps everything. With `always`, it drops in evaluation, too.

    Raises:
        OperatorError: if the ratio is not in [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise OperatorError(f"ratio: expected a number from 0 to 1, got {ratio}")
    training = bool(training_mode) if version >= 12 else version < 7 and not is_test
    kind = torch.bool if version >= 10 else data.dtype
    if not training or ratio == 0 or (evaluates() and not always):
        keeping = num_outputs > 1 and read_outputs[1]
        mask = torch.ones_like(data, dtype=kind) if keeping else None
        return (data, mask) if num_outputs > 1 else data
    kept = randomness.dropout_mask(node, data.shape, ratio, data.device, seed)
    # Autograd keeps the mask alone, a byte per element: a product with a number keeps nothing.
    y = data * (0.0 if ratio == 1 else 1 / (1 - ratio)) * kept
    return (y, kept.to(kind)) if num_outputs > 1 else y


def random_normal(
    input: Tensor | None = None,
    shape: tuple[int, ...] = (),
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    *,
    dtype: torch.dtype,
    device: str,
    node: str,
) -> Tensor:
    """Normal numbers with this mean and standard deviation; in the shape of the input, if any."""
    size, place = (shape, device) if input is None else (input.shape, input.device)
    return mean + scale * randomness.standard_normal(node, size, dtype, place, seed)


def random_uniform(
    input: Tensor | None = None,
    shape: tuple[int, ...] = (),
    low: float = 0.0,
    high: float = 1.0,
    seed: float | None = None,
    *,
    dtype: torch.dtype,
    device: str,
    node: str,
) -> Tensor:
    """Numbers uniform in [low, high); in the shape of the input, if any."""
    size, place = (shape, device) if input is None else (input.shape, input.device)
    return low + (high - low) * randomness.standard_uniform(node, size, dtype, place, seed)


def bernoulli(input: Tensor, seed: float | None = None, *, dtype: torch.dtype, node: str) -> Tensor:
    """1 with the probability that the input gives for each element, else 0."""
    drawn = randomness.standard_uniform(node, input.shape, input.dtype, input.device, seed)
    return (drawn < input).to(dtype)


def multinomial(
    input: Tensor,
    sample_size: int,
    seed: float | None = None,
    *,
    dtype: torch.dtype,
    node: str,
) -> Tensor:
    """Indices of classes, drawn with replacement.

    Args:
        input: (B, C) logarithm of the probability of each class, up to a constant per row.
        sample_size: number of draws per row.

    Returns:
        (B, sample_size) indices.
    """
    return randomness.classes(node, input, sample_size, seed).to(dtype)
