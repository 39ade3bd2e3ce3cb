"""Measuring a cluster: every rank that torchrun starts calls `probe`, rank 0 gets the result.

Clocks of different hosts are never compared. The source of a pair sends n bytes, the target answers
with one byte as soon as all have come, and the source takes the time T(n) of both. One byte is
assumed to take the same time both ways, so that

    one-way time of n bytes = T(n) - T(1) / 2

Bandwidth is therefore measured for each direction; latency is half of a round trip. Each size is
measured several times, after one untimed transfer, and the median is taken. No size is faster than
one byte, so T(1) is the smallest of all medians. Pairs are measured one after the other, on an
otherwise idle network; those whose times do not fit any latency and bandwidth are measured again.
Collectives of all groups of a size run at once (`clusters/probing/collectives.py`), and after a
little work, as in a run: then threads and caches are cold, and the ranks do not arrive at the same
moment. What a rank waits for the others is part of its time, because an iteration consists of what
its operators take and of this. Times are means over ranks and repetitions, without the tenth of
these at either end. All-reduces work in place, as on gradients; the others are those of split
operators (`mesh/lines.py`), new buffers included.

Transfers use gloo between CPUs and nccl between GPUs.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from planner.artefacts.topology import CollectiveKind, DeviceType
from planner.clusters.probing.collectives import CollectiveTimes, Groups, groups_at_once
from planner.clusters.probing.infer import (
    Inferred,
    RankDevice,
    SimultaneousTransfers,
    devices_of,
    experiments,
    infer,
)
from planner.clusters.probing.link_fit import (
    Pair,
    PairFit,
    PairTimes,
    fit_all,
    pairs_to_repeat,
    shorter_times,
)
from planner.clusters.yaml.read import device_table
from planner.clusters.yaml.schema import available_bytes, available_cores, core_numbers
from planner.launcher.groups import collective_group
from planner.launcher.mesh.lines import ProcessGroupAxis
from planner.launcher.options import LARGEST_BYTES
from planner.launcher.rendezvous import (
    TIMEOUT,
    ProcessRank,
    choose_device,
    gathered,
    host_key,
    join_group,
    peer_errors,
    process_rank,
)
from planner.support.errors import LaunchError, PlannerError, Stopped
from planner.support.repeat import repeat

# Sizes of transfers and all-reduces: 1 KiB to 256 MiB, each 4 times the one before.
SMALLEST_BYTES, GROWTH = 1024, 4
# No transfer is started that is expected to take longer.
MAX_TRANSFER_S = 1.0
# Time for the repetitions of one size, and limits of their number.
REPEATED_S, MIN_REPEATS, MAX_REPEATS = 0.25, 3, 300
# Of collectives, which have work between them: a product of this many rows and columns.
# Back to back gloo's all-gather of 1 KiB takes 0.4 ms, and in a run of ZeRO-3 1.4 ms on average.
MAX_COLLECTIVES, WORK_SIZE = 100, 320
# Number of times that a pair whose times make no sense is measured.
ATTEMPTS = 4
# Time that each of several simultaneous transfers would take alone.
TOGETHER_S = 0.2
# Names of the table of device types, by the drivers' names.
DRIVER_NAMES = {"H100-80GB-HBM3": "H100-SXM", "H200": "H200-SXM", "P100-SXM2-16GB": "P100"}

T = TypeVar("T")

_Announced = tuple[str, str, RankDevice | None, frozenset[int]]
"""What a rank tells of its device: the host's key, torch's name or what is wrong, the device, and
the cores that the rank may use."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of probing, on rank 0.

    Attributes:
        inferred: the topology.
        times: times of every ordered pair of ranks, by source, then target.
        fits: latency and bandwidth of every ordered pair of ranks, by source, then target.
        collectives: times of collectives, by group, then kind.
        backend: "gloo" or "nccl".
        torch: version of torch.
    """

    inferred: Inferred
    times: tuple[PairTimes, ...]
    fits: tuple[PairFit, ...]
    collectives: tuple[CollectiveTimes, ...]
    backend: str
    torch: str


def probe(
    name: str,
    *,
    device: str = "auto",
    largest_bytes: int = LARGEST_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Probed | None:
    """Measures all pairs of ranks, and infers the topology.

    Args:
        name: name of the topology.
        device: auto, cpu or cuda.
        largest_bytes: largest size of a transfer or collective.
        progress: on rank 0, called after each measurement with the number of those done and of all.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        LaunchError: if there are no ranks, or fewer GPUs than ranks on a host.
        TopologyError: on rank 0, if the measured times are absurd.
        Stopped: on a rank that has lost another one, which has a message for the user.
    """
    process = process_rank()
    if process is None:
        raise LaunchError(
            "probe measures between processes, and this is a single one; run one of\n"
            "  planner topology probe --nproc N\n"
            "  torchrun --nproc-per-node N --no-python planner topology probe"
        )
    torch.set_num_threads(1)
    _meet(process)
    with peer_errors(process.rank):
        devices, own_device = _gather_devices(process, device)
        ranks = _Ranks(process, own_device, largest_bytes)
        result = _measure(ranks, name, devices, progress)
        dist.barrier()
    dist.destroy_process_group()
    return result


def _meet(process: ProcessRank) -> None:
    try:
        join_group(process.rank, process.world_size)
    except RuntimeError as error:
        if process.local_rank > 0:
            raise Stopped(f"rank {process.rank} stops because another rank has") from error
        raise LaunchError(
            f"rank {process.rank} cannot reach the others: {str(error).splitlines()[0]}; where a"
            " host has several network interfaces, GLOO_SOCKET_IFNAME names the one to use"
        ) from error


# -------------------------------------------------------------------------- hosts and devices


def _gather_devices(process: ProcessRank, name: str) -> tuple[list[RankDevice], str]:
    """The device and host of every rank, and torch's name of this rank's own device.

    A rank without a usable device takes part with its message, so that all ranks stop together and
    rank 0 prints each message once.
    """
    mine: _Announced
    try:
        device = _choose(name, process)
        mine = host_key(), device, _described(device), core_numbers()
    except PlannerError as error:
        mine = "", str(error), None, frozenset()
    everyone = gathered(mine)
    problems = [*dict.fromkeys(text for _, text, described, _ in everyone if described is None)]
    kinds = {device.partition(":")[0] for _, device, _, _ in everyone}
    if not problems and len(kinds) > 1:
        problems = ["some ranks have a GPU each and some have none; probe them with --device cpu"]
    if problems:
        if process.rank > 0:
            raise Stopped(f"rank {process.rank} stops because another rank has")
        raise LaunchError("\n".join(problems))
    return _on_their_hosts(everyone), mine[1]


def _on_their_hosts(everyone: Sequence[_Announced]) -> list[RankDevice]:
    """The devices of all ranks, which have announced them, with names and cores of their hosts."""
    names = _host_names([key for key, _, _, _ in everyone])
    # Ranks that are bound to cores of their own share them all.
    cores: dict[str, frozenset[int]] = {}
    for host, (_, _, _, own) in zip(names, everyone, strict=True):
        cores[host] = cores.get(host, frozenset()) | own
    return [
        replace(one, host=host, host_cores=None if one.host_cores is None else len(cores[host]))
        for host, (_, _, one, _) in zip(names, everyone, strict=True)
        if one is not None
    ]


def _choose(name: str, process: ProcessRank) -> str:
    """Torch's name of this rank's device."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and 0 < num_gpus < process.local_world_size:
        raise LaunchError(
            f"{process.local_world_size} ranks on {socket.gethostname()} share {num_gpus} GPU"
            f"{'s' if num_gpus > 1 else ''}, and nccl refuses two ranks on one GPU; start"
            f" {num_gpus} per host, or measure between CPUs with --device cpu"
        )
    return choose_device(name, process, process.world_size, frozenset())


def _host_names(keys: Sequence[str]) -> list[str]:
    """Different names for different hosts: the second `node` is `node-2`.

    >>> _host_names(["node 12ab", "node 12ab", "node 34cd", "other 56ef"])
    ['node', 'node', 'node-2', 'other']
    """
    chosen: dict[str, str] = {}
    for key in keys:
        if key not in chosen:
            bare = key.partition(" ")[0]
            same = sum(one.partition(" ")[0] == bare for one in chosen)
            chosen[key] = f"{bare}-{same + 1}" if same else bare
    return [chosen[key] for key in keys]


def _described(device: str) -> RankDevice:
    """This rank's device, and its host's cores and memory; the host gets its name later."""
    if device == "cpu":
        return RankDevice("", device_table()["cpu"], available_cores(), available_bytes())
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    words = [word for word in properties.name.split() if word not in ("NVIDIA", "Tesla", "AMD")]
    name = "-".join(words)
    known = device_table().get(DRIVER_NAMES.get(name, name))
    return RankDevice("", known or _measured_type(name, properties.total_memory, device))


def _measured_type(name: str, memory_bytes: int, device: str) -> DeviceType:
    """A type that is not in the table; its speeds are those of a large product and of a copy."""
    side, size_bytes = 4096, 256 * 1024**2
    flops = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = torch.ones(side, side, dtype=dtype, device=device)
        product_s = _timed(lambda a=a: a @ a)  # type: ignore[misc]
        flops[str(dtype).removeprefix("torch.")] = float(f"{2 * side**3 / product_s:.3g}")
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads and writes each byte.
    bandwidth_bytes_per_s = 2 * size_bytes / _timed(lambda: target.copy_(source))
    return DeviceType(
        name,
        memory_bytes,
        flops,
        float(f"{bandwidth_bytes_per_s:.3g}"),
        f"memory: driver; measured by planner topology probe: product of {side}-cubed, copy of"
        f" {size_bytes // 1024**2} MiB, bytes read and written together",
    )


def _timed(run: Callable[[], object]) -> float:
    """Median time on the GPU, in s, after one untimed run."""

    def once() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    return median(repeat(once, least=7, warm_ups=1))


# ------------------------------------------------------------------------------ the transfers


class _Ranks:
    """This rank's buffers, and its transfers and collectives with the others.

    Args:
        process: rank and number of ranks.
        device: torch's name of this rank's device.
        largest_bytes: largest size of a transfer or collective.
    """

    def __init__(self, process: ProcessRank, device: str, largest_bytes: int) -> None:
        self.process = process
        self.backend = "gloo" if device == "cpu" else "nccl"
        self.sizes = tuple(_transfer_sizes(largest_bytes))
        self._device = device
        self._buffer = torch.zeros(max(self.sizes), dtype=torch.uint8, device=device)
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)
        self._factor = torch.ones(WORK_SIZE, WORK_SIZE, device=device)
        self._group = None if device == "cpu" else dist.new_group(backend="nccl", timeout=TIMEOUT)

    def send_and_wait(self, target: int, size_bytes: int) -> float:
        """Time until the target has answered, in s."""
        start = time.perf_counter()
        dist.send(self._buffer[:size_bytes], target, group=self._group, tag=1)
        dist.recv(self._byte, target, group=self._group, tag=2)
        self._settle()
        return time.perf_counter() - start

    def answer(self, source: int, size_bytes: int) -> None:
        """The target's part in `send_and_wait`."""
        dist.recv(self._buffer[:size_bytes], source, group=self._group, tag=1)
        dist.send(self._byte, source, group=self._group, tag=2)
        self._settle()

    def announce(self, target: int, size_bytes: int, repeats: int) -> None:
        """Announces the size and the number of the next transfers; size 0 ends them."""
        dist.send(torch.tensor([size_bytes, repeats]), target, tag=0)

    def announced(self, source: int) -> tuple[int, int]:
        """The size and the number of the next transfers, as the source has announced them."""
        announced = torch.zeros(2, dtype=torch.int64)
        dist.recv(announced, source, tag=0)
        size_bytes, repeats = announced.tolist()
        return size_bytes, repeats

    def collective(self, kind: CollectiveKind, group: dist.ProcessGroup, size_bytes: int) -> float:
        """Time of a collective after some work, in s; all members start that at once.

        Args:
            size_bytes: of the largest buffer, a multiple of 4 for each member.
        """
        members = dist.get_process_group_ranks(group)
        count = len(members)
        buffer = self._buffer[:size_bytes].view(torch.float32)
        line = ProcessGroupAxis(group, members, self.process.rank, nullcontext)
        run: Callable[[], object] = {
            CollectiveKind.ALL_REDUCE: lambda: dist.all_reduce(buffer, group=group),
            CollectiveKind.ALL_GATHER: lambda: line.all_gather(buffer[: len(buffer) // count]),
            CollectiveKind.REDUCE_SCATTER: lambda: line.reduce_scatter(buffer.view(count, -1)),
            CollectiveKind.ALL_TO_ALL: lambda: line.all_to_all(buffer.view(count, -1)),
        }[kind]
        dist.all_reduce(self._byte, group=group)
        self._factor @ self._factor
        self._settle()
        start = time.perf_counter()
        run()
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def group(self, groups: Groups) -> dist.ProcessGroup | None:
        """The one of some groups that this rank is in, if any; every rank has to call this."""
        made = [collective_group(some, self.backend) for some in groups]
        mine = (one for one, some in zip(made, groups, strict=True) if self.process.rank in some)
        return next(mine, None)


def _transfer_sizes(largest_bytes: int) -> Iterator[int]:
    """The sizes that are measured, in bytes.

    >>> list(_transfer_sizes(20_000))
    [1024, 4096, 16384]
    """
    size_bytes = SMALLEST_BYTES
    while size_bytes <= max(largest_bytes, SMALLEST_BYTES):
        yield size_bytes
        size_bytes *= GROWTH


def _in_growing_sizes(
    sizes: Iterable[int], most: int, measure: Callable[[int, int], float]
) -> dict[int, float]:
    """Times by size, in s, until one would take too long.

    Args:
        sizes: ascending, each about `GROWTH` times the one before.
        most: number of repetitions.
        measure: the time of a size, from a number of repetitions after an untimed one.
    """
    times_s: dict[int, float] = {}
    expected_s = 1e-3
    for size_bytes in sizes:
        if expected_s > MAX_TRANSFER_S:
            break
        repeats = int(min(most, max(MIN_REPEATS, REPEATED_S / expected_s)))
        times_s[size_bytes] = measure(size_bytes, repeats)
        expected_s = GROWTH * times_s[size_bytes]
    return times_s


def _middle_mean(times_s: Sequence[float]) -> float:
    """The mean without the tenth at either end.

    >>> _middle_mean([9.0, 1.0, 2.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    2.125
    """
    end = len(times_s) // 10
    return fmean(sorted(times_s)[end : len(times_s) - end])


def _from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------- the measurements


def _measure(
    ranks: _Ranks, name: str, devices: Sequence[RankDevice], progress: Callable[[int, int], None]
) -> Probed | None:
    """All measurements, and on rank 0 the topology.

    Every rank walks through the same loops, so that they agree on the next measurement without a
    message. What depends on results (which pairs are measured again, sizes of simultaneous
    transfers) is decided by rank 0 and sent to all.
    """
    rank = ranks.process.rank
    crowds = experiments([one.host for one in devices])
    groups = groups_at_once(devices_of(devices))
    step = _Steps(rank, progress, len(crowds) + len(groups) * len(CollectiveKind))
    names = [f"rank {r} on {one.host}" for r, one in enumerate(devices)]
    times = _time_all_pairs(ranks, names, step)
    # Absurd times are refused here, before the rest is measured: rank 0 raises, and the other ranks
    # notice that it is gone.
    fits = fit_all(times.values(), names) if rank == 0 else {}
    together = []
    for crowd in crowds:
        together.append(_time_together(ranks, crowd, _from_first(_size_together(fits, crowd))))
        step()
    collectives = []
    for some in groups:
        own = ranks.group(some)
        for kind in CollectiveKind:
            collectives.append(_time_collectives(ranks, kind, some, own))
            step()
    if rank > 0:
        return None
    inferred = infer(name, devices, fits, together, collectives)
    by_pair = tuple(times[pair] for pair in sorted(times)), tuple(fits[p] for p in sorted(fits))
    return Probed(inferred, *by_pair, tuple(collectives), ranks.backend, torch.__version__)


@dataclass(slots=True)
class _Steps:
    """Called after each measurement: waits for all ranks, and reports it on rank 0.

    Attributes:
        rank: this one.
        progress: as of `probe`.
        total: number of all measurements.
        done: number of those so far.
    """

    rank: int
    progress: Callable[[int, int], None]
    total: int
    done: int = 0

    def __call__(self) -> None:
        self.done += 1
        dist.barrier()
        if self.rank == 0:
            self.progress(self.done, self.total)


def _time_all_pairs(ranks: _Ranks, names: Sequence[str], step: _Steps) -> dict[Pair, PairTimes]:
    """Times of all pairs; those that make no sense are measured again, and the shorter ones kept.

    Args:
        names: of the ranks, for messages.
    """
    count = ranks.process.world_size
    times: dict[Pair, PairTimes] = {}
    todo = [(p, q) for p in range(count) for q in range(count) if p != q]
    for _ in range(ATTEMPTS):
        step.total += len(todo)
        for one in _time_pairs(ranks, todo, step):
            pair = one.source, one.target
            times[pair] = shorter_times(one, times.get(pair, one))
        todo = _from_first(pairs_to_repeat(times.values(), names))
        if not todo:
            break
    return times


def _time_pairs(ranks: _Ranks, pairs: Sequence[Pair], step: Callable[[], None]) -> list[PairTimes]:
    """Times of some pairs, measured one after the other, on every rank."""
    own = []
    for p, q in pairs:
        if ranks.process.rank == p:
            own.append(_time_pair(ranks, q))
        elif ranks.process.rank == q:
            _answer_pair(ranks, p)
        step()
    return [one for part in gathered(own) for one in part]


def _time_pair(ranks: _Ranks, target: int) -> PairTimes:
    """Times of transfers to a rank, in growing sizes until one would take too long."""
    spreads: list[float] = []

    def round_trip_s(size_bytes: int, repeats: int) -> float:
        ranks.announce(target, size_bytes, repeats)
        send = partial(ranks.send_and_wait, target, size_bytes)
        samples_s = repeat(send, least=repeats, warm_ups=1)
        low, middle, high = np.quantile(samples_s, (0.25, 0.5, 0.75)).tolist()
        spreads.append((high - low) / middle)
        return float(middle)

    round_trips_s = _in_growing_sizes((1, *ranks.sizes), MAX_REPEATS, round_trip_s)
    ranks.announce(target, 0, 0)
    # No size is faster than one byte; where one seems to be, the byte's transfer was disturbed.
    byte_s = min(round_trips_s.values()) / 2
    del round_trips_s[1]
    times_s = tuple(time_s - byte_s for time_s in round_trips_s.values())
    return PairTimes(ranks.process.rank, target, (*round_trips_s,), times_s, (*spreads[1:],))


def _answer_pair(ranks: _Ranks, source: int) -> None:
    """The target's part in `_time_pair`."""
    size_bytes, repeats = ranks.announced(source)
    while size_bytes:
        repeat(partial(ranks.answer, source, size_bytes), least=repeats, warm_ups=1)
        size_bytes, repeats = ranks.announced(source)


def _size_together(fits: dict[Pair, PairFit], crowd: Sequence[Pair]) -> int:
    """The size of a transfer that the slowest pair moves in `TOGETHER_S` alone; on rank 0."""
    slowest = min((fits[pair].bandwidth_bytes_per_s for pair in crowd if pair in fits), default=0.0)
    return max(SMALLEST_BYTES, int(slowest * TOGETHER_S))


def _time_together(ranks: _Ranks, crowd: Sequence[Pair], size_bytes: int) -> SimultaneousTransfers:
    """The rate of simultaneous transfers: median of `MIN_REPEATS` after an untimed one."""
    size_bytes = min(size_bytes, max(ranks.sizes))

    def slowest_s() -> float:
        dist.barrier()
        own_s = 0.0
        for source, target in crowd:
            if ranks.process.rank == source:
                own_s = ranks.send_and_wait(target, size_bytes)
            elif ranks.process.rank == target:
                ranks.answer(source, size_bytes)
        return max(gathered(own_s))

    together_s = median(repeat(slowest_s, least=MIN_REPEATS, warm_ups=1))
    return SimultaneousTransfers(tuple(crowd), len(crowd) * size_bytes / together_s)


def _time_collectives(
    ranks: _Ranks, kind: CollectiveKind, groups: Groups, own: dist.ProcessGroup | None
) -> CollectiveTimes:
    """Times of collectives of a kind that some groups run at once.

    Args:
        own: the group that this rank is in, if it is in one.
    """
    count = len(groups[0])

    def mean_s(size_bytes: int, repeats: int) -> float:
        dist.barrier()
        own_s = 0.0
        if own is not None:
            run = partial(ranks.collective, kind, own, size_bytes)
            own_s = _middle_mean(repeat(run, least=repeats, warm_ups=1))
        return sum(gathered(own_s)) / (count * len(groups))

    # Each member has as many floats as the others.
    sizes = filter(None, dict.fromkeys(size - size % (4 * count) for size in ranks.sizes))
    times_s = _in_growing_sizes(sizes, MAX_COLLECTIVES, mean_s)
    return CollectiveTimes(groups, (*times_s,), (*times_s.values(),), kind)
