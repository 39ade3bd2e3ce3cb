"""The processes of a launch, and the transfers between them.

Rank r runs device `plan.ranks[r]`. Ranks beyond the strategy's devices take no part in anything.
One process alone needs no process group.
"""

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.launcher import clocks, ending
from planner.launcher.clocks import EXCHANGES, Reading, read_clock
from planner.launcher.failures.page import Phase
from planner.launcher.split.mesh import GroupLine
from planner.launcher.split.sockets import patient_sockets
from planner.launcher.store import TIMEOUT, groups_store
from planner.schedules.actions import Program, Send
from planner.support.errors import LaunchError, Stopped


@contextmanager
def contact(rank: int) -> Iterator[None]:
    """Takes errors of gloo and nccl for a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Stopped(f"rank {rank} stops because another rank has") from error


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """This process among those that torchrun started.

    Attributes:
        rank: over all hosts.
        world_size: processes over all hosts.
        local_rank: on this host.
        local_world_size: processes on this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def process_rank() -> ProcessRank | None:
    """The seat that torchrun wrote into the environment; None outside it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    if not all(name in os.environ for name in names):
        return None
    return ProcessRank(*(int(os.environ[name]) for name in names[:-1]))


def meet(rank: int, num_ranks: int, world_size: int) -> None:
    """Joins the other ranks in the default group, which is gloo's.

    Args:
        rank: of this process.
        num_ranks: ranks of the group.
        world_size: number of all processes.

    Raises:
        RuntimeError: if the others cannot be reached.
    """
    keep_to_this_host()
    ending.page().enter(Phase.MEETING)
    store = groups_store(rank, world_size)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=TIMEOUT, store=store)


def keep_to_this_host() -> None:
    """Lets gloo listen on the loopback interface alone if all ranks are on this host, unless
    GLOO_SOCKET_IFNAME names another one.
    """
    seat = process_rank()
    if seat is None or seat.world_size > seat.local_world_size:
        return
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def choose_device(
    name: str, seat: ProcessRank, num_ranks: int, planned_types: frozenset[str]
) -> str:
    """Where this rank computes, in torch's words.

    Args:
        name: "cpu", "cuda", or "auto": the kind that the plan was made for, if there is a GPU for
            every rank of this host.
        seat: of this process.
        num_ranks: ranks that the strategy uses.
        planned_types: types of the plan's devices.

    Raises:
        LaunchError: if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_here = min(seat.local_world_size, num_ranks)
    if name == "auto":
        name = "cuda" if num_gpus >= num_here and planned_types != {"cpu"} else "cpu"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise LaunchError(f"--device: expected auto, cpu or cuda, got {name!r}")
    if num_gpus < num_here:
        raise LaunchError(
            f"--device cuda: {num_here} ranks on this host need a GPU each, torch finds "
            f"{num_gpus}; use --device cpu or fewer ranks per host"
        )
    return f"cuda:{seat.local_rank}"


class _Watcher:
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

    def __init__(self, buffer: Tensor, work: dist.Work, watcher: _Watcher | None) -> None:
        self.posted_s = clocks.now_s()
        self._ended: Future[float] | None = None
        if watcher is None:
            self._kept = (buffer, work)
        else:
            self._ended = watcher.watch(work, buffer)

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
        self._watcher = _Watcher() if group is None else None

    def post(self, tensor: Tensor) -> PostedTransfer:
        """Starts to send a tensor, or to receive into it; it has to be contiguous."""
        raw = tensor.detach().view(-1).view(torch.uint8)  # any dtype, without a copy
        work = self._post(raw, self._peer, group=self._group, tag=next(self._tags))
        assert work is not None
        return PostedTransfer(raw, work, self._watcher)


class LateSums:
    """Sums of numbers over all ranks, each of which is known once the last rank has given its part.
    All ranks give their parts in the same order.

    Args:
        rank: of this process.
        group: of all ranks, for these sums alone; None if there is one rank.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = rank, group
        self._watcher = None if group is None else _Watcher()
        self._waiting: deque[tuple[Tensor, PostedTransfer | None]] = deque()

    def start(self, value: float) -> None:
        """Gives this rank's part of the next sum."""
        total, posted = torch.tensor([value], dtype=torch.float64), None
        if self._group is not None:
            with contact(self._rank):
                work = dist.all_reduce(total, group=self._group, async_op=True)
            assert work is not None
            posted = PostedTransfer(total, work, self._watcher)
        self._waiting.append((total, posted))

    def known(self, *, all_of_them: bool = False) -> Iterator[float]:
        """The sums that are there and were not given yet, in their order.

        Args:
            all_of_them: whether to wait for those that are not there.
        """
        while self._waiting:
            total, posted = self._waiting[0]
            if posted is not None and not all_of_them and not posted.is_over():
                return
            if posted is not None:
                with contact(self._rank):
                    posted.wait()
            self._waiting.popleft()
            yield total.item()


class World:
    """Everything that this process shares with the others.

    Attributes:
        device: index of its device into the topology.
        torch_device: where it computes.

    Args:
        ranks: device of each rank.
        rank: of this process.
        program: decides which groups there are; the same on every rank. Its sums are buckets, each
            once.
        lines: devices of the lines of meshes; the same on every rank.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        program: Program,
        torch_device: str,
        lines: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.device = ranks[rank]
        self.torch_device = torch_device
        self._rank, self._ranks = rank, ranks
        self._size = len(ranks)
        self._channels: dict[tuple[int, int], Channel] = {}
        self._groups: list[dist.ProcessGroup | None] = []
        self._lines: dict[tuple[int, ...], GroupLine] = {}
        self._sums = _Watcher() if self._size > 1 and torch_device == "cpu" else None
        if self._size > 1:
            with contact(rank):
                self._connect({device: r for r, device in enumerate(ranks)}, program, lines)

    def _connect(
        self, rank_of: Mapping[int, int], program: Program, lines: Sequence[tuple[int, ...]]
    ) -> None:
        """Every rank creates every group in the same order, because torch asks for it. The default
        group is gloo's, for control and for transfers between CPUs. With nccl each ordered pair
        has a communicator of its own, since opposing transfers in one would wait for each other.
        """
        seat = process_rank()
        meet(self._rank, self._size, self._size if seat is None else seat.world_size)
        backend = "gloo" if self.torch_device == "cpu" else "nccl"
        for source, target in _pairs(program):
            ends = rank_of[source], rank_of[target]
            group = None
            if backend == "nccl":
                group = dist.new_group(sorted(ends), backend=backend, timeout=TIMEOUT)
            if self._rank in ends:
                sends = self._rank == ends[0]
                channel = Channel(ends[1] if sends else ends[0], group, sends)
                self._channels[source, target] = channel
                # nccl connects at the first transfer, which both ends have to reach in one order.
                channel.post(torch.zeros(1, device=self.torch_device)).wait()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for one in program.sums:
            own = None
            for devices in one.keep or (one.devices,):
                if devices not in groups and len(devices) > 1:
                    members = [rank_of[device] for device in devices]
                    groups[devices] = collective_group(members, backend)
                if self.device in devices:
                    own = groups.get(devices)
            self._groups.append(own)
        # Lines have groups of their own, because sums run beside the collectives of a backward.
        for devices in lines:
            members = [rank_of[device] for device in devices]
            group = collective_group(members, backend)
            if self._rank in members:
                assert group is not None
                touch = partial(contact, self._rank)
                self._lines[devices] = GroupLine(group, members, self._rank, touch)

    def sums_parts(self, index: int) -> bool:
        """Whether several devices keep the same part of a sum as this one."""
        return self._groups[index] is not None

    def line(self, devices: tuple[int, ...]) -> GroupLine:
        """The line of some devices, this one among them."""
        return self._lines[devices]

    def send(self, tensor: Tensor, device: int) -> PostedTransfer:
        """Starts to send a tensor to a device."""
        with contact(self._rank):
            return self._channels[self.device, device].post(tensor)

    def receive(self, buffer: Tensor, device: int) -> PostedTransfer:
        """Starts to fill a buffer from a device."""
        with contact(self._rank):
            return self._channels[device, self.device].post(buffer)

    def finish(self, transfer: PostedTransfer) -> float:
        """Waits until a tensor is there (or gone), and says when that was."""
        with contact(self._rank):
            return transfer.wait()

    def start_sum(self, buffer: Tensor, index: int) -> PostedTransfer:
        """Starts to add up a buffer over the devices of an all-reduce of the program, in place; all
        members start their sums in one order.
        """
        with contact(self._rank):
            work = dist.all_reduce(buffer, group=self._groups[index], async_op=True)
        assert work is not None
        return PostedTransfer(buffer, work, self._sums)

    def late_sums(self) -> "LateSums":
        """Sums that no rank waits for; every rank calls it at the same place."""
        group = None
        if self._size > 1:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return LateSums(self._rank, group)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over all ranks; every rank calls it and gets the same."""
        if self._size == 1:
            return [*values]
        sums = torch.tensor(values, dtype=torch.float64)
        with contact(self._rank):
            dist.all_reduce(sums)
        return [float(one) for one in sums.tolist()]

    def share(self, tensor: Tensor, devices: Sequence[int]) -> None:
        """Gives a contiguous tensor on the CPU of the first of some devices to the others, in
        place; each of them calls it.
        """
        first, *others = (self._ranks.index(device) for device in devices)
        with contact(self._rank):
            if self._rank != first:
                dist.recv(tensor, first)
                return
            for rank in others:
                dist.send(tensor, rank)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self._size > 1:
            with contact(self._rank):
                dist.barrier()

    def read_clocks(self) -> tuple[Reading, ...]:
        """The clock of every rank beside rank 0's; every rank calls it, and rank 0 gets them."""
        answer = torch.zeros(1, dtype=torch.float64)

        def ask(rank: int) -> float:
            dist.send(answer, rank)
            dist.recv(answer, rank)
            return answer.item()

        self.barrier()
        own = Reading(clocks.now_s(), 0.0, 0.0)
        with contact(self._rank):
            if self._rank == 0:
                others = range(1, self._size)
                return (own, *(read_clock(partial(ask, rank)) for rank in others))
            for _ in range(EXCHANGES):
                dist.recv(answer, 0)
                dist.send(answer.fill_(clocks.now_s()), 0)
        return ()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        if self._size == 1:
            return [value]
        values = [None] * self._size
        with contact(self._rank):
            dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leaves the group after a success; after a failure the process just ends."""
        if dist.is_initialized():
            dist.destroy_process_group()


def collective_group(members: Sequence[int], backend: str) -> dist.ProcessGroup:
    """A group of ranks for collectives; every rank calls it, in it or not."""
    with patient_sockets():
        return dist.new_group([*members], backend=backend, timeout=TIMEOUT)  # type: ignore[no-any-return]


def _pairs(program: Program) -> list[tuple[int, int]]:
    """The ordered pairs of devices that send."""
    return sorted(
        {
            (device, action.device)
            for device, actions in program.lists.items()
            for action in actions
            if isinstance(action, Send)
        }
    )
