"""Equal stages, as PipeDream-2BW's planner cuts transformers: what Piper compares with.

The repeated layers (those with the most frequent name) are cut into stages with equally many
each; where they do not divide, the last stages have one more. What comes before and after them
goes to the first and the last stage, or is a stage of its own. All stages have the same t and d,
and all layers recompute their activations, or none does. The fastest that fits is taken.

Source: Narayanan et al., ICML 2021, section 3.3, as Piper's authors compare with it.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

from planner.artefacts.formats.piper import PiperGraph, layer_predecessors
from planner.artefacts.problem import Status
from planner.solvers.piper.costs import StageFigures, stage_figures
from planner.solvers.piper.solve import PiperOptions, PiperPlan, PiperStage, allowed

Cut = list[list[int]]


def equal_stages(
    graph: PiperGraph, options: PiperOptions, time_limit_s: float = math.inf
) -> PiperPlan:
    """The fastest plan with equal stages that fits; infeasible if there is none.

    Args:
        time_limit_s: of processor time; the plan is the best one by then.
    """
    end_s = time.process_time() + time_limit_s
    best, chosen = float("inf"), PiperPlan(Status.INFEASIBLE, ())
    most = min(options.num_devices, options.batch)
    degrees = sorted({int(t) for node in graph.nodes for t in node.tmpcs})
    for cut in _cuts(graph, options.num_devices):
        for t in (t for t in degrees if len(cut) * t <= options.num_devices):
            for place in range(max(len(node.tmpcs.get(str(t), ())) for node in graph.nodes)):
                if time.process_time() > end_s:
                    return replace(chosen, status=_late(chosen), in_time=False)
                figures = _figures(graph, cut, t, place, options)
                if figures is None:
                    continue
                for d in range(1, min(most, options.num_devices // t) // len(cut) + 1):
                    time_s = max(one.time_s(d) for one in figures)
                    if options.batch % d == 0 and time_s < best and _fits(figures, d, options):
                        best = time_s
                        chosen = _plan(cut, t, d, place)
    return chosen


def _late(chosen: PiperPlan) -> Status:
    return Status.FEASIBLE if chosen.stages else Status.UNKNOWN


def _plan(cut: Cut, t: int, d: int, place: int) -> PiperPlan:
    return PiperPlan(
        Status.FEASIBLE,
        tuple(
            PiperStage(tuple(sorted(part)), t, d, d * (len(cut) - s), (place,) * len(part))
            for s, part in enumerate(cut)
        ),
    )


def _fits(figures: Sequence[StageFigures], d: int, options: PiperOptions) -> bool:
    return all(
        one.memory_bytes(d, d * (len(figures) - s)) <= options.memory_bytes
        for s, one in enumerate(figures)
    )


def _figures(
    graph: PiperGraph, cut: Cut, t: int, place: int, options: PiperOptions
) -> list[StageFigures] | None:
    """The stages of a cut, all layers in the configuration at one place; None if one has none."""
    figures = []
    for part in cut:
        tmpcs = [graph.nodes[v].tmpcs.get(str(t), ()) for v in sorted(part)]
        if any(place not in allowed(siblings, options.recompute) for siblings in tmpcs):
            return None
        chosen = [siblings[place] for siblings in tmpcs]
        rate = options.bandwidth_bytes_per_s
        figures.append(stage_figures(graph, sorted(part), chosen, options.batch, rate))
    return figures


def _parts(graph: PiperGraph) -> tuple[list[int], list[int], list[int]]:
    """The layers of the most frequent name, those that they need, and the others; each in
    topological order: before, body, after.
    """
    feeds = layer_predecessors(graph)
    order = list(TopologicalSorter(dict(enumerate(feeds))).static_order())
    names = Counter(node.name for node in graph.nodes)
    usual = max(names, key=names.__getitem__)
    body = [v for v in order if graph.nodes[v].name == usual]
    leading = set(body)
    for v in reversed(order):
        if v in leading:
            leading.update(feeds[v])
    before = [v for v in order if v in leading and graph.nodes[v].name != usual]
    return before, body, [v for v in order if v not in leading]


def _cuts(graph: PiperGraph, most_stages: int) -> Iterator[Cut]:
    """The cuts that leave every edge forward."""
    feeds, (before, body, after) = layer_predecessors(graph), _parts(graph)
    for alone in (False, True):
        ends = (before, after) if alone else ()
        for count in range(1, min(len(body), most_stages - len(ends)) + 1):
            cut = _equal(body, count)
            if alone:
                cut = [before, *cut, after]
            else:
                cut[0] = before + cut[0]
                cut[-1] = cut[-1] + after
            cut = [part for part in cut if part]
            stage = {v: s for s, part in enumerate(cut) for v in part}
            if all(stage[u] <= stage[v] for v, sources in enumerate(feeds) for u in sources):
                yield cut


def _equal(items: Sequence[int], count: int) -> Cut:
    """Items in order, in parts with equally many; the last parts have one more.

    >>> _equal([0, 1, 2, 3, 4], 3)
    [[0], [1, 2], [3, 4]]
    """
    size, larger = divmod(len(items), count)
    bounds = [k * size + max(0, k - (count - larger)) for k in range(count + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds)]
