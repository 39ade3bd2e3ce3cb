"""Which segments of a stage are worth running again: layers, those first that free the most bytes
per second. A layer is run again as a whole, or but for its attention and every second one of its
products with weights, as torchtitan's selective recomputation per operator has it. Activations of
the same layers may wait in the host's memory instead, or what those read that run again.

Layers are the numbered modules of the network where the profile names modules. Elsewhere they are
what lies between two places of the stage that a single activation crosses, as between the blocks of
a ResNet or of a Transformer (Chen et al. 2016, arXiv:1604.06174, section 4.3).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import groupby, pairwise
from typing import NamedTuple

from planner.artefacts.graph import (
    consumers,
    loss_outputs,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.modules import block_of
from planner.artefacts.operator_types import ATTENTION, PRODUCTS
from planner.artefacts.options import Offload, Recompute, Training
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, stash_bytes, storage_owner
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.casts import held_private_bytes
from planner.costs.offloading import host_of, host_rate_bytes_per_s
from planner.costs.operators import operator_times
from planner.costs.passes import RerunOperators, read_from_outside, there_before, used_outside
from planner.support.memo import remembered

MOST_LAYERS = 64
"""Layers without names are one where they have less than that part of a stage's stash."""

Segments = tuple[tuple[str, ...], ...]


class Again(IntEnum):
    """What of a stage is run again in its backward, or waits in the host's memory for it."""

    NOTHING = 0
    SELECTED = 1
    """Its layers run again but for attention and every second product."""
    LAYERS = 2
    HOST = 3
    """Activations of its layers wait there."""
    HOST_SELECTED = 4
    """As `SELECTED`, and what its layers read waits there."""
    HOST_LAYERS = 5
    """As `LAYERS`, and what these read waits there."""
    STAGE = 6

    @property
    def reruns(self) -> bool:
        """Whether anything is run again."""
        return self not in (Again.NOTHING, Again.HOST)

    @property
    def offloads(self) -> bool:
        """Whether anything waits in the host's memory."""
        return self in (Again.HOST, Again.HOST_SELECTED, Again.HOST_LAYERS)


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
    choices = _choices(training)
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
    host_first = tuple(sorted(choices, key=lambda one: (one not in _HOST_FIRST, one)))
    return (host_first, choices) if _is_hidden(problem) else (choices, host_first)


_HOST_FIRST = (Again.NOTHING, Again.HOST)


def _choices(training: Training) -> tuple[Again, ...]:
    """The same where all devices have links to their hosts' memory."""
    match training.recompute:
        case Recompute.NONE:
            return Again.NOTHING, Again.HOST
        case Recompute.FULL:
            return Again.LAYERS, Again.HOST_LAYERS, Again.STAGE
        case Recompute.SELECTIVE:
            return tuple(one for one in Again if one.reruns)
    # Where whole layers do not fit, selected operators do not either.
    return tuple(one for one in Again if one is not Again.HOST_SELECTED)


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


def segments_by_worth(profile: Profile, stage: Stage, what: Again = Again.LAYERS) -> Segments:
    """The layers of a stage whose forward may be run again, the best first. The one that makes the
    output with a loss is not among them: its backward comes at once.

    Args:
        what: whole layers, or selected operators of those that these free something of; of nothing
            and whole stages there are none.
    """
    return tuple(one.operators for one in _by_worth(profile, stage.operators, what))


def freed_share(profile: Profile, stage: Stage, what: Again) -> float:
    """The part of the stash of a stage without a mesh that all its segments free, from 0 to 1.

    Args:
        what: see `segments_by_worth`.
    """
    freed = sum(one.freed_bytes for one in _by_worth(profile, stage.operators, what))
    return freed / max(1, stash_bytes(profile, indices_of(stage, profile.graph)))


def running_again(problem: Problem, stage: Stage, what: int) -> Stage:
    """A stage that runs all that it may again, and keeps all that it may in the host's memory. One
    without layers is one.

    Args:
        what: one of `Again`.
    """
    what = Again(what)
    segments = in_order(stage, segments_by_worth(problem.profile, stage, what))
    return replace(
        stage,
        recompute=what.reruns,
        recomputed=segments if what.reruns else (),
        offloaded=segments if what.offloads else (),
    )


def num_optional(problem: Problem, stage: Stage, what: Again) -> int:
    """The number of layers of a stage that may do what was chosen for it, or else not; 0 where all
    have to.

    Args:
        what: see `segments_by_worth`.
    """
    may_rerun = what.reruns and problem.training.recompute is Recompute.AUTO
    is_optional = may_rerun or _may_stay(problem, what)
    return len(segments_by_worth(problem.profile, stage, what)) if is_optional else 0


def _may_stay(problem: Problem, what: Again) -> bool:
    """Whether layers that wait in the host's memory may as well stay on the device."""
    return what.offloads and problem.training.offload is Offload.AUTO


def with_fewer(problem: Problem, stage: Stage, what: Again, count: int) -> Stage:
    """A stage with fewer of the layers that it keeps in the host's memory, at equal distances, so
    that copies hide behind the layers between them; or of those that it runs again, the best of
    them (`best_running_again`).

    Args:
        stage: with all of them.
        what: see `segments_by_worth`.
        count: the number of layers.
    """
    if _may_stay(problem, what):
        every = stage.offloaded
        some = tuple(every[i * len(every) // count] for i in range(count))
        return replace(stage, offloaded=some)
    return replace(stage, recomputed=best_running_again(problem, stage, what, count))


def best_running_again(problem: Problem, stage: Stage, what: Again, count: int) -> Segments:
    """The segments of a stage of whose layers only the best run again, the others by the choice
    before, if that is one and leaves out something of them.

    Args:
        what: see `segments_by_worth`.
        count: the number of layers.
    """
    every = segments_by_worth(problem.profile, stage, what)
    best = every[:count]
    if what is Again.LAYERS and Again.SELECTED in recompute_choices(problem):
        whole = {some[0] for some in best}
        others = {*segments_by_worth(problem.profile, stage, Again.SELECTED)} - {*every}
        best = (*best, *(some for some in others if some[0] not in whole))
    return in_order(stage, best)


def share_of_others(problem: Problem, stage: Stage, what: Again) -> float:
    """The part, from 0 to 1, of what all segments of a stage free that `best_running_again` frees
    without a best one.

    Args:
        what: see `segments_by_worth`.
    """
    if what is not Again.LAYERS or Again.SELECTED not in recompute_choices(problem):
        return 0.0
    selected, whole = (
        {
            one.operators: one.freed_bytes
            for one in _by_worth(problem.profile, stage.operators, kind)
        }
        for kind in (Again.SELECTED, Again.LAYERS)
    )
    parts = sum(freed for some, freed in selected.items() if some not in whole)
    return parts / max(1, sum(whole.values()))


def in_order(stage: Stage, segments: Segments) -> Segments:
    """Segments as a stage lists them."""
    place = {name: i for i, name in enumerate(stage.operators)}
    return tuple(sorted(segments, key=lambda some: place[some[0]]))


class _Worth(NamedTuple):
    """A segment that is worth running again."""

    operators: tuple[str, ...]
    freed_bytes: int


@remembered(kept=128)
def _by_worth(profile: Profile, operators: tuple[str, ...], what: Again) -> tuple[_Worth, ...]:
    if what in (Again.NOTHING, Again.STAGE):
        return ()
    is_selected = what in (Again.SELECTED, Again.HOST_SELECTED)
    lost, worth = set(loss_outputs(profile.graph)), []
    for a, layer in _layers(profile, operators):
        if lost.isdisjoint(n for v in layer for n in profile.graph.operators[v].outputs):
            segment = RerunOperators(frozenset(layer))
            selected = segment._replace(kept=_kept(profile, layer))
            if is_selected and _freed_bytes(profile, selected) > 0:
                segment = selected
            freed = _freed_bytes(profile, segment)
            again = [v for v in layer if v not in segment.kept]
            freed_per_s = freed / max(_forward_s(profile, again), 1e-12)
            names = tuple(profile.graph.operators[v].name for v in again)
            worth.append((-freed_per_s, a, _Worth(names, freed)))
    return tuple(one for _, _, one in sorted(worth))


def _kept(profile: Profile, layer: Sequence[int]) -> frozenset[int]:
    """The operators inside a layer that are not run again with it: attention, and the first, third,
    fifth, .. product with weights.
    """
    operators, inside = profile.graph.operators, frozenset(layer)
    weights = parameters_by_name(profile.graph)

    def has_weights(v: int) -> bool:
        names = (*operators[v].parameters, *operators[v].inputs)
        return any(storage_owner(profile, name, inside) in weights for name in names)

    products = [v for v in layer if operators[v].type in PRODUCTS and has_weights(v)]
    attention = [v for v in layer if operators[v].type in ATTENTION]
    return frozenset((*products[::2], *attention)) - {layer[0], layer[-1]}


def _forward_s(profile: Profile, some: Sequence[int]) -> float:
    return sum(profile.operators[v].forward_s for v in some)


def _freed_bytes(profile: Profile, segment: RerunOperators) -> int:
    """The stash of some operators less what they read or make for others, and what is held of kept
    ones: that stays.
    """
    graph, inside = profile.graph, segment.operators
    names = (*there_before(graph, segment), *used_outside(graph, inside))
    private = sum(held_private_bytes(profile, v) for v in segment.kept)
    return stash_bytes(profile, inside) - _bytes_of(profile, names, inside) - private


def _bytes_of(profile: Profile, names: Iterable[str], inside: Collection[int]) -> int:
    """Of the storages of some tensors."""
    known = tensors_by_name(profile.graph)
    owners = {storage_owner(profile, name, inside) for name in names}
    return sum(known[name].bytes for name in owners if name in known)


@remembered(kept=64)
def _layers(
    profile: Profile, operators: tuple[str, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The layers of a stage, each with its place in it: several as one where one frees less than it
    reads.
    """
    indices = indices_of(Stage.whole(operators, (0,), warmup=1, recompute=False), profile.graph)
    named = _numbered(profile, indices) if profile.modules else []
    enough = 0.0 if named else stash_bytes(profile, indices) / MOST_LAYERS
    found: list[tuple[int, tuple[int, ...]]] = []
    first = behind = 0
    for a, b in named or _between_narrow_places(profile, indices):
        first, behind = (first if a == behind else a), b
        some = indices[first:b]
        whole = RerunOperators(frozenset(some))
        read = read_from_outside(profile.graph, whole.operators)
        least = max(1, _bytes_of(profile, read, whole.operators))
        if _freed_bytes(profile, whole) >= least and stash_bytes(profile, some) >= enough:
            found.append((first, tuple(some)))
            first = b
    return tuple(found)


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
