"""`LossTotals`: the numbers that the losses of a step are divided by.

A loss over classes is a sum over the counted targets of a microbatch, and its total is the number
of counted targets in the whole step, over all microbatches and replicas. So a step has the mean
over all its counted targets, whatever the sizes of its microbatches. Any other loss is a mean of
its microbatch, and its total is the number of microbatches.

A loss that the model computes itself may have denominators within the graph. Each is a total, too:
the operators that divide by it take it from the step.

Each rank counts in its own microbatches before the first action of a step, and the ranks add up
their counts where they meet. Of a mesh, whose devices have the same class indices, the first one's
count is added. Under an asynchronous schedule each microbatch is divided by its own totals.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import isinf
from typing import cast

import torch
from torch import Tensor

from planner.launcher.batch import Batch
from planner.launcher.denominators import Denominator, Denominators, inputs_of, makers
from planner.launcher.device_part import DevicePart
from planner.launcher.job import TrainingJob
from planner.model.load import Model
from planner.operators import parameters, to_torch
from planner.operators.losses import IGNORED_CLASS, num_counted

Counter = Callable[[Sequence[Batch]], Tensor]
"""A count in some microbatches together, as this device has them: a scalar."""


class LossTotals:
    """The totals of all losses.

    Attributes:
        names: of all counts, the same on all ranks.

    Args:
        job: what is trained.
        counters: by name, the counts that this device can make from its data. A loss over classes
            is called after its output.
        reported: names of the losses and denominators that this device has for its mesh.
    """

    def __init__(
        self, job: TrainingJob, counters: Mapping[str, Counter], reported: Iterable[str]
    ) -> None:
        self._losses = dict(zip(job.losses, job.denominators, strict=True))
        self._counters, self._reported = counters, frozenset(reported)
        self._denominators = {one.name: one for each in job.denominators for one in each.of}
        names = {one.output.name for one in job.losses if one.counts_targets}
        self.names = tuple(sorted(names | self._denominators.keys()))

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
        """The totals of a step: of losses by output, of denominators by name. The total of a loss
        is 0 if nothing counts in it.

        Args:
            counts: of all ranks, added up.
            num_microbatches: of the step, over all replicas.
        """
        totals = {
            name: one.of_step(counts[name], num_microbatches)
            for name, one in self._denominators.items()
            if name in counts
        }
        for loss, inside in self._losses.items():
            name = loss.output.name
            if loss.counts_targets:
                totals.update({name: counts[name]} if name in counts else {})
            else:
                found = [totals.get(one.name, 0.0) for one in inside.of]
                nothing = inside.complete and all(map(isinf, found))
                totals[name] = 0.0 if nothing else float(num_microbatches)
        return totals

    def of_microbatch(self, batch: Batch) -> dict[str, float]:
        """The totals of one microbatch alone, of losses whose targets and denominators this device
        has. One whose count is known after its forward is left out.
        """
        totals = self.of_step(self._counts([batch], self.names), 1)
        users = {one.output.name for one in self._losses if one.is_users}
        return {name: total for name, total in totals.items() if name not in users}

    def counts_any(self, totals: Mapping[str, float]) -> bool:
        """Whether something counts in a loss.

        Args:
            totals: as `of_step` and `of_microbatch` give them.
        """
        return any(totals.get(one.output.name) for one in self._losses)

    def is_nothing(self, totals: Mapping[str, float], counted: float) -> bool:
        """Whether this device reports the losses of a microbatch alone, and nothing counts in it.

        Args:
            totals: of the microbatch.
            counted: as `ReportedLoss` has it.
        """
        here = [one for one in self._losses if one.output.name in self._reported]
        if any(one.is_users for one in here):
            return not counted
        return bool(here) and not self.counts_any(totals)


def why_nothing_counts(job: TrainingJob) -> str:
    """Why a microbatch or a step has no counted targets, as a clause.

    Args:
        job: with losses that all count nothing.
    """
    return " and ".join(
        f"--loss {one.function} counts 0"
        if one.is_users
        else f"all targets of {one.output.name!r} are {IGNORED_CLASS}, which is ignored"
        if one.has_target
        else f"nothing counts in {_inputs(job, inside)}, by which {one.output.name!r} is divided"
        for one, inside in zip(job.losses, job.denominators, strict=True)
    )


def _inputs(job: TrainingJob, inside: Denominators) -> str:
    """The inputs that denominators are counted in."""
    read = {n for one in inside.of for n in inputs_of(one.summed, job.model.graph)}
    return " and ".join(f"input {name!r}" for name in job.model.graph.inputs if name in read)


def loss_totals(job: TrainingJob, part: DevicePart) -> LossTotals:
    """The totals of the losses of a model, as one device counts them."""
    index = {one.name: v for v, one in enumerate(job.model.nodes)}
    counters: dict[str, Counter] = {}
    reported = set[str]()
    for s, stage in part.stages.items():
        place = part.places[s]
        losses = [one for one in job.losses if one.output.name in stage.output_names]
        operators = {index[name] for name in place.stage.operators}
        divided = [one for one in part.denominators if one.operator in operators]
        for loss in losses:
            if loss.counts_targets:
                counters[loss.output.name] = _counter(loss.output.name)
        for one in divided:
            counters[one.name] = _DenominatorCounter(job.model, one)
        if place.mesh.index == 0:
            reported |= {one.output.name for one in losses} | {one.name for one in divided}
    return LossTotals(job, counters, reported)


def _counter(output: str) -> Counter:
    """Counts the targets of an output."""
    # All targets at once: on a CPU, a call of torch takes as long as to count thousands of them.
    return lambda batches: num_counted(torch.stack([one.targets[output] for one in batches]))


class _DenominatorCounter:
    """Counts a denominator of the model, by the operators that make it of inputs.

    Args:
        denominator: of an operator of the model.
    """

    def __init__(self, model: Model, denominator: Denominator) -> None:
        self._denominator, summed = denominator, denominator.summed
        self._module = to_torch(model, makers(summed, model.graph))
        self._read = cast(tuple[str, ...], self._module.input_names)
        self._made = cast(tuple[str, ...], self._module.output_names)
        held = [name for name in summed if name not in {*self._made, *model.graph.inputs}]
        self._constants = parameters(model, held, "cpu")

    @torch.no_grad()
    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """The count in some microbatches together, a scalar."""
        each = [self._summed(one) for one in batches]
        first = torch.stack([one[0] for one in each])
        if self._denominator.ignored is None:
            return first.double().sum()
        counted = first != self._denominator.ignored
        if len(each[0]) == 1:
            return torch.count_nonzero(counted)
        # The operator itself refuses a label beyond the classes.
        weights = torch.stack([one[1].double() for one in each])
        inside = counted & (first >= 0) & (first < weights.shape[1])
        labels = torch.where(inside, first, 0).long().flatten(1)
        return (weights.gather(1, labels) * inside.flatten(1)).sum()

    def _summed(self, batch: Batch) -> list[Tensor]:
        """The tensors of a microbatch that it counts in."""
        known = {**self._constants, **batch.inputs, **batch.counted}
        if self._made:
            results = self._module(*(known[name] for name in self._read))
            known.update(zip(self._made, results, strict=True))
        return [known[name] for name in self._denominator.summed]
