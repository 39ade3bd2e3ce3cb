"""`GradientBuckets`: the gradients of one device in flat buffers, and their sums over devices."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from planner.artefacts.strategy import GradientSum
from planner.launcher import clocks
from planner.launcher.groups import Groups
from planner.launcher.mesh.queue import Pending
from planner.launcher.mesh.shards import OptimizerShards
from planner.launcher.transfers import PostedTransfer
from planner.schedules.actions import Action, AllReduce, Compute, Direction

NO_SUM = -1
"""The bucket of gradients that only one device has."""


class GradientBuckets:
    """The gradients of a device's parameters, in one flat buffer per bucket and dtype.

    Every parameter's gradient is a view into its buffer, so that microbatches accumulate in place
    and an all-reduce needs no copy. Buckets are summed one after the other over the devices that
    have them, in the order of the action list, as the simulator has it
    (`schedules/event_loop.py`). A sum starts when the backward before it has made all gradients
    of the bucket, or when the device comes to its action.

    Args:
        parameters: the device's trainable parameters, by name.
        sums: the buckets of the whole program, each once (`buckets`); those of other devices are
            left out.
        groups: the other devices.
        shards: of its parameters; None where there are none.
        non_contributing: parameters whose gradients another device contributes to their sums.
        dtype: type in which gradients are added up; None for that of the parameters.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], sums: Sequence[GradientSum], groups: Groups,
        shards: OptimizerShards | None = None, non_contributing: Collection[str] = (),
        dtype: str | None = None,
    ) -> None:  # fmt: skip
        self._sums, self._groups, self._shards = sums, groups, shards
        sum_of = {
            name: index
            for index, one in enumerate(sums)
            if groups.device in one.devices
            for name in one.parameters
        }
        self._non_contributing: dict[int, list[Tensor]] = {}
        for name in sorted(sum_of.keys() & {*non_contributing}):
            self._non_contributing.setdefault(sum_of[name], []).append(parameters[name])
        # Also on one device. A plain loop lets autograd keep the first gradient, which saves
        # zeroing a buffer and adding to it; it was not faster on a CPU, because new memory is
        # mapped in each step.
        self._buffers: dict[int, list[Tensor]] = {}
        self._parameters: dict[int, list[Tensor]] = {}
        self._bucket_of = {parameters[name]: index for name, index in sum_of.items()}
        # All members of an all-reduce lay out its buffers alike, by dtype and then by name, though
        # each has parameters besides that the others do not have.
        for index, some in _in_buckets(parameters, sum_of):
            self._buffers.setdefault(index, []).append(_flat(some, dtype))
            self._parameters.setdefault(index, []).extend(some)
        self._shard_buffers: dict[int, list[Tensor]] = {}
        for index, some in _in_buckets({} if shards is None else shards.scattered, sum_of):
            self._shard_buffers.setdefault(index, []).append(_flat(some, dtype))
        self._closing: dict[Compute, tuple[int, ...]] = {}
        self._listeners: dict[int, Callable[[Tensor], None]] = {}
        self._due: deque[int] = deque()  # sums of the backward that runs, which are not started
        self._missing: dict[int, int] = {}  # how many gradients of each of them are not there yet
        self._started: dict[int, list[PostedTransfer]] = {}
        self._scattering: dict[int, tuple[float, Pending[float]]] = {}  # since when, till when
        self._free_s = 0.0  # end of the last sum

    def buffers(self, index: int) -> Sequence[Tensor]:
        """The buffers of a bucket, one per dtype, in the same order on all devices that have it."""
        return self._buffers[index]

    def everything(self) -> Iterator[Tensor]:
        """All buffers."""
        for buffers in (*self._buffers.values(), *self._shard_buffers.values()):
            yield from buffers

    def clear(self) -> None:
        """Sets all gradients to zero, in place."""
        for buffer in self.everything():
            buffer.zero_()

    def adopt(self, parameter: Tensor, leaf: Tensor) -> None:
        """Adds up the gradients of another tensor in the place of a parameter's.

        Args:
            leaf: stands for the parameter in forward and backward passes.
        """
        _add_up_in(leaf, parameter.grad)
        leaf.grad = parameter.grad
        listener = self._listeners.get(self._bucket_of.get(parameter, NO_SUM))
        if listener is not None:
            _call_after(leaf, listener)

    def follow(self, actions: Sequence[Action]) -> None:
        """Takes the list of the device that is run next.

        Args:
            actions: all-reduces have the numbers of their buckets.
        """
        self._closing = closing_backwards(actions)
        early = {index for due in self._closing.values() for index in due}
        for index in sorted(early - self._listeners.keys()):
            self.listen(index, partial(self._there, index))

    def listen(self, index: int, listener: Callable[[Tensor], None]) -> None:
        """Calls a function whenever a backward has added up a gradient of a bucket."""
        self._listeners[index] = listener
        for parameter in self._parameters[index]:
            _call_after(parameter, listener)

    def begin(self, compute: Compute) -> None:
        """A backward is about to begin: sums that come right after it may start within it."""
        self._due = deque(self._closing.get(compute, ()))
        self._missing = {index: len(self._parameters[index]) for index in self._due}

    def _there(self, index: int, _: Tensor) -> None:
        """The backward has added up a gradient of a bucket. Of the sums that are ready, only the
        next one may start: all members of a group have to start its collectives in one order.
        """
        if index in self._missing:
            self._missing[index] -= 1
            while self._due and not self._missing[self._due[0]]:
                self._start(self._due.popleft())

    def _start(self, index: int) -> None:
        for parameter in self._non_contributing.get(index, ()):
            if parameter.grad is not None:
                parameter.grad.zero_()
        buffers = () if self._sums[index].shards else self._buffers[index]
        self._started[index] = [self._groups.start_sum(one, index) for one in buffers]
        if self._shards is not None and self._shards.runs_beside and self._sums[index].shards:
            self._scattering[index] = self._scatter(index)

    def finish(self, index: int) -> tuple[float, float]:
        """Waits until a bucket is summed; gives start and end on this process's clock."""
        # The backward has left out a gradient of this bucket, or of one before it.
        while self._due and index not in self._started:
            self._start(self._due.popleft())
        if index not in self._started:
            self._start(index)
        posted = self._started.pop(index)
        if self._sums[index].shards:
            return self._scattered(index)
        start_s = max(self._free_s, posted[0].posted_s)
        self._free_s = max(self._groups.finish(one) for one in posted)
        return start_s, self._free_s

    def _scatter(self, index: int) -> tuple[float, Pending[float]]:
        assert self._shards is not None, "only meshes keep parts"
        return clocks.now_s(), self._shards.scatter(self._sums[index].parameters)

    def _scattered(self, index: int) -> tuple[float, float]:
        """A sum of which each device keeps a part: a reduce-scatter over the devices of the mesh,
        and a sum of the parts over those that keep the same. Without a queue for it, the former
        waits until nothing else is done.
        """
        if index not in self._scattering:
            self._scattering[index] = self._scatter(index)
        begun_s, scattering = self._scattering.pop(index)
        start_s = max(self._free_s, begun_s)
        self._free_s = max(start_s, scattering.wait())
        if self._groups.sums_parts(index):
            buffers = self._shard_buffers.get(index, ())
            for one in [self._groups.start_sum(buffer, index) for buffer in buffers]:
                self._free_s = self._groups.finish(one)
        return start_s, self._free_s


def _in_buckets(
    parameters: Mapping[str, Tensor], sum_of: Mapping[str, int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Parameters by bucket and dtype, by name in each."""
    groups: dict[tuple[int, str], list[Tensor]] = {}
    for name in sorted(parameters):
        key = sum_of.get(name, NO_SUM), str(parameters[name].dtype)
        groups.setdefault(key, []).append(parameters[name])
    for (index, _), some in sorted(groups.items(), key=lambda item: item[0]):
        yield index, some


def _call_after(leaf: Tensor, listener: Callable[[Tensor], None]) -> None:
    leaf.register_post_accumulate_grad_hook(listener)  # type: ignore[no-untyped-call]


def _add_up_in(leaf: Tensor, gradients: Tensor | None) -> None:
    """Lets a tensor have gradients of the type of others."""
    if gradients is not None and gradients.dtype != leaf.dtype:
        leaf.grad_dtype = gradients.dtype


def _flat(parameters: Sequence[Tensor], dtype: str | None) -> Tensor:
    """A buffer of zeros; the gradients of the parameters become views of it.

    Args:
        dtype: of the buffer; None for that of the parameters.
    """
    buffer = torch.zeros(
        sum(p.numel() for p in parameters),
        dtype=parameters[0].dtype if dtype is None else getattr(torch, dtype),
        device=parameters[0].device,
    )
    start = 0
    for parameter in parameters:
        _add_up_in(parameter, buffer)
        parameter.grad = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return buffer


def buckets(sums: Sequence[GradientSum]) -> tuple[GradientSum, ...]:
    """The buckets that all-reduces sum, each once, in the order in which they come first.

    >>> one, two = GradientSum((0, 1), ("w",), 4), GradientSum((2, 3), ("v",), 4)
    >>> buckets([one, two, one, two]) == (one, two)
    True
    """
    return tuple(dict.fromkeys(sums))


def closing_backwards(actions: Sequence[Action]) -> dict[Compute, tuple[int, ...]]:
    """The sums of a list by the last backward before them; none where a device runs several stages,
    which makes gradients of one bucket in several backwards.
    """
    closing: dict[Compute, tuple[int, ...]] = {}
    if len({one.stage for one in actions if isinstance(one, Compute)}) > 1:
        return closing
    latest: Compute | None = None
    for action in actions:
        if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
            latest = action
        elif isinstance(action, AllReduce) and latest is not None:
            closing[latest] = (*closing.get(latest, ()), action.sum)
    return closing
