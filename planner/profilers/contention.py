"""`contention`: how much processes on this machine slow each other that compute at the same time.

Cores may be threads of one core, and all cores share caches and memory. So each of n processes that
compute takes longer for the same work than a process that computes alone:

    slowdown(n) = (CPU time with n processes / CPU time alone) x max(1, n x threads / cores)

CPU time, because it grows with what the processes share, and not with what other programs take of
the cores meanwhile; with more threads than cores the processes also take turns.

More processes than the cores run at a time slow each other also where only one of them computes and
the others wait: it starts on a core whose caches hold another one's data, or the other's core. So

    turns(n) = CPU time of n processes that compute one after the other
               / CPU time of as many as run at a time that compute one after the other

which leaves out what a process waits for its turn. Both are measured once per machine
(contention_worker.py), for work bound by computation and for work bound by memory, and kept in the
user's cache folder. A profile has the mean of both, weighted by the time of its operators of either
kind.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median

from planner.artefacts.profile import Contention, OperatorCost, Profile
from planner.artefacts.strict import reader
from planner.clusters.yaml.schema import available_cores
from planner.profilers.cache import processor
from planner.profilers.reliability import MAX_WALL_PER_CPU
from planner.support.caches import LOGGER, CacheFolder, cache_root

METHOD = 2
"""Number of the way to measure; a new one makes all entries of the cache unused."""
BUDGET_S, LONGEST_S = 10.0, 60.0
"""Time after which no new round of phases starts, and after which the worker is ended."""
MOST_PROCESSES = 64
"""The largest number of processes that is measured."""
FLOPS_PER_BYTE = 4.0
"""Operators with fewer are bound by memory: a core of a server computes some 50 GFLOP/s and reads
some 12 GB/s."""

IN_TURNS = " in turns"
"""What the worker puts behind the name of work that processes do in turns."""
_WORKER = Path(__file__).with_name("contention_worker.py")


@dataclass(frozen=True, slots=True)
class MachineContention:
    """Slowdowns on this machine by number of processes, from 2 on.

    Attributes:
        cores: cores that this process may use.
        compute: of work bound by computation.
        memory: of work bound by memory.
        compute_turns, memory_turns: turns(n) of the same, of more processes than run at a time.
    """

    cores: int
    compute: dict[int, float]
    memory: dict[int, float]
    compute_turns: dict[int, float] = field(default_factory=dict)
    memory_turns: dict[int, float] = field(default_factory=dict)


def machine_contention(threads: int, *, cached: bool) -> tuple[MachineContention | None, str]:
    """The slowdowns of processes on this machine.

    Args:
        threads: CPU threads of each process.
        cached: whether to take those that were measured here before, and to store new ones.

    Returns:
        The slowdowns, None where they cannot be measured; and a warning, "" for none.
    """
    import torch

    cores = available_cores()
    conditions = [METHOD, processor(), cores, threads, torch.__version__]
    digest = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
    shelf, name = CacheFolder(cache_root() / "contention" if cached else None), f"{digest}.entry"
    if (content := shelf.get(name)) is not None:
        return reader(MachineContention).validate_json(content), ""
    measured, warning = _measured(cores, threads)
    if measured is not None and not warning:
        shelf.put_json(name, asdict(measured))
        if shelf.problem:
            LOGGER.warning("%s; the next profile measures contention again", shelf.problem)
    return measured, warning


# Two kinds of work stand for all models. Steps of the user's model in several processes would be
# nearer to the truth, but would take long for each model, and hold it several times in memory.
# Once per process: the microbatches of one call have the same slowdowns.
@cache
def _measured(cores: int, threads: int) -> tuple[MachineContention | None, str]:
    """The slowdowns, and a warning."""
    at_once = cores / threads
    try:
        numbers = numbers_of_processes(cores)
        crowded = [n for n in numbers if n > at_once]
        turns = [max(1, int(at_once)), *crowded] if crowded else []
        phases = _phases(threads, numbers, turns)
        measured = MachineContention(
            cores,
            slowdowns(phases, "compute", at_once),
            slowdowns(phases, "memory", at_once),
            slowdowns(phases, "compute" + IN_TURNS, math.inf),
            slowdowns(phases, "memory" + IN_TURNS, math.inf),
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, (
            "the slowdown of processes that compute at the same time could not be measured, and is"
            f" taken for processes / cores: {error}"
        )
    ratio = _wall_per_cpu(phases, at_once)
    if ratio <= MAX_WALL_PER_CPU:
        return measured, ""
    return measured, (
        f"processes that were timed at the same time took {ratio:.2f} times their own CPU time: the"
        " machine was busy, and their slowdown may be too small; profile again when it is quiet"
    )


def contention_of(profile: Profile, machine: MachineContention) -> Contention:
    """The slowdown of the profile's operators: that of both kinds of work, weighted by the time
    of its operators of either kind.
    """
    by_memory_s = sum(map(_time_s, filter(_memory_bound, profile.operators)))
    share = by_memory_s / sum(map(_time_s, profile.operators))

    def mean(compute: dict[int, float], memory: dict[int, float]) -> dict[int, float]:
        return {n: round((1 - share) * compute[n] + share * memory[n], 3) for n in sorted(compute)}

    return Contention(
        machine.cores,
        mean(machine.compute, machine.memory),
        mean(machine.compute_turns, machine.memory_turns) or None,
    )


def _time_s(cost: OperatorCost) -> float:
    return cost.forward_s + cost.backward_s


def _memory_bound(cost: OperatorCost) -> bool:
    return cost.flops < FLOPS_PER_BYTE * cost.bytes_moved


def numbers_of_processes(cores: int) -> tuple[int, ...]:
    """The numbers that are measured: all up to 4, powers of two, the number of cores and twice it.

    >>> numbers_of_processes(2), numbers_of_processes(6)
    ((2, 3, 4), (2, 3, 4, 6, 8, 12))
    """
    most = min(2 * cores, MOST_PROCESSES)
    some = {2, 3, 4, cores, most, *(2**i for i in range(1, 7))}
    return tuple(sorted(n for n in some if 2 <= n <= max(2, most)))


# A phase of the worker: work, number of processes, wall and CPU time of a repetition in s.
Phase = tuple[str, int, float, float]


def _phases(threads: int, numbers: Iterable[int], turns: Iterable[int] = ()) -> list[Phase]:
    """The phases that the worker has timed.

    Raises:
        OSError, SubprocessError, ValueError: if it does not start, fails, or takes too long.
    """
    some = [",".join(map(str, which)) for which in (numbers, turns)]
    worker = [sys.executable, "-P", str(_WORKER)]
    command = [*worker, str(threads), str(BUDGET_S), *some, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(reason[-1])
    return [(str(work), int(n), float(w), float(c)) for work, n, w, c in json.loads(done.stdout)]


def slowdowns(phases: Sequence[Phase], work: str, at_once: float) -> dict[int, float]:
    """The slowdown by number of processes: the median over pairs of a phase of one process and the
    phase of several behind it. At least 1, and not smaller for more processes.

    Args:
        phases: in the order in which they were timed.
        work: name of the work.
        at_once: number of processes that have cores at a time.
    """
    ratios: dict[int, list[float]] = defaultdict(list)
    for alone, together in zip(phases[::2], phases[1::2], strict=True):
        if together[0] == work:
            ratios[together[1]].append(together[3] / alone[3])
    numbers = sorted(ratios)
    slow = (round(median(ratios[n]) * max(1.0, n / at_once), 3) for n in numbers)
    return dict(zip(numbers, list(accumulate(slow, max, initial=1.0))[1:], strict=True))


def _wall_per_cpu(phases: Sequence[Phase], at_once: float) -> float:
    """Wall time over CPU time where every process could have a core, the median of the phases."""
    return median(
        wall_s / cpu_s
        for work, n, wall_s, cpu_s in phases
        if not work.endswith(IN_TURNS) and (n <= at_once or n == 1)
    )
