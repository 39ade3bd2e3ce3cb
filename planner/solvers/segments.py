"""Which segments of a stage are worth running again: whole layers, those first that free the most
bytes per second. Activations of the same layers may wait in the host's memory instead, or what is
kept of those that run again.

Layers are the numbered modules of the network where the profile names modules. Elsewhere they are
what lies between two places of the stage that a single activation crosses, as between the blocks of
a ResNet or of a Transformer (Chen et al. 2016, arXiv:1604.06174, section 4.3).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import groupby, pairwise

from planner.artefacts.graph import consumers, loss_outputs, producers, tensors_by_name
from planner.artefacts.modules import block_of
from planner.artefacts.options import Offload, Recompute
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, stash_bytes, storage_owner
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.offloading import host_of, host_rate_bytes_per_s
from planner.costs.operators import operator_times
from planner.costs.passes import read_from_outside, used_outside
from planner.support.memo import remembered

MOST_LAYERS = 64
"""Layers without names are one where they have less than that part of a stage's stash."""

Segments = tuple[tuple[str, ...], ...]


class Again(IntEnum):
    """What of a stage is run again in its backward, or waits in the host's memory for it."""

    NOTHING = 0
    LAYERS = 1
    HOST = 2
    """Activations of its layers wait there."""
    HOST_LAYERS = 3
    """Its layers run again, and what they read waits there."""
    STAGE = 4

    @property
    def reruns(self) -> bool:
        """Whether anything is run again."""
        return self in (Again.LAYERS, Again.HOST_LAYERS, Again.STAGE)

    @property
    def offloads(self) -> bool:
        """Whether anything waits in the host's memory."""
        return self in (Again.HOST, Again.HOST_LAYERS)


def recompute_choices(problem: Problem) -> tuple[Again, ...]:
    """What stages may run again, or keep in the host's memory, in the order of preference; see
    `choice_orders`.
    """
    return choice_orders(problem)[0]


def choice_orders(problem: Problem) -> tuple[tuple[Again, ...], ...]:
    """The same in all orders that may be the best: where layers may be run again or wait in the
    host's memory, both ways round, that first which takes less time if all layers do.

    Raises:
        TopologyError: if activations have to wait there, and a device has no link to it.
    """
    training = problem.training
    choices = {
        Recompute.NONE: (Again.NOTHING, Again.HOST),
        Recompute.FULL: (Again.LAYERS, Again.HOST_LAYERS, Again.STAGE),
        Recompute.AUTO: tuple(Again),
    }[training.recompute]
    if training.offload is Offload.YES:
        for device in range(len(problem.topology.devices)):
            host_rate_bytes_per_s(problem.topology, device)
        return (tuple(one for one in choices if one.offloads),)
    if not _may_offload(problem):
        choices = tuple(one for one in choices if not one.offloads)
    if training.schedule.is_asynchronous:  # versions of the parameters belong to whole stages
        choices = tuple(one for one in choices if one in (Again.NOTHING, Again.STAGE))
    if not {Again.HOST, Again.LAYERS} <= {*choices}:
        return (choices,)
    both = (Again.NOTHING, Again.HOST, Again.LAYERS, Again.HOST_LAYERS, Again.STAGE), choices
    return both if _is_hidden(problem) else both[::-1]


def _may_offload(problem: Problem) -> bool:
    linked = all(host.host_link is not None for host in problem.topology.hosts)
    return problem.training.offload is Offload.AUTO and linked


def _is_hidden(problem: Problem) -> bool:
    """Whether a second forward takes longer than the part of the copies of all activations that
    passes do not hide.
    """
    profile, times = problem.profile, operator_times(problem, 0)
    forward_s, backward_s = float(times.forward_s.sum()), float(times.backward_s.sum())
    rate = host_rate_bytes_per_s(problem.topology, 0)
    copy_s = stash_bytes(profile, range(len(profile.operators))) / rate
    exposed_s = 2 * copy_s
    if host_of(problem.topology, 0).cores is None:
        exposed_s = max(copy_s - forward_s, 0.0) + max(copy_s - backward_s, 0.0)
    return exposed_s <= forward_s


def segments_by_worth(profile: Profile, stage: Stage) -> Segments:
    """The layers of a stage whose forward may be run again, the best first. The one that makes the
    output with a loss is not among them: its backward comes at once.
    """
    return _by_worth(profile, stage.operators)


def running_again(problem: Problem, stage: Stage, what: int) -> Stage:
    """A stage that runs all that it may again, and keeps all that it may in the host's memory. One
    without layers is one.

    Args:
        what: one of `Again`.
    """
    what = Again(what)
    segments: Segments = ()
    if what not in (Again.NOTHING, Again.STAGE):
        segments = in_order(stage, segments_by_worth(problem.profile, stage))
    return replace(
        stage,
        recompute=what.reruns,
        recomputed=segments if what.reruns else (),
        offloaded=segments if what.offloads else (),
    )


def with_fewer(problem: Problem, stage: Stage) -> tuple[Stage, ...]:
    """A stage with one, two and so on up to all of the layers that it keeps in the host's memory,
    at equal distances, so that copies hide behind the layers between them; or of those that it runs
    again, those first that are worth most. None where it may not leave out any.
    """
    training = problem.training
    if stage.offloaded and training.offload is Offload.AUTO:
        every = stage.offloaded
        return tuple(
            replace(stage, offloaded=tuple(every[i * len(every) // n] for i in range(n)))
            for n in range(1, len(every) + 1)
        )
    if stage.recomputed and training.recompute is Recompute.AUTO:
        every = segments_by_worth(problem.profile, stage)
        some = (in_order(stage, every[: n + 1]) for n in range(len(every)))
        return tuple(replace(stage, recomputed=one) for one in some)
    return ()


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
    behind: dict[tuple[str, int], int] = {}
    for owner, made, last in _activations(profile, indices):
        behind[owner, made] = max(last, behind.get((owner, made), last))
    crossing = Counter(i for (_, made), last in behind.items() for i in range(made + 1, last + 1))
    return [i for i in range(1, len(indices)) if crossing[i] == 1]


def _activations(profile: Profile, indices: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """The tensors with a gradient that a stage reads or makes: the owner of the storage, the place
    of what makes that, -1 of another stage, and of the last reader, that behind all of a later one.
    """
    graph, inside = profile.graph, frozenset(indices)
    tensors, read_by, made_by = tensors_by_name(graph), consumers(graph), producers(graph)
    place = {v: i for i, v in enumerate(indices)}
    made = (name for v in indices for name in graph.operators[v].outputs)
    for name in (*read_from_outside(graph, inside), *made):
        owner = storage_owner(profile, name, inside)
        readers = [place.get(v, len(indices)) for v in read_by[name] if v >= indices[0]]
        # A transposed weight is there anyway.
        if tensors[name].gradient and owner in tensors and readers:
            yield owner, place.get(made_by.get(owner, -1), -1), max(readers)
