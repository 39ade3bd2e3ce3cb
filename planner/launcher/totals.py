"""`LossTotals`: the numbers that the losses of a step are divided by.

A loss over classes is a sum over the counted targets of a microbatch, and its total is the number
of counted targets in the whole step, over all microbatches and replicas. So a step has the mean
over all its counted targets, whatever the sizes of its microbatches. Any other loss is a mean of
its microbatch, and its total is the number of microbatches.

Each rank counts in its own microbatches before the first action of a step, and the ranks add up
their counts where they meet. Of a mesh, whose devices have the same class indices, the first one's
count is added. Under an asynchronous schedule each microbatch is divided by its own totals.

A sum inside the model's graph with a denominator of its own would be one more name with a counter,
in `LossTotals.names` and `loss_totals`.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from planner.artefacts.losses import Loss
from planner.launcher.batch import Batch
from planner.launcher.device_part import DevicePart
from planner.operators.losses import IGNORED_CLASS, num_counted

Counter = Callable[[Sequence[Batch]], Tensor]
"""A count in some microbatches together, as this device has them: a scalar."""


class LossTotals:
    """The totals of all losses.

    Args:
        losses: that are trained, all of the model.
        counters: by name, the counts that this device can make from its data. A loss over classes
            is called after its output.
        reported: names of the losses that this device counts for its mesh.
    """

    def __init__(
        self, losses: Sequence[Loss], counters: Mapping[str, Counter], reported: Iterable[str]
    ) -> None:
        self._counters, self._reported = counters, frozenset(reported)
        self.names = tuple(sorted(one.output.name for one in losses if one.counts_targets))
        self._means = [one.output.name for one in losses if not one.counts_targets]
        self._users = {one.output.name for one in losses if one.is_users}

    def own(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The counts that this rank adds to those of the others; the same names on all ranks.

        Args:
            batches: its microbatches of the step.
        """
        counts = self._counts(batches, self._reported)
        return {name: counts.get(name, 0.0) for name in self.names}

    def _counts(self, batches: Sequence[Batch], names: Container[str]) -> dict[str, float]:
        counters = {name: one for name, one in self._counters.items() if name in names}
        return {name: float(count(batches)) for name, count in counters.items()} if batches else {}

    def of_step(self, counts: Mapping[str, float], num_microbatches: int) -> dict[str, float]:
        """The totals of a step, by output.

        Args:
            counts: of all ranks, added up.
            num_microbatches: of the step, over all replicas.
        """
        return {n: counts[n] for n in self.names} | dict.fromkeys(self._means, num_microbatches)

    def of_microbatch(self, batch: Batch) -> dict[str, float]:
        """The totals of one microbatch alone, by output, of losses whose targets this device has.
        One whose count is known after its forward is left out.
        """
        means = [name for name in self._means if name not in self._users]
        return self._counts([batch], self.names) | dict.fromkeys(means, 1.0)

    def is_nothing(self, totals: Mapping[str, float], counted: float) -> bool:
        """Whether this device reports the losses of a microbatch alone, and nothing counts in it.

        Args:
            totals: of the microbatch.
            counted: as `ReportedLoss` has it.
        """
        return bool(self._reported) and not (counted if self._users else any(totals.values()))


def why_nothing_counts(losses: Sequence[Loss]) -> str:
    """Why a microbatch or a step has no counted targets, as a clause.

    Args:
        losses: all of a model, each of which counts nothing.
    """
    return " and ".join(
        f"--loss {one.function} counts 0"
        if one.is_users
        else f"all targets of {one.output.name!r} are {IGNORED_CLASS}, which is ignored"
        for one in losses
    )


def loss_totals(losses: Sequence[Loss], part: DevicePart) -> LossTotals:
    """The totals of the losses of a model, as one device counts them."""
    made = {name: s for s, stage in part.stages.items() for name in stage.output_names}
    here = [one for one in losses if one.output.name in made]
    counters = {n: _counter(n) for n in (one.output.name for one in here if one.counts_targets)}
    names = (one.output.name for one in here)
    return LossTotals(losses, counters, [n for n in names if not part.places[made[n]].mesh.index])


def _counter(output: str) -> Counter:
    """Counts the targets of an output."""
    # All targets at once: on a CPU, a call of torch takes as long as to count thousands of them.
    return lambda batches: num_counted(torch.stack([one.targets[output] for one in batches]))
