"""Figures of an evaluation: the loss, the accuracy, and functions of the user.

Each is a mean over all samples of all ranks, not one of means: microbatches count by their samples,
losses over classes and accuracy by the classes that are not ignored, and a loss of the user that
returns (sum, count) by its count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.artefacts.losses import Loss
from planner.operators.losses import criterion, num_counted
from planner.support.errors import LaunchError
from planner.support.named import function_named

LOSS, ACCURACY = "loss", "accuracy"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of one output.

    Attributes:
        name: "loss", "accuracy", or "module:function" of the user.
        loss: that the output has.
    """

    name: str
    loss: Loss


def metrics_of(losses: Sequence[Loss], names: Sequence[str]) -> tuple[Metric, ...]:
    """All figures of a model: for each loss itself, its accuracy where it is of classes, and the
    user's functions where there is a target.

    Args:
        names: "module:function"s of (output, target) -> number.
    """
    found = []
    for loss in losses:
        found.append(Metric(LOSS, loss))
        if loss.class_dim is not None:
            found.append(Metric(ACCURACY, loss))
        found += [Metric(name, loss) for name in names if loss.has_target]
    return tuple(found)


def sum_of(metric: Metric, output: Tensor, target: Tensor | None) -> tuple[float, float]:
    """A figure of some samples, summed over what counts in it, and how much that is.

    Raises:
        LaunchError: if a function of the user fails, or returns no number.
    """
    loss = metric.loss
    counts = float(output.shape[0]) if output.dim() else 1.0
    if loss.class_dim is not None and target is not None:
        counts = float(num_counted(target))
        if not counts:
            return 0.0, 0.0
    if metric.name == LOSS:
        value, count = criterion(loss)(output, target)
        if loss.counts_targets or count is not None:
            return value.item(), counts if count is None else count
        return value.item() * counts, counts
    assert target is not None, "without a target there is only a loss"
    if metric.name == ACCURACY:
        assert loss.class_dim is not None
        return float((output.argmax(loss.class_dim) == target).sum()), counts
    rows = float(output.shape[0])
    return _users(metric.name, output, target) * rows, rows


def _users(name: str, output: Tensor, target: Tensor) -> float:
    function = function_named(name, "--metric", LaunchError)
    try:
        value = function(output, target)
    except Exception as error:
        raise LaunchError(f"--metric {name}: {type(error).__name__}: {error}") from error
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LaunchError(
            f"--metric {name}: expected a number, or a tensor of one, got {type(value).__name__}"
        )
    return float(value)


class Meter:
    """Adds up figures.

    Args:
        metrics: the same on all ranks.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self._sums = torch.zeros(2 * len(metrics), dtype=torch.float64)

    def add(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Counts the figures of the outputs that are there."""
        for i, metric in enumerate(self.metrics):
            output = outputs.get(metric.loss.output.name)
            if output is not None:
                target = targets.get(metric.loss.output.name)
                value, counts = sum_of(metric, output, target)
                self._sums[2 * i] += value
                self._sums[2 * i + 1] += counts

    def sums(self) -> list[float]:
        """Of this rank."""
        return [float(one) for one in self._sums.tolist()]

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        """The figures by name.

        Args:
            sums: of all ranks, added up. Losses of several outputs are added; other figures are
                called after their outputs then.
        """
        found: dict[str, float] = {}
        several = len({one.loss.output.name for one in self.metrics}) > 1
        for metric, total, counts in zip(self.metrics, sums[::2], sums[1::2], strict=True):
            mean, name = total / counts if counts else math.nan, metric.name.rpartition(":")[2]
            if metric.name == LOSS:
                found[LOSS] = found.get(LOSS, 0.0) + mean
            else:
                found[f"{name} of {metric.loss.output.name}" if several else name] = mean
        return found
