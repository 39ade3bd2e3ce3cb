"""`Mesh`: this device's place in the mesh of its stage, and the lines of devices that it is in.

A *line* are the devices along one axis that share all other coordinates. Each collective of a
stage runs in one line.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import LaunchError
from planner.splitting.sums import coordinates
from planner.strategy import Stage, Strategy

# Since 2.13 under other names.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Line(Protocol):
    """The devices along one axis of a mesh, and what they do together. All of them call the same
    methods in the same order, with contiguous tensors of equal shapes.

    Attributes:
        rank: the position of this device.
        size: n, the number of devices.
    """

    rank: int
    size: int

    def all_gather(self, part: Tensor) -> Tensor:
        """(n, *shape) the tensors of all devices."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """(n, *shape) the tensor of each device for this one.

        Args:
            parts: (n, *shape) the tensor of this device for each.
        """

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum over all devices, in place."""

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """The sum over all devices of their tensors for this one.

        Args:
            parts: (n, *shape) the tensor of this device for each.
        """


class GroupLine:
    """A line of processes.

    Args:
        group: its process group.
        ranks: of the processes, in the order of the line. The group has them in ascending order.
        rank: of this process.
        contact: gives a context that tells errors of transfers from others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        contact: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._group, self._contact = group, contact
        ascending = sorted(ranks)
        # Where each process of the line is in the group, and the other way round.
        self._in_group = [ascending.index(one) for one in ranks]
        self._in_line = [ranks.index(one) for one in ascending]
        self._sorted = [*ranks] == ascending

    def _to_group(self, parts: Tensor) -> Tensor:
        return parts if self._sorted else parts[self._in_line]

    def _from_group(self, parts: Tensor) -> Tensor:
        return parts if self._sorted else parts[self._in_group]

    def all_gather(self, part: Tensor) -> Tensor:
        """As `Line.all_gather`."""
        every = part.new_empty((self.size, *part.shape))
        with self._contact():
            _GATHER(_bytes(every), _bytes(part), group=self._group)
        return self._from_group(every)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As `Line.all_to_all`."""
        come, go = torch.empty_like(parts), self._to_group(parts)
        with self._contact():
            dist.all_to_all_single(_bytes(come), _bytes(go), group=self._group)
        return self._from_group(come)

    def all_reduce(self, part: Tensor) -> Tensor:
        """As `Line.all_reduce`."""
        with self._contact():
            dist.all_reduce(part, group=self._group)
        return part

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """As `Line.reduce_scatter`."""
        own, go = parts.new_empty(parts.shape[1:]), self._to_group(parts)
        with self._contact():
            _SCATTER(own.view(-1), go.view(-1), group=self._group)
        return own


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor; gloo knows few types of elements, and bytes are one."""
    return tensor.view(-1).view(torch.uint8)


class Alone:
    """A line of one device, along an axis of size 1."""

    rank, size = 0, 1

    def all_gather(self, part: Tensor) -> Tensor:
        """As `Line.all_gather`."""
        return part[None]

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As `Line.all_to_all`."""
        return parts

    def all_reduce(self, part: Tensor) -> Tensor:
        """As `Line.all_reduce`."""
        return part

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """As `Line.reduce_scatter`."""
        return parts[0]


class Mesh:
    """This device's place in the mesh of its stage.

    Attributes:
        sizes: of the axes.
        index: position of this device in the mesh, row-major.
        coordinates: of this device, by axis.
        lines: of this device, by axis; before `connect`, only those of one device.
    """

    def __init__(self, sizes: Sequence[int], index: int) -> None:
        self.sizes = tuple(sizes)
        self.index = index
        self.coordinates = coordinates(index, self.sizes)
        self.lines: list[Line | None] = [Alone() if size == 1 else None for size in sizes]

    def connect(self, lines: Sequence[Line | None]) -> None:
        """Gives the mesh its lines, by axis; None leaves a line as it is."""
        self.lines = [new or old for new, old in zip(lines, self.lines, strict=True)]

    def line(self, axis: int) -> Line:
        """The line along an axis.

        Raises:
            LaunchError: if the mesh is not connected.
        """
        line = self.lines[axis]
        if line is None:
            raise LaunchError("the mesh of a stage has met nobody yet; step with all ranks first")
        return line


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


def all_lines(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """The devices of all lines of all stages, each line of several devices once, in one order for
    all ranks.
    """
    return tuple(dict.fromkeys(line for stage in strategy.stages for line in _lines(stage)))


def _lines(stage: Stage) -> Iterator[tuple[int, ...]]:
    sizes = () if stage.sharding is None else stage.sharding.mesh
    for group in stage.groups:
        for axis, size in enumerate(sizes):
            for index in range(len(group)):
                if size > 1 and coordinates(index, sizes)[axis] == 0:
                    yield tuple(group[i] for i in line_of(sizes, index, axis))
