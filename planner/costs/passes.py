"""Bytes that live only inside one forward or backward pass of a stage.

Tensors are made and dropped as operators run in their order, and backward in the reverse one. There
are two views of that. `operator_workspaces` counts the bytes that are alive beside all that is
kept; they are known before there are stages. `forward_workspace_bytes` and
`backward_workspace_bytes` say how far a pass of a given stage gets above the bytes that it keeps,
some of which are not there yet or gone already.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Parameter,
    Tensor,
    consumers,
    differentiated,
    loss_outputs,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.profile import Profile, gradient_bases, storage_owner, view_bases
from planner.artefacts.segments import Segment
from planner.costs.casts import held_private_bytes


class Leaving(NamedTuple):
    """What a forward pass copies to the host's memory.

    Attributes:
        storages: by owner of a storage, the operator to whose end it is held.
        private: by operator, the same of what it keeps for itself.
    """

    storages: Mapping[str, int]
    private: Mapping[int, int]


STAYS = Leaving({}, {})


def read_from_outside(graph: Graph, inside: Collection[int]) -> tuple[str, ...]:
    """Tensors that a set of operators reads and does not make, in order of first use."""
    made = {name for v in inside for name in graph.operators[v].outputs}
    read = dict.fromkeys(name for v in sorted(inside) for name in graph.operators[v].inputs)
    return tuple(name for name in read if name not in made)


def used_outside(graph: Graph, inside: Collection[int]) -> tuple[str, ...]:
    """Tensors that a set of operators makes for others or for the model's user."""
    read_by, results = consumers(graph), set(graph.outputs)
    return tuple(
        name
        for v in sorted(inside)
        for name in graph.operators[v].outputs
        if name in results or any(w not in inside for w in read_by[name])
    )


class RerunOperators(NamedTuple):
    """A segment that is run again, by indices of operators.

    Attributes:
        operators: all of it.
        kept: those of them that are not computed again: what they made is held from the forward on.
    """

    operators: frozenset[int]
    kept: frozenset[int] = frozenset()


def rerun_operators(
    segments: Iterable[Segment], indices: Sequence[int]
) -> tuple[RerunOperators, ...]:
    """Segments of a stage that is not split, by indices of operators.

    Args:
        indices: of the operators of the stage.
    """
    return tuple(
        RerunOperators(
            frozenset(indices[one.first : one.end]), frozenset(indices[i] for i in one.kept)
        )
        for one in segments
    )


def there_before(graph: Graph, segment: RerunOperators) -> tuple[str, ...]:
    """Tensors that are there when a segment is run again: those that it reads, and those that its
    kept operators made.
    """
    held = (name for v in sorted(segment.kept) for name in graph.operators[v].outputs)
    return (*read_from_outside(graph, segment.operators), *held)


def operator_workspaces(profile: Profile) -> tuple[int, ...]:
    """Per operator, the bytes of activations and gradients that are alive only inside one pass over
    the whole graph while it runs, and that its kernels take. In a stage there are no more, except
    for the gradients of the tensors that leave it, and of parameters that several of its operators
    read: few stages hold all readers of one.
    """
    by_operator = _workspaces(profile, frozenset(range(len(profile.operators))))
    return tuple(by_operator[v] for v in range(len(profile.operators)))


def block_workspace_bytes(profile: Profile, block: Iterable[int]) -> int:
    """The most of the same in a pass over a block of operators."""
    return max(_workspaces(profile, frozenset(block)).values(), default=0)


def _workspaces(profile: Profile, inside: Collection[int]) -> dict[int, int]:
    graph = profile.graph
    kept = {
        storage_owner(profile, name, inside)
        for v in inside
        for name in profile.operators[v].stash_tensors
    }
    part = len(inside) < len(profile.operators)
    if part:
        around = (*read_from_outside(graph, inside), *used_outside(graph, inside))
        kept |= {storage_owner(profile, name, inside) for name in around}
    leaving = [
        name
        for name in used_outside(graph, inside)
        if tensors_by_name(graph)[name].gradient or name in loss_outputs(graph)
    ]
    forward = _forward_alive(profile, inside, kept)
    # Where a cut will be, every gradient is a tensor of its own.
    shared = _first_readers(graph, inside) if part else {}
    backward = _backward_alive(profile, inside, (leaving, ()), {}, shared)
    return {
        v: max(forward[v] + profile.operators[v].workspace_bytes, backward[v].most) for v in inside
    }


def forward_workspace_bytes(
    profile: Profile, inside: Collection[int], kept: Collection[str], loss_bytes: int,
    segments: Sequence[RerunOperators] = (), leaving: Leaving = STAYS,
) -> int:  # fmt: skip
    """The most bytes above all that a forward pass keeps, while it runs.

    Args:
        inside: the operators of the stage.
        kept: owners of storage that is there when the pass has ended.
        loss_bytes: bytes that the loss keeps in addition.
        segments: of operators that a backward runs again, so that they keep nothing for themselves
            but what is held of the kept ones.
        leaving: what goes to the host's memory.
    """
    private = _remade_private_bytes(profile, segments)
    coming = Counter(
        {
            v: profile.operators[v].stash_private_bytes - private[v]
            for v in inside
            if v not in leaving.private
        }
    )
    coming += _made_bytes_of(profile.graph, inside, kept)
    alive = _forward_alive(profile, inside, kept, leaving)
    most = _most_above(profile, alive, (coming, private), loss_bytes)
    copies = 0 if profile.fused_loss else loss_copy_bytes(profile.graph, inside)
    return max(copies, most)


def _remade_private_bytes(profile: Profile, segments: Iterable[RerunOperators]) -> Counter[int]:
    """Per operator of segments that are run again, the bytes that it keeps for itself only then."""
    return Counter(
        {
            v: profile.operators[v].stash_private_bytes
            - (held_private_bytes(profile, v) if v in some.kept else 0)
            for some in segments
            for v in some.operators
        }
    )


def _made_bytes_of(graph: Graph, inside: Collection[int], owners: Collection[str]) -> Counter[int]:
    """Per operator of some, the bytes of the storages of some owners that it makes."""
    made_by, found = producers(graph), Counter[int]()
    for name, size in _sizes(graph, owners):
        if made_by.get(name) in inside:
            found[made_by[name]] += size
    return found


def _most_above(
    profile: Profile, alive: Mapping[int, int], added: tuple[Counter[int], Counter[int]], later: int
) -> int:
    """The most bytes above all that a run of operators leaves, while it runs.

    Args:
        alive: per operator, the bytes that are gone when the run has ended (`_forward_alive`).
        added: per operator, the bytes that it adds to what is left, and those that are gone when it
            has run.
        later: bytes that come behind the run.
    """
    # `later` are the kept bytes that the operators behind v and the loss will add. They are not
    # there yet while v runs, so the pass is above the kept bytes by that much less.
    (coming, dropped), most = added, 0
    for v in sorted(alive, reverse=True):
        running = profile.operators[v].workspace_bytes + dropped[v]
        most = max(most, alive[v] + running - later)
        later += coming[v]
    return most


def is_short(tensor: Tensor) -> bool:
    """Whether a loss is computed from a float32 copy of a tensor."""
    return tensor.dtype in ("float16", "bfloat16")


def loss_copy_bytes(graph: Graph, inside: Collection[int]) -> int:
    """Bytes of the float32 copies that losses are computed from."""
    made_by, tensors = producers(graph), tensors_by_name(graph)
    lost = (tensors[name] for name in loss_outputs(graph) if made_by.get(name) in inside)
    return round(sum(prod(one.shape) * ITEM_BYTES["float32"] for one in lost if is_short(one)))


def backward_workspace_bytes(
    profile: Profile,
    inside: Collection[int],
    freed: Collection[str],
    loss: tuple[int, int],
    segments: Sequence[RerunOperators] = (),
    coming_back: Mapping[int, int] = {},
) -> int:
    """The most bytes above all that was kept, while a backward pass runs. Gradients that have come
    from other stages are not counted here.

    Autograd lets go of an operator's stash when its backward has run. The loss begins with the
    gradients of its input and of the tensor that it keeps.

    Args:
        inside: the operators of the stage.
        freed: owners of storage that is let go on the way; inputs and outputs of the stage stay.
        loss: bytes that it keeps in addition, and the part of these that are targets of data, which
            stay until the pass has ended.
        segments: of operators that the pass runs again.
        coming_back: bytes that come back from the host's memory, by the operator whose backward
            needs them. They are there from that of the one before them on, the first from the
            start.
    """
    graph, (loss_bytes, target_bytes) = profile.graph, loss
    going = Counter({v: profile.operators[v].stash_private_bytes for v in inside})
    last_user = _last_users(profile, inside, segments)
    for name, size in _sizes(graph, freed):
        going[last_user[name]] += size
    reruns = {_begin(graph, some.operators): _rerun(profile, some) for some in segments}
    for again in reruns.values():
        going.update(again.going)
    read_by, made_by = consumers(graph), producers(graph)
    coming = [
        name
        for name in used_outside(graph, inside)
        if tensors_by_name(graph)[name].gradient and any(w not in inside for w in read_by[name])
    ]
    lost = [name for name in loss_outputs(graph) if made_by.get(name) in inside]
    alive = _backward_alive(
        profile, inside, (lost, coming), gradient_bases(profile), _first_readers(graph, inside)
    )
    # Both gradients of the loss are alive at once, then the tensor that it keeps goes. A fused loss
    # makes that of the output alone, which is there when the backward of its maker begins.
    back = iter([coming_back[v] for v in sorted(coming_back, reverse=True)])
    come = next(back, 0)
    gone, most = loss_bytes - target_bytes - come, come
    most += 0 if profile.fused_loss else 2 * loss_bytes
    for v in sorted(inside, reverse=True):
        if v in coming_back:
            gone -= next(back, 0)
        if v in reruns:
            most = max(most, alive[v].before + reruns[v].most - gone)
            gone -= reruns[v].kept
        most = max(most, alive[v].most - gone)
        gone += going[v]
    return most


class _Rerun(NamedTuple):
    """Bytes of a segment that is run again.

    Attributes:
        kept: for its backward.
        most: while it runs.
        going: by operator, the part of `kept` that goes with its backward, but for what it keeps
            for itself.
    """

    kept: int
    most: int
    going: Counter[int]


def _rerun(profile: Profile, segment: RerunOperators) -> _Rerun:
    """A segment that is run again. What it reads is there, and what its kept operators made; what
    it makes for others is held until it has run.
    """
    graph, inside = profile.graph, segment.operators
    stashed = _stashed(profile, inside, inside)
    before = {storage_owner(profile, name, inside) for name in there_before(graph, segment)}
    private = _remade_private_bytes(profile, [segment])
    made = {storage_owner(profile, name, inside) for name in used_outside(graph, inside)}
    coming = private + _made_bytes_of(graph, inside, {*stashed, *made} - before)
    alive = _forward_alive(profile, inside, {*stashed, *made, *before})
    above = _most_above(profile, alive, (coming, Counter()), 0)
    going = Counter[int]()
    for name, size in _sizes(graph, stashed.keys() - before):
        if producers(graph).get(name) in inside:
            going[stashed[name]] += size
    return _Rerun(going.total() + private.total(), coming.total() + above, going)


def _begin(graph: Graph, segment: Collection[int]) -> int:
    """The operator before whose backward a segment is run again."""
    return max(differentiated(graph).intersection(segment))


def _stashed(
    profile: Profile, operators: Collection[int], inside: Collection[int]
) -> dict[str, int]:
    """The owners of the storages that operators stash, each with the first of them: it runs its
    backward last, and lets it go.
    """
    return {
        storage_owner(profile, name, inside): v
        for v in sorted(operators, reverse=True)
        for name in profile.operators[v].stash_tensors
    }


def _last_users(
    profile: Profile, inside: Collection[int], segments: Sequence[RerunOperators]
) -> Mapping[str, int]:
    """By owner of a storage that is kept, the operator whose backward lets it go. What is there
    when a segment is run again goes then, or with those of its operators that stash it.
    """
    graph = profile.graph
    again = frozenset[int]().union(*(some.operators for some in segments))
    found = _stashed(profile, [v for v in inside if v not in again], inside)
    for some in segments:
        mine, begin = _stashed(profile, some.operators, inside), _begin(graph, some.operators)
        for name in there_before(graph, some):
            owner = storage_owner(profile, name, inside)
            v = mine.get(owner, begin)
            found[owner] = min(v, found.get(owner, v))
    return found


def _sizes(graph: Graph, owners: Collection[str]) -> list[tuple[str, int]]:
    """Owners of storage that are tensors, not parameters, with their bytes."""
    tensors = tensors_by_name(graph)
    return [(name, tensors[name].bytes) for name in sorted(owners) if name in tensors]


def _forward_alive(
    profile: Profile, inside: Collection[int], kept: Collection[str], leaving: Leaving = STAYS
) -> Mapping[int, int]:
    """Bytes of tensors that are made and dropped again inside a forward pass, or leave it for the
    host's memory, while each of its operators runs.
    """
    graph = profile.graph
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    owners = {
        name: storage_owner(profile, name, inside)
        for v in inside
        for name in graph.operators[v].outputs
    }
    # A storage lives until the last reader of any view of it has run.
    last: dict[str, int] = {}
    for name, owner in owners.items():
        if owner not in kept and owner in tensors:
            until = max(last.get(owner, -1), leaving.storages.get(owner, -1))
            last[owner] = max((until, *(w for w in read_by[name] if w in inside)))
    dropped = Counter[int]()
    by_operator, alive = {}, 0
    for v in sorted(inside):
        if v in leaving.private:
            alive += profile.operators[v].stash_private_bytes
            dropped[leaving.private[v]] += profile.operators[v].stash_private_bytes
        for name in graph.operators[v].outputs:
            if owners[name] == name and name in last:
                alive += tensors[name].bytes
                # Without a reader inside it is dropped by the operator that makes it.
                dropped[max(v, last[name])] += tensors[name].bytes
        by_operator[v] = alive
        alive -= dropped[v]
    return by_operator


class _Alive(NamedTuple):
    """Bytes of gradients before the backward of an operator, and the most while it runs."""

    before: int
    most: int


def _backward_alive(
    profile: Profile,
    inside: Collection[int],
    there: tuple[Iterable[str], Iterable[str]],
    bases: Mapping[tuple[int, str], str],
    first_reader: Mapping[str, int],
) -> Mapping[int, _Alive]:
    """Bytes of gradients alive while each operator of a backward pass runs: a tensor's from its
    last reader's backward to its maker's, and those of the operator's own parameters, unless it
    only makes a view of them, whose gradient becomes theirs. Where an operator's workspace was
    measured, these are in it, because they are gone again when they have been added up. The
    gradient of a parameter that several operators read waits from the last one's backward to that
    of the first one, where it is complete.

    Args:
        there: tensors whose gradients are there before, and those whose gradients are there, too,
            but are not counted here.
        bases: by operator and input, the output in the storage of whose gradient that of the input
            lies. Gradients that go back to other stages do not, because they are copied.
        first_reader: of each parameter whose gradients are added up in the pass.
    """
    graph = profile.graph
    tensors, parameters, made_by = (
        tensors_by_name(graph), parameters_by_name(graph), producers(graph)
    )  # fmt: skip
    base_of, (at_first, coming) = view_bases(profile), there
    gradients = _GradientStorages({name: tensors[name].bytes for name in at_first}, coming)
    by_operator, with_backward = {}, differentiated(graph)
    for v in sorted(inside, reverse=True):
        operator = graph.operators[v]
        if v not in with_backward:
            by_operator[v] = _Alive(gradients.alive_bytes, gradients.alive_bytes)
            continue
        before = gradients.alive_bytes
        for name in dict.fromkeys(operator.inputs):
            if tensors[name].gradient:
                base = bases.get((v, name)) if made_by.get(name) in inside else None
                gradients.create(name, tensors[name].bytes, base)
        trained = [n for n in operator.parameters if parameters[n].trainable]
        viewed = {base_of.get(name) for name in operator.outputs}
        made = {n: _made_bytes(parameters[n]) for n in trained}
        own = sum(made[n] for n in trained if n not in viewed)
        running = gradients.alive_bytes + max(own, profile.operators[v].workspace_bytes)
        shared = [n for n in trained if n in first_reader]
        for name in shared:
            is_view = name in viewed
            base = operator.outputs[0] if is_view else None
            gradients.create(name, made[name], base, is_view)
            own -= 0 if is_view else made[name]
        # The backward has used the gradients of the outputs, so they go before its own results are
        # added to those of other readers.
        for name in operator.outputs:
            gradients.release(name)
        by_operator[v] = _Alive(before, max(running, gradients.accumulate() + own))
        for name in shared:
            if first_reader[name] == v:
                gradients.release(name)
    return by_operator


def _made_bytes(one: Parameter) -> int:
    """Of the gradient that is made of it, with its copy where it is added up in another type."""
    return one.bytes + (0 if one.gradient_dtype is None else one.gradient_bytes)


def _first_readers(graph: Graph, inside: Collection[int]) -> Mapping[str, int]:
    """The first reader with a backward of each parameter that several such ones of a set read."""
    inside = differentiated(graph).intersection(inside)
    readers = Counter(n for v in inside for n in graph.operators[v].parameters)
    first = {n: v for v in sorted(inside, reverse=True) for n in graph.operators[v].parameters}
    return {name: first[name] for name, count in readers.items() if count > 1}


@dataclass(slots=True)
class _Storage:
    bytes: int
    holders: int
    is_viewed: bool = False


class _GradientStorages:
    """Gradients of tensors while a backward pass runs, and the storages that they lie in, each
    until no gradient lies there any more.

    Attributes:
        alive_bytes: of all storages.

    Args:
        at_first: bytes of gradients that are there before.
        coming: gradients that other stages send.
    """

    def __init__(self, at_first: Mapping[str, int], coming: Iterable[str]) -> None:
        self.alive_bytes = 0
        self._storages: dict[str, _Storage] = {}
        self._made: list[tuple[str, int, _Storage]] = []
        for name in coming:
            self._receive(name)
        for name, size in at_first.items():
            self.create(name, size)
        self.accumulate()

    def _receive(self, name: str) -> None:
        """A gradient that another stage sent. Nothing is added to it in place, since its buffer is
        held until the pass ends.
        """
        # Its holders are the pass and the receive buffer, which counts the bytes.
        self._storages[name] = _Storage(bytes=0, holders=2)

    def create(self, name: str, size: int, base: str | None = None, is_view: bool = False) -> None:
        """A gradient of a tensor, which `accumulate` adds to the one that is there already.

        Args:
            base: the tensor in the storage of whose gradient it lies, if there is one; else it lies
                in a new one.
            is_view: whether it is a view in the eyes of autograd, which adds to none in place.
        """
        storage = None if base is None else self._storages.get(base)
        if storage is None:
            storage = self._new(size)
        else:
            storage.holders += 1
        storage.is_viewed = storage.is_viewed or is_view
        self._made.append((name, size, storage))

    def accumulate(self) -> int:
        """Adds the gradients that were made to those that were there: in place, unless these are
        views or others lie in the same storage, too. Gives the most bytes alive meanwhile.
        """
        most = self.alive_bytes
        for name, size, made in self._made:
            had = self._storages.setdefault(name, made)
            if had is made:
                continue
            if had.holders > 1 or had.is_viewed:
                # The sum is a tensor of its own, and both summands are still there.
                self._storages[name] = self._new(size)
                most = max(most, self.alive_bytes)
                self._let_go(had)
            self._let_go(made)
        self._made = []
        return most

    def release(self, name: str) -> None:
        """The gradient of a tensor, if there is one, has been used."""
        storage = self._storages.pop(name, None)
        if storage is not None:
            self._let_go(storage)

    def _new(self, size: int) -> _Storage:
        self.alive_bytes += size
        return _Storage(size, 1)

    def _let_go(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.alive_bytes -= storage.bytes
