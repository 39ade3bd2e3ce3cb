"""Bounds between operators that almost all others come before or behind, for NetSplit's full model
where links are shared.

Legend: a_i, b_i ticks of forward and backward of i on its fastest device; h, J, K, F, B as in
`windows.py`. A cut is an operator with few others that neither come before it nor behind it. The
span of two cuts u, v are these two and all operators between them; the first span begins with the
graph, the last one ends with it.

    (d1) D_uv is the least sum of the ticks from the start of u to the end of v forwards and from
         the start of v to the end of u backwards, by one placement of the span alone. No schedule
         of all operators has less: leaving out operators only relaxes the model
    (d2) what comes before v is over when v starts: J_i >= J_v + J_i of the span that begins with
         v, the same of K, and of h in each phase                                     `joined`
    (d3) J_v of a span is at least D_uv without the longest time that v takes; so is K_u
                                                                                      `_lifted`
    (d4) F + B >= J_i + a_i + b_i + K_i                                               `joined`

The cuts are a chain that makes all spans small, because the work of a proof grows exponentially
with its operators. A span is first bounded by windows and then climbed as in `cpsat.py`: by the
model without (7) and (8), but with `cpsat_ports.py`. Then neighbouring spans are merged, small ones
first, and climbed again: that adds what operators beside a cut cost, and tensors that pass it.

With 60 s of work the gap on four devices is 0.7 to 5.4 % on the benchmark's seeds 0 to 7 (middle
2.4 %), on eight devices 2.7 to 4.8 % on seeds 0 to 4; none is proved. In the best
schedule of seed 0 two spans are 2.0 and 3.1 ms longer than their bounds. It is not known whether
they could be shorter, or the bounds miss what happens where spans meet.

Source: this project's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.artefacts.problem import Status
from planner.solvers.engines.mip import Answer
from planner.solvers.netsplit.bounds import (
    NONE,
    SubproblemBounds,
    edges_of,
    subproblem_bounds_of,
)
from planner.solvers.netsplit.cpsat_call import CONSTRAINTS_PER_S, SearchBudget, call
from planner.solvers.netsplit.cpsat_model import (
    add_apart,
    add_both,
    model_of,
    num_constraints,
)
from planner.solvers.netsplit.cpsat_ports import add_ports
from planner.solvers.netsplit.model import KnownPlacement, NetSplitInstance, part
from planner.solvers.netsplit.windows import (
    BOTH,
    Rows,
    bounds_of_rows,
    pass_on,
    rows_of,
    windows_of_size,
)

BESIDE = 6
"""A cut has at most this many operators that come neither before it nor behind it."""

HALF, PER_BESIDE = 8, 4.0
"""A span costs 2 ** (operators / `HALF`), and a cut `PER_BESIDE` for each operator beside it: the
work of a proof, and the bound that is lost there."""

NEAR = 40
"""Cuts before a cut that are asked for its span's begin: of more, the span would be too large."""

MOST_DOUBLINGS = 1_000
"""Of a span's cost, so that it is a number."""

RISE = 0.001
"""A climb first looks this share above the bound, then twice as far each time."""

WINDOWS = (8, 0.01)
"""Operators of a window, and units of deterministic work for an operator's three windows."""

ONE_SHARE = 0.2
"""Largest share of the work of all spans for one of them."""

MERGE_SHARE = 0.4
"""Largest share of the budget's rest for a merged span."""

Ends = tuple[int | None, int | None]
"""u and v of a span; None for the begin or the end of the graph."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span with its bounds.

    Attributes:
        ends: u, v.
        operators: ascending.
        bounds: of these operators alone.
    """

    ends: Ends
    operators: tuple[int, ...]
    bounds: SubproblemBounds

    def between(self) -> dict[tuple[int, int], int]:
        """D by pairs of operators of the graph."""
        here = self.operators
        return {(here[u], here[v]): ticks for (u, v), ticks in self.bounds.between.items()}


# ------------------------------------------------------------------------------------------ cuts


def spans_of(instance: NetSplitInstance) -> list[tuple[Ends, tuple[int, ...]]]:
    """The ends and operators of the spans between the best cuts, in the order of the graph."""
    inside, beside = _inside(instance)
    cuts = [i for i, others in enumerate(beside) if others <= BESIDE]

    def cost(u: int | None, v: int | None) -> float:
        return math.exp2(min(inside(u, v).bit_count() / HALF, MOST_DOUBLINGS))

    # The cheapest chain that ends in v, for all v in topological order and then for the end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for v in (*cuts, None):
        chains = [(cost(None, v), tuple[int, ...]())]
        for u in list(best)[-NEAR:]:
            if v is None or inside(u, None) >> v & 1:
                so_far, chain = best[u]
                chains.append((so_far + cost(u, v) + PER_BESIDE * beside[u], (*chain, u)))
        cheapest = min(chains)
        if v is not None:
            best[v] = cheapest
    ends = pairwise((None, *cheapest[1], None))
    return [((u, v), _numbers(inside(u, v))) for u, v in ends]


def _numbers(operators: int) -> tuple[int, ...]:
    """The operators that are bits of a number, ascending."""
    return tuple(i for i in range(operators.bit_length()) if operators >> i & 1)


def _inside(
    instance: NetSplitInstance,
) -> tuple[Callable[[int | None, int | None], int], list[int]]:
    """The operators of the span of u and v, as bits; and (N,) the number of operators beside each.

    Only tensors with gradients count: without one, the backwards of two operators do not wait for
    each other.
    """
    num = instance.problem.num_operators
    behind, before = [0] * num, [0] * num  # as bits
    edges = edges_of(instance, backward=True)
    for j, i, _ in edges:
        behind[i] |= behind[j] | 1 << j
    for j, i, _ in reversed(edges):
        before[j] |= before[i] | 1 << i

    def inside(u: int | None, v: int | None) -> int:
        operators = (1 << num) - 1
        operators &= -1 if u is None else behind[u] | 1 << u
        return operators & (-1 if v is None else before[v] | 1 << v)

    beside = [num - 1 - (behind[i] | before[i]).bit_count() for i in range(num)]
    return inside, beside


# ---------------------------------------------------------------------------------------- bounds


def spanned(instance: NetSplitInstance, budget: SearchBudget, share: float) -> list[Span]:
    """The spans of a graph, each bounded alone.

    Args:
        share: largest share of the budget's rest.
    """
    limit_s, spans = share * budget.left_s, list[Span]()
    until_s = budget.left_s - limit_s
    for ends, operators in spans_of(instance):
        alone = part(instance, operators)
        bounds = subproblem_bounds_of(alone)
        if budget.left_s > until_s and not budget.over():
            rest = (budget.left_s - until_s) / budget.left_s
            bounds = windows_of_size(alone, bounds, budget, rest, WINDOWS)
        span = Span(ends, operators, bounds)
        least_s = max(until_s, budget.left_s - ONE_SHARE * limit_s)
        spans.append(_climbed(alone, span, budget, least_s))
    return spans


def merged(
    instance: NetSplitInstance, spans: list[Span], budget: SearchBudget, latest: int
) -> Iterator[list[Span]]:
    """Spans of which two neighbours after the other are merged and climbed, until one takes more
    than its share of the work.

    Args:
        latest: ticks of the best schedule. Nothing that exceeds them has to be proved.
    """
    inside, _ = _inside(instance)
    while len(spans) > 1 and not budget.over() and budget.left_s > 0:
        merges = [(one.ends[0], other.ends[1]) for one, other in pairwise(spans)]
        k, ends = min(enumerate(merges), key=lambda merge: inside(*merge[1]).bit_count())
        operators = _numbers(inside(*ends))
        alone = part(instance, operators)
        bounds = joined(instance, operators, spans[k : k + 2])
        beyond = joined(instance, range(instance.problem.num_operators), spans).least
        worst = latest - 1 - (beyond - bounds.least)
        until_s = budget.left_s * (1 - MERGE_SHARE)
        span = Span(ends, operators, bounds)
        spans = [*spans[:k], _climbed(alone, span, budget, until_s, worst), *spans[k + 2 :]]
        yield spans
        # Larger ones take more work than one that was too large.
        if budget.left_s <= until_s:
            return


def joined(
    instance: NetSplitInstance, operators: Sequence[int], spans: Sequence[Span]
) -> SubproblemBounds:
    """(d2) and (d4): bounds of the operators between the ends of neighbouring spans.

    Args:
        operators: ascending; those beside the cuts are in no span.
        spans: in the order of the graph.
    """
    alone, at = part(instance, operators), {i: k for k, i in enumerate(operators)}
    known = subproblem_bounds_of(alone)
    before, behind = (_side(alone, at, spans, known, behind=side) for side in (False, True))
    bounds = bounds_of_rows(alone, known, before, behind)
    between = {(at[u], at[v]): ticks for span in spans for (u, v), ticks in span.between().items()}
    # The whole graph has no ends whose bounds could say it.
    whole = spans[0].bounds.least if spans[0].ends == (None, None) else 0
    return replace(bounds, between=between, least=max(bounds.least, whole))


def _side(
    alone: NetSplitInstance,
    at: Mapping[int, int],
    spans: Sequence[Span],
    known: SubproblemBounds,
    *,
    behind: bool,
) -> Rows:
    """(d2): the bounds of a side.

    Args:
        alone: the operators between the ends of the spans; at: their numbers in it.
        known: bounds before.
    """
    passed: tuple[int, ...] = (0,) * (BOTH + 1)
    rows = rows_of(known, behind=behind)
    for span in reversed(spans) if behind else spans:
        own = rows_of(span.bounds, behind=behind)
        for row, new, ticks in zip(rows, own, passed, strict=True):
            for i, here in zip(span.operators, new, strict=True):
                row[at[i]] = max(row[at[i]], ticks + here)
        cut = span.ends[not behind]
        if cut is not None:
            passed = tuple(row[at[cut]] for row in rows)
    pass_on(alone, rows, behind=behind)
    return rows


def _lifted(alone: NetSplitInstance, span: Span, least: int) -> Span:
    """(d3): a span with a better bound.

    Args:
        alone: its operators; least: D of its ends.
    """
    where = [None if end is None else span.operators.index(end) for end in span.ends]
    longest = (alone.forward + alone.backward).max(axis=1).tolist()
    sides = [list(span.bounds.behind), list(span.bounds.before)]
    # D counts u and v, K_u and J_v do not count the operator itself: it takes its longest time at
    # most. D is over one placement, so u and v each run on one device in it, and nothing of D is
    # taken off twice.
    for k, side in zip(where, sides, strict=True):
        if k is not None:
            side[k] = max(side[k], least - longest[k])
    between = dict(span.bounds.between)
    u, v = where
    if u is not None and v is not None:
        between[u, v] = least
    behind, before = sides
    bounds = replace(
        span.bounds, before=tuple(before), behind=tuple(behind), least=least, between=between
    )
    return replace(span, bounds=bounds)


def _climbed(
    alone: NetSplitInstance, span: Span, budget: SearchBudget, until_s: float, worst: int = NONE
) -> Span:
    """(d1): a span with its best bound, found as in `cpsat._climb`.

    Args:
        until_s: what is left of the budget at the end.
        worst: ends the climb; no bound above it is asked for.
    """
    least, rise = span.bounds.least, RISE
    build_s = num_constraints(alone, (False, True), channels=False) / CONSTRAINTS_PER_S
    while least <= worst and budget.left_s - build_s > until_s and not budget.over():
        max_ticks = min(int((1 + rise) * least), worst)
        answer = _solved(alone, span, budget, until_s, max_ticks)
        if answer.status is not Status.INFEASIBLE:
            least = max(least, int(answer.bound))
            break
        least, rise = max_ticks + 1, 2 * rise
    return _lifted(alone, span, least)


def _solved(
    alone: NetSplitInstance, span: Span, budget: SearchBudget, until_s: float, max_ticks: int
) -> Answer:
    """The answer for a span's model.

    Args:
        max_ticks: upper limit of D.
    """
    nowhere = KnownPlacement((0,) * len(span.operators), False, 0)
    model = model_of(alone, nowhere, memory=False)
    add_apart(model)
    add_both(model, span.bounds, max_ticks, add_ports)
    budget.left_s -= len(model.cp.proto.constraints) / CONSTRAINTS_PER_S
    share = max(0.0, 1 - until_s / budget.left_s) if budget.left_s > 0 else 0.0
    return call(model, budget, share, hinted=False)
