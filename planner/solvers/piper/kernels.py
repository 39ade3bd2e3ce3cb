"""The inner loops of Piper's problem (`solve.py`), compiled by numba.

Symbols; arrays are indexed by them:

    i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every layer
    v     layers
    o     configurations of a layer for one degree of tensor parallelism
    x     degrees t of tensor parallelism, ascending
    y     degrees d of data parallelism, ascending
    p     pairs of downsets: stages

Costs come from `costs.py`, whose functions are compiled in here.
"""

import time
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numba import objmode

from planner.solvers.graphs.downsets import Downsets
from planner.solvers.piper import costs as piper
from planner.support.arrays import Bools, Floats, Ints
from planner.support.jit import inner, njit

Picks = npt.NDArray[np.int32]
Array = TypeVar("Array", Floats, Ints)

stage_time_s = njit(piper.stage_time_s)
memory_bytes = njit(piper.memory_bytes)
in_flight = njit(piper.in_flight)

# Columns of the figures of a choice: s of computation and transfers, which data parallelism
# divides; s of synchronisation; bytes per sample in flight (A); other bytes (B).
SERIAL, SYNC, PER_SAMPLE, BESIDES = 0, 1, 2, 3
# Columns of `_reach`: a downset; the place of the one that it was reached from; the layer added.
TO, FROM, ADDED = 0, 1, 2
# Of two sums in another order, neither is the better one.
ROUNDING = 1e-13
NEVER = 1 << 30
# The clock is looked at once for so many stages.
LOOK_EVERY = 64
# More stages times degrees, or choices, are not listed: some GB.
MAX_ROWS = 1 << 26
# Instead of no time at all, to divide by.
TINY = 1e-300


class Layers(NamedTuple):
    """What layers cost.

    Attributes:
        option_start: (layers * degrees + 1,) the configurations of layer v for degree x are those
            from option_start[v * degrees + x] up to the next.
        figures: (configurations, 4) compute_s, sync_s, A and B.
        crossing: (layers * degrees, neighbours) s of the edge to each neighbour, if it crosses, in
            the configuration where that is least.
        extra: (configurations, neighbours) s of it besides, in each configuration.
        mixed: whether there is any.
        near_start: (layers + 1,) the neighbours of layer v are near[near_start[v]:near_start[v+1]].
        near: see near_start.
    """

    option_start: Ints
    figures: Floats
    crossing: Floats
    extra: Floats
    mixed: bool
    near_start: Ints
    near: Ints


class Stages(NamedTuple):
    """Every stage, with the configurations that are worth choosing.

    Attributes:
        start: (n + 1,) the stages that begin after D_i are those from start[i] up to the next.
        end: (pairs,) the j of each.
        point_start: (pairs * degrees + 1,) the choices of stage p for degree x.
        outside: (pairs * degrees,) s of the edges that cross, in any choice.
        figures: (choices, 4) serial_s besides, sync_s, A and B.
        most: (choices,) samples in flight that fit, capped.
    """

    start: Ints
    end: Ints
    point_start: Ints
    outside: Floats
    figures: Floats
    most: Ints


class Degrees(NamedTuple):
    """What a stage may take.

    Attributes:
        tensor: (degrees,) t, ascending.
        data: (divisors,) d, ascending.
        num_devices: K.
        batch: the most samples in flight.
    """

    tensor: Ints
    data: Ints
    num_devices: int
    batch: int


@njit
def is_over(end_s: float) -> bool:
    """Whether the processor time of this process is past a time, for compiled code: takes
    microseconds. That code cannot tell how long its own compiling took, so whoever calls it has to
    look again.
    """
    with objmode(now_s="float64"):
        now_s = time.process_time()
    return bool(now_s > end_s)


@njit
def _longer(old: Array, size: int) -> Array:
    new = np.zeros(size, old.dtype)
    for p in range(old.shape[0]):
        new[p] = old[p]
    return new


@njit
def _taller(old: Floats) -> Floats:
    new = np.zeros((2 * old.shape[0], 4))
    for p in range(old.shape[0]):
        for f in range(4):
            new[p, f] = old[p, f]
    return new


@njit
def _within(choices: Floats, p: int, q: int) -> bool:
    """Whether choice p of the second half is no worse than choice q in any figure."""
    for f in range(4):
        if choices[1, p, f] > choices[1, q, f] * (1 + ROUNDING):
            return False
    return True


@njit
def _move(choices: Floats, picks: Picks, half: int, p: int, other: int, q: int) -> None:
    """Writes choice p of one half over choice q of the other one."""
    for f in range(4):
        choices[other, q, f] = choices[half, p, f]
    for v in range(picks.shape[2]):
        picks[other, q, v] = picks[half, p, v]


@njit
def _bytes(choices: Floats, p: int) -> float:
    return float(choices[1, p, PER_SAMPLE] + choices[1, p, BESIDES])


@njit
def _thinned(choices: Floats, picks: Picks, count: int, most: int) -> int:
    """Leaves the one with the least memory of choices with much the same computation, and at most
    `most` choices. Writes them into the first half, and returns how many they are.
    """
    least, largest = np.inf, 0.0
    for p in range(count):
        time = choices[1, p, SERIAL]
        least, largest = min(least, time), max(largest, time)
    chosen = np.full(most, -1, np.int64)
    for p in range(count):
        place = int((choices[1, p, SERIAL] - least) / max(largest - least, TINY) * (most - 1))
        other = chosen[place]
        if other < 0 or _bytes(choices, p) < _bytes(choices, other):
            chosen[place] = p
    kept = 0
    for place in range(most):
        if chosen[place] >= 0:
            _move(choices, picks, 1, int(chosen[place]), 0, kept)
            kept += 1
    return kept


@njit
def _combine(
    layers: Layers, option_range: tuple[int, int], extra: Floats, memory: float, spare: float,
    most: int, choices: Floats, picks: Picks, count: int, size: int,
) -> tuple[int, bool]:  # fmt: skip
    """Adds a layer to a stage: every choice with every configuration, in place; those that do not
    fit with one sample in flight, or are worse than another one in every figure, are dropped.
    Where a choice fits whatever comes, its memory does not matter and is set to nothing.

    Args:
        spare: bytes that a choice may take with `most` samples in flight to fit whatever comes.
        extra: (configurations of the layer,) s that its crossing edges take besides.
        choices: (2, room, 4) figures; the first half is changed, the second one is for scratch. An
            eighth of the room, or less, is taken.
        picks: (2, room, layers) the configuration of each layer; no columns where nobody asks.
        count: choices so far.
        size: layers so far.

    Returns:
        The number of choices, and whether they are all that is worth it.
    """
    kept, complete = 0, True
    for p in range(count):
        for o in range(option_range[0], option_range[1]):
            a = choices[0, p, PER_SAMPLE] + layers.figures[o, PER_SAMPLE]
            b = choices[0, p, BESIDES] + layers.figures[o, BESIDES]
            # Safe to leave out: more layers take more memory, and one sample in flight is the
            # least.
            if memory_bytes(a, b, 1) > memory or kept == choices.shape[1]:
                complete = complete and kept < choices.shape[1]
                continue
            # It fits with any layers to come, so choices that do are compared by time alone.
            if memory_bytes(a, b, most) <= spare:
                a, b = 0.0, 0.0
            serial = choices[0, p, SERIAL] + layers.figures[o, SERIAL]
            choices[1, kept, SERIAL] = serial + extra[o - option_range[0]]
            choices[1, kept, SYNC] = choices[0, p, SYNC] + layers.figures[o, SYNC]
            choices[1, kept, PER_SAMPLE], choices[1, kept, BESIDES] = a, b
            for v in range(min(size, picks.shape[2])):
                picks[1, kept, v] = picks[0, p, v]
            if picks.shape[2] > 0:
                picks[1, kept, size] = o
            # Safe to leave out if worse: the layers to come add the same to both. The last choice
            # fills the place of one that goes.
            worse, q = False, 0
            while q < kept and not worse:
                if _within(choices, q, kept):
                    worse = True
                elif _within(choices, kept, q):
                    _move(choices, picks, 1, kept - 1, 1, q)
                    _move(choices, picks, 1, kept, 1, kept - 1)
                    kept -= 1
                else:
                    q += 1
            if not worse:
                kept += 1
    if kept > choices.shape[1] // 8:
        return _thinned(choices, picks, kept, choices.shape[1] // 8), False
    for p in range(kept):
        _move(choices, picks, 1, p, 0, p)
    return kept, complete


@njit
def choose(
    layers: Layers, num_degrees: int, x: int, added: Ints, places: tuple[int, int], inside: Bools,
    memory: float, spare: float, most: int, choices: Floats, picks: Picks, count: int,
) -> tuple[int, bool]:  # fmt: skip
    """All choices for a stage, written into `choices` and `picks`; see `_combine`.

    Args:
        x: the degree of tensor parallelism.
        added: the layers that are not yet in the `count` choices there are, between two places.
        inside: (layers,) whether each is in the stage.
    """
    complete = True
    extra = np.zeros(0)
    for place in range(places[0], places[1]):
        v = added[place]
        first = layers.option_start[v * num_degrees + x]
        last = layers.option_start[v * num_degrees + x + 1]
        if extra.shape[0] < last - first:
            extra = np.zeros(last - first)
        for o in range(last - first):
            extra[o] = 0.0
        if layers.mixed:
            for z in range(layers.near_start[v], layers.near_start[v + 1]):
                if not inside[layers.near[z]]:
                    for o in range(first, last):
                        extra[o - first] += layers.extra[o, z - layers.near_start[v]]
        count, whole = _combine(
            layers, (first, last), extra, memory, spare, most, choices, picks, count, place
        )  # fmt: skip
        complete = complete and whole
    return count, complete


@njit
def _largest_bytes(layers: Layers, row: int, most: int) -> float:
    """Bytes of a layer for one degree, in its largest configuration.

    Args:
        row: of the layer and the degree in `Layers.option_start`.
        most: samples in flight.
    """
    largest = 0.0
    for o in range(layers.option_start[row], layers.option_start[row + 1]):
        a, b = layers.figures[o, PER_SAMPLE], layers.figures[o, BESIDES]
        largest = max(largest, memory_bytes(a, b, most))
    return largest


@njit
def _outside_s(
    layers: Layers, num_degrees: int, x: int, stage: Ints, size: int, inside: Bools
) -> float:
    """Time of the edges that cross the boundary of a stage, in s.

    Args:
        stage: its layers are the first `size` of these.
    """
    total = 0.0
    for place in range(size):
        v = stage[place]
        for z in range(layers.near_start[v], layers.near_start[v + 1]):
            if not inside[layers.near[z]]:
                total += layers.crossing[v * num_degrees + x, z - layers.near_start[v]]
    return total


@inner
def _most_bytes(subsets: Downsets, layers: Layers, num_degrees: int, most: int) -> Floats:
    """(n, degrees) bytes that the layers of each downset take at the most."""
    before = np.zeros((subsets.masks.shape[0], num_degrees))
    for i in range(before.shape[0]):
        for e in range(subsets.start[i], subsets.start[i + 1]):
            for x in range(num_degrees):
                row = subsets.added[e] * num_degrees + x
                before[subsets.cover[e], x] = before[i, x] + _largest_bytes(layers, row, most)
    return before


@inner
def _reach(subsets: Downsets, i: int, seen: Ints, reached: Ints) -> int:
    """Lists D_i and the downsets that hold it, smaller ones first.

    Args:
        seen: (n,) the last i that reached each downset.
        reached: (n, 3) is filled, by TO, FROM and ADDED.

    Returns:
        How many they are.
    """
    head, tail = 0, 1
    reached[0, TO] = i
    while head < tail:
        here = reached[head, TO]
        for e in range(subsets.start[here], subsets.start[here + 1]):
            j = subsets.cover[e]
            if seen[j] != i:
                seen[j] = i
                reached[tail, TO], reached[tail, FROM] = j, head
                reached[tail, ADDED] = subsets.added[e]
                tail += 1
        head += 1
    return tail


@inner
def _list_layers(subsets: Downsets, i: int, j: int, inside: Bools, members: Ints) -> int:
    """Writes the layers of the stage D_j minus D_i, and gives their number.

    Args:
        inside: (layers,) whether each is in the stage.
        members: those that are, ascending; the rest is left as it is.
    """
    size = 0
    for v in range(inside.shape[0]):
        stage = subsets.masks[j, v // 64] & ~subsets.masks[i, v // 64]
        inside[v] = (stage >> np.uint64(v % 64)) & np.uint64(1) == np.uint64(1)
        if inside[v]:
            members[size] = v
            size += 1
    return size


@inner
def _samples_that_fit(figures: Floats, memory: float, most: int) -> Ints:
    """(choices,) samples in flight that fit a device, at most `most`."""
    fitting = np.zeros(figures.shape[0], np.int64)
    for p in range(figures.shape[0]):
        a, spare = figures[p, PER_SAMPLE], memory - figures[p, BESIDES]
        fitting[p] = most if a * most <= spare else np.int64(spare / a)
    return fitting


@njit
def stages(
    subsets: Downsets, layers: Layers, num_degrees: int, memory: float, room: int, most: int,
    end_s: float,
) -> tuple[Stages, bool, bool]:  # fmt: skip
    """All stages D_j minus D_i that fit, with their choices of one configuration per layer. A
    stage's choices are those of a stage that has one layer less, with each of the layer's: the
    downset that D_j was reached from stands before it in the list of those that hold D_i, so the
    choices of that stage are known. Where the time of an edge depends on the configuration
    (`Layers.mixed`), a new layer changes the figures of its neighbours, and all layers are chosen
    anew.

    Args:
        memory: of a device, in bytes.
        room: for choices while they are being made; an eighth is kept.
        most: cap of samples in flight.
        end_s: by the processor time of this process; the stages are no use where it is over.

    Returns:
        The stages, whether all choices that are worth it were kept, and whether all stages were
        listed in time and memory.
    """
    n, num_layers = subsets.masks.shape[0], layers.near_start.shape[0] - 1
    start = np.zeros(n + 1, np.int64)
    end, point_start = np.zeros(64, np.int64), np.zeros(64 * num_degrees + 1, np.int64)
    outside, figures = np.zeros(64 * num_degrees), np.zeros((256, 4))
    seen, reached = np.full(n, -1, np.int64), np.zeros((n, 3), np.int64)
    inside, members = np.zeros(num_layers, np.bool_), np.zeros(num_layers + 1, np.int64)
    choices = np.zeros((2, room, 4))
    no_picks = np.zeros((2, room, 0), np.int32)
    before = _most_bytes(subsets, layers, num_degrees, most)
    pairs, points, complete, in_time = 0, 0, True, True
    for i in range(n):
        start[i] = pairs
        if not in_time:
            continue
        for place in range(1, _reach(subsets, i, seen, reached)):
            if pairs % LOOK_EVERY == 0 and (
                max(pairs * num_degrees, points) > MAX_ROWS or is_over(end_s)
            ):
                in_time = False
                break
            j, smaller = reached[place, TO], reached[place, FROM]
            size = _list_layers(subsets, i, j, inside, members)
            if pairs == end.shape[0]:
                end = _longer(end, 2 * pairs)
                point_start = _longer(point_start, 2 * pairs * num_degrees + 1)
                outside = _longer(outside, 2 * pairs * num_degrees)
            end[pairs] = j
            for x in range(num_degrees):
                first, count = 0, 1
                choices[0, 0] = 0.0
                if smaller > 0 and not layers.mixed:
                    # Place 0 is D_i itself, so the stage at place s is pair start[i] + s - 1.
                    base = (start[i] + smaller - 1) * num_degrees + x
                    count = point_start[base + 1] - point_start[base]
                    for p in range(count):
                        choices[0, p] = figures[point_start[base] + p]
                    first, members[size] = size, reached[place, ADDED]
                # What is left if all layers that are still to come take their most.
                spare = memory - (before[n - 1, x] - before[i if layers.mixed else j, x])
                count, whole = choose(
                    layers, num_degrees, x, members, (first, max(size, first + 1)), inside, memory,
                    spare, most, choices, no_picks, count,
                )  # fmt: skip
                complete = complete and whole
                while points + count > figures.shape[0]:
                    figures = _taller(figures)
                figures[points : points + count] = choices[0, :count]
                points += count
                row = pairs * num_degrees + x
                outside[row] = _outside_s(layers, num_degrees, x, members, size, inside)
                point_start[row + 1] = points
            pairs += 1
    start[n] = pairs
    figures = figures[:points]
    every = Stages(
        start, end[:pairs], point_start[: pairs * num_degrees + 1], outside[: pairs * num_degrees],
        figures, _samples_that_fit(figures, memory, most),
    )  # fmt: skip
    return every, complete, in_time


@njit
def fewest_in_flight(
    stages: Stages, degrees: Degrees, work: Floats, target_s: float, end_s: float
) -> tuple[npt.NDArray[np.int32], bool]:
    """For everything behind a downset, with at most k devices and no stage slower than the target,
    the smallest sum of degrees of data parallelism. That is what matters to the stages in front:
    the fewer, the less memory they need.

        least[i, k] = min over stages D_j minus D_i, t, d of least[j, k - t d] + d,
            if the stage fits its memory with that many samples in flight

    Only k matter that leave the layers of D_i enough devices.

    Args:
        work: (n,) devices times s, at least, of the layers of D_i.
        end_s: by the processor time of this process.

    Returns:
        (n, K + 1), NEVER where it cannot be done; and whether it was all done in time.
    """
    n, num_degrees = work.shape[0], degrees.tensor.shape[0]
    least = np.full((n, degrees.num_devices + 1), NEVER, np.int32)
    least[n - 1] = 0
    # Each row falls with k, because leaving devices unused is allowed.
    for i in range(n - 2, -1, -1):
        if is_over(end_s):
            return least, False
        room = degrees.num_devices - np.int64(np.ceil(work[i] * (1 - 1e-9) / max(target_s, TINY)))
        own = least[i]
        for p in range(stages.start[i], stages.start[i + 1]):
            behind = least[stages.end[p]]
            # The entries that are not NEVER begin here, with the largest of them.
            first = _first_within(behind, NEVER - 1)
            # Safe: D_i needs the other devices for its own work.
            if first > room:
                continue
            for x in range(num_degrees):
                t = degrees.tensor[x]
                low, high = (
                    stages.point_start[p * num_degrees + x],
                    stages.point_start[p * num_degrees + x + 1],
                )
                if low == high:
                    continue
                outside, widest = stages.outside[p * num_degrees + x], -1
                for y in range(degrees.data.shape[0]):
                    d = degrees.data[y]
                    # Safe: d ascends, and so do the devices. Once a smaller d allows every sum
                    # behind, the largest of which is at `first`, a larger one adds more for more
                    # devices.
                    if first + t * d > room or widest >= behind[first]:
                        break
                    fitting = 0
                    for q in range(low, high):
                        if stages.most[q] > fitting:
                            serial, sync = (
                                outside + stages.figures[q, SERIAL],
                                stages.figures[q, SYNC],
                            )
                            if stage_time_s(serial, sync, d) <= target_s:
                                fitting = stages.most[q]
                    # ceil(sum / d) samples fit if the sum, d included, is at most d x fitting.
                    limit = min(d * fitting, degrees.batch) - d
                    # Safe: a smaller d allows all sums behind that this one does.
                    if limit <= widest:
                        continue
                    widest = limit
                    begin = _first_within(behind, limit)
                    for k in range(begin + t * d, room + 1):
                        own[k] = min(own[k], behind[k - t * d] + np.int32(d))
        own[room + 1 :] = own[room] if room >= 0 else NEVER
    return least, True


@njit
def _first_within(falling: npt.NDArray[np.int32], limit: int) -> int:
    """The first place of a falling row whose entry is at most the limit."""
    low, high = 0, falling.shape[0]
    while low < high:
        middle = (low + high) // 2
        if falling[middle] <= limit:
            high = middle
        else:
            low = middle + 1
    return low


@njit
def walk(
    stages: Stages, degrees: Degrees, least: npt.NDArray[np.int32], target_s: float
) -> tuple[float, Ints]:
    """The plan behind `fewest_in_flight`, which must have one.

    Returns:
        Its largest stage time, with the fastest choices that fit, and a row per stage: j, t, d, and
        the sum of the degrees of data parallelism to the end.
    """
    n, num_degrees = least.shape[0], degrees.tensor.shape[0]
    rows = np.zeros((n, 4), np.int64)
    count, i, k, largest = 0, 0, degrees.num_devices, 0.0
    while i < n - 1:
        chosen, total = False, int(least[i, k])
        # The fewest devices with this sum: entries for more of them may be copies, which no stage
        # stands behind.
        k = _first_within(least[i], total)
        for p in range(stages.start[i], stages.start[i + 1]):
            j = stages.end[p]
            for x in range(num_degrees):
                for y in range(degrees.data.shape[0]):
                    t, d = degrees.tensor[x], degrees.data[y]
                    if chosen or t * d > k or least[j, k - t * d] + d != total:
                        continue
                    best = np.inf
                    for q in range(
                        stages.point_start[p * num_degrees + x],
                        stages.point_start[p * num_degrees + x + 1],
                    ):
                        serial = stages.outside[p * num_degrees + x] + stages.figures[q, SERIAL]
                        time = stage_time_s(serial, stages.figures[q, SYNC], d)
                        if in_flight(total, d) <= stages.most[q] and time < best:
                            best = time
                    if best <= target_s:
                        rows[count, 0], rows[count, 1] = j, t
                        rows[count, 2], rows[count, 3] = d, total
                        chosen = True
                        largest = max(largest, best)
        if not chosen:
            raise ValueError("no plan behind the least")
        i, k, count = rows[count, 0], k - rows[count, 1] * rows[count, 2], count + 1
    return largest, rows[:count]


@njit
def times_between(stages: Stages, degrees: Degrees, low_s: float, high_s: float) -> Floats:
    """Times of stages between two, both left out, in no order; some more than once."""
    num_degrees = degrees.tensor.shape[0]
    times, count = np.zeros(64), 0
    for p in range(stages.end.shape[0]):
        for x in range(num_degrees):
            outside = stages.outside[p * num_degrees + x]
            for q in range(
                stages.point_start[p * num_degrees + x], stages.point_start[p * num_degrees + x + 1]
            ):
                for y in range(degrees.data.shape[0]):
                    d, serial = degrees.data[y], outside + stages.figures[q, SERIAL]
                    time = stage_time_s(serial, stages.figures[q, SYNC], d)
                    if low_s < time < high_s and degrees.tensor[x] * d <= degrees.num_devices:
                        if count == times.shape[0]:
                            grown = np.zeros(2 * count)
                            grown[:count] = times
                            times = grown
                        times[count] = time
                        count += 1
    return times[:count]
