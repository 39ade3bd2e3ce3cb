"""Times of transfers -> latency and bandwidth of each pair of devices, with the error of the fit,
and classes of pairs that agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from planner.support.arrays import Floats
from planner.support.errors import TopologyError
from planner.support.units import format_rate, format_seconds

# Figures further apart, as a share of the smaller one, are not the same.
TOLERANCE = 0.15
# The smallest spread that is believed: no time is more certain than this.
CLOSE = 0.05
# A fit beyond these limits is refused.
MAX_ERROR = 0.5
MAX_BYTES_PER_S = 10e12
# Repetitions that differ by more are noted with the result.
LARGE_SPREAD = 0.25

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairTimes:
    """One-way times of one ordered pair of ranks.

    Attributes:
        sizes_bytes: of the messages, ascending.
        times_s: the median of each size.
        spreads: of each size, the range of the middle half of the repetitions over the median.
    """

    source: int
    target: int
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    spreads: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PairFit:
    """The line of one ordered pair: a transfer takes latency_s + size / bandwidth_bytes_per_s.

    Attributes:
        error: mean of |fitted - measured| / measured over the sizes, by the weights of the fit's s.
        spread: median over the sizes of the repetitions' spread.
    """

    source: int
    target: int
    latency_s: float
    bandwidth_bytes_per_s: float
    error: float
    spread: float


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Pairs that agree.

    Attributes:
        kind: how the link graph joins them.
        pairs: source and target of each.
        latency_s, bandwidth_bytes_per_s: middle of the pairs' range, by ratio.
        error, spread: the largest of the pairs' fits.
    """

    kind: str
    pairs: tuple[Pair, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    error: float
    spread: float


# -------------------------------------------------------------------------------- fitting


def fit(times: PairTimes, names: Sequence[str]) -> PairFit:
    """Latency L and bandwidth B of one pair: the least sum over the sizes n, with times t, of

        (r / s)^2,  r = (L + n / B - t) / t,  s = max(CLOSE, spread of the size),  L at least 0

    where a size with |r / s| above 1 weighs |s / r| as much (Huber's weights): caches, protocols
    that change with the size, and shapers that let short messages pass bend the line.

    Args:
        times: at least two sizes.
        names: of the ranks, for messages.

    Raises:
        TopologyError: if the result is absurd: no time, a latency that would be clearly negative,
            no bandwidth or more than 10 TB/s, an error of more than 50 %.

    >>> fit(PairTimes(0, 1, (1000, 5000), (2.0, 6.0), (0.0, 0.0)), ["a", "b"])
    PairFit(source=0, target=1, latency_s=1.0, bandwidth_bytes_per_s=1000.0, error=0.0, spread=0.0)
    """
    where = f"{names[times.source]} -> {names[times.target]}"
    sizes, t = np.array(times.sizes_bytes, dtype=float), np.array(times.times_s, dtype=float)
    if len(sizes) < 2:
        raise TopologyError(
            f"{where}: expected times for two sizes or more, got {len(sizes)}; the link is too slow"
            " to be probed, or --largest is too small"
        )
    if not (np.isfinite(t) & (t > 0)).all():
        raise TopologyError(f"{where}: expected times above 0 s, got {t.min():g} s; {_AGAIN}")
    # Divided by t, the equations L + n / B = t have the right side 1, and their residuals are
    # relative errors.
    columns = np.stack([1 / t, sizes / t], axis=1)
    spreads = np.maximum(CLOSE, times.spreads)
    latency, slope = _line(columns, spreads)
    _check(where, latency, slope, float(t[0]))
    if latency < 0:
        # The least sum of a convex function over L >= 0 is on the border where it is outside of it
        # over all L.
        latency, slope = 0.0, _line(columns[:, 1:], spreads)[0]
    error = float(np.average(np.abs(columns @ (latency, slope) - 1), weights=1 / spreads))
    if error > MAX_ERROR:
        raise TopologyError(
            f"{where}: latency and bandwidth explain the times only within {error:.0%}, expected"
            f" {MAX_ERROR:.0%} or better; {_AGAIN}"
        )
    return PairFit(
        times.source,
        times.target,
        float(f"{latency:.9g}"),
        float(f"{1 / slope:.9g}"),
        round(error, 6),
        float(np.median(times.spreads)),
    )


def _line(columns: Floats, spreads: Floats) -> tuple[float, ...]:
    """The coefficients of the columns whose sum is closest to 1, by Huber's weights: least squares,
    repeated with the weights that the last residuals give until the coefficients stay.

    Args:
        columns: (sizes, coefficients).
        spreads: (sizes,) the distance from 1 up to which a size weighs fully.
    """
    # Columns of one magnitude keep the solution exact.
    scale = np.abs(columns).max(axis=0)
    weights = 1 / spreads
    scaled = np.zeros(columns.shape[1])
    for _ in range(100):
        before = scaled
        scaled = np.linalg.lstsq(columns / scale * weights[:, None], weights, rcond=None)[0]
        if np.allclose(scaled, before, rtol=1e-9, atol=0.0):
            break
        off = np.abs(columns / scale @ scaled - 1) / spreads
        # lstsq squares the rows, so the root of Huber's weight 1 / off stands here.
        weights = np.sqrt(1 / np.maximum(off, 1)) / spreads
    return tuple((scaled / scale).tolist())


_AGAIN = "probe again while nothing else runs there"


def _check(where: str, latency: float, slope: float, shortest_s: float) -> None:
    if slope <= 0:
        raise TopologyError(
            f"{where}: larger messages took no longer than small ones, so their times say nothing"
            f" about the bandwidth; {_AGAIN}, with a larger --largest"
        )
    if 1 / slope > MAX_BYTES_PER_S:
        raise TopologyError(
            f"{where}: expected at most {format_rate(MAX_BYTES_PER_S)}, measured"
            f" {format_rate(1 / slope)}; {_AGAIN}, with a larger --largest"
        )
    # A small negative latency is noise; one below minus the shortest time is not.
    if latency < -shortest_s:
        raise TopologyError(
            f"{where}: expected a latency of at least 0 s, fitted {format_seconds(latency)};"
            f" {_AGAIN}"
        )


def fit_all(measured: Iterable[PairTimes], names: Sequence[str]) -> dict[Pair, PairFit]:
    """The fit of every pair.

    Raises:
        TopologyError: for all absurd fits at once.
    """
    fits, wrong = {}, []
    for times in measured:
        try:
            fits[times.source, times.target] = fit(times, names)
        except TopologyError as error:
            wrong.append(str(error))
    if wrong:
        raise TopologyError("\n".join(wrong))
    return fits


def pairs_to_repeat(measured: Iterable[PairTimes], names: Sequence[str]) -> list[Pair]:
    """The pairs whose fit is absurd, to be measured again."""
    absurd = []
    for times in measured:
        try:
            fit(times, names)
        except TopologyError:
            absurd.append((times.source, times.target))
    return absurd


def shorter_times(one: PairTimes, other: PairTimes) -> PairTimes:
    """Two measurements of a pair as one: the shorter time of each size, because a disturbance only
    makes a transfer longer.

    >>> first = PairTimes(0, 1, (8, 9), (5.0, 1.0), (0.1, 0.1))
    >>> shorter_times(first, PairTimes(0, 1, (8,), (2.0,), (0.0,)))
    PairTimes(source=0, target=1, sizes_bytes=(8, 9), times_s=(2.0, 1.0), spreads=(0.0, 0.1))
    """
    best: dict[int, tuple[float, float]] = {}
    for times in (one, other):
        for size, time_s, spread in zip(
            times.sizes_bytes, times.times_s, times.spreads, strict=True
        ):
            best[size] = min(best.get(size, (inf, 0.0)), (time_s, spread))
    sizes = tuple(sorted(best))
    return PairTimes(
        one.source,
        one.target,
        sizes,
        tuple(best[size][0] for size in sizes),
        tuple(best[size][1] for size in sizes),
    )


# -------------------------------------------------------------------------------- merging


def clusters(values: Sequence[float], tolerance: float = TOLERANCE) -> list[list[int]]:
    """Indices of values in groups whose largest is at most 1 + tolerance times the smallest: cut
    at the widest gap for as long as a group spans more. The smallest values come first.

    >>> clusters([10.0, 1.0, 10.5, 1.1])
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))

    def cut(group: list[int]) -> list[list[int]]:
        low, high = values[group[0]], values[group[-1]]
        if high <= low * (1 + tolerance):
            return [sorted(group)]
        gaps = [values[b] / values[a] if values[a] > 0 else inf for a, b in pairwise(group)]
        at = int(np.argmax(gaps)) + 1
        return cut(group[:at]) + cut(group[at:])

    return cut(order) if order else []


def classes(fits: Mapping[Pair, PairFit], kinds: Mapping[Pair, str]) -> tuple[LinkClass, ...]:
    """Pairs of one kind whose bandwidths agree and whose latencies agree, fastest first."""
    merged = []
    for kind in sorted(set(kinds.values())):
        pairs = sorted(pair for pair in kinds if kinds[pair] == kind)
        for wide in clusters([fits[pair].bandwidth_bytes_per_s for pair in pairs]):
            for near in clusters([fits[pairs[i]].latency_s for i in wide]):
                merged.append(_link_class(kind, [fits[pairs[wide[i]]] for i in near]))
    return tuple(sorted(merged, key=lambda one: (-one.bandwidth_bytes_per_s, one.pairs)))


def _link_class(kind: str, members: Sequence[PairFit]) -> LinkClass:
    return LinkClass(
        kind,
        tuple((one.source, one.target) for one in members),
        geometric_middle([one.latency_s for one in members]),
        geometric_middle([one.bandwidth_bytes_per_s for one in members]),
        max(one.error for one in members),
        max(one.spread for one in members),
    )


def geometric_middle(values: Sequence[float]) -> float:
    """The middle of a range by ratio: both ends are the same factor away."""
    return float(np.sqrt(min(values) * max(values)))
