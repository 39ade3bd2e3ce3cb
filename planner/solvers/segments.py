"""Which segments of a stage are worth running again: whole layers, those first that free the most
bytes per second.

Layers are the numbered modules of the network where the profile names modules. Elsewhere they are
what lies between two places of the stage that a single activation crosses, as between the blocks of
a ResNet or of a Transformer (Chen et al. 2016, arXiv:1604.06174, section 4.3).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import groupby, pairwise

from planner.artefacts.graph import consumers, loss_outputs, producers, tensors_by_name
from planner.artefacts.modules import block_of
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, stash_bytes, storage_owner
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.passes import read_from_outside, used_outside
from planner.support.memo import remembered

MOST_LAYERS = 64
"""Layers without names are one where they have less than that part of a stage's stash."""

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
            freed_per_s = _freed_bytes(profile, some) / max(_forward_s(profile, some), 1e-12)
            worth.append((-freed_per_s, a, operators[a:b]))
    return tuple(names for _, _, names in sorted(worth))


def _forward_s(profile: Profile, some: Sequence[int]) -> float:
    return sum(profile.operators[v].forward_s for v in some)


def _freed_bytes(profile: Profile, some: Sequence[int]) -> int:
    """The stash of some operators less what they read or make for others, which stays."""
    inside = frozenset(some)
    return stash_bytes(profile, some) - _bytes_of(
        profile,
        (*read_from_outside(profile.graph, inside), *used_outside(profile.graph, inside)),
        inside,
    )


def _bytes_of(profile: Profile, names: Iterable[str], inside: Collection[int]) -> int:
    """Of the storages of some tensors."""
    known = tensors_by_name(profile.graph)
    owners = {storage_owner(profile, name, inside) for name in names}
    return sum(known[name].bytes for name in owners if name in known)


def _layers(profile: Profile, indices: Sequence[int]) -> list[tuple[int, int]]:
    """The layers of a stage, by places in it: several as one where one frees less than it reads."""
    named = _numbered(profile, indices) if profile.modules else []
    enough = 0.0 if named else stash_bytes(profile, indices) / MOST_LAYERS
    found: list[tuple[int, int]] = []
    first = behind = 0
    for a, b in named or _between_narrow_places(profile, indices):
        first, behind = (first if a == behind else a), b
        some = indices[first:b]
        read = read_from_outside(profile.graph, frozenset(some))
        least = max(1, _bytes_of(profile, read, frozenset(some)))
        if _freed_bytes(profile, some) >= least and stash_bytes(profile, some) >= enough:
            found.append((first, b))
            first = b
    return found


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
    return [*pairwise([0, *_narrow_places(profile, indices), len(indices)])]


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
        owner = storage_owner(profile, name, inside)
        # A transposed weight is there anyway.
        if tensors[name].gradient and owner in tensors and (readers or outside):
            made = place[made_by[owner]] if made_by.get(owner) in inside else -1
            last = len(indices) if outside else max(readers)
            span = spans.setdefault(owner, [made, last])
            span[1] = max(span[1], last)
    crossing = [0] * (len(indices) + 1)
    for made, last in spans.values():
        for i in range(made + 1, min(last, len(indices) - 1) + 1):
            crossing[i] += 1
    return [i for i in range(1, len(indices)) if crossing[i] == 1]
