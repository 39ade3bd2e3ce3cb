"""Transfers of tensors between two devices: channels, the order in memory, and parts of tensors.

A transposed view is sent without a copy and is a transposed view where it arrives. So the kernels
behind a cut compute, copy and keep the same as in the profile. Before a tensor is sent from one
device to another for the first time, the order of its dimensions is sent. Sent as dense tensors,
those of a cut inside attention made the predicted peak of memory 26 % wrong.

A stage has its local part of a tensor, which is the whole where it is not split. What is sent is a
box of the whole tensor, and lies within that part.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.artefacts import graph as graphs
from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.sharding import Box, tile
from planner.artefacts.strategy import Strategy, indices_of
from planner.launcher import clocks
from planner.launcher.batch import torch_dtype
from planner.launcher.mesh.lines import replica_and_index
from planner.schedules.actions import Receive, Send


class CompletionThread:
    """Waits for the transfers of one channel, in order, in a thread: gloo's never look completed
    before one waits for them. A daemon, so that a rank that fails does not stay for the others.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[dist.Work, Tensor, Future[float]]] = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def watch(self, work: dist.Work, buffer: Tensor) -> Future[float]:
        """The time at which the transfer ends; its buffer is kept until then, and no longer."""
        ended: Future[float] = Future()
        self._queue.put((work, buffer, ended))
        return ended

    def _run(self) -> None:
        while True:
            self._watch_next()

    def _watch_next(self) -> None:
        work, buffer, ended = self._queue.get()
        failed = None
        try:
            work.wait()
        except RuntimeError as error:
            failed = error
        ended_s = clocks.now_s()
        del work, buffer  # whoever learns of the end counts on their memory
        if failed is None:
            ended.set_result(ended_s)
        else:
            ended.set_exception(failed)


class PostedTransfer:
    """A send, receive or sum that was posted; its buffer lives until the transfer is over.

    Attributes:
        posted_s: when it was posted, on this process's clock.
    """

    def __init__(
        self, buffer: Tensor, work: dist.Work, completion: CompletionThread | None
    ) -> None:
        self.posted_s = clocks.now_s()
        self._ended: Future[float] | None = None
        if completion is None:
            self._kept = (buffer, work)
        else:
            self._ended = completion.watch(work, buffer)

    def wait(self) -> float:
        """Waits until the tensor is there (or gone), and says when that was."""
        if self._ended is not None:
            return self._ended.result()
        buffer, work = self._kept
        work.wait()
        torch.cuda.current_stream(buffer.device).synchronize()
        return clocks.now_s()

    def is_over(self) -> bool:
        """Whether `wait` would not wait."""
        return self._kept[1].is_completed() if self._ended is None else self._ended.done()


class Channel:
    """The transfers from one device to another, first in, first out.

    Args:
        peer: rank of the other end.
        group: that the transfers run in.
        sends: whether this is the sending end.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None, sends: bool) -> None:
        self._peer = peer
        self._group = group
        self._post = dist.isend if sends else dist.irecv
        self._tags = count()
        self._completion = CompletionThread() if group is None else None

    def post(self, tensor: Tensor) -> PostedTransfer:
        """Starts to send a tensor, or to receive into it; it has to be contiguous."""
        raw = tensor.detach().view(-1).view(torch.uint8)  # any dtype, without a copy
        work = self._post(raw, self._peer, group=self._group, tag=next(self._tags))
        assert work is not None
        return PostedTransfer(raw, work, self._completion)


# ------------------------------------------------------------------------- order in memory

Order = tuple[int, ...]


def order_of(tensor: Tensor) -> Order:
    """Its dimensions, from the one with the widest step to the one with the narrowest; as they
    are where elements repeat.

    >>> order_of(torch.zeros(2, 3, 4).transpose(1, 2))
    (0, 2, 1)
    """
    steps = tensor.stride()
    if 0 in steps:
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=lambda d: -steps[d]))


def in_a_row(tensor: Tensor, order: Order) -> Tensor:
    """(n,) all its elements, ascending in the order of its dimensions; a copy only where they do
    not lie so.
    """
    return tensor.permute(order).contiguous().view(-1)


def laid_out(row: Tensor, shape: Sequence[int], order: Order) -> Tensor:
    """The tensor of a shape whose elements are in a row, in its storage."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return row.view([shape[d] for d in order]).permute(back)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it is a part of something larger or elements repeat."""
    order = order_of(tensor)
    return laid_out(in_a_row(tensor, order), tensor.shape, order)


class Peers(Protocol):
    """The other devices, as an exchange needs them: `Groups`."""

    torch_device: str

    def send(self, tensor: Tensor, device: int) -> PostedTransfer:
        """Starts to send a tensor to a device."""

    def receive(self, buffer: Tensor, device: int) -> PostedTransfer:
        """Starts to fill a buffer from a device."""

    def finish(self, transfer: PostedTransfer) -> float:
        """Waits until a tensor is there (or gone), and says when that was."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that is expected.

    Attributes:
        action: the receive.
        row: its elements, once `transfer` has filled it.
    """

    action: Receive
    row: Tensor
    transfer: PostedTransfer


class Exchange:
    """Sends and receives the tensors of the actions of one device.

    The order of dimensions goes ahead of the first transfer of each direction, tensor, device and
    box; later ones are sent in the same order.

    Args:
        peers: the other devices.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._orders_sent: dict[object, Order] = {}
        self._orders_known: dict[object, Order] = {}
        self._orders_pending: dict[object, tuple[Tensor, PostedTransfer]] = {}

    def send(self, action: Send, tensor: Tensor) -> PostedTransfer:
        """Starts to send a tensor."""
        key = _key(action)
        if key not in self._orders_sent:
            self._orders_sent[key] = order_of(tensor)
            if tensor.dim() > 1:
                order = torch.tensor(self._orders_sent[key], device=tensor.device)
                self._peers.send(order, action.device)
        return self._peers.send(in_a_row(tensor, self._orders_sent[key]), action.device)

    def expect(self, action: Receive, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Starts to receive a tensor."""
        key, device = _key(action), self._peers.torch_device
        if key not in self._orders_known and key not in self._orders_pending:
            if len(shape) > 1:
                order = torch.empty(len(shape), dtype=torch.int64, device=device)
                self._orders_pending[key] = order, self._peers.receive(order, action.device)
            else:
                self._orders_known[key] = tuple(range(len(shape)))
        row = torch.empty(math.prod(shape), dtype=dtype, device=device)
        return Arrival(action, row, self._peers.receive(row, action.device))

    def take(self, arrival: Arrival, shape: Sequence[int]) -> tuple[Tensor, float]:
        """Waits for a tensor; gives it, and the time at which it was there."""
        key = _key(arrival.action)
        ended_s = self._peers.finish(arrival.transfer)
        if key in self._orders_pending:
            order, transfer = self._orders_pending.pop(key)
            self._peers.finish(transfer)
            self._orders_known[key] = tuple(order.tolist())
        return laid_out(arrival.row, shape, self._orders_known[key]), ended_s


def _key(action: Send | Receive) -> object:
    return action.direction, action.tensor, action.device, action.box


# ------------------------------------------------------------------------- parts of tensors


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of one device.

    Attributes:
        tensors: of the graph, with the types of elements that they have where they cross stages.
        tiles: by stage and tensor, the part that this device has of it; whole tensors are left out.
    """

    tensors: Mapping[str, graphs.Tensor]
    tiles: Mapping[tuple[int, str], Box]

    def shape(self, action: Send | Receive) -> tuple[int, ...]:
        """The shape of what an action moves."""
        if action.box is None:
            return self.tensors[action.tensor].shape
        return tuple(stop - start for start, stop in action.box)

    def dtype(self, action: Send | Receive) -> torch.dtype:
        """The type of the elements that an action moves."""
        return torch_dtype(self.tensors[action.tensor])

    def cut(self, action: Send, local: Tensor) -> Tensor:
        """What is sent of the local part of a tensor."""
        inside = self._inside(action)
        return local if inside is None else local[inside]

    def put(self, arrived: dict[str, Tensor], action: Receive, tensor: Tensor) -> None:
        """Puts what has come into the local part of its tensor; parts of one place add up."""
        name, inside = action.tensor, self._inside(action)
        if inside is None:
            arrived[name] = arrived[name].add_(tensor) if name in arrived else tensor
            return
        if name not in arrived:
            arrived[name] = tensor.new_zeros([stop - start for start, stop in self._tile(action)])
        arrived[name][inside] += tensor

    def _tile(self, action: Send | Receive) -> Box:
        """The part of the tensor of an action that this device has in the stage."""
        whole = tuple((0, size) for size in self.tensors[action.tensor].shape)
        return self.tiles.get((action.stage, action.tensor), whole)

    def _inside(self, action: Send | Receive) -> tuple[slice, ...] | None:
        """Where a box is in the local part of its tensor; None where it is all of that."""
        have = self._tile(action)
        box = action.box or tuple((0, size) for size in self.tensors[action.tensor].shape)
        if box == have:
            return None
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(box, have, strict=True)
        )


def boxes_of(strategy: Strategy, graph: Graph, device: int) -> Boxes:
    """The boxes of a device.

    Args:
        graph: with the types of elements that tensors have where they cross stages.
    """
    tiles: dict[tuple[int, str], Box] = {}
    for s, stage in enumerate(strategy.stages):
        if (sharding := stage.sharding) is None or device not in stage.devices:
            continue
        _, index = replica_and_index(stage, device)
        outputs = {n for v in indices_of(stage, graph) for n in graph.operators[v].outputs}
        for name, tensor in tensors_by_name(graph).items():
            specs = sharding.outputs if name in outputs else sharding.inputs
            spec = specs.get(name, ("R",) * len(sharding.mesh))
            tiles[s, name] = tile(tensor.shape, spec, sharding.mesh, index)
    return Boxes(tensors_by_name(graph), tiles)
