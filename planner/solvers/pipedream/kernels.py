"""The inner loops of PipeDream's optimizer (`solve.py`), compiled by numba. Symbols as in
`costs.py`, whose formulas are compiled in here; states i, k, j from 0, and index m of a table
stands for m + 1 machines.
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.pipedream import costs
from planner.support.arrays import Bools, Floats
from planner.support.jit import njit

whole_s = njit(costs.whole_s)
last_s = njit(costs.last_s)
transfer_s = njit(costs.transfer_s)
stashed = njit(costs.stashed)


class LevelTables(NamedTuple):
    """What the search knows at one level. Infinity stands for what cannot be.

    Attributes:
        compute: (S, S) c[i][j], in s; what is below the diagonal is not read.
        parameters: (S,) P.
        activations: (S,) Act.
        outputs: (S,) O.
        before: (S, S) whether [j, k], that is k, is a strict predecessor of j.
        machines: n.
        bandwidth: B, in bytes per s.
        inside: N, machines of the level inside.
        widest: machines that a stage may have: n, or 1 in a straight pipeline.
        memory: bytes that (4) may reach.
        ratio: of compression, or 0 where transfers do not count.
        fewer: whether machines may be left out.
        final: whether this is the outermost level, where only i = 0 is asked for.
    """

    compute: Floats
    parameters: Floats
    activations: Floats
    outputs: Floats
    before: Bools
    machines: int
    bandwidth: float
    inside: int
    widest: int
    memory: float
    ratio: float
    fewer: bool
    final: bool


@njit
def whole(t: LevelTables, i: int, j: int, m: int) -> float:
    """(1) with (4): the time of the range i..j on m + 1 machines without a split."""
    if m >= t.widest:
        return np.inf
    parameters, activations = t.parameters[j], t.activations[j]
    if i > 0:
        parameters -= t.parameters[i - 1]
        activations -= t.activations[i - 1]
    if stashed(t.machines, m + 1, m + 1) * (parameters + activations) > t.memory:
        return np.inf
    return whole_s(t.compute[i, j], parameters, m + 1, t.bandwidth, t.inside)


@njit
def last_stages(t: LevelTables, j: int, least: int, last: Floats, size: Floats) -> None:
    """(2) and (3) for all last stages that end with state j and start behind `least` or later.

    Args:
        last: (S, n) is filled with the time of the stage k+1..j on m' + 1 machines, transfers
            included where they count.
        size: (S,) is filled with the bytes that (4) multiplies.
    """
    end = len(t.parameters) - 1
    for k in range(least, j):
        parameters = t.parameters[j] - t.parameters[k]
        size[k] = t.activations[j] - t.activations[k] + parameters
        for q in range(t.machines):
            last[k, q] = np.inf
            if q < t.widest and t.before[j, k]:
                stage_s = last_s(t.compute[k + 1, j], parameters, q + 1, t.bandwidth)
                if t.ratio > 0:
                    stage_s = max(stage_s, transfer_s(t.outputs[k], q + 1, t.bandwidth, t.ratio))
                    if j < end:
                        stage_s = max(
                            stage_s, transfer_s(t.outputs[j], q + 1, t.bandwidth, t.ratio)
                        )
                last[k, q] = stage_s


@njit
def improve(best: Floats, front: Floats, last: float) -> None:
    """Splits at one place that are faster replace what was best, for neighbouring i at once.

    Args:
        best: times of i..j.
        front: times of i..k.
        last: time of the stage behind.
    """
    for i in range(len(best)):
        best[i] = min(best[i], max(front[i], last))


@njit
def fill(t: LevelTables) -> Floats:
    """A[i][j][m] at [j, m, i], (S, n, rows): the least time of every range on every number of
    machines; one row at the outermost level, else S.
    """
    size, n = len(t.parameters), t.machines
    rows = 1 if t.final else size
    best = np.full((size, n, rows), np.inf)
    last, stage_bytes = np.empty((size, n)), np.empty(size)
    for j in range(size):
        last_stages(t, j, 0, last, stage_bytes)
        for m in range(n):
            for i in range(min(rows, j + 1)):
                best[j, m, i] = whole(t, i, j, m)
            if m > 0 and t.fewer:
                stop = min(rows, j)
                # One machine left out: nothing stands behind, so the time is that on m machines.
                improve(best[j, m, :stop], best[j, m - 1, :stop], -np.inf)
            for k in range(j):
                if not t.before[j, k]:
                    continue
                stop = min(rows, k + 1)
                # The last stage is k+1..j on q + 1 machines. It leaves m - q of them, at index m -
                # 1 - q, to the states up to k, whose tables are final since k < j.
                for q in range(min(m, t.widest)):
                    if stashed(n, m + 1, q + 1) * stage_bytes[k] > t.memory:
                        continue
                    if t.final:  # one row: a call for it would take longer
                        time = max(best[k, m - 1 - q, 0], last[k, q])
                        best[j, m, 0] = min(best[j, m, 0], time)
                    else:
                        improve(best[j, m, :stop], best[k, m - 1 - q, :stop], last[k, q])
    return best
