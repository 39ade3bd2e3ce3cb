"""Gradients and optimizer states that are cut further than their parameters: ZeRO-1 and ZeRO-2
(Rajbhandari et al., SC 2020, section 5).

Such a parameter has a *shard* on each device: the part that the device steps. Its gradient comes by
a reduce-scatter out of the accumulated one, or, where that is cut itself, backward passes add to it
at once. After the step the parameter is gathered again from all shards. Both run in the queue of
the device, where it has one: beside the backward that goes on, and beside the next forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, fx, nn

from planner.artefacts.graph import Graph
from planner.artefacts.sharding import CHUNKS, Spec
from planner.artefacts.strategy import Stage
from planner.launcher import clocks
from planner.launcher.mesh.late_gradients import late_parameters
from planner.launcher.mesh.lines import ConversionGroup, Mesh
from planner.launcher.mesh.module import conversions_of
from planner.launcher.mesh.queue import INLINE, Pending
from planner.operators.parts.calls import free_name
from planner.operators.parts.slices import chunk_rows, joined, part_of, views_of_parts
from planner.resharding.conversion import Collective, Step
from planner.resharding.sums import (
    gather_starts,
    gathered_together,
    parameter_specs,
    state_steps,
    steps_key,
)


class OptimizerShards:
    """The shards of one device.

    Attributes:
        shards: by the names of their parameters, what the optimizer steps instead of these.
        cut_gradients: names of those whose gradients are cut as they are accumulated.

    Args:
        stage: that the device runs; of one that is not split there are no shards.
        mesh: of the stage.
        values: local parameters, by name.
        graph: the model's.
    """

    def __init__(
        self, stage: Stage, mesh: Mesh, values: Mapping[str, Tensor], graph: Graph
    ) -> None:
        self._mesh, self._values = mesh, values
        self._steps, lies = state_steps(stage, graph), parameter_specs(stage, graph)
        self._further: dict[str, Spec] = {}
        self.shards: dict[str, nn.Parameter] = {}
        cut = set()
        for name in self._steps:
            one = lies[name]
            self._further[name] = tuple(
                after if before == "R" else "R"
                for before, after in zip(one.parameter, one.state, strict=True)
            )
            # Along the first dimension it is a view, so that it takes no memory of its own: to step
            # it is to step the parameter, and `gather` overwrites that part with itself.
            part = self._mesh.local_part(values[name].detach(), self._further[name])
            self.shards[name] = nn.Parameter(part if part.is_contiguous() else part.clone())
            if one.gradient == one.state:
                cut.add(name)
        self.cut_gradients = frozenset(cut)
        self._summed = {
            name
            for name in self._steps
            if any(step.kind is Collective.REDUCE_SCATTER for step in self._steps[name].scatter)
        }
        self._gathers, starts = gathered_together(stage, graph), gather_starts(stage, graph)
        self._gathering: dict[int, Pending[None]] = {}  # by place in `_gathers`
        # Where in the forward those in the queue are followed by others.
        self._started_at = [[i for i, at in enumerate(starts) if at == k]
                            for k in range(-1, len(starts))]  # fmt: skip
        self._to_start: set[int] = set()

    @property
    def runs_beside(self) -> bool:
        """Whether gathers and scatters run beside computations."""
        return self._mesh.queue is not INLINE

    @property
    def scattered(self) -> dict[str, Tensor]:
        """The shards that get their gradients from those of their parameters."""
        return {n: one for n, one in self.shards.items() if n not in self.cut_gradients}

    def _scatter_key(self, name: str) -> str:
        """Gradients with the same key go together."""
        return f"{steps_key(self._steps[name].scatter)} {self._values[name].dtype}"

    def connect(self, module: fx.GraphModule) -> None:
        """Lets the conversions of a module give gradients that are cut to the shards, and its
        operators wait for parameters that are gathered beside them.
        """
        for name, conversion in conversions_of(module):
            if name in self.cut_gradients:
                conversion.sink = partial(_accumulate, self.shards[name])
        if not self.runs_beside:
            return
        held = {node.meta["onnx_value"]: node for node in module.graph.nodes
                if node.op == "get_attr" and "onnx_value" in node.meta}  # fmt: skip
        place = {node: i for i, node in enumerate(module.graph.nodes)}
        for i, names in enumerate(self._gathers):
            readers = [one for name in names for one in held[name].users
                       if one.target is not late_parameters]  # fmt: skip
            word = free_name(module, "gathered")
            module.add_submodule(word, _Calling(partial(self._reach, i)))
            with module.graph.inserting_before(min(readers, key=place.__getitem__)):
                module.graph.call_module(word)
        module.recompile()

    def scatter(self, names: Sequence[str]) -> Pending[float]:
        """Starts to make the gradients of some shards out of the accumulated ones; all devices of
        the mesh call it together. Gives the time of the end, on this process's clock.
        """
        return self._mesh.queue.start(partial(self._scatter, names))

    def _scatter(self, names: Sequence[str]) -> float:
        ordered = sorted(names, key=self._scatter_key)
        for _, group in groupby(ordered, key=self._scatter_key):
            alike = [*group]
            some = [one for one in (self._values[n].grad for n in alike) if one is not None]
            for step in self._steps[alike[0]].scatter:
                some = self._scattered_by(some, step)
            self._fill(alike, some)
        return clocks.now_s()

    def _scattered_by(self, some: Sequence[Tensor], step: Step) -> list[Tensor]:
        line = self._mesh.lines[step.axis]
        if step.kind is Collective.SLICE:
            return [part_of(one, line.size, step.target, line.rank) for one in some]
        shapes = [part_of(one, line.size, step.target, line.rank).shape for one in some]
        if step.target == CHUNKS:
            return self._chunks(some, shapes, line)
        every = [views_of_parts(one, line.size, step.target) for one in some]
        widths = [shape.numel() for shape in shapes]
        flat = some[0].new_empty((line.size, sum(widths)))
        for views, column in zip(every, torch.split(flat, widths, 1), strict=True):
            column.view(views.shape).copy_(views)
        return [*_apart(line.reduce_scatter(flat), shapes)]

    def _chunks(
        self, some: Sequence[Tensor], shapes: Sequence[torch.Size], line: ConversionGroup
    ) -> list[Tensor]:
        """The sums of this device's chunks of some gradients.

        Args:
            shapes: of its chunks.
        """
        widths = [chunk_rows(len(one), line.size) * one[0].numel() for one in some]
        flat = some[0].new_zeros((line.size, sum(widths)))
        for one, column in zip(some, torch.split(flat, widths, 1), strict=True):
            # There may be fewer chunks than devices.
            for row, part in zip(
                column, torch.split(one, chunk_rows(len(one), line.size)), strict=False
            ):
                row[: part.numel()] = part.flatten()
        columns = torch.split(line.reduce_scatter(flat), widths)
        both = zip(columns, shapes, strict=True)
        return [column[: shape.numel()].view(shape) for column, shape in both]

    def cut(self) -> None:
        """Before a step: takes the parts of gradients that all devices of the mesh have whole."""
        for name in self._steps:
            if name not in self._summed and name not in self.cut_gradients:
                self._fill([name], [self._cut_of(name, self._values[name].grad)])

    def _cut_of(self, name: str, whole: Tensor | None) -> Tensor | None:
        return None if whole is None else self._mesh.local_part(whole, self._further[name])

    def _fill(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            held = self.shards[name].grad
            if held is not None and gradient is not None:
                held.copy_(gradient)

    def gather(self) -> None:
        """After a step: makes the parameters out of all shards; all devices of the mesh call it
        together. In a queue that goes on beside the next forward, whose operators wait for the
        parameters that they read, and start those that are read later; whatever else reads
        parameters calls `settle` before.
        """
        self._to_start = {*range(len(self._gathers))}
        for i in self._started_at[0] if self.runs_beside else range(len(self._gathers)):
            self._start(i)

    def settle(self) -> None:
        """Waits until all parameters are there; all devices of the mesh call it together."""
        for i in range(len(self._gathers)):
            self._start(i)
        for i in range(len(self._gathers)):
            self._wait_for(i)

    def _reach(self, i: int) -> None:
        """What a forward does in front of the first reader of some parameters."""
        for later in self._started_at[1 + i]:
            self._start(later)
        self._wait_for(i)

    def _start(self, i: int) -> None:
        if i in self._to_start:
            self._to_start.remove(i)
            self._gathering[i] = self._mesh.queue.start(partial(self._gather, self._gathers[i]))

    def _wait_for(self, i: int) -> None:
        if i in self._gathering:
            self._gathering.pop(i).wait()

    @torch.no_grad()
    def _gather(self, names: Sequence[str]) -> None:
        """Gathers some parameters at once; nothing of their buffers is kept for the next ones."""
        some: list[Tensor] = [self.shards[name].detach() for name in names]
        *before, last = zip(*(self._steps[name].gather for name in names), strict=True)
        for steps in before:
            # Nothing else may hold the parts: a zip with a name would hold its last ones.
            some = [
                joined(parts, step.source, step.rows)
                for parts, step in zip(self._gathered(some, steps), steps, strict=True)
            ]
        for name, parts, step in zip(names, self._gathered(some, last), last, strict=True):
            whole = self._values[name]
            if step.source == CHUNKS:
                places = torch.split(whole, chunk_rows(step.rows, len(parts)))
                for place, part in zip(places, parts, strict=False):
                    place.copy_(part[: len(place)])
            else:
                views = views_of_parts(whole, len(parts), step.source)
                views.copy_(parts.view(views.shape))

    def _gathered(self, some: Sequence[Tensor], steps: Sequence[Step]) -> list[Tensor]:
        """(n, *shape) each, the parts of all devices of a line, in one buffer; chunks are as long
        as the largest.

        Args:
            steps: of each, alike but for numbers of rows.
        """
        line = self._mesh.lines[steps[0].axis]
        shapes = [one.shape for one in some]
        if steps[0].source == CHUNKS:
            rows = [chunk_rows(step.rows, line.size) for step in steps]
            shapes = [torch.Size((n, *one.shape[1:])) for n, one in zip(rows, some, strict=True)]
        widths = [shape.numel() for shape in shapes]
        columns = torch.split(line.all_gather(_in_a_row(some, widths)), widths, 1)
        both = zip(columns, shapes, strict=True)
        return [column.view(line.size, *shape) for column, shape in both]

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the shards out of the parameters, which have changed."""
        for name, shard in self.shards.items():
            shard.copy_(self._mesh.local_part(self._values[name], self._further[name]))


class _Calling(nn.Module):
    """A call of a function in a module, between its operators."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._function = function

    def forward(self) -> None:
        """Calls it."""
        self._function()


def _in_a_row(some: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The elements of some tensors behind each other, with zeros up to the width of each."""
    flat = some[0].new_zeros(sum(widths))
    for one, place in zip(some, torch.split(flat, list(widths)), strict=True):
        place[: one.numel()] = one.flatten()
    return flat


def _accumulate(shard: Tensor, gradient: Tensor) -> None:
    assert shard.grad is not None, "gradients are in buffers"
    shard.grad.add_(gradient)


def _apart(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Tensors out of their elements in a row."""
    start = 0
    for shape in shapes:
        count = torch.Size(shape).numel()
        yield flat[start : start + count].view(*shape)
        start += count
