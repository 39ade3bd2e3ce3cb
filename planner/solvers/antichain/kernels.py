"""The inner loops of the antichain solver (`solve.py`), compiled by numba.

Symbols; arrays are indexed by them:

    i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every block
    b     blocks
    t, p  tensors and parameters
    c     a combination (k, r, W): k devices in use, taken from the end of the order, by stages of
          which the first has width r and warm-up depth W; 0 stands for no stage
    e     a move from one combination to the next: one more stage in front
    l     a label: one way to run everything behind a cut

For one j the stages D_j minus D_i are visited from small to large. Each is one block larger than
a stage visited before, along the covers of the lattice of downsets, so its bytes follow from
that stage's bytes and from the tensors and parameters that the new block touches.

Costs come from `planner/costs`: the functions of its closed forms are compiled in here. All
others are `inlined`: they take many arrays and run millions of times, and numba counts references
to every array of a call.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.costs import closed_form, shared_forms, stage_memory, transfers
from planner.solvers.graphs.downsets import Downsets
from planner.support.arrays import Bools, Floats, Ints, Masks
from planner.support.jit import inlined, inner, njit

extend = inner(closed_form.extend)
exposed_sum_s = inner(closed_form.exposed_sum_s)
sum_launches = inner(closed_form.sum_launches)
rounds_to_turn = inner(closed_form.rounds_to_turn)
ring_allreduce_s = inner(transfers.ring_allreduce_s)
search_bytes = inner(stage_memory.search_bytes)
search_recompute_bytes = inner(stage_memory.search_recompute_bytes)
shared_static_bytes = inner(shared_forms.shared_static_bytes)
exchanged_bytes = inner(shared_forms.exchanged_bytes)

# Labels that there is room for at first, and at most: these take 4.8 GB.
_ROOM, _MOST_ROOM = 1 << 14, 1 << 26

# Rows of `Scratch.stage`, the bytes of a stage: from forward to backward of one microbatch; its
# inputs, and the model's outputs that it makes; the inputs among these that earlier stages make;
# parameters; trained parameters; the largest workspace of its blocks. Where replicas may share, two
# more rows have the workspace at levels 2 and 3.
KEPT, BOUNDARY, ENTERING, HELD, TRAINED, WORKSPACE = 0, 1, 2, 3, 4, 5
# Rows of `Parts` and of `Scratch.part`: bytes of parameters whose state is in parts from level 1
# on; of those that are themselves in parts at level 3, and of a row of each; bytes and number of
# what a backward scatters from level 2 on, of what a forward gathers at level 3, and of what a
# backward gathers again; bytes that are kept at lower levels only.
STEPPED, CUT, ROW, SCATTERED, SCATTERS, GATHERED, GATHERS, AGAIN_BYTES, AGAINS, SAVED = range(10)
# In s: of a backward, sums of gradients of which each replica does a part from level 2 on.
ADDED = 10
NUM_PARTS = 11
# Columns of `Labels.value`, in s: round trip; slowest period behind the cut, forward and back (in a
# flow without end, both passes of the first stage behind the cut); exposed end.
TOTAL, WORST, WORST_BACK, EXPOSED = 0, 1, 2, 3
# Columns of `Labels.link`: the next label of the same state; the label behind it; its downset,
# combination and recomputation; the level at which its replicas share.
NEXT, BEHIND, DOWNSET, COMBINATION, AGAIN, LEVEL = 0, 1, 2, 3, 4, 5
# The last label of no pipeline.
NO_LABEL = 0
# Of a flow without end.
MANY_ROUNDS = closed_form.MANY_ROUNDS
# The number of levels at which replicas may share, from 0 (nothing) to 3; also that of a stage that
# fits at none.
NUM_LEVELS = 4


class DownsetTimes(NamedTuple):
    """Times of all blocks of a downset.

    Attributes:
        forward: (types, n) forward on a type of device, in s.
        backward: (types, n) backward on a type of device, in s.
        ahead: (n,) both, each operator where it is fastest: a downset takes no less, in s.
    """

    forward: Floats
    backward: Floats
    ahead: Floats


class Sets(NamedTuple):
    """Tensors and parameters with the blocks that touch them.

    Attributes:
        size: (T,) bytes of a tensor.
        maker: (T,) block that makes it, -1 for the model's inputs.
        gradient: (T,) 1 where a gradient comes back.
        free: (T,) whether it lies in a parameter's storage on the device that makes it.
        kept: (T, words) blocks that stash it.
        read: (T, words) blocks that read it.
        tensor_start: (blocks + 1,) where the tensors that a block touches begin.
        tensors: their numbers.
        parameter_size: (P,) bytes, with a copy in the type of autocast.
        parameter_trained: (P,) the share of these that is trained, without that copy.
        parameter_users: (P, words) blocks that use it.
        parameter_start: (blocks + 1,) where the parameters of a block begin.
        parameters: their numbers.
        tied: trained parameters that several blocks use.
        private: (blocks,) other bytes that a block keeps.
        workspace: (1 or 3, blocks) bytes that live inside one pass of a block; where replicas may
            share, also at levels 2 and 3.
        returned: (blocks,) bytes of the model's outputs that it makes.
    """

    size: Floats
    maker: Ints
    gradient: Floats
    free: Bools
    kept: Masks
    read: Masks
    tensor_start: Ints
    tensors: Ints
    parameter_size: Floats
    parameter_trained: Floats
    parameter_users: Masks
    parameter_start: Ints
    parameters: Ints
    tied: Ints
    private: Floats
    workspace: Floats
    returned: Floats


class Parts(NamedTuple):
    """What lies in parts where replicas share, by STEPPED, CUT, ...

    Attributes:
        sums: (NUM_PARTS, n) of the parameters that one block alone uses, over the blocks of a
            downset.
        tied: (NUM_PARTS, tied) of each of `Sets.tied`.
        largest: bytes of the largest parameter.
    """

    sums: Floats
    tied: Floats
    largest: float


class Cuts(NamedTuple):
    """Transfers over the cut behind D_i, (n,) each: bytes and number, forward and back."""

    bytes: Floats
    messages: Floats
    gradient_bytes: Floats
    gradients: Floats


class Moves(NamedTuple):
    """The combinations, the devices of their first stages, and how they follow each other.

    Attributes:
        k: (C,) devices in use.
        r: (C,) width of the first stage.
        w: (C,) its warm-up depth.
        weight: (C,) of its period in the objective; 0 for no stage.
        factor: (types, C) slowdown of a type of device in it, 0 where it has none of that type.
        limit: (C,) bytes per device, reserve deducted.
        ring_latency: (C,) s.
        ring_rate: (C,) bytes/s.
        beside: (C,) whether its sums of gradients run beside its backward.
        step: (C,) s of the optimizer's step per byte of trained parameters.
        launch: (C,) s to start a computation, a sum or a step on its slowest device.
        type_launch: (types, C) the same of a computation on a type of device, slowed as that.
        post: (C,) s that posting a message keeps a device.
        copy: (C,) s that it takes longer for each byte.
        tie_latency: (C,) s, the least between its devices and those behind it.
        tie_rate: (C,) bytes/s, the largest between the same.
        levels: (C,) the number of levels at which its replicas may share, from 0 on.
        gather: (2, C) of an all-gather over its replicas, start in s and s per byte.
        scatter: (2, C) the same of a reduce-scatter in a backward.
        part_sum: (2, C) the same of a sum of gradients of which each replica keeps a part.
        start: (C + 1,) where the moves from a combination begin.
        to: (E,) the combination that a move leads to.
        latency: (E,) s, from the new stage to the one behind it.
        rate: (E,) bytes/s, from the new stage to the one behind it.
        back_latency: (E,) s, in the other direction.
        back_rate: (E,) bytes/s, in the other direction.
    """

    k: Ints
    r: Ints
    w: Ints
    weight: Floats
    factor: Floats
    limit: Floats
    ring_latency: Floats
    ring_rate: Floats
    beside: Floats
    step: Floats
    launch: Floats
    type_launch: Floats
    post: Floats
    copy: Floats
    tie_latency: Floats
    tie_rate: Floats
    levels: Ints
    gather: Floats
    scatter: Floats
    part_sum: Floats
    start: Ints
    to: Ints
    latency: Floats
    rate: Floats
    back_latency: Floats
    back_rate: Floats


class SearchOptions(NamedTuple):
    """The options, as numbers.

    Attributes:
        num_devices: K.
        num_microbatches: M.
        moments: optimizer state over the bytes of trained parameters.
        total: weight of the round trip in the objective.
        trip: whether the round trip counts at all, if only for the minibatches in flight.
        back: weight of the slowest backward.
        exposed: weight of the exposed end.
        even: of the slowest period, where this has no exposed end: the factor of the time in which
            all devices share work evenly; 0 for an objective without a period.
        may_keep: whether a stage may stash.
        may_recompute: whether it may run its forward twice.
        phases: whether all forwards run before all backwards.
        steady: whether the optimizer steps after every backward, in a flow without end.
        stashing: whether each microbatch in flight keeps the version of the parameters that it
            began with.
        sharing: whether replicas may keep parts.
        overlap: whether what these exchange may run beside computations.
    """

    num_devices: int
    num_microbatches: int
    moments: int
    total: float
    trip: bool
    back: float
    exposed: float
    even: float
    may_keep: bool
    may_recompute: bool
    phases: bool
    steady: bool
    stashing: bool
    sharing: bool
    overlap: bool


class SearchLimits(NamedTuple):
    """The limits of a search.

    Attributes:
        incumbent: objective that a pipeline must beat.
        labels: maximum number of labels that a state keeps.
        work: maximum number of labels that are extended by a stage.
    """

    incumbent: float
    labels: int
    work: int


class Labels(NamedTuple):
    """Ways to run everything behind a cut. Label 0 runs nothing.

    Attributes:
        value: (room, 4) s, by TOTAL, WORST, ...
        link: (room, 6) by NEXT, BEHIND, ...
        head: (n, C) the first label of every state, -1 for none.
    """

    value: Floats
    link: Ints
    head: npt.NDArray[np.int32]


class Scratch(NamedTuple):
    """Memory of the search.

    Attributes:
        visited: (n,) the downset j for which a downset i was last reached.
        stage: (6 or 8, n) bytes of the stage D_j minus D_i, by KEPT, BOUNDARY, ...
        part: (NUM_PARTS,) of the stage in hand, by STEPPED, CUT, ...
        active: (C,) combinations that have labels.
    """

    visited: Ints
    stage: Floats
    part: Floats
    active: Ints


# How far a search is. best: the least objective so far, or the incumbent's; last: the label of the
# first stage of the pipeline that has it, NO_LABEL for the incumbent.
# size: number of labels; work: number of labels that were extended.
# dropped: whether a label had to go that no other one beat.
PROGRESS = np.dtype(
    [("best", "f8"), ("last", "i8"), ("size", "i8"), ("work", "i8"), ("dropped", "?")]
)


class Sweep(NamedTuple):
    """A search: all that it reads, and where it stands."""

    subsets: Downsets
    times: DownsetTimes
    sets: Sets
    parts: Parts
    cuts: Cuts
    moves: Moves
    options: SearchOptions
    limits: SearchLimits
    labels: Labels
    scratch: Scratch
    progress: Any  # (1,) PROGRESS; mypy does not see the fields of a record


class NewStage(NamedTuple):
    """A stage D_j minus D_i, to be put in front.

    Attributes:
        i: the cut in front of it.
        j: the cut behind it.
        static: bytes of parameters, gradients and optimizer state.
        trained: bytes of trained parameters.
        tied: bytes of those among them that other stages use as well.
        first: bytes of those among these that no earlier stage uses.
    """

    i: int
    j: int
    static: float
    trained: float
    tied: float
    first: float


class NewStageTimes(NamedTuple):
    """Time of such a stage on its devices, in s; letters of `costs.closed_form`.

    Attributes:
        forward: f.
        backward: b.
        others: posting in a forward.
        others_back: posting in a backward.
        send: c.
        back: g.
        tail: a.
        rounds: ceil(M / R), or any number above W in a flow without end.
        warmup: W.
        turn: n.
        again: 1 if it recomputes its activations, else 0.
        level: at which its replicas share.
        spread: the least share of the slowest period in the objective; see `_least_period`.
    """

    forward: float
    backward: float
    others: float
    others_back: float
    send: float
    back: float
    tail: float
    rounds: int
    warmup: int
    turn: int
    again: int
    level: int
    spread: float


# --------------------------------------------------------------------------- bytes of stages


@inlined
def leaves(rows: Masks, row: int, masks: Masks, j: int) -> bool:
    """Whether the set in a row has a member outside downset j."""
    for w in range(masks.shape[1]):
        if rows[row, w] & ~masks[j, w]:
            return True
    return False


@inlined
def meets(rows: Masks, row: int, masks: Masks, i: int, j: int) -> bool:
    """Whether the set in a row has a member in the stage D_j minus D_i; i = j stands for all of
    D_j.
    """
    for w in range(masks.shape[1]):
        inside = masks[j, w]
        if i != j:
            inside &= ~masks[i, w]
        if rows[row, w] & inside:
            return True
    return False


@njit
def cut_bytes(masks: Masks, sets: Sets) -> Cuts:
    """The transfers over the cut behind every downset."""
    n = masks.shape[0]
    cuts = Cuts(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n))
    one = np.uint64(1)
    for i in range(n):
        for t in range(sets.size.shape[0]):
            b = sets.maker[t]
            if b < 0 or (masks[i, b // 64] >> np.uint64(b % 64)) & one == 0:
                continue
            if leaves(sets.read, t, masks, i):
                cuts.bytes[i] += sets.size[t]
                cuts.messages[i] += 1
                cuts.gradient_bytes[i] += sets.size[t] * sets.gradient[t]
                cuts.gradients[i] += sets.gradient[t]
    return cuts


@inlined
def grow(stage: Floats, i: int, behind: int, j: int, block: int, masks: Masks, sets: Sets) -> None:
    """Bytes of the stage D_j minus D_i from those of D_j minus D_behind, which lacks one block.

    A stage keeps the tensors that it stashes, its inputs, and its outputs. The block comes in front
    of all others of the stage. So no other one makes what it reads, and a tensor that it makes has
    all its readers in the stage or behind it: whether that is kept depends on j alone.

    Args:
        stage: `Scratch.stage`; column i is written.
    """
    empty = behind == j
    for row in range(stage.shape[0]):
        stage[row, i] = 0.0 if empty else stage[row, behind]
    stage[KEPT, i] += sets.private[block]
    stage[BOUNDARY, i] += sets.returned[block]
    for x in range(sets.workspace.shape[0]):
        stage[WORKSPACE + x, i] = max(stage[WORKSPACE + x, i], sets.workspace[x, block])
    one = np.uint64(1)
    word, bit = block // 64, one << np.uint64(block % 64)
    for x in range(sets.tensor_start[block], sets.tensor_start[block + 1]):
        t = sets.tensors[x]
        size = sets.size[t]
        was_read = not empty and meets(sets.read, t, masks, behind, j)
        was_touched = was_read or (not empty and meets(sets.kept, t, masks, behind, j))
        if sets.maker[t] == block:
            # So far an input of the stage; from now on its own.
            if was_touched:
                stage[KEPT, i] -= size
            if was_read:
                stage[BOUNDARY, i] -= size
                stage[ENTERING, i] -= size
            stays = meets(sets.kept, t, masks, j, j) or leaves(sets.read, t, masks, j)
            if stays and not sets.free[t]:
                stage[KEPT, i] += size
            continue
        if not was_touched:
            stage[KEPT, i] += size
        if not was_read and sets.read[t, word] & bit:
            stage[BOUNDARY, i] += size
            if sets.maker[t] >= 0:
                stage[ENTERING, i] += size
    for x in range(sets.parameter_start[block], sets.parameter_start[block + 1]):
        p = sets.parameters[x]
        if empty or not meets(sets.parameter_users, p, masks, behind, j):
            stage[HELD, i] += sets.parameter_size[p]
            stage[TRAINED, i] += sets.parameter_size[p] * sets.parameter_trained[p]


@inlined
def _tied_bytes(masks: Masks, i: int, j: int, sets: Sets) -> tuple[float, float]:
    """Bytes of the trained parameters of the stage D_j minus D_i that other stages use as well, and
    of those among them that no earlier stage uses.

    Their gradients are not reduced over the replicas of the stage but over all holders. That
    all-reduce is charged to the first of these stages, the last to have its gradients.
    """
    tied = first = 0.0
    for x in range(sets.tied.shape[0]):
        p = sets.tied[x]
        if meets(sets.parameter_users, p, masks, i, j):
            earlier = meets(sets.parameter_users, p, masks, i, i)
            if earlier or leaves(sets.parameter_users, p, masks, j):
                trained = sets.parameter_size[p] * sets.parameter_trained[p]
                tied += trained
                if not earlier:
                    first += trained
    return tied, first


@inlined
def _add_parts(part: Floats, parts: Parts, masks: Masks, i: int, j: int, sets: Sets) -> None:
    """Writes what lies in parts of the stage D_j minus D_i, if its replicas share: no parameter
    that other stages use, too.

    Args:
        part: `Scratch.part`.
    """
    for row in range(part.shape[0]):
        part[row] = parts.sums[row, j] - parts.sums[row, i]
    for x in range(sets.tied.shape[0]):
        p = sets.tied[x]
        if (
            meets(sets.parameter_users, p, masks, i, j)
            and not meets(sets.parameter_users, p, masks, i, i)
            and not leaves(sets.parameter_users, p, masks, j)
        ):
            for row in range(part.shape[0]):
                part[row] += parts.tied[row, x]


# -------------------------------------------------------------------------------- the search


def search(
    subsets: Downsets,
    times: DownsetTimes,
    sets: Sets,
    parts: Parts,
    cuts: Cuts,
    moves: Moves,
    options: SearchOptions,
    limits: SearchLimits,
) -> tuple[float, Ints, bool, int]:
    """The best pipeline. Where tied parameters are in several stages, its objective is an estimate
    from below: how many replicas behind share in their all-reduce is not known when it is charged.
    It is one, too, where replicas keep parts, whose rows are not counted one by one.

    The arrays are allocated here, and larger ones where they do not suffice: compiling is quicker
    without.

    Returns:
        The objective (the incumbent if nothing is better), the stages from the first to the last
        as rows (downset before, downset behind, combination, recomputation, level), whether
        something had to be dropped, so that a better one may exist, and the labels that were
        extended.
    """
    n, num_moves = len(subsets.masks), moves.k.shape[0]
    room = _ROOM
    while True:
        labels = Labels(
            value=np.zeros((room, 4)),
            link=np.zeros((room, 6), dtype=np.int64),
            head=np.full((n, num_moves), -1, dtype=np.int32),
        )
        scratch = Scratch(
            visited=np.full(n, -1, dtype=np.int64),
            stage=np.zeros((WORKSPACE + len(sets.workspace), n)),
            part=np.zeros(NUM_PARTS),
            active=np.zeros(num_moves, dtype=np.int64),
        )
        progress = np.zeros(1, PROGRESS)
        sweep = Sweep(
            subsets, times, sets, parts, cuts, moves, options, limits, labels, scratch, progress
        )  # fmt: skip
        _search(sweep)
        best, last, size, work, dropped = progress[0].item()
        full = size + 1 >= room
        if not full or room >= _MOST_ROOM:
            return best, _stages(labels.link, last), full or dropped or work > limits.work, work
        room *= 8


@njit
def _search(sweep: Sweep) -> None:
    """Every state from the last cut to the first, and every stage in front of each."""
    head, link, progress = sweep.labels.head, sweep.labels.link, sweep.progress[0]
    n = head.shape[0]
    head[n - 1, 0] = 0
    link[0, NEXT], link[0, BEHIND], link[0, DOWNSET] = -1, -1, n - 1
    progress.best, progress.last, progress.size = sweep.limits.incumbent, NO_LABEL, 1
    for j in range(n - 1, 0, -1):
        # The labels of this cut were made by stages that end at later cuts, so all of them are
        # there. Without any, no pipeline has this cut.
        num_active = _activate(head, sweep.scratch.active, j)
        if num_active > 0 and _has_room(sweep):
            _put_stages_in_front(sweep, j, num_active)


@inlined
def _put_stages_in_front(sweep: Sweep, j: int, num_active: int) -> None:
    """Puts every stage that ends at the cut behind D_j in front of that cut's labels.

    A subset of D_j has a smaller number, and so do its covers between it and D_j: these were
    visited before it, and the bytes of their stages are there to grow from.
    """
    subsets, visited = sweep.subsets, sweep.scratch.visited
    visited[j] = j
    for i in range(j - 1, -1, -1):
        x = _cover_inside(subsets.start, subsets.cover, visited, i, j)
        # Without such a cover, D_i is no subset of D_j, and D_j minus D_i no stage. Without room,
        # the whole search is done again with more.
        if x >= 0 and _has_room(sweep):
            visited[i] = j
            grow(
                sweep.scratch.stage, i, subsets.cover[x], j, subsets.added[x], subsets.masks,
                sweep.sets,
            )  # fmt: skip
            _try_devices(sweep, _front_stage(sweep, i, j), num_active)


@inlined
def _front_stage(sweep: Sweep, i: int, j: int) -> NewStage:
    """The stage D_j minus D_i, whose bytes are in `Scratch.stage`."""
    stage = sweep.scratch.stage
    trained = stage[TRAINED, i]
    static = stage[HELD, i] + (1 + sweep.options.moments) * trained
    tied, first = _tied_bytes(sweep.subsets.masks, i, j, sweep.sets)
    if sweep.options.sharing:
        _add_parts(sweep.scratch.part, sweep.parts, sweep.subsets.masks, i, j, sweep.sets)
    return NewStage(i, j, static, trained, tied, first)


@inlined
def _try_devices(sweep: Sweep, stage: NewStage, num_active: int) -> None:
    """Puts a stage in front of the labels behind it, on all devices that it may have there."""
    moves = sweep.moves
    # Safe: such a stage shares a parameter with another one, which no asynchronous schedule runs.
    if sweep.options.stashing and stage.tied > 0:
        num_active = 0
    for y in range(num_active):
        c = sweep.scratch.active[y]
        # Not safe: `search` says that something was dropped if the work is cut off.
        if sweep.progress[0].work > sweep.limits.work:
            break
        for e in range(moves.start[c], moves.start[c + 1]):
            to = moves.to[e]
            # Safe: D_i has blocks left that no device would be left for.
            if stage.i > 0 and _devices_left(sweep, to) == 0:
                continue
            # Safe: the bytes of a stage do not depend on the stages in front, so no pipeline with
            # one that fits neither way fits. A higher level exchanges more in each pass, which
            # costs no less than what it saves at the end. So the least at which a stage fits is
            # the best, but for level 2, from which on each replica adds up a part of the gradients.
            # Recomputing, which takes longer, is only for a lower one.
            least = NUM_LEVELS
            for again in range(2):
                level = _least_level(sweep, stage, to, again, least)
                if level < least:
                    price = _price(sweep, stage, c, e, again, level)
                    _extend_labels(sweep, stage, c, to, price)
                    if level < 2 < least and _adds_up_in_parts(sweep, stage, to, again):
                        price = _price(sweep, stage, c, e, again, 2)
                        _extend_labels(sweep, stage, c, to, price)
                    least = level


@inlined
def _adds_up_in_parts(sweep: Sweep, stage: NewStage, to: int, again: int) -> bool:
    """Whether level 2 saves time of a backward, and a stage fits at it.

    Args:
        again: 1 if it recomputes its activations, else 0.
    """
    if sweep.moves.levels[to] <= 2 or sweep.scratch.part[ADDED] == 0.0:
        return False
    return bool(_needed_bytes(sweep, stage, to, again, 2) <= sweep.moves.limit[to])


@inlined
def _devices_left(sweep: Sweep, c: int) -> int:
    """The number of devices that a combination does not use."""
    return int(sweep.options.num_devices - sweep.moves.k[c])


@inlined
def _price(
    sweep: Sweep, stage: NewStage, c: int, e: int, again: int, level: int
) -> NewStageTimes:  # fmt: skip
    """What the stage takes on the devices of move e, in front of combination c.

    Args:
        again: 1 if it recomputes its activations, else 0.
        level: at which its replicas share.
    """
    moves, cuts, i, j = sweep.moves, sweep.cuts, stage.i, stage.j
    to = moves.to[e]
    rounds = _rounds(sweep, to)
    send = back = 0.0
    if c > 0:  # there is a stage behind
        send = moves.latency[e] * cuts.messages[j] + cuts.bytes[j] / moves.rate[e]
        back = (
            moves.back_latency[e] * cuts.gradients[j] + cuts.gradient_bytes[j] / moves.back_rate[e]
        )
        # A transfer begins when its sender has posted it.
        send += moves.post[to] * cuts.messages[j] + moves.copy[to] * cuts.bytes[j]
        back += moves.post[c] * cuts.gradients[j] + moves.copy[c] * cuts.gradient_bytes[j]
    others, others_back = _posting(moves, cuts, stage, to)
    forward, backward = _slowest_passes(sweep, stage, to, again, level)
    # A bottleneck is that of a steady pipeline: enough microbatches in flight.
    warmup, turn = rounds, rounds
    if sweep.options.trip:
        warmup, turn = moves.w[to], 1
        if c > 0:
            turn = rounds_to_turn(moves.w[to], moves.r[to], moves.w[c], moves.r[c])
    ahead, left = sweep.times.ahead[i], _devices_left(sweep, to)
    spread = _least_period(ahead, left, sweep.options) if i > 0 else 0.0
    tail = _tail_s(sweep, stage, to, backward - again * forward, level)
    return NewStageTimes(
        forward, backward, others, others_back, send, back, tail, rounds, warmup, turn, again,
        level, spread,
    )  # fmt: skip


@inlined
def _posting(moves: Moves, cuts: Cuts, stage: NewStage, to: int) -> tuple[float, float]:
    """For how long posting what comes and goes keeps a device of the stage, forward and back."""
    post, copy, i, j = moves.post[to], moves.copy[to], stage.i, stage.j
    return (
        post * (cuts.messages[i] + cuts.messages[j]) + copy * (cuts.bytes[i] + cuts.bytes[j]),
        post * (cuts.gradients[i] + cuts.gradients[j])
        + copy * (cuts.gradient_bytes[i] + cuts.gradient_bytes[j]),
    )


@inlined
def _rounds(sweep: Sweep, to: int) -> int:
    """Microbatches per replica of a stage."""
    if sweep.options.stashing:
        return MANY_ROUNDS
    return int(-(-sweep.options.num_microbatches // sweep.moves.r[to]))


@inlined
def _slowest_passes(
    sweep: Sweep, stage: NewStage, to: int, again: int, level: int
) -> tuple[float, float]:
    """Forward and backward of the stage where each is slowest, in s."""
    times, i, j = sweep.times, stage.i, stage.j
    gather, exchange = _exchanges_s(sweep, to, level)
    forward = backward = 0.0
    for kind in range(times.forward.shape[0]):
        slow = sweep.moves.factor[kind, to]
        launch = sweep.moves.type_launch[kind, to]
        own = times.forward[kind, j] - times.forward[kind, i]
        gone = times.backward[kind, j] - times.backward[kind, i]
        if level >= 2:
            gone -= sweep.scratch.part[ADDED] * (1.0 - 1.0 / sweep.moves.r[to])
        if _hides(sweep, to):  # the least that both streams take
            own, gone = slow * max(own, gather), slow * max(gone, exchange)
        else:
            own, gone = slow * (own + gather), slow * (gone + exchange)
        forward = max(forward, own + launch)
        backward = max(backward, gone + again * own + launch)
    return forward, backward


@inlined
def _hides(sweep: Sweep, to: int) -> bool:
    """Whether what replicas exchange in passes, and gather after a step, is beside computations."""
    return sweep.options.overlap and sweep.moves.beside[to] > 0.0


@inlined
def _exchanges_s(sweep: Sweep, to: int, level: int) -> tuple[float, float]:
    """What replicas that share exchange in a forward and in a backward, in s."""
    moves, part = sweep.moves, sweep.scratch.part
    forward = backward = 0.0
    if level >= 2:
        backward += moves.scatter[0, to] * part[SCATTERS] + moves.scatter[1, to] * part[SCATTERED]
    if level == 3:
        forward += moves.gather[0, to] * part[GATHERS] + moves.gather[1, to] * part[GATHERED]
        backward += moves.gather[0, to] * part[AGAINS] + moves.gather[1, to] * part[AGAIN_BYTES]
    return forward, backward


@inlined
def _tail_s(sweep: Sweep, stage: NewStage, to: int, backward: float, level: int) -> float:
    """The optimizer's step, what is left of the sums of gradients behind the last backward, and the
    gathers after the step, once per iteration, in s.

    Args:
        backward: of the stage, without a forward that is run again.
    """
    moves = sweep.moves
    launch, width = moves.launch[to], moves.r[to]
    stepped = sweep.scratch.part[STEPPED] if level > 0 else 0.0
    tail = moves.step[to] * (stage.trained - stepped + stepped / width) + launch
    if (
        level < 3 and stepped > 0 and not _hides(sweep, to)
    ):  # parameters are gathered from the parts that were stepped
        tail += moves.gather[0, to] + moves.gather[1, to] * stepped
    # What is summed once per iteration: whole, and in parts.
    whole, parted = stage.trained - stage.tied - stepped, stepped if level == 1 else 0.0
    if width > 1 and whole + parted > 0:
        sums = 0.0
        if whole > 0:
            sums += ring_allreduce_s(whole, width, moves.ring_latency[to], moves.ring_rate[to])
            sums += launch * sum_launches(whole)
        if parted > 0:
            sums += moves.part_sum[0, to] + moves.part_sum[1, to] * parted
            sums += launch * sum_launches(parted)
        tail += exposed_sum_s(sums, whole + parted, backward, moves.beside[to] > 0.0)
    if stage.first > 0:
        tail += ring_allreduce_s(stage.first, width + 1, moves.tie_latency[to], moves.tie_rate[to])
        tail += launch
    return float(tail)


@inlined
def _extend_labels(sweep: Sweep, stage: NewStage, c: int, to: int, price: NewStageTimes) -> None:
    """Puts a stage in front of every label of a combination c behind it, which leads to `to`."""
    value, link, progress = sweep.labels.value, sweep.labels.link, sweep.progress[0]
    moves, options = sweep.moves, sweep.options
    label = sweep.labels.head[stage.j, c]
    while label >= 0 and _has_room(sweep):
        progress.work += 1
        total, worst, worst_back, exposed = extend(
            value[label, TOTAL], value[label, WORST], value[label, WORST_BACK],
            value[label, EXPOSED], price.forward, price.backward, price.others,
            price.others_back, price.send, price.back, price.tail, price.rounds, price.warmup,
            price.turn, moves.weight[to], moves.weight[c], options.phases, options.steady,
        )  # fmt: skip
        # What the objective does not count does not tell labels apart.
        if not options.trip:
            total = 0.0
        if options.exposed == 0.0:
            exposed = 0.0
        if stage.i == 0:
            objective = options.total * total + worst + options.back * worst_back + exposed
            _finish(sweep, objective, label, to, price)
        # Safe to leave out otherwise: a stage in front makes no value smaller, a microbatch passes
        # through everything in front once, and the slowest period is at least that of an even
        # spread.
        elif (
            options.total * (total + sweep.times.ahead[stage.i])
            + max(worst + options.back * worst_back, price.spread)
            < progress.best
        ):
            new = progress.size
            value[new, TOTAL], value[new, WORST] = total, worst
            value[new, WORST_BACK], value[new, EXPOSED] = worst_back, exposed
            _describe(link, new, label, stage.i, to, price)
            taken, full = _insert(sweep.labels.head, value, link, new, sweep.limits.labels)
            progress.size += taken
            progress.dropped = progress.dropped or full
        label = link[label, NEXT]


@inlined
def _finish(sweep: Sweep, objective: float, behind: int, to: int, price: NewStageTimes) -> None:
    """Keeps a whole pipeline, the first stage in front of label `behind`, if it is the best."""
    progress = sweep.progress[0]
    if objective < progress.best:
        progress.best = objective
        if progress.last == NO_LABEL:  # one label serves every best pipeline
            progress.last = progress.size
            progress.size += 1
        _describe(sweep.labels.link, progress.last, behind, 0, to, price)


@inlined
def _describe(link: Ints, label: int, behind: int, i: int, to: int, price: NewStageTimes) -> None:
    """Writes the stage that a label puts in front, and the label behind it."""
    link[label, BEHIND], link[label, DOWNSET] = behind, i
    link[label, COMBINATION], link[label, AGAIN] = to, price.again
    link[label, LEVEL] = price.level


@inlined
def _has_room(sweep: Sweep) -> bool:
    """Whether there is room for one more label."""
    return bool(sweep.progress[0].size + 1 < sweep.labels.value.shape[0])


@inlined
def _activate(head: npt.NDArray[np.int32], active: Ints, j: int) -> int:
    """Lists the combinations that have labels behind D_j, and gives their number."""
    count = 0
    for c in range(head.shape[1]):
        if head[j, c] >= 0:
            active[count] = c
            count += 1
    return count


@inlined
def _cover_inside(start: Ints, cover: Ints, visited: Ints, i: int, j: int) -> int:
    """The first cover of D_i that lies within D_j, as its place in `cover`; -1 if there is none,
    that is if D_i is no subset of D_j.
    """
    for x in range(start[i], start[i + 1]):
        if visited[cover[x]] == j:
            return x
    return -1


@inlined
def _least_level(sweep: Sweep, stage: NewStage, to: int, again: int, below: int) -> int:
    """The least level at which a stage fits, if it keeps its activations or recomputes them.

    Args:
        again: 1 if it recomputes them, else 0.
        below: what is given where no lower level fits.
    """
    options = sweep.options
    allowed = options.may_recompute if again else options.may_keep
    if allowed:
        for level in range(min(below, sweep.moves.levels[to])):
            if _needed_bytes(sweep, stage, to, again, level) <= sweep.moves.limit[to]:
                return level
    return below


@inlined
def _needed_bytes(sweep: Sweep, stage: NewStage, to: int, again: int, level: int) -> float:
    """Bytes that a stage needs on each device.

    Args:
        again: 1 if it recomputes its activations, else 0.
        level: at which its replicas share.
    """
    moves, cuts, options, i, j = sweep.moves, sweep.cuts, sweep.options, stage.i, stage.j
    own, part = sweep.scratch.stage, sweep.scratch.part
    kept, entering, leaving = own[KEPT, i], own[ENTERING, i], cuts.gradient_bytes[j]
    workspace = own[WORKSPACE + max(0, level - 1), i]
    warmup, rounds, width = moves.w[to], _rounds(sweep, to), moves.r[to]
    static = stage.static + ((warmup - 1) * stage.trained if options.stashing else 0.0)
    exchanged = 0.0
    if level > 0:
        static = shared_static_bytes(
            level, own[HELD, i], stage.trained, part[STEPPED], part[CUT], part[ROW], width,
            options.moments,
        )  # fmt: skip
        exchanged = exchanged_bytes(level, part[STEPPED], part[ROW], sweep.parts.largest, width)
        kept -= part[SAVED] if level == 3 else 0.0
    if again:
        boundary = own[BOUNDARY, i] + cuts.bytes[j]
        need = search_recompute_bytes(
            static, kept, boundary, entering, leaving, workspace, warmup, rounds
        )
    else:
        need = search_bytes(static, kept, entering, leaving, workspace, warmup, rounds)
    return float(max(need, static + exchanged))


@inlined
def _least_period(ahead: float, left: int, options: SearchOptions) -> float:
    """The share of the slowest period in the objective, at least, in s: the work in front of a
    stage can do no better than to be spread evenly over the devices that are left.
    """
    if options.exposed > 0:
        # All microbatches but one on each of these devices wait for another one there.
        return float(max(0.0, (options.num_microbatches - left) / left) * ahead)
    return options.even * ahead / left


@inlined
def _beats(value: Floats, one: int, other: int) -> bool:
    """Whether a label is as good as another one in everything. `extend` never falls where one of
    its values grows, so no pipeline through the other one is better: it may go.
    """
    return bool(
        value[one, TOTAL] <= value[other, TOTAL]
        and value[one, WORST] <= value[other, WORST]
        and value[one, WORST_BACK] <= value[other, WORST_BACK]
        and value[one, EXPOSED] <= value[other, EXPOSED]
    )


@inlined
def _sum(value: Floats, label: int) -> float:
    """The objective of a label, if nothing came in front of it."""
    return float(
        value[label, TOTAL] + value[label, WORST] + value[label, WORST_BACK] + value[label, EXPOSED]
    )


@inlined
def _unlink(head: npt.NDArray[np.int32], link: Ints, before: int, label: int) -> None:
    """Takes a label out of the list of its state.

    Args:
        before: the label in front of it there; -1 if it is the first.
    """
    if before < 0:
        head[link[label, DOWNSET], link[label, COMBINATION]] = link[label, NEXT]
    else:
        link[before, NEXT] = link[label, NEXT]


@inlined
def _insert(
    head: npt.NDArray[np.int32], value: Floats, link: Ints, new: int, max_labels: int
) -> tuple[int, bool]:
    """Puts a label, the last one, into the list of its state unless another is as good in
    everything; takes out those that it beats.

    Args:
        head: (n, C) the first label of every state, -1 for none.
        new: its index.
        max_labels: maximum number of labels that a state keeps.

    Returns:
        1 if the label is used, else 0; and whether there were too many, so that the one with the
        largest sum had to go.
    """
    i, c = link[new, DOWNSET], link[new, COMBINATION]
    label = head[i, c]
    while label >= 0:
        # Safe: what comes in front of the new one can come in front of the other, for no more.
        if _beats(value, label, new):
            return 0, False
        label = link[label, NEXT]
    count, before, label = 0, -1, head[i, c]
    largest, worst, before_worst = -1.0, -1, -1
    while label >= 0:
        following = link[label, NEXT]
        if _beats(value, new, label):
            _unlink(head, link, before, label)
        else:
            whole = _sum(value, label)
            if whole > largest:
                largest, worst, before_worst = whole, label, before
            count += 1
            before = label
        label = following
    # Not safe, which the caller is told: one that is dropped may lead to the best pipeline.
    full = count >= max_labels
    if full:
        if _sum(value, new) >= largest:
            return 0, True
        _unlink(head, link, before_worst, worst)
    link[new, NEXT] = head[i, c]
    head[i, c] = new
    return 1, full


def _stages(link: Ints, last: int) -> Ints:
    """The rows of the pipeline that ends with a label, first stage first; none for NO_LABEL."""
    rows, label = [], last
    while label > 0:
        behind = link[label, BEHIND]
        row = link[label, DOWNSET], link[behind, DOWNSET], link[label, COMBINATION]
        rows.append((*row, link[label, AGAIN], link[label, LEVEL]))
        label = behind
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
