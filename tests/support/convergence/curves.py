"""What a training leaves: the loss of each step, and figures of the evaluation after each epoch."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Curves:
    """The course of a training.

    Attributes:
        losses: of each step, before the step.
        judged_losses: of the evaluation after each epoch.
        accuracies: the same, as shares.
    """

    losses: list[float] = field(default_factory=list)
    judged_losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def judge(self, loss: float, accuracy: float) -> None:
        """Adds the figures of one more evaluation."""
        self.judged_losses.append(loss)
        self.accuracies.append(accuracy)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))


def read_curves(path: Path) -> Curves:
    """What `Curves.write` has written."""
    return Curves(**json.loads(path.read_text()))


def of_log(path: Path) -> Curves:
    """What `planner launch --log-file` has written."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    evaluations = [line["evaluation"] for line in lines if "evaluation" in line]
    return Curves(
        losses=[line["loss"] for line in lines if "loss" in line],
        judged_losses=[figures["loss"] for figures in evaluations],
        accuracies=[figures["accuracy"] for figures in evaluations],
    )


def apart(one: Iterable[float], other: Iterable[float]) -> float:
    """The largest difference of two curves.

    >>> apart([1.0, 2.0], [1.0, 2.5])
    0.5
    """
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
