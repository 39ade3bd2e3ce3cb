"""The peak of a device, read off its action list: for which reasons it holds bytes during each
action.

Tensors may wait because they have not reached other devices, however slow these and the links are.
A computation that waits for sends (`actions.waiting_for_sends`) begins when all results of the
second one before it of its kind have been sent. So the results of one may wait while the next is
made, and those of two while the device does something else. Where some device runs several stages
no computation waits for sends. The other devices are counted as if theirs did, though they may hold
more behind slow links.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import Graph, Tensor, tensors_by_name
from planner.artefacts.plan import MemoryParts
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy, crossings
from planner.costs.mesh_memory import local_bytes
from planner.costs.stage_memory import StageMemory
from planner.costs.update import state_copies
from planner.schedules.actions import ActionKind, Code, piece_bytes
from planner.schedules.versions import alive
from planner.support.arrays import Bools, Ints


def peak_memory(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
    waits: bool = True,
) -> MemoryParts:
    """The peak of one device, read off its action list: the first of equal ones.

    Args:
        code: the lists of all devices.
        device: its position among them.
        stages: by index, the needs of the stages on the device.
        waits: whether outputs and gradients stay as long as they may have to wait until they are
            sent, however slow links and other devices are; else they go at once.
    """
    base = static_memory(problem, strategy, stages)
    kept, buffers, workspace = dynamic_bytes(problem, strategy, code, device, stages, waits)
    use = kept + buffers + workspace
    fullest = int(use.argmax()) if len(use) else 0
    if not len(use) or use[fullest] <= 0:
        return base
    return replace(
        base,
        stash_bytes=int(kept[fullest]),
        buffer_bytes=int(buffers[fullest]),
        workspace_bytes=int(workspace[fullest]),
    )


def static_memory(
    problem: Problem, strategy: Strategy, stages: Mapping[int, StageMemory]
) -> MemoryParts:
    """Memory that a device holds all the time, or, of versions of its parameters, at most.

    Args:
        stages: as of `peak_memory`.
    """
    copies = state_copies(problem.profile.parameter_dtype, problem.training.optimizer)
    older = 0
    if strategy.schedule.is_asynchronous:
        older = sum(
            (alive(strategy, s) - 1) * (one.static.trainable + one.static.casts)
            for s, one in stages.items()
        )
    return MemoryParts(
        parameter_bytes=sum(one.static.parameter for one in stages.values()),
        version_bytes=older,
        gradient_bytes=sum(one.static.gradient for one in stages.values()),
        optimizer_bytes=copies * sum(one.static.state for one in stages.values()),
        reserve_bytes=problem.training.reserve,
    )


class MemoryReason(StrEnum):
    """Why a device holds bytes for a while; see `bytes_by_reason`."""

    STASH = "stash"
    RERUN = "made again"
    OUTPUTS = "outputs not sent"
    RECEIVED = "received"
    COPIES = "copies not sent"
    GRADIENTS = "gradients not sent"
    LEFT = "gradients for a stage here"
    PARTS = "sums and steps of parts"
    WORKSPACE = "workspace"


IN_STASH = (MemoryReason.STASH, MemoryReason.RERUN, MemoryReason.OUTPUTS)
IN_BUFFERS = (
    MemoryReason.RECEIVED,
    MemoryReason.COPIES,
    MemoryReason.GRADIENTS,
    MemoryReason.LEFT,
    MemoryReason.PARTS,
)


class ByteChanges(NamedTuple):
    """How the bytes held for one reason change with each action of a list.

    Attributes:
        kind: the reason.
        from_start: (n,) bytes more from the start of each action on.
        from_end: (n,) bytes more from its end on.
    """

    kind: MemoryReason
    from_start: Ints
    from_end: Ints


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of a stage in its passes over one microbatch, recomputation decided.

    Attributes:
        need: of the stage.
        held: from the start of a forward to the end of its backward.
        released: the part of these that is let go at the end of the forward: outputs, which count
            as `waiting` then.
        again: what a backward makes again; the inputs are there already.
        waiting: outputs, as long as they may have to wait.
        copies: copies of outputs that are parts of something larger, as long as these.
        forward: workspace of a forward.
    """

    need: StageMemory
    held: int
    released: int
    again: int
    waiting: int
    copies: int
    forward: int


def _pass_memory(need: StageMemory, *, recompute: bool, alone: bool) -> PassMemory:
    """The bytes of a stage in its passes.

    Args:
        alone: whether its device runs no other stage. Where it does, no output counts as sent.
    """
    if not recompute:
        # After a forward the copies of its outputs are made.
        forward = max(need.forward_workspace_bytes, need.copied_bytes)
        return PassMemory(need, need.kept_bytes, 0, 0, 0, need.copied_bytes, forward)
    # The outputs are made a second time. Those of the forward have been sent, or count where they
    # wait: as waiting, or among those held on a device with several stages.
    again = need.kept_bytes - need.boundary_bytes + need.output_bytes
    released = need.output_bytes if alone else 0
    return PassMemory(
        need, need.boundary_bytes, released, again, need.output_bytes, 0,
        need.forward_workspace_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _DeviceActions:
    """One device and its list.

    Attributes:
        stages: by index, its stages.
        forward: (n,) which actions are forwards.
        back: (n,) which are backwards.
        stage: (n,) of each computation.
        waits: as of `peak_memory`.
    """

    strategy: Strategy
    graph: Graph
    stages: Mapping[int, PassMemory]
    forward: Bools
    back: Bools
    stage: Ints
    waits: bool

    def of_stage(self, value: Callable[[PassMemory], int]) -> Ints:
        """(n,) a figure of the stage of each computation, 0 at other actions."""
        table = np.zeros(int(self.stage.max(initial=0)) + 1, dtype=np.int64)
        for s, one in self.stages.items():
            table[s] = value(one)
        return np.where(self.forward | self.back, table[self.stage], 0)

    @property
    def alone(self) -> int | None:
        """The only stage of the device; None if there are several."""
        return next(iter(self.stages)) if len(self.stages) == 1 else None


def _stash(own: _DeviceActions) -> ByteChanges:
    held, released = own.of_stage(lambda one: one.held), own.of_stage(lambda one: one.released)
    # Both ends together free what the start of the forward has added.
    freed = np.where(own.forward, released, 0) + np.where(own.back, held - released, 0)
    return ByteChanges(MemoryReason.STASH, np.where(own.forward, held, 0), -freed)


def _rerun(own: _DeviceActions) -> ByteChanges:
    made = np.where(own.back, own.of_stage(lambda one: one.again), 0)
    return ByteChanges(MemoryReason.RERUN, made, -made)


def _outputs(own: _DeviceActions) -> ByteChanges:
    return _level(MemoryReason.OUTPUTS, _output_bytes_waiting(own, lambda one: one.waiting))


def _copies(own: _DeviceActions) -> ByteChanges:
    """On a device with several stages, to the end of the backward."""
    if own.alone is not None or not own.waits:
        return _level(MemoryReason.COPIES, _output_bytes_waiting(own, lambda one: one.copies))
    copied = own.of_stage(lambda one: one.copies)
    made = np.where(own.forward, copied, 0) - np.where(own.back, copied, 0)
    return ByteChanges(MemoryReason.COPIES, np.zeros_like(made), made)


def _output_bytes_waiting(own: _DeviceActions, value: Callable[[PassMemory], int]) -> Ints:
    """(n,) bytes of outputs that may have to wait; none on a device with several stages.

    Args:
        value: bytes for each forward.
    """
    each = 0 if own.alone is None else value(own.stages[own.alone])
    if own.alone is None or not own.waits or not each:
        return np.zeros(len(own.stage), dtype=np.int64)
    return each * outputs_waiting(own.strategy, own.graph, own.alone, own.forward, own.back)


def _received(own: _DeviceActions, came: Ints, used: Ints) -> ByteChanges:
    """From the posting of a receive to the computation that it is for. A forward turns the tensors
    into inputs, which its stash contains; a backward frees the gradients when it has ended.

    Args:
        came: (n,) bytes that each receive brings.
        used: (n,) bytes that have come for each computation.
    """
    return ByteChanges(
        MemoryReason.RECEIVED,
        came - np.where(own.forward, used, 0),
        -np.where(own.back, used, 0),
    )


def _gradients(own: _DeviceActions) -> ByteChanges:
    """Gradients that go back to earlier stages, as long as they may have to wait: on a device with
    several stages, those of its latest backward.
    """
    nothing = np.zeros(len(own.stage), dtype=np.int64)
    if not own.waits:
        return _level(MemoryReason.GRADIENTS, nothing)
    if own.alone is not None:
        waiting = gradients_waiting(own.strategy, own.graph, own.alone, own.forward, own.back)
        return _level(MemoryReason.GRADIENTS, waiting)
    # Each backward's take the place of the ones before: the differences add up to the latest.
    made = nothing.copy()
    made[own.back] = np.diff(own.of_stage(lambda one: one.need.returned_bytes)[own.back], prepend=0)
    return ByteChanges(MemoryReason.GRADIENTS, nothing, made)


def _left(own: _DeviceActions) -> ByteChanges:
    """Gradients that a backward leaves to another stage of the device, until that one's ends."""
    change = own.of_stage(lambda one: one.need.left_bytes - one.need.taken_bytes)
    return ByteChanges(MemoryReason.LEFT, np.zeros_like(change), np.where(own.back, change, 0))


def _workspace(own: _DeviceActions) -> ByteChanges:
    forward = own.of_stage(lambda one: one.forward)
    backward = own.of_stage(lambda one: one.need.backward_workspace_bytes)
    size = np.where(own.back, backward, forward)
    return ByteChanges(MemoryReason.WORKSPACE, size, -size)


def _parts(own: _DeviceActions, sums: Bools, steps: Bools) -> ByteChanges:
    """Where each device steps parts of its parameters, while their gradients are summed and after
    the step; where it steps float32 copies, in the step. Then there are no copies of weights in the
    type of autocast, which count as static.

    Args:
        sums: (n,) which actions are all-reduces.
        steps: (n,) which are steps.
    """
    scattered = max(one.need.static.scatter for one in own.stages.values())
    stepped = [one.need.static for one in own.stages.values()]
    gathered = max(max(one.gather, one.step) for one in stepped)
    gathered -= sum(one.casts for one in stepped)
    size = scattered * sums + gathered * steps
    return ByteChanges(MemoryReason.PARTS, size, -size)


def _level(kind: MemoryReason, held: Ints) -> ByteChanges:
    """The contribution that amounts to these bytes during each action."""
    return ByteChanges(kind, np.diff(held, prepend=0), np.zeros_like(held))


def bytes_by_reason(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
    waits: bool = True,
) -> Mapping[MemoryReason, Ints]:
    """By reason, (n,) bytes that a device holds during each action of its list, in addition to its
    `static_memory`. Arguments as of `peak_memory`.
    """
    graph, mine = problem.profile.graph, slice(code.start[device], code.start[device + 1])
    computes, sums, steps = (
        code.kind[mine] == kind
        for kind in (ActionKind.COMPUTE, ActionKind.ALL_REDUCE, ActionKind.STEP)
    )
    backward = code.backward[mine]
    passes = {
        s: _pass_memory(one, recompute=strategy.stages[s].reruns_whole, alone=len(stages) == 1)
        for s, one in stages.items()
    }
    own = _DeviceActions(
        strategy, graph, passes, computes & ~backward, computes & backward, code.stage[mine], waits
    )
    parts = (
        _stash(own), _rerun(own), _outputs(own), _received(own, *_arrivals(code, mine, graph)),
        _copies(own), _gradients(own), _left(own), _parts(own, sums, steps), _workspace(own),
    )  # fmt: skip
    # One column more: a change at the end of an action is seen by the next action.
    changes = np.zeros((len(parts), len(computes) + 1), dtype=np.int64)
    for row, part in zip(changes, parts, strict=True):
        row[:-1] += part.from_start
        row[1:] += part.from_end
    held = np.cumsum(changes, axis=1)[:, :-1]
    return {part.kind: row for part, row in zip(parts, held, strict=True)}


def _arrivals(code: Code, mine: slice, graph: Graph) -> tuple[Ints, Ints]:
    """(n,) bytes that each receive of a list brings, and those that came for each computation."""
    tensors = tensors_by_name(graph)
    size = np.array(
        [piece_bytes(tensors[piece.tensor], piece.box) for piece in code.pieces], dtype=np.int64
    )
    receives, computes = (
        code.kind[mine] == ActionKind.RECEIVE,
        code.kind[mine] == ActionKind.COMPUTE,
    )
    came = np.zeros(len(receives), dtype=np.int64)
    came[receives] = size[code.piece[mine][receives]]
    # A receive and the computation that it is for have stage, direction and microbatch in common.
    microbatch = code.microbatch[mine]
    turn = (2 * code.stage[mine] + code.backward[mine]) * (int(microbatch.max(initial=0)) + 1)
    # Other actions may get the number of a computation; they neither add to `used` nor read it.
    _, number = np.unique(turn + microbatch, return_inverse=True)
    used = np.zeros(len(came), dtype=np.int64)
    np.add.at(used, number[receives], came[receives])
    return came, np.where(computes, used[number], 0)


def dynamic_bytes(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
    waits: bool = True,
) -> tuple[Ints, Ints, Ints]:
    """(n,) stash, buffers and workspace of a device during each action of its list. Arguments as of
    `peak_memory`.
    """
    held = bytes_by_reason(problem, strategy, code, device, stages, waits)
    stash, buffers = (_sum(held, kinds) for kinds in (IN_STASH, IN_BUFFERS))
    return stash, buffers, held[MemoryReason.WORKSPACE]


def _sum(held: Mapping[MemoryReason, Ints], kinds: Iterable[MemoryReason]) -> Ints:
    """(n,) bytes held for several reasons together."""
    total: Ints = np.sum([held[kind] for kind in kinds], axis=0)
    return total


# ------------------------------------------------------------------------ unsent tensors


def gradients_waiting(
    strategy: Strategy, graph: Graph, s: int, forward: Bools, back: Bools
) -> Ints:
    """(n,) bytes of the gradients that a replica of a stage may hold because they have not come
    back to earlier stages. Its device has no other stage.

    A replica of a stage u is W_u forwards ahead of its backwards, so that of microbatch m says that
    the gradient of m - W_u R_u has come. A replica of stage s hears of every L-th replica of u in
    turn, L = lcm(R_s, R_u) / R_s.

    Args:
        forward: (n,) which actions of the device are forwards.
        back: (n,) which are backwards.
    """
    begun: Ints = np.cumsum(forward) - 1
    ended: Ints = np.cumsum(back) - back
    # A backward began when the results of the second one before it had been sent, and its own are
    # not made yet: only those of one may wait then, and those of two between backwards.
    most = np.minimum(ended, np.where(back, 1, 2))
    width, size = strategy.stages[s].num_replicas, tensors_by_name(graph)
    waiting_bytes: Ints = np.zeros_like(ended)
    for one in crossings(strategy, graph):
        if s in one.targets and size[one.tensor].gradient:
            source = strategy.stages[one.source]
            every = math.lcm(width, source.num_replicas)  # microbatches between two of one source
            # In the numbers of this replica's own microbatches, gradients up to begun - ahead have
            # come back, and those up to ended - 1 were made. W_u R_u is rounded up to whole rounds,
            # so that both microbatches belong to the same replica of the source.
            ahead = -(-source.warmup * source.num_replicas // every) * every // width
            # So begun - ahead + 1 to ended - 1 have been made and may not have come back.
            waiting = np.clip(ahead - 1 - (begun - ended), 0, most)
            waiting_bytes += waiting * _bytes_inside(strategy.stages[s], size[one.tensor])
    return waiting_bytes


def outputs_waiting(strategy: Strategy, graph: Graph, s: int, forward: Bools, back: Bools) -> Ints:
    """(n,) number of forwards of a stage whose outputs may wait, the action's own microbatch not
    counted. Its device has no other stage.

    The outputs of a backward's own microbatch have come, or its gradient would not be there. With
    GPipe their readers have run all their forwards then. With 1F1B, where forwards do not wait for
    sends, the replica of a stage t that sent the gradient of microbatch m has run W_t forwards from
    m on, every R_t-th microbatch. A replica of stage s sends to every L-th replica of t in turn,
    L = lcm(R_s, R_t) / R_s, so the forwards that another of them has run are known from the
    gradient that it sent last.

    Args:
        forward: (n,) which actions of the device are forwards.
        back: (n,) which are backwards.
    """
    ahead: Ints = np.cumsum(forward) - forward - np.cumsum(back)  # in flight, its own not counted
    latest = np.cumsum(back) - 1
    width = strategy.stages[s].num_replicas
    targets = {t for one in crossings(strategy, graph) if one.source == s for t in one.targets}
    if not targets:
        return np.zeros_like(ahead)
    if strategy.schedule.has_phases:
        return np.where(latest < 0, np.minimum(ahead, np.where(forward, 1, 2)), 0)
    readers = [strategy.stages[t] for t in targets]
    most = min((one.warmup - 1) * one.num_replicas for one in readers) // width
    num_waiting: Ints = ahead.copy()
    for i in range(1, min(most, int(ahead.max(initial=0))) + 1):
        # The i-th output after the microbatch whose gradient came last: has every reader taken it?
        come = (latest >= 0) & (i <= ahead)
        for reader in readers:
            # One replica of the reader gets every `turns`-th output. The one that gets this output
            # sent its last gradient for the one `before` places earlier, and has run W - 1 forwards
            # since, one for every R_t microbatches: it has taken this output if these reach it.
            turns = math.lcm(width, reader.num_replicas) // width
            before = -(-i // turns) * turns
            run = before * width <= (reader.warmup - 1) * reader.num_replicas
            come &= (latest + i >= before) & run
        num_waiting -= come
    return num_waiting


def _bytes_inside(stage: Stage, tensor: Tensor) -> int:
    """Bytes of a tensor from outside on each device of a stage."""
    sharding = stage.sharding
    if sharding is None or tensor.name not in sharding.inputs:
        return tensor.bytes
    return local_bytes(tensor, sharding.inputs[tensor.name], sharding.mesh)
