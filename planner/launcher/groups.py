"""`Groups`: the process groups of a launch, and what all ranks do together.

Rank r runs device `plan.ranks[r]`. Ranks beyond the strategy's devices take no part in anything.
One process alone needs no process group.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.launcher import clocks
from planner.launcher.clocks import EXCHANGES, Reading, read_clock
from planner.launcher.mesh.lines import ConversionGroup, ProcessGroupAxis, SingleDeviceAxis
from planner.launcher.mesh.sockets import patient_sockets
from planner.launcher.rendezvous import TIMEOUT, gathered, join_group, peer_errors
from planner.launcher.transfers import Channel, CompletionThread, PostedTransfer
from planner.schedules.actions import Program, Send


class PendingSums:
    """Sums of numbers over all ranks, each of which is known once the last rank has given its part.
    All ranks give their parts in the same order.

    Args:
        rank: of this process.
        group: of all ranks, for these sums alone; None if there is one rank.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = rank, group
        self._waiting: deque[tuple[Tensor, dist.Work | None]] = deque()

    def start(self, value: float) -> None:
        """Gives this rank's part of the next sum."""
        total, work = torch.tensor([value], dtype=torch.float64), None
        if self._group is not None:
            with peer_errors(self._rank):
                work = dist.all_reduce(total, group=self._group, async_op=True)
        self._waiting.append((total, work))

    def finished(self, *, wait: bool = False) -> Iterator[float]:
        """The sums that are there and were not given yet, in their order.

        Args:
            wait: whether to wait for those that are not there.
        """
        while self._waiting:
            total, work = self._waiting[0]
            if work is not None:
                with peer_errors(self._rank):
                    if not wait and not work.is_completed():
                        return
                    work.wait()
            self._waiting.popleft()
            yield total.item()


class Groups:
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
        self._sum_groups: list[dist.ProcessGroup | None] = []
        self._lines: dict[tuple[int, ...], ConversionGroup] = {}
        self._sums_end = CompletionThread() if self._size > 1 and torch_device == "cpu" else None
        if self._size > 1:
            with peer_errors(rank):
                self._connect({device: r for r, device in enumerate(ranks)}, program, lines)

    def _connect(
        self, rank_of: Mapping[int, int], program: Program, lines: Sequence[tuple[int, ...]]
    ) -> None:
        """Every rank creates every group in the same order, in it or not, because torch's store
        counts groups to name them. The default group is gloo's, for control and for transfers
        between CPUs. With nccl each ordered pair has a communicator of its own, since opposing
        transfers in one would wait for each other.
        """
        join_group(self._rank, self._size)
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
            for devices in one.shards or (one.devices,):
                if devices not in groups and len(devices) > 1:
                    members = [rank_of[device] for device in devices]
                    groups[devices] = collective_group(members, backend)
                if self.device in devices:
                    own = groups.get(devices)
            self._sum_groups.append(own)
        # Lines have groups of their own, because sums run beside the collectives of a backward.
        for devices in lines:
            members = [rank_of[device] for device in devices]
            group = collective_group(members, backend)
            if self._rank in members:
                assert group is not None
                errors = partial(peer_errors, self._rank)
                self._lines[devices] = ProcessGroupAxis(group, members, self._rank, errors)

    def sums_parts(self, index: int) -> bool:
        """Whether several devices keep the same part of a sum as this one."""
        return self._sum_groups[index] is not None

    def line(self, devices: tuple[int, ...]) -> ConversionGroup:
        """The line of some devices, this one among them."""
        return SingleDeviceAxis() if len(devices) == 1 else self._lines[devices]

    def send(self, tensor: Tensor, device: int) -> PostedTransfer:
        """Starts to send a tensor to a device."""
        with peer_errors(self._rank):
            return self._channels[self.device, device].post(tensor)

    def receive(self, buffer: Tensor, device: int) -> PostedTransfer:
        """Starts to fill a buffer from a device."""
        with peer_errors(self._rank):
            return self._channels[device, self.device].post(buffer)

    def finish(self, transfer: PostedTransfer) -> float:
        """Waits until a tensor is there (or gone), and says when that was."""
        with peer_errors(self._rank):
            return transfer.wait()

    def start_sum(self, buffer: Tensor, index: int) -> PostedTransfer:
        """Starts to add up a buffer over the devices of an all-reduce of the program, in place; all
        members start their sums in one order.
        """
        with peer_errors(self._rank):
            work = dist.all_reduce(buffer, group=self._sum_groups[index], async_op=True)
        assert work is not None
        return PostedTransfer(buffer, work, self._sums_end)

    def pending_sums(self) -> "PendingSums":
        """Sums that no rank waits for; every rank calls it at the same place."""
        group = None
        if self._size > 1:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return PendingSums(self._rank, group)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over all ranks; every rank calls it and gets the same. It is a
        barrier, also for no numbers.
        """
        if self._size == 1:
            return [*values]
        if not values:
            self.barrier()
            return []
        sums = torch.tensor(values, dtype=torch.float64)
        with peer_errors(self._rank):
            dist.all_reduce(sums)
        return [float(one) for one in sums.tolist()]

    def share(self, tensor: Tensor, devices: Sequence[int]) -> None:
        """Gives a contiguous tensor on the CPU of the first of some devices to the others, in
        place; each of them calls it.
        """
        first, *others = (self._ranks.index(device) for device in devices)
        with peer_errors(self._rank):
            if self._rank != first:
                dist.recv(tensor, first)
                return
            for rank in others:
                dist.send(tensor, rank)

    def extremes(self, values: Sequence[float | None]) -> list[tuple[float, float]]:
        """The smallest and the largest value of all ranks, for each of some numbers; every rank
        calls it and gets the same. None counts for neither: where no rank has a number, they are
        inf and -inf.
        """
        # The smallest value is minus the largest of the negatives, so that one all-reduce does.
        pairs = [(-math.inf, -math.inf) if value is None else (-value, value) for value in values]
        both = torch.tensor(pairs, dtype=torch.float64)
        if self._size > 1:
            with peer_errors(self._rank):
                dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return [(-negative, largest) for negative, largest in both.tolist()]

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self._size > 1:
            with peer_errors(self._rank):
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
        with peer_errors(self._rank):
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
        with peer_errors(self._rank):
            return gathered(value)

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
