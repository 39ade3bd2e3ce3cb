"""Schedules: the order of the forwards and backwards of one replica, and how many microbatches are
in flight.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.artefacts.strategy import ScheduleName, Strategy
from planner.schedules.actions import Direction


def gpipe(num_microbatches: int, warmup: int) -> Iterator[tuple[Direction, int]]:
    """All forwards, then all backwards in the same order (Huang et al., GPipe, 2019).

    Args:
        num_microbatches: how many this device runs.
        warmup: not used; all microbatches are in flight.
    """
    for direction in Direction:
        for k in range(num_microbatches):
            yield direction, k


def one_f_one_b(num_microbatches: int, warmup: int) -> Iterator[tuple[Direction, int]]:
    """`warmup` forwards, then one backward and one forward in turn, then the backwards that are
    left (PipeDream-flush: Narayanan et al., 2021).

    Args:
        num_microbatches: how many this device runs.
        warmup: W, the forwards before the first backward.
    """
    ahead = min(warmup, num_microbatches)
    for k in range(ahead):
        yield Direction.FORWARD, k
    for k in range(num_microbatches):
        yield Direction.BACKWARD, k
        if k + ahead < num_microbatches:
            yield Direction.FORWARD, k + ahead


SCHEDULES: Mapping[ScheduleName, Callable[[int, int], Iterator[tuple[Direction, int]]]] = {
    ScheduleName.GPIPE: gpipe,
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.PIPEDREAM: one_f_one_b,
}


def default_warmups(
    widths: Sequence[int],
    num_microbatches: int,
    extra: int = 0,
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    devices: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """W of every stage. For 1F1B: 1 in the last stage and, before it,

        W_s = ceil(W_{s+1} R_{s+1} / R_s) + 1 + extra,

    at most ceil(M / R_s), without the 1 + extra where a device of the stage runs a later one too:
    it has that one's microbatches to go on with. For GPipe: ceil(M / R_s). For PipeDream, whatever
    M is, what keeps a pipeline of equal stages busy, which is NOAM in the first stage (Narayanan et
    al., PipeDream, SOSP 2019, section 3.2):

        W_s = ceil(sum_{t >= s} R_t / R_s)

    Args:
        widths: R_s, the number of replicas of each stage.
        num_microbatches: M.
        extra: more microbatches in flight per stage, to hide transfers; not for PipeDream, where
            they decide what is trained.
        devices: of each stage; without them no two stages share one.

    >>> default_warmups((2, 3, 1), 12)
    (4, 2, 1)
    >>> default_warmups((1, 1, 1), 12, devices=((0,), (1,), (0,)))
    (2, 2, 1)
    >>> default_warmups((2, 3, 1), 12, schedule=ScheduleName.PIPEDREAM)
    (3, 2, 1)
    """
    # No `extra`, even where it is faster: W decides how old the parameters are.
    if schedule is ScheduleName.PIPEDREAM:
        return tuple(-(-sum(widths[s:]) // width) for s, width in enumerate(widths))
    if schedule.has_phases:
        return tuple(-(-num_microbatches // width) for width in widths)
    warmups: list[int] = []
    later: set[int] = set()
    for s in reversed(range(len(widths))):
        own = set(devices[s]) if devices else set()
        more = 0 if own & later else 1 + extra
        deep = 1 if not warmups else -(-warmups[0] * widths[s + 1] // widths[s]) + more
        warmups.insert(0, min(deep, -(-num_microbatches // widths[s])))
        later |= own
    return tuple(warmups)


def with_microbatches(strategy: Strategy, num_microbatches: int) -> Strategy:
    """The same stages for another M, each with as many microbatches in flight beyond the default
    as before.
    """

    def defaults(count: int) -> tuple[int, ...]:
        return default_warmups(
            [stage.num_replicas for stage in strategy.stages],
            count,
            schedule=strategy.schedule,
            devices=[stage.devices for stage in strategy.stages],
        )

    if strategy.schedule.is_asynchronous:
        return replace(strategy, num_microbatches=num_microbatches)
    before, after = defaults(strategy.num_microbatches), defaults(num_microbatches)
    stages = [
        replace(
            stage,
            warmup=min(
                max(1, new + stage.warmup - old), -(-num_microbatches // stage.num_replicas)
            ),
        )
        for stage, old, new in zip(strategy.stages, before, after, strict=True)
    ]
    return replace(strategy, stages=tuple(stages), num_microbatches=num_microbatches)
