"""Clocks of ranks: each process has its own; traces have the times of rank 0's.

Rank 0 asks rank r, which answers with the time of its clock; rank 0 reads its own clock before and
after. If the ways there and back take equally long, the answer was written in the middle, so

    offset = answer - (before + after) / 2

The error is at most half of the round trip, so the shortest of several round trips counts
(Cristian, Distributed Computing 3, 1989). The offset is measured before and after the training, and
interpolated linearly in between: clocks of different machines drift by microseconds per second.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

EXCHANGES = 40
"""Round trips per rank; the shortest of them is hardly disturbed."""


def now_s() -> float:
    """The time of this process's clock, in s; its zero is arbitrary."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one exchange.

    Attributes:
        time_s: time of the answer on the rank's own clock.
        offset_s: the rank's clock minus rank 0's at that time.
        round_trip_s: length of the exchange, twice the largest error of the offset.
    """

    time_s: float
    offset_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a rank.

    Attributes:
        before: a reading before the training.
        after: a reading after the training.
    """

    before: Reading
    after: Reading

    def on_rank_0(self, time_s: float) -> float:
        """The time of rank 0's clock at a time of this clock, in s.

        >>> Clock(Reading(10.0, 5.0, 0.0), Reading(20.0, 6.0, 0.0)).on_rank_0(15.0)
        9.5
        """
        length_s = self.after.time_s - self.before.time_s
        # One reading twice has no drift.
        share = (time_s - self.before.time_s) / length_s if length_s > 0 else 0.0
        drift_s = self.after.offset_s - self.before.offset_s
        return time_s - self.before.offset_s - share * drift_s


def read_clock(ask: Callable[[], float], exchanges: int = EXCHANGES) -> Reading:
    """The offset of a rank's clock; rank 0 calls it.

    Args:
        ask: asks the rank and returns its answer, the time of its clock in s.
        exchanges: number of round trips.
    """
    readings = []
    for _ in range(exchanges):
        before_s = now_s()
        answer_s = ask()
        after_s = now_s()
        offset_s = answer_s - (before_s + after_s) / 2
        readings.append(Reading(answer_s, offset_s, after_s - before_s))
    return min(readings, key=lambda reading: reading.round_trip_s)
