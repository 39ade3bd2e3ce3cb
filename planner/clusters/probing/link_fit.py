"""Times of transfers -> latency and bandwidth of each pair of devices, with the error of the fit,
and classes of pairs that agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from planner.errors import TopologyError
from planner.support.arrays import Floats
from planner.units import format_rate, format_seconds

# Figures further apart, as a share of the smaller one, are not the same.
TOLERANCE = 0.15
# The least spread that is believed: no size is known any better.
CLOSE = 0.05
# Beyond these a fit says nothing about a link.
LARGEST_ERROR = 0.5
LARGEST_BYTES_PER_S = 10e12
# Repetitions that differ by more say little.
LARGE_SPREAD = 0.25

Matrix: TypeAlias = Floats
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Times:
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
class Fit:
    """A transfer takes latency_s + size / bandwidth_bytes_per_s.

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


def fit(times: Times, names: Sequence[str]) -> Fit:
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

    >>> fit(Times(0, 1, (1000, 5000), (2.0, 6.0), (0.0, 0.0)), ["a", "b"])
    Fit(source=0, target=1, latency_s=1.0, bandwidth_bytes_per_s=1000.0, error=0.0, spread=0.0)
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
    columns = np.stack([1 / t, sizes / t], axis=1)
    spreads = np.maximum(CLOSE, times.spreads)
    latency, slope = _line(columns, spreads)
    _check(where, latency, slope, float(t[0]))
    if latency < 0:
        latency, slope = 0.0, _line(columns[:, 1:], spreads)[0]
    error = float(np.average(np.abs(columns @ (latency, slope) - 1), weights=1 / spreads))
    if error > LARGEST_ERROR:
        raise TopologyError(
            f"{where}: latency and bandwidth explain the times only within {error:.0%}, expected"
            f" {LARGEST_ERROR:.0%} or better; {_AGAIN}"
        )
    return Fit(
        times.source,
        times.target,
        float(f"{latency:.9g}"),
        float(f"{1 / slope:.9g}"),
        round(error, 6),
        float(np.median(times.spreads)),
    )


def _line(columns: Matrix, spreads: Matrix) -> tuple[float, ...]:
    """The coefficients of columns whose sum is 1 as nearly as can be, by Huber's weights.

    Args:
        columns: (sizes, coefficients).
        spreads: (sizes,) the distance from 1 up to which a size weighs fully.
    """
    scale = np.abs(columns).max(axis=0)
    weights = 1 / spreads
    found = np.zeros(columns.shape[1])
    for _ in range(100):
        before = found
        found = np.linalg.lstsq(columns / scale * weights[:, None], weights, rcond=None)[0]
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
        off = np.abs(columns / scale @ found - 1) / spreads
        weights = np.sqrt(1 / np.maximum(off, 1)) / spreads
    return tuple((found / scale).tolist())


_AGAIN = "probe again while nothing else runs there"


def _check(where: str, latency: float, slope: float, shortest_s: float) -> None:
    if slope <= 0:
        raise TopologyError(
            f"{where}: larger messages took no longer than small ones, so that there is no"
            f" bandwidth to be found; {_AGAIN}, with a larger --largest"
        )
    if 1 / slope > LARGEST_BYTES_PER_S:
        raise TopologyError(
            f"{where}: expected at most {format_rate(LARGEST_BYTES_PER_S)}, measured"
            f" {format_rate(1 / slope)}; {_AGAIN}, with a larger --largest"
        )
    if latency < -shortest_s:
        raise TopologyError(
            f"{where}: expected a latency of at least 0 s, fitted {format_seconds(latency)};"
            f" {_AGAIN}"
        )


def fit_all(measured: Iterable[Times], names: Sequence[str]) -> dict[Pair, Fit]:
    """The fit of every pair.

    Raises:
        TopologyError: all that are absurd, at once.
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


def suspects(measured: Iterable[Times], names: Sequence[str]) -> list[Pair]:
    """The pairs whose fit is absurd, to be measured again."""
    found = []
    for times in measured:
        try:
            fit(times, names)
        except TopologyError:
            found.append((times.source, times.target))
    return found


def calmer(one: Times, other: Times) -> Times:
    """Two measurements of a pair as one: of each size the shorter time, because what disturbs a
    transfer only makes it longer.

    >>> calmer(Times(0, 1, (8, 9), (5.0, 1.0), (0.1, 0.1)), Times(0, 1, (8,), (2.0,), (0.0,)))
    Times(source=0, target=1, sizes_bytes=(8, 9), times_s=(2.0, 1.0), spreads=(0.0, 0.1))
    """
    best: dict[int, tuple[float, float]] = {}
    for times in (one, other):
        for size, *found in zip(times.sizes_bytes, times.times_s, times.spreads, strict=True):
            best[size] = min(best.get(size, (inf, 0.0)), (found[0], found[1]))
    sizes = tuple(sorted(best))
    return Times(
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


def classes(fits: Mapping[Pair, Fit], kinds: Mapping[Pair, str]) -> tuple[LinkClass, ...]:
    """Pairs of one kind whose bandwidths agree and whose latencies agree, fastest first."""
    found = []
    for kind in sorted(set(kinds.values())):
        pairs = sorted(pair for pair in kinds if kinds[pair] == kind)
        for wide in clusters([fits[pair].bandwidth_bytes_per_s for pair in pairs]):
            for near in clusters([fits[pairs[i]].latency_s for i in wide]):
                members = [fits[pairs[wide[i]]] for i in near]
                found.append(
                    LinkClass(
                        kind,
                        tuple((one.source, one.target) for one in members),
                        middle([one.latency_s for one in members]),
                        middle([one.bandwidth_bytes_per_s for one in members]),
                        max(one.error for one in members),
                        max(one.spread for one in members),
                    )
                )
    return tuple(sorted(found, key=lambda one: (-one.bandwidth_bytes_per_s, one.pairs)))


def middle(values: Sequence[float]) -> float:
    """The middle of a range by ratio, from which all of a class are equally far."""
    return float(np.sqrt(min(values) * max(values)))
