"""The steady state of a measured flow: the time of a step of the training, and its timeline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from planner.artefacts.strategy import Strategy
from planner.schedules.flows import in_flight
from planner.simulator.timeline import Event, Timeline, Transfer

Timed = TypeVar("Timed", Event, Transfer)


@dataclass(frozen=True, slots=True)
class Window:
    """A step of a flow.

    Attributes:
        step: its index in the flow; it begins with the end of the step before.
        start_s: on the clock of the flow.
        end_s: the same.
        step_s: the median time of a step in the steady state.
        steps_s: the time of the first step of the flow, and those of which this is the median.
        is_steady: whether the pipeline was full all the time; else the flow was too short.
    """

    step: int
    start_s: float
    end_s: float
    step_s: float
    steps_s: tuple[float, ...]
    is_steady: bool


def _steps_filling(strategy: Strategy) -> int:
    """Steps in which a flow fills the pipeline, and as many in which it empties it."""
    return -(-in_flight(strategy) // strategy.num_microbatches)


def steps_to_show(strategy: Strategy) -> int:
    """Steps of the shortest flow that has one with a full pipeline."""
    return 2 * _steps_filling(strategy) + 1


def steady_window(strategy: Strategy, begun_s: float, ends_s: Sequence[float]) -> Window:
    """The step of a flow whose time is closest to the median of those in the steady state.

    The first steps fill the pipeline and the last ones empty it. Between them a step takes from the
    end of the one before to its own end.

    Args:
        strategy: that was run.
        begun_s: the start of the flow.
        ends_s: the end of each step on the last device that ended it.
    """
    count = len(ends_s)
    bounds_s = [begun_s, *ends_s]
    times_s = [end_s - start_s for start_s, end_s in zip(bounds_s, ends_s, strict=False)]
    filling = _steps_filling(strategy)
    steady = range(filling, count - filling)
    used = steady or range(min(1, count - 1), count)
    step_s = median(times_s[i] for i in used)
    step = min(used, key=lambda i: (abs(times_s[i] - step_s), i))
    told_s = tuple(times_s[i] for i in sorted({0, *used}))
    return Window(step, bounds_s[step], ends_s[step], step_s, told_s, bool(steady))


def cropped(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """A part of a timeline; what was begun before or ends behind is cut off.

    Args:
        start_s: where the part begins, which becomes its 0.
        end_s: where it ends.
    """

    def inside(some: Iterable[Timed]) -> Iterator[Timed]:
        for one in some:
            first, last = (min(max(s, start_s), end_s) for s in (one.start_s, one.end_s))
            if first < last:
                yield replace(one, start_s=first - start_s, end_s=last - start_s)

    return Timeline(
        end_s - start_s, tuple(inside(timeline.events)), tuple(inside(timeline.transfers))
    )
