"""Where a chain of operators is cut into stages: that run at the same pace (`balanced_cuts`), or
that have the same number of layers (`even_cuts`).

    N operators in order, cut into p stages; stage s is [a_s, a_s+1), a_0 = 0, a_p = N
    T_s(a, b)   time of the operators [a, b), with a second forward where stage s recomputes
    C_s(a)      time to send what crosses the cut a, behind stage s, and the gradients back
    K           microbatches that each replica runs

        minimise   K max(max_s T_s, (sum_s T_s + sum_s C_s) / p)  +  sum_s C_s

The period of a pipeline is its longest stage, or the round trip of a microbatch over the p that are
in flight; stages of the same pace leave no slack for transfers. The last term is the time of
transfers as it fills and empties. There are two dynamic programs over stages and cuts: the first
has the smallest largest stage, the second the least sum of transfers of all cuts whose stages are
at most some share longer. Of a few such shares the best is taken, so the minimum is near, not
exact.

Tried and left: stages that get shorter towards the end, because the last one starts last. Under
1F1B the first ones wait as long for the first gradients, and four stages took 3 % longer.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from planner.artefacts.modules import block_of
from planner.support.arrays import Floats

# The shares by which stages may be longer than they have to be, to be cut where less crosses.
_SLACKS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


def balanced_cuts(
    forward_s: Floats,
    backward_s: Floats,
    crossing_s: Floats,
    recompute: Sequence[bool],
    rounds: float,
) -> tuple[tuple[int, ...], ...]:
    """The operators of each stage.

    Args:
        forward_s: (N,) time of each operator.
        backward_s: (N,) the same of its backward.
        crossing_s: (p - 1, N + 1) C of each cut behind each stage but the last.
        recompute: of each stage.
        rounds: K.

    Raises:
        ValueError: if there are fewer operators than stages.

    >>> ones, free = np.ones(6), np.zeros((1, 7))
    >>> balanced_cuts(ones, ones, free, (False, False), 4)
    ((0, 1, 2), (3, 4, 5))
    >>> balanced_cuts(ones, ones, free, (True, False), 4)
    ((0, 1), (2, 3, 4, 5))
    """
    size, count = len(forward_s), len(recompute)
    if size < count:
        raise ValueError(f"expected at least {count} operators for as many stages, got {size}")
    forward, both = (
        np.concatenate(([0.0], np.cumsum(one))) for one in (forward_s, forward_s + backward_s)
    )
    empty = np.tril(np.full((size + 1, size + 1), np.inf))  # [a, b] with b <= a
    plain_s = both[None, :] - both[:, None] + empty
    again_s = plain_s + (forward[None, :] - forward[:, None])
    stage_s = [again_s if one else plain_s for one in recompute]
    least_s = _smallest_largest(stage_s)
    best: tuple[float, list[int]] | None = None
    for slack in _SLACKS:
        cuts = _cheapest(stage_s, crossing_s, least_s * (1 + slack) + 1e-15)
        times_s = [stage_s[s][cuts[s], cuts[s + 1]] for s in range(count)]
        sent_s = sum(crossing_s[s][cuts[s + 1]] for s in range(count - 1))
        value = rounds * max(*times_s, (sum(times_s) + sent_s) / count) + sent_s
        if best is None or value < best[0]:
            best = value, cuts
    assert best is not None, "there is a slack"
    return tuple(tuple(range(best[1][s], best[1][s + 1])) for s in range(count))


def even_cuts(modules: Sequence[str], num_stages: int) -> tuple[tuple[int, ...], ...] | None:
    """The operators of each stage, where all have the same number of layers, which are numbered
    modules. What comes before the first layer is in the first stage, and what comes after the last
    one in the last. Each of these counts as a layer where layers can be dealt evenly with them
    only. Where they cannot be at all, stages differ by a layer.

    Args:
        modules: (N,) path of the module that each operator came from.

    Returns:
        None where there are fewer layers than stages.

    >>> even_cuts(["embed", "h.0", "h.0", "h.1", "h.2", "h.3", "head"], 2)
    ((0, 1, 2, 3), (4, 5, 6))
    >>> even_cuts(["embed", "h.0", "head"], 3)
    """
    firsts, at = [], 0
    for block, some in groupby(map(block_of, modules)):
        if any(part.isdecimal() for part in block.split(".")):
            firsts.append(at)
        at += len(list(some))
    count = len(firsts)
    if count < num_stages:
        return None
    ends = int(count % num_stages > 0 and (count + 2) % num_stages == 0)
    inner = [s * (count + 2 * ends) // num_stages - ends for s in range(1, num_stages)]
    cuts = [0, *(firsts[layer] for layer in inner), len(modules)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def _smallest_largest(stage_s: Sequence[Floats]) -> float:
    """The smallest time of the largest stage.

    Args:
        stage_s: per stage, (N + 1, N + 1) its time by its two cuts.
    """
    longest = np.full(len(stage_s[0]), np.inf)
    longest[0] = 0.0
    for time_s in stage_s:
        longest = np.maximum(longest[:, None], time_s).min(axis=0)
    return float(longest[-1])


def _cheapest(stage_s: Sequence[Floats], crossing_s: Floats, limit_s: float) -> list[int]:
    """The cuts with the least sum of transfers of those whose stages are within a limit, with the
    ends; of equal ones the earlier.
    """
    total = np.full(len(stage_s[0]), np.inf)
    total[0] = 0.0
    before = []
    for s, time_s in enumerate(stage_s):
        reached = np.where(time_s <= limit_s, total[:, None], np.inf)
        before.append(reached.argmin(axis=0))
        total = reached.min(axis=0)
        if s < len(crossing_s):
            total = total + crossing_s[s]
    cuts = [len(total) - 1]
    for sources in reversed(before):
        cuts.append(int(sources[cuts[-1]]))
    return cuts[::-1]
