"""`Mesh`: this device's place in the mesh of its stage, and the lines of devices that it is in.

A *line* are the devices along one axis that share all other coordinates. Each collective of a
stage runs in one line.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.artefacts.graph import Graph
from planner.artefacts.sharding import Spec
from planner.artefacts.strategy import Stage, Strategy
from planner.launcher.mesh.queue import INLINE, CollectiveQueue
from planner.operators.parts.line import MeshAxisGroup
from planner.operators.parts.slices import local_part
from planner.resharding.over_replicas import with_axes
from planner.resharding.sums import coordinates

# Since 2.13 under other names.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LONGEST_HOLD_S, PAUSE_S = 0.01, 2e-5
"""For so long a collective waits until gloo's threads have let go of its tensors, and for so long
at a time: such a thread needs the interpreter's lock for that, and maybe this thread's core."""

HELD_BYTES = 2**16
"""Smaller tensors are not waited for."""


class ConversionGroup(MeshAxisGroup, Protocol):
    """A line of devices with the collectives of conversions. All devices call the same methods in
    the same order, with contiguous tensors of equal shapes.
    """

    def all_gather(self, part: Tensor) -> Tensor:
        """(n, *shape) the tensors of all devices."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """(n, *shape) the tensor of each device for this one.

        Args:
            parts: (n, *shape) the tensor of this device for each.
        """

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """The sum over all devices of their tensors for this one.

        Args:
            parts: (n, *shape) the tensor of this device for each.
        """


class ProcessGroupAxis:
    """A line of processes.

    Args:
        group: its process group.
        ranks: of the processes, in the order of the line. The group has them in ascending order.
        rank: of this process.
        peer_errors: gives a context that tells errors of transfers from others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        peer_errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._group, self._peer_errors = group, peer_errors
        self._ranks, ascending = tuple(ranks), sorted(ranks)
        # Where each process of the line is in the group, and the other way round.
        self._in_group = [ascending.index(one) for one in ranks]
        self._in_line = [ranks.index(one) for one in ascending]
        self._sorted = [*ranks] == ascending

    def _to_group(self, parts: Tensor) -> Tensor:
        return parts if self._sorted else parts[self._in_line]

    def _from_group(self, parts: Tensor) -> Tensor:
        return parts if self._sorted else parts[self._in_group]

    def all_gather(self, part: Tensor) -> Tensor:
        """As `ConversionGroup.all_gather`."""
        every = part.new_empty((self.size, *part.shape))
        self._run(_GATHER, _bytes(every), _bytes(part))
        return self._from_group(every)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.all_to_all`."""
        come, go = torch.empty_like(parts), self._to_group(parts)
        self._run(dist.all_to_all_single, _bytes(come), _bytes(go))
        return self._from_group(come)

    def all_reduce(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce`."""
        return self._reduced(own, dist.ReduceOp.SUM)

    def all_reduce_max(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce_max`."""
        return self._reduced(own, dist.ReduceOp.MAX)

    def _reduced(self, own: Tensor, how: Any) -> Tensor:
        total = own.detach().clone(memory_format=torch.contiguous_format)
        self._run(partial(dist.all_reduce, op=how), total.view(-1))
        return total

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `MeshAxisGroup.exchange`."""
        front, back = torch.zeros_like(after), torch.zeros_like(before)
        posts = []
        if self.rank > 0:
            posts += self._both_ways(self._ranks[self.rank - 1], before, front)
        if self.rank < self.size - 1:
            posts += self._both_ways(self._ranks[self.rank + 1], after, back)
        with self._peer_errors():
            for work in dist.batch_isend_irecv(posts):
                work.wait()
        return front, back

    def _both_ways(self, rank: int, out: Tensor, into: Tensor) -> list[dist.P2POp]:
        ends = ((dist.isend, out), (dist.irecv, into))
        return [
            dist.P2POp(post, _bytes(one), rank, self._group) for post, one in ends if one.numel()
        ]

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.reduce_scatter`."""
        if parts.is_cpu:
            # Gloo's own does the work of an all-reduce: 1.1 to 1.6 times as long as this on two
            # processes of one host and 2.6 to 5 times on four, of 64 KiB to 16 MiB (November 2026).
            return self.all_to_all(parts).sum(0, dtype=parts.dtype)
        own, go = parts.new_empty(parts.shape[1:]), self._to_group(parts)
        self._run(_SCATTER, own.view(-1), go.view(-1))
        return own

    def _run(self, collective: Callable[..., object], *views: Tensor) -> None:
        """Runs a collective on views that nobody else has. A thread of gloo's holds them, and their
        storages, until some time after the end; where they are large, that is waited for, so that
        they can be freed.
        """
        with self._peer_errors():
            collective(*views, group=self._group)
        if views[0].is_cpu:
            held = [weakref.ref(view) for view in views if view.nbytes >= HELD_BYTES]
            del views
            until = time.monotonic() + LONGEST_HOLD_S
            while any(ref() is not None for ref in held) and time.monotonic() < until:
                time.sleep(PAUSE_S)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor; gloo knows few types of elements, and bytes are one."""
    return tensor.view(-1).view(torch.uint8)


class SingleDeviceAxis:
    """A line of one device, along an axis of size 1."""

    rank, size = 0, 1

    def all_gather(self, part: Tensor) -> Tensor:
        """As `ConversionGroup.all_gather`."""
        return part[None]

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.all_to_all`."""
        return parts

    def all_reduce(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce`."""
        return own

    def all_reduce_max(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce_max`."""
        return own

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `MeshAxisGroup.exchange`."""
        return torch.zeros_like(after), torch.zeros_like(before)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.reduce_scatter`."""
        return parts[0]


class QueuedLine:
    """A line whose collectives go through the queue of this device, and are waited for.

    Args:
        line: itself.
        queue: of the device.
    """

    def __init__(self, line: ConversionGroup, queue: CollectiveQueue) -> None:
        self.rank, self.size = line.rank, line.size
        self._line, self._queue = line, queue

    def all_gather(self, part: Tensor) -> Tensor:
        """As `ConversionGroup.all_gather`."""
        return self._queue.start(self._line.all_gather, part).wait()

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.all_to_all`."""
        return self._queue.start(self._line.all_to_all, parts).wait()

    def all_reduce(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce`."""
        return self._queue.start(self._line.all_reduce, own).wait()

    def all_reduce_max(self, own: Tensor) -> Tensor:
        """As `MeshAxisGroup.all_reduce_max`."""
        return self._queue.start(self._line.all_reduce_max, own).wait()

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """As `MeshAxisGroup.exchange`."""
        return self._queue.start(self._line.exchange, before, after).wait()

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """As `ConversionGroup.reduce_scatter`."""
        return self._queue.start(self._line.reduce_scatter, parts).wait()


@dataclass(frozen=True, slots=True)
class Mesh:
    """This device's place in the mesh of its stage; that of a stage that is not split has no axes.

    Attributes:
        sizes: of the axes.
        index: position of this device in the mesh, row-major.
        lines: of this device, by axis.
        queue: that their collectives go through.
    """

    sizes: tuple[int, ...]
    index: int
    lines: Sequence[ConversionGroup]
    queue: CollectiveQueue = INLINE

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Of this device, by axis."""
        return coordinates(self.index, self.sizes)

    def local_part(self, whole: Tensor, spec: Spec) -> Tensor:
        """The part of a whole tensor that this device has; of a summand, all."""
        return local_part(whole, spec, self.sizes, self.coordinates)


def queued(mesh: Mesh, queue: CollectiveQueue) -> Mesh:
    """A mesh whose collectives go through a queue."""
    lines = [QueuedLine(one, queue) if one.size > 1 else one for one in mesh.lines]
    return replace(mesh, lines=lines, queue=queue)


def replica_and_index(stage: Stage, device: int) -> tuple[int, int]:
    """The replica of a device in a stage, and its position in the replica's mesh."""
    return next(
        (replica, group.index(device))
        for replica, group in enumerate(stage.groups)
        if device in group
    )


def line_of(sizes: tuple[int, ...], index: int, axis: int) -> tuple[int, ...]:
    """The positions of the devices that are in one line with a device, along an axis.

    >>> line_of((2, 3), 4, 0), line_of((2, 3), 4, 1)
    ((1, 4), (3, 4, 5))
    """
    step = 1
    for size in sizes[axis + 1 :]:
        step *= size
    first = index - coordinates(index, sizes)[axis] * step
    return tuple(first + k * step for k in range(sizes[axis]))


def lines_of(stage: Stage, device: int) -> list[tuple[int, ...]]:
    """The devices of the lines that a device of a stage is in, by axis."""
    replica, index = replica_and_index(stage, device)
    sizes, group = stage.mesh, stage.groups[replica]
    return [tuple(group[i] for i in line_of(sizes, index, a)) for a in range(len(sizes))]


def all_lines(strategy: Strategy, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The devices of all lines of all stages, replicas that share among them, each line of several
    devices once, in one order for all ranks.
    """
    every = (
        lines_of(stage, device)[axis]
        for stage in with_axes(strategy, graph).stages
        for group in stage.groups
        for axis in range(len(stage.mesh))
        for device in group
    )
    return tuple(dict.fromkeys(line for line in every if len(line) > 1))
