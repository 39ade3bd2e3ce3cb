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

from collections.abc import Callable, Iterable, Mapping
from math import isinf
from typing import cast

import torch
from torch import Tensor

from planner.launcher.batch import Batch
from planner.launcher.denominators import Denominator, makers
from planner.launcher.device_part import DevicePart
from planner.launcher.job import TrainingJob
from planner.model.load import Model
from planner.operators import parameters, to_torch
from planner.operators.losses import num_counted

Counter = Callable[[Batch], Tensor]
"""A count in a microbatch, as this device has it: a scalar."""


class LossTotals:
    """The totals of all losses.

    Attributes:
        names: of all counts, the same on all ranks.

    Args:
        job: what is trained.
        counters: by name, the counts that this device can make from its data. A loss over classes
            is called after its output.
        added: names of those that are added to the other ranks' counts.
    """

    def __init__(
        self, job: TrainingJob, counters: Mapping[str, Counter], added: Iterable[str]
    ) -> None:
        self._losses = tuple(zip(job.losses, job.denominators, strict=True))
        self._counters, self._added = counters, frozenset(added)
        names = {one.output.name for one in job.losses if one.counts_targets}
        names |= {one.name for _, inside in self._losses for one in inside.of}
        self.names = tuple(sorted(names))

    def counts(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The counts of this device in some microbatches, each summed over them, by name."""
        each = [count(batch).double() for batch in batches for count in self._counters.values()]
        if not each:
            return {}
        # One transfer from the device.
        sums = torch.stack(each).view(-1, len(self._counters)).sum(0).tolist()
        return dict(zip(self._counters, sums, strict=True))

    def own(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The counts that this rank adds to those of the others; the same names on all ranks."""
        counts = self.counts(batches) if self._added else {}
        return {n: counts.get(n, 0.0) if n in self._added else 0.0 for n in self.names}

    def of_step(self, counts: Mapping[str, float], num_microbatches: int) -> dict[str, float]:
        """The totals of a step: of losses by output, of denominators by name. The total of a loss
        is 0 if nothing counts in it.

        Args:
            counts: of all ranks, added up.
            num_microbatches: of the step, over all replicas.
        """
        totals = self._of_denominators(counts, num_microbatches)
        for loss, inside in self._losses:
            name = loss.output.name
            nothing = inside.complete and all(isinf(totals[d.name]) for d in inside.of)
            mean_over = 0 if nothing else num_microbatches
            totals[name] = counts[name] if loss.counts_targets else mean_over
        return totals

    def of_microbatch(self, batch: Batch) -> dict[str, float]:
        """The totals of one microbatch alone, of losses whose targets and denominators this device
        has. One whose count is known after its forward is left out.
        """
        counts = self.counts([batch])
        losses = (loss for loss, _ in self._losses)
        means = (one for one in losses if not one.counts_targets and not one.is_users)
        return {
            **counts,
            **self._of_denominators(counts, 1),
            **{one.output.name: 1.0 for one in means},
        }

    def _of_denominators(self, counts: Mapping[str, float], num: int) -> dict[str, float]:
        """The denominators in some microbatches, by name; those without a count are left out."""
        every = {one.name: one for _, inside in self._losses for one in inside.of}
        return {n: d.of_step(counts[n], num) for n, d in every.items() if n in counts}


def loss_totals(job: TrainingJob, part: DevicePart) -> LossTotals:
    """The totals of the losses of a model, as one device counts them."""
    counters: dict[str, Counter] = {}
    added = set()
    for s, stage in part.stages.items():
        here = set[str]()
        for loss in job.losses:
            name = loss.output.name
            if loss.counts_targets and name in stage.output_names:
                counters[name] = _counter(name)
                here.add(name)
        operators = part.places[s].stage.operators
        for one in part.denominators:
            if job.model.nodes[one.operator].name in operators:
                counters[one.name] = _DenominatorCounter(job.model, one, job.device)
                here.add(one.name)
        if part.places[s].mesh.index == 0:
            added |= here
    return LossTotals(job, counters, added)


def _counter(output: str) -> Counter:
    """Counts the targets of an output."""
    return lambda batch: num_counted(batch.targets[output])


class _DenominatorCounter:
    """Counts a denominator of the model in a microbatch, by the operators that make it of inputs.

    Args:
        denominator: of an operator of the model.
        device: of the data.
    """

    def __init__(self, model: Model, denominator: Denominator, device: str) -> None:
        self._denominator, summed = denominator, denominator.summed
        self._module = to_torch(model, makers(summed, model.graph), device=device)
        self._read = cast(tuple[str, ...], self._module.input_names)
        self._made = cast(tuple[str, ...], self._module.output_names)
        held = [name for name in summed if name not in {*self._made, *model.graph.inputs}]
        self._constants = parameters(model, held, device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """The count, a scalar."""
        known = {**self._constants, **batch.inputs, **batch.counted}
        results = self._module(*(known[name] for name in self._read))
        known.update(zip(self._made, results, strict=True))
        first, *others = (known[name] for name in self._denominator.summed)
        if self._denominator.ignored is None:
            return first.reshape(())
        counted = first != self._denominator.ignored
        if not others:
            return counted.sum()
        # The operator itself refuses a label beyond the classes.
        (weights,) = others
        inside = counted & (first >= 0) & (first < len(weights))
        return weights.double()[first[inside].long()].sum()
