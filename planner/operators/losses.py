"""Losses that a model computes itself. Classes lie on dimension 1."""

import torch
from torch import Tensor
from torch.nn import functional

from planner.errors import OperatorError

_NO_CLASS = -100  # torch's default for the class that is ignored


def negative_log_likelihood_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Minus the target's input, weighted by class; the mean is divided by the sum of weights."""
    if reduction not in ("none", "mean", "sum"):
        raise OperatorError(f"reduction: expected none, mean or sum, got {reduction!r}")
    ignored = _NO_CLASS if ignore_index is None else ignore_index
    return functional.nll_loss(
        input, target.long(), weight, ignore_index=ignored, reduction=reduction
    )


def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """The negative log likelihood of the softmax, and then the logarithm of the softmax."""
    log_prob = torch.log_softmax(scores, 1)
    loss = negative_log_likelihood_loss(log_prob, labels, weights, ignore_index, reduction)
    return (loss, log_prob) if num_outputs > 1 else loss
