"""The inner loops of `antichain.py`, compiled by numba. Arrays are indexed by

    i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every block
    c     a combination (k, r, W): k devices in use, taken from the end of the order, by stages of
          which the first has width r and warm-up depth W; 0 stands for no stage
    e     a move from one combination to the next: one more stage in front

For one j the stages D_j minus D_i are visited from small to large. Each is one block larger than
a stage visited before, along the covers of the lattice of downsets, so what it costs follows from
that stage's costs and from the tensors and parameters that the new block touches.

Costs come from `planner/costs`: the functions of its closed forms are compiled in here.
"""

import numpy as np
import numpy.typing as npt

from planner.costs import closed_form, collectives, memory
from planner.solvers.antichain.arrays import (
    Cuts,
    Labels,
    Lattice,
    Limits,
    Moves,
    Scratch,
    Sets,
    Training,
)
from planner.support.arrays import Floats, Ints, Masks
from planner.support.jit import inner, njit

extend = inner(closed_form.extend)
ring_allreduce_s = inner(collectives.ring_allreduce_s)
search_bytes = inner(memory.search_bytes)
search_recompute_bytes = inner(memory.search_recompute_bytes)


# Labels that there is room for at first.
_ROOM = 1 << 14


@njit
def sums(lattice_start: Ints, cover: Ints, added: Ints, weights: Floats) -> Floats:
    """(n,) sum over the blocks of each downset.

    Args:
        weights: (blocks,)
    """
    n = lattice_start.shape[0] - 1
    found = np.zeros(n)
    for i in range(n):
        for e in range(lattice_start[i], lattice_start[i + 1]):
            found[cover[e]] = found[i] + weights[added[e]]
    return found


@inner
def leaves(rows: Masks, row: int, masks: Masks, j: int) -> bool:
    """Whether the set in a row has a member outside downset j."""
    for w in range(masks.shape[1]):
        if rows[row, w] & ~masks[j, w]:
            return True
    return False


@inner
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
    """What crosses the cut behind every downset."""
    n = masks.shape[0]
    found = Cuts(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n))
    one = np.uint64(1)
    for i in range(n):
        for t in range(sets.size.shape[0]):
            b = sets.maker[t]
            if b < 0 or (masks[i, b // 64] >> np.uint64(b % 64)) & one == 0:
                continue
            if leaves(sets.read, t, masks, i):
                found.bytes[i] += sets.size[t]
                found.messages[i] += 1
                found.gradient_bytes[i] += sets.size[t] * sets.gradient[t]
                found.gradients[i] += sets.gradient[t]
    return found


# Rows of the bytes of a stage.
KEPT, BOUNDARY, ENTERING, HELD, TRAINED, WORKSPACE = 0, 1, 2, 3, 4, 5


@inner
def grow(stage: Floats, i: int, behind: int, j: int, block: int, masks: Masks, sets: Sets) -> None:
    """Bytes of the stage D_j minus D_i from those of D_j minus D_behind, which lacks one block.

    A stage keeps the tensors that it stashes, its inputs, and its outputs. A tensor made in it
    has all readers behind it, so whether it is kept depends on j alone.

    Args:
        stage: (6, n) by KEPT (from forward to backward of one microbatch), BOUNDARY (what it
            reads from outside, and the model's outputs that it makes), ENTERING (what of it
            earlier stages make), HELD (parameters), TRAINED (those that are trained), WORKSPACE
            (the largest of its blocks). Row i is written.
    """
    empty = behind == j
    for row in range(6):
        stage[row, i] = 0.0 if empty else stage[row, behind]
    stage[KEPT, i] += sets.private[block]
    stage[BOUNDARY, i] += sets.returned[block]
    stage[WORKSPACE, i] = max(stage[WORKSPACE, i], sets.workspace[block])
    one = np.uint64(1)
    word, bit = block // 64, one << np.uint64(block % 64)
    for x in range(sets.tensor_start[block], sets.tensor_start[block + 1]):
        t = sets.tensors[x]
        size = sets.size[t]
        was_read = not empty and meets(sets.read, t, masks, behind, j)
        was_touched = was_read or (not empty and meets(sets.kept, t, masks, behind, j))
        if sets.maker[t] == block:
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


@inner
def tied_bytes(masks: Masks, i: int, j: int, sets: Sets) -> tuple[float, float]:
    """Bytes of the trained parameters of the stage D_j minus D_i that other stages use as well, and
    of those among them that no earlier stage uses.

    Their gradients are not summed over the replicas of the stage but over all holders, which is
    charged to the first of these stages, the last to have its gradients.
    """
    tied = first = 0.0
    for x in range(sets.tied.shape[0]):
        p = sets.tied[x]
        if meets(sets.parameter_users, p, masks, i, j):
            earlier = meets(sets.parameter_users, p, masks, i, i)
            if earlier or leaves(sets.parameter_users, p, masks, j):
                tied += sets.parameter_size[p]
                if not earlier:
                    first += sets.parameter_size[p]
    return tied, first


def search(
    lattice: Lattice, sets: Sets, cuts: Cuts, moves: Moves, training: Training, limits: Limits
) -> tuple[float, Ints, bool, int]:
    """The best pipeline. Where tied parameters are in several stages, its objective is an estimate
    from below: how many replicas behind share in their sum is not known when it is charged.

    The arrays are allocated here, and larger ones where they do not suffice: compiling is quicker
    without.

    Returns:
        The objective (the incumbent if nothing is better), the stages from the first to the last
        as rows (downset before, downset behind, combination, recomputation), whether something
        had to be dropped, so that a better one may exist, and the labels that were extended.
    """
    n, num_moves = lattice.masks.shape[0], moves.k.shape[0]
    room = _ROOM
    while True:
        labels = Labels(
            value=np.zeros((room, 4)),
            link=np.zeros((room, 5), dtype=np.int64),
            head=np.full((n, num_moves), -1, dtype=np.int32),
        )
        scratch = Scratch(
            visited=np.full(n, -1, dtype=np.int64),
            stage=np.zeros((6, n)),
            active=np.zeros(num_moves, dtype=np.int64),
        )
        best, last, dropped, work = _search(
            lattice, sets, cuts, moves, training, limits, labels, scratch
        )
        if last >= 0:
            return best, _stages(labels.link, last), dropped, work
        room *= 8


@njit
def _search(
    lattice: Lattice,
    sets: Sets,
    cuts: Cuts,
    moves: Moves,
    training: Training,
    limits: Limits,
    labels: Labels,
    scratch: Scratch,
) -> tuple[float, int, bool, int]:
    """The objective, the last label of the best pipeline (0 for none, -1 if there is no room for
    all labels), whether something was dropped, and the labels that were extended.
    """
    value, link, head = labels.value, labels.link, labels.head
    visited, stage, active = scratch.visited, scratch.stage, scratch.active
    n, num_moves = lattice.masks.shape[0], moves.k.shape[0]
    num_types = lattice.forward.shape[0]
    masks = lattice.masks
    size = 1
    head[n - 1, 0] = 0
    link[0, 0], link[0, 1], link[0, 2] = -1, -1, n - 1
    dropped = False
    best, last = limits.incumbent, -1
    work = 0
    microbatches = training.num_microbatches
    for j in range(n - 1, 0, -1):
        num_active = 0
        for c in range(num_moves):
            if head[j, c] >= 0:
                active[num_active] = c
                num_active += 1
        if num_active == 0:
            continue
        visited[j] = j
        for i in range(j - 1, -1, -1):
            behind = block = -1
            for e in range(lattice.start[i], lattice.start[i + 1]):
                if visited[lattice.cover[e]] == j:
                    behind, block = lattice.cover[e], lattice.added[e]
                    break
            if behind < 0:
                continue
            visited[i] = j
            grow(stage, i, behind, j, block, masks, sets)
            trained = stage[TRAINED, i]
            static = stage[HELD, i] + (1 + training.moments) * trained
            tied, first = tied_bytes(masks, i, j, sets)
            for x in range(num_active):
                c = active[x]
                if work > limits.work:
                    break
                for e in range(moves.start[c], moves.start[c + 1]):
                    then = moves.to[e]
                    width, warmup = moves.r[then], moves.w[then]
                    left = training.num_devices - moves.k[then]
                    if i > 0 and left == 0:
                        continue
                    send = back = 0.0
                    if c > 0:
                        send = moves.latency[e] * cuts.messages[j] + cuts.bytes[j] / moves.rate[e]
                        back = (
                            moves.back_latency[e] * cuts.gradients[j]
                            + cuts.gradient_bytes[j] / moves.back_rate[e]
                        )
                    rounds = -(-microbatches // width)
                    again = 0.0
                    need = search_bytes(
                        static, stage[KEPT, i], stage[ENTERING, i], cuts.gradient_bytes[j],
                        stage[WORKSPACE, i], warmup, rounds,
                    )  # fmt: skip
                    if not training.may_keep or need > moves.limit[then]:
                        if not training.may_recompute:
                            continue
                        again = 1.0
                        need = search_recompute_bytes(
                            static, stage[KEPT, i], stage[BOUNDARY, i] + cuts.bytes[j],
                            stage[ENTERING, i], cuts.gradient_bytes[j], stage[WORKSPACE, i],
                            warmup, rounds,
                        )  # fmt: skip
                        if need > moves.limit[then]:
                            continue
                    f = b = 0.0
                    for kind in range(num_types):
                        slow = moves.factor[kind, then]
                        own = slow * (lattice.forward[kind, j] - lattice.forward[kind, i])
                        gone = slow * (lattice.backward[kind, j] - lattice.backward[kind, i])
                        f, b = max(f, own), max(b, gone + again * own)
                    tail = moves.step[then] * trained
                    if width > 1 and trained > tied:
                        tail += ring_allreduce_s(
                            trained - tied, width, moves.ring_latency[then], moves.ring_rate[then]
                        )
                    if first > 0:
                        tail += ring_allreduce_s(
                            first, width + 1, moves.tie_latency[then], moves.tie_rate[then]
                        )
                    # A bottleneck is asked for as if enough were in flight.
                    limited = warmup if training.total > 0.0 else rounds
                    # What the rest costs at least besides the round trip so far: its work once,
                    # and its share of the other microbatches spread evenly over what is left.
                    spread = 0.0
                    if i > 0:
                        if training.exposed > 0:
                            spread = max(0.0, (microbatches - left) / left) * lattice.ahead[i]
                        elif training.total == 0.0:
                            spread = lattice.ahead[i] / left
                    label = head[j, c]
                    while label >= 0:
                        if size + 1 >= value.shape[0]:
                            return best, -1, dropped, work
                        work += 1
                        total, worst, worst_back, exposed = extend(
                            value[label, 0], value[label, 1], value[label, 2], value[label, 3],
                            f, b, send, back, tail, rounds, limited,
                            moves.weight[then], moves.weight[c], training.phases,
                        )  # fmt: skip
                        # What the objective does not count does not tell labels apart.
                        if training.total == 0.0:
                            total = 0.0
                        if training.exposed == 0.0:
                            exposed = 0.0
                        if i == 0:
                            objective = total + worst + worst_back + exposed
                            if objective < best:
                                best = objective
                                if last < 0:
                                    last = size
                                    size += 1
                                link[last, 1], link[last, 2] = label, 0
                                link[last, 3], link[last, 4] = then, again
                        elif (
                            training.total * (total + lattice.ahead[i])
                            + max(worst + worst_back, spread)
                            < best
                        ):
                            value[size, 0], value[size, 1] = total, worst
                            value[size, 2], value[size, 3] = worst_back, exposed
                            link[size, 1], link[size, 2] = label, i
                            link[size, 3], link[size, 4] = then, again
                            taken, full = _insert(head, value, link, size, limits.labels)
                            size += taken
                            dropped = dropped or full
                        label = link[label, 0]
    return best, max(last, 0), dropped or work > limits.work, work


@inner
def _insert(
    head: npt.NDArray[np.int32], value: Floats, link: Ints, new: int, most: int
) -> tuple[int, bool]:
    """Puts a label, the last one, into the list of its state unless another is as good in
    everything; takes out those that it beats.

    Args:
        head: (n, C) the first label of every state, -1 for none.
        new: its index.
        most: labels that a state keeps.

    Returns:
        1 if the label is used, else 0; and whether there were too many, so that the one with the
        largest sum had to go.
    """
    i, c = link[new, 2], link[new, 3]
    label = head[i, c]
    while label >= 0:
        if (
            value[label, 0] <= value[new, 0]
            and value[label, 1] <= value[new, 1]
            and value[label, 2] <= value[new, 2]
            and value[label, 3] <= value[new, 3]
        ):
            return 0, False
        label = link[label, 0]
    count, before, label = 0, -1, head[i, c]
    largest, worst, before_worst = -1.0, -1, -1
    while label >= 0:
        behind = link[label, 0]
        beaten = (
            value[new, 0] <= value[label, 0]
            and value[new, 1] <= value[label, 1]
            and value[new, 2] <= value[label, 2]
            and value[new, 3] <= value[label, 3]
        )
        if beaten:
            if before < 0:
                head[i, c] = behind
            else:
                link[before, 0] = behind
        else:
            whole = value[label, 0] + value[label, 1] + value[label, 2] + value[label, 3]
            if whole > largest:
                largest, worst, before_worst = whole, label, before
            count += 1
            before = label
        label = behind
    full = count >= most
    if full:
        if value[new, 0] + value[new, 1] + value[new, 2] + value[new, 3] >= largest:
            return 0, True
        if before_worst < 0:
            head[i, c] = link[worst, 0]
        else:
            link[before_worst, 0] = link[worst, 0]
    link[new, 0] = head[i, c]
    head[i, c] = new
    return 1, full


def _stages(link: Ints, last: int) -> Ints:
    """The rows of the pipeline that ends with a label, first stage first; none for 0."""
    rows, label = [], last
    while label > 0:
        behind = link[label, 1]
        rows.append((link[label, 2], link[behind, 2], link[label, 3], link[label, 4]))
        label = behind
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
