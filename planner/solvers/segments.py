"""Which segments of a stage are worth running again: whole layers, those first that free the most
bytes per second.

Layers are the numbered modules of the network where the profile names modules. Elsewhere they are
what lies between two places of the stage that a single activation crosses, as between the blocks of
a ResNet or of a Transformer (Chen et al. 2016, arXiv:1604.06174, section 4.3).
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import groupby, pairwise

from planner.artefacts.graph import consumers, loss_outputs, producers, tensors_by_name
from planner.artefacts.modules import block_of
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, stash_bytes, storage_owner
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.passes import read_from_outside
from planner.support.memo import remembered

MOST_LAYERS = 64
"""Neighbouring layers are one segment where each has less than that part of a stage's stash."""

Segments = tuple[tuple[str, ...], ...]


class Again(IntEnum):
    """What of a stage is run again in its backward; what takes less time comes first."""

    NOTHING = 0
    LAYERS = 1
    STAGE = 2


def recompute_choices(problem: Problem) -> tuple[Again, ...]:
    """What stages may run again, in the order of preference."""
    training = problem.training
    # Versions of the parameters belong to whole stages.
    layers = () if training.schedule.is_asynchronous else (Again.LAYERS,)
    match training.recompute:
        case Recompute.NONE:
            return (Again.NOTHING,)
        case Recompute.FULL:
            return (*layers, Again.STAGE)
    return (Again.NOTHING, *layers, Again.STAGE)


def segments_by_worth(profile: Profile, stage: Stage) -> Segments:
    """The layers of a stage whose forward may be run again, the best first. The one that makes the
    output with a loss is not among them: its backward comes at once.
    """
    return _by_worth(profile, stage.operators)


def running_again(problem: Problem, stage: Stage, what: Again) -> Stage:
    """A stage that runs all that it may again. One without layers is one."""
    segments = () if what is not Again.LAYERS else segments_by_worth(problem.profile, stage)
    return replace(stage, recompute=bool(what), recomputed=in_order(stage, segments))


def in_order(stage: Stage, segments: Segments) -> Segments:
    """Segments as a stage lists them."""
    place = {name: i for i, name in enumerate(stage.operators)}
    return tuple(sorted(segments, key=lambda some: place[some[0]]))


@remembered(kept=64)
def _by_worth(profile: Profile, operators: tuple[str, ...]) -> Segments:
    stage = Stage.whole(operators, (0,), warmup=1, recompute=False)
    indices = indices_of(stage, profile.graph)
    lost = set(loss_outputs(profile.graph))
    worth = []
    for a, b in _layers(profile, indices):
        some = indices[a:b]
        if lost.isdisjoint(n for v in some for n in profile.graph.operators[v].outputs):
            freed, time_s = _freed_bytes(profile, some), _forward_s(profile, some)
            if freed > 0:
                worth.append((-freed / max(time_s, 1e-12), a, operators[a:b]))
    return tuple(names for _, _, names in sorted(worth))


def _forward_s(profile: Profile, some: Sequence[int]) -> float:
    return sum(profile.operators[v].forward_s for v in some)


def _freed_bytes(profile: Profile, some: Sequence[int]) -> int:
    """The stash of some operators less what they read."""
    inside, known = frozenset(some), tensors_by_name(profile.graph)
    read = {storage_owner(profile, n, inside) for n in read_from_outside(profile.graph, inside)}
    return stash_bytes(profile, some) - sum(known[n].bytes for n in read if n in known)


def _layers(profile: Profile, indices: Sequence[int]) -> list[tuple[int, int]]:
    """The layers of a stage, by places in it."""
    named = _numbered(profile, indices) if profile.modules else []
    return named or _between_narrow_places(profile, indices)


def _numbered(profile: Profile, indices: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of operators of the same numbered module."""
    found, at = [], 0
    for block, some in groupby(block_of(profile.modules[v]) for v in indices):
        count = len(list(some))
        if any(part.isdecimal() for part in block.split(".")):
            found.append((at, at + count))
        at += count
    return found


def _between_narrow_places(profile: Profile, indices: Sequence[int]) -> list[tuple[int, int]]:
    cuts = [0, *_narrow_places(profile, indices), len(indices)]
    enough = stash_bytes(profile, indices) / MOST_LAYERS
    found: list[tuple[int, int]] = []
    first = 0
    for _, b in pairwise(cuts):
        if b == len(indices) or stash_bytes(profile, indices[first:b]) >= enough:
            found.append((first, b))
            first = b
    return [(a, b) for a, b in found if b > a]


def _narrow_places(profile: Profile, indices: Sequence[int]) -> list[int]:
    """The places inside a stage that one activation with a gradient crosses."""
    graph, inside = profile.graph, frozenset(indices)
    tensors, read_by, made_by = tensors_by_name(graph), consumers(graph), producers(graph)
    place = {v: i for i, v in enumerate(indices)}
    spans: dict[str, list[int]] = {}
    names = [n for v in indices for n in graph.operators[v].outputs]
    for name in (*read_from_outside(graph, inside), *names):
        readers = [place[v] for v in read_by[name] if v in inside]
        outside = any(v not in inside for v in read_by[name])
        if tensors[name].gradient and (readers or outside):
            owner = storage_owner(profile, name, inside)
            made = place[made_by[owner]] if made_by.get(owner) in inside else -1
            last = len(indices) if outside else max(readers)
            span = spans.setdefault(owner, [made, last])
            span[1] = max(span[1], last)
    crossing = [0] * (len(indices) + 1)
    for made, last in spans.values():
        for i in range(made + 1, min(last, len(indices) - 1) + 1):
            crossing[i] += 1
    return [i for i in range(1, len(indices)) if crossing[i] == 1]
