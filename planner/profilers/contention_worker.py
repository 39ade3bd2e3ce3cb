"""A program of its own: work for several processes at once, timed.

    python contention_worker.py THREADS BUDGET_S NUMBER,... TURNS,... PARENT

It ends when PARENT, the process that started it, does. It loads PyTorch once and forks as many
processes as the largest number. Phase after phase, some of them do the same work for the same time.
A phase of each number follows one of a single process, so that a change of the machine meets both.
For each number in TURNS but the first there are phases in which as many processes take turns, each
after one of the first number. It prints a JSON list of phases (`Phase`).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic, perf_counter, process_time, sleep
from typing import Any, NamedTuple

import torch
from torch.nn import functional

PHASE_S, LEAST_ROUNDS = 0.25, 2
IN_TURNS = " in turns"
"""What the names of works end with in phases in which processes take turns."""
AHEAD_S = 0.005
"""How long before its start a phase is announced."""


class Phase(NamedTuple):
    """Processes that do the same work at the same time.

    Attributes:
        work: name of the work.
        num_processes: number of the processes.
        wall_s: mean time of one repetition.
        cpu_s: mean CPU time of one repetition.
    """

    work: str
    num_processes: int
    wall_s: float
    cpu_s: float


def _compute_bound() -> Callable[[], None]:
    """Forward and backward of a convolution of ResNet-50 and of a matrix product of GPT-2."""
    image = torch.randn(1, 64, 56, 56, requires_grad=True)
    window = torch.randn(64, 64, 3, 3, requires_grad=True)
    rows = torch.randn(64, 768, requires_grad=True)
    weight = torch.randn(768, 3072, requires_grad=True)

    def run() -> None:
        for leaf in (image, window, rows, weight):
            leaf.grad = None
        torch.autograd.backward(functional.conv2d(image, window, padding=1).sum())
        torch.autograd.backward((rows @ weight).sum())

    return run


def _memory_bound() -> Callable[[], None]:
    """Forward and backward of a normalization, an activation and a sum of ResNet-50, and a sum of
    gradients: more data than the caches of a core hold.
    """
    image = torch.randn(4, 64, 56, 56, requires_grad=True)
    scale, shift = (torch.randn(64, requires_grad=True) for _ in range(2))
    total, more = (torch.randn(2 * 2**20) for _ in range(2))

    def run() -> None:
        normal = functional.batch_norm(image, None, None, scale, shift, training=True)
        torch.autograd.backward((functional.relu(normal) + image).sum())
        total.add_(more)

    return run


WORK = {"compute": _compute_bound, "memory": _memory_bound}


def serve(
    orders: "Connection[Any, Any]", inherited: "list[Connection[Any, Any]]", threads: int
) -> None:
    """Does the work that is ordered, as (name, start, end), and tells its times, until the process
    that orders it ends.

    Args:
        inherited: the other process's ends of the pipes so far; one that stays open here would keep
            reading from waiting for ever.
    """
    for one in inherited:
        one.close()
    with suppress(EOFError, ConnectionError):
        _serve(orders, threads)


def _serve(orders: "Connection[Any, Any]", threads: int) -> None:
    torch.set_num_threads(threads)
    works = {name: make() for name, make in WORK.items()}
    for run in works.values():
        run()
    orders.send(None)
    while (order := orders.recv()) is not None:
        name, start_s, end_s = order
        sleep(max(0.0, start_s - monotonic()))
        begin_s, begin_cpu_s, count = perf_counter(), process_time(), 0
        while count == 0 or monotonic() < end_s:
            works[name]()
            count += 1
        wall_s, cpu_s = perf_counter() - begin_s, process_time() - begin_cpu_s
        orders.send((wall_s / count, cpu_s / count))


def phases(
    workers: "list[Connection[Any, Any]]",
    numbers: list[int],
    turns: list[int],
    budget_s: float,
    parent: int,
) -> Iterator[Phase]:
    """Rounds of all phases until the budget is spent, or nobody waits for them."""
    begin_s, rounds = monotonic(), 0
    while rounds < LEAST_ROUNDS or monotonic() - begin_s < budget_s:
        rounds += 1
        for name in WORK:
            pairs = [(phase, 1, n) for n in numbers]
            pairs += [(_in_turns, turns[0], n) for n in turns[1:]]
            for timed, few, many in pairs:
                if os.getppid() != parent:
                    sys.exit(1)
                yield timed(workers[:few], name)
                yield timed(workers[:many], name)


def phase(workers: "list[Connection[Any, Any]]", name: str) -> Phase:
    """One phase."""
    start_s = monotonic() + AHEAD_S
    for one in workers:
        one.send((name, start_s, start_s + PHASE_S))
    times_s = [one.recv() for one in workers]
    wall_s, cpu_s = (sum(column) / len(workers) for column in zip(*times_s, strict=True))
    return Phase(name, len(workers), wall_s, cpu_s)


def _in_turns(workers: "list[Connection[Any, Any]]", name: str) -> Phase:
    """One phase in which one process after the other does the work once."""
    times_s: list[tuple[float, float]] = []
    begin_s = monotonic()
    while monotonic() - begin_s < PHASE_S or len(times_s) < 2 * len(workers):
        for one in workers:
            one.send((name, 0.0, 0.0))
            times_s.append(one.recv())
    wall_s, cpu_s = (sum(column) / len(times_s) for column in zip(*times_s, strict=True))
    return Phase(name + IN_TURNS, len(workers), wall_s, cpu_s)


def main() -> None:
    """Starts the processes, runs the phases, and prints them."""
    threads, budget_s = int(sys.argv[1]), float(sys.argv[2])
    numbers, turns = ([int(n) for n in some.split(",") if n] for some in sys.argv[3:5])
    parent = int(sys.argv[5])
    # Nothing has run here yet, so there are no threads that a fork would lose.
    context = get_context("fork")
    workers = []
    for _ in range(max(numbers + turns)):
        own, other = context.Pipe()
        workers.append(own)
        context.Process(target=serve, args=(other, workers, threads), daemon=True).start()
        other.close()  # so that reading from a worker that was killed ends
    for one in workers:
        one.recv()
    sys.stdout.write(json.dumps(list(phases(workers, numbers, turns, budget_s, parent))))


if __name__ == "__main__":
    main()
