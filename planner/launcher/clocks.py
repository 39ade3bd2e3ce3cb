"""Clocks of ranks: each process has its own, and traces are told on rank 0's.

Rank 0 sends a message to rank r, which answers with the time that its clock shows; rank 0 reads its
own clock before and after. If the ways there and back take equally long, the answer was written in
the middle, so

    offset = answer - (before + after) / 2

The error is at most half of the round trip, so of many the shortest one counts (Cristian,
Distributed Computing 3, 1989). This is done before and after the training, and offsets between are
read off the straight line through both: clocks of different machines drift by microseconds a
second.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Round trips per rank: the shortest of so many is hardly disturbed.
EXCHANGES = 40


def now_s() -> float:
    """What this process's clock shows, in s; its zero means nothing."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one exchange tells.

    Attributes:
        time_s: on the rank's own clock.
        offset_s: the rank's clock minus rank 0's, at that time.
        round_trip_s: twice the largest error of it.
    """

    time_s: float
    offset_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a rank.

    Attributes:
        before: a reading before the training.
        after: one after it.
    """

    before: Reading
    after: Reading

    def on_rank_0(self, time_s: float) -> float:
        """A time of this clock as rank 0's clock would show it, in s.

        >>> Clock(Reading(10.0, 5.0, 0.0), Reading(20.0, 6.0, 0.0)).on_rank_0(15.0)
        9.5
        """
        length_s = self.after.time_s - self.before.time_s
        share = (time_s - self.before.time_s) / length_s if length_s > 0 else 0.0
        drift_s = self.after.offset_s - self.before.offset_s
        return time_s - self.before.offset_s - share * drift_s


def read_clock(ask: Callable[[], float], exchanges: int = EXCHANGES) -> Reading:
    """The offset of a rank's clock; rank 0 calls it.

    Args:
        ask: gets an answer from the rank: the time that its clock shows, in s.
    """
    found = []
    for _ in range(exchanges):
        before_s = now_s()
        answer_s = ask()
        after_s = now_s()
        offset_s = answer_s - (before_s + after_s) / 2
        found.append(Reading(answer_s, offset_s, after_s - before_s))
    return min(found, key=lambda reading: reading.round_trip_s)
