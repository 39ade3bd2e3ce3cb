"""The inner loops of `antichain.py`, compiled by numba. Arrays are indexed by

    i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every block
    k     devices in use behind a cut, taken from the end of the order
    r     width of a stage, its number of replicas
    c     a combination (k, r, W) of the first stage behind a cut; 0 stands for no stage

Costs come from `planner/costs`: the functions of its closed forms are compiled in here.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.costs import closed_form, collectives, memory
from planner.jit import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint64]

extend = njit(closed_form.extend)
ring_allreduce_s = njit(collectives.ring_allreduce_s)
search_bytes = njit(memory.search_bytes)
search_recompute_bytes = njit(memory.search_recompute_bytes)


class Sets(NamedTuple):
    """Weighted sets of blocks: tensors with who keeps and reads them, parameters with their users.

    Attributes:
        size: (T,) bytes.
        made: (T, words) the block that makes it, no bit for the model's inputs.
        kept: (T, words) blocks that stash it.
        read: (T, words) blocks that read it.
        gradient: (T,) 1 where a gradient comes back.
        parameter_size: (P,) bytes.
        parameter_trained: (P,) 1 where it is trained.
        parameter_users: (P, words).
        private: (blocks,) bytes that a block keeps besides.
        workspace: (blocks,) bytes that live inside one pass of a block.
    """

    size: Floats
    made: Masks
    kept: Masks
    read: Masks
    gradient: Floats
    parameter_size: Floats
    parameter_trained: Floats
    parameter_users: Masks
    private: Floats
    workspace: Floats


class Pairs(NamedTuple):
    """Bytes of the stage D_j minus D_i, (n, n) each, where D_i is inside D_j.

    Attributes:
        inside: whether it is.
        kept: from forward to backward of one microbatch.
        inputs: what the stage reads from outside.
        entering: what of it earlier stages make.
        held: parameters.
        trained: those that are trained.
        workspace: the largest of its blocks.
    """

    inside: npt.NDArray[np.bool_]
    kept: Floats
    inputs: Floats
    entering: Floats
    held: Floats
    trained: Floats
    workspace: Floats


class Cuts(NamedTuple):
    """What crosses the cut behind D_i, (n,) each: bytes and messages, there and back."""

    bytes: Floats
    messages: Floats
    gradient_bytes: Floats
    gradients: Floats


class Machine(NamedTuple):
    """Devices in one linear order, by k and r, for the stage that brings the devices in use to k.

    Attributes:
        factor: (types, K + 1, K + 1) slowdown of a type in the stage, 0 where it has none.
        limit: (K + 1, K + 1) bytes per device, reserve deducted.
        ring_latency: (K + 1, K + 1) s.
        ring_rate: (K + 1, K + 1) bytes/s.
        step: (K + 1, K + 1) s of the optimizer's step per byte of trained parameters.
        latency: (K + 1, K + 1, K + 1) s, from a stage of width r' to the stage (k, r) behind it.
        rate: (K + 1, K + 1, K + 1) bytes/s, likewise.
        back_latency: the other direction.
        back_rate: the other direction.
    """

    factor: Floats
    limit: Floats
    ring_latency: Floats
    ring_rate: Floats
    step: Floats
    latency: Floats
    rate: Floats
    back_latency: Floats
    back_rate: Floats


class Moves(NamedTuple):
    """The combinations and how a stage in front of one leads to another.

    Attributes:
        k: (C,) devices in use.
        r: (C,) width.
        w: (C,) warm-up depth.
        then: (C, K + 1, 2) the combination that a stage of width r' in front leads to, without
            and with one more microbatch in flight; -1 for none.
    """

    k: Ints
    r: Ints
    w: Ints
    then: Ints


class Training(NamedTuple):
    """What the options say, as numbers.

    Attributes:
        num_microbatches: M.
        moments: optimizer state per trained parameter.
        weight: (K + 1,) of a stage's period, by width.
        total: weight of the round trip in the objective.
        exposed: weight of the exposed end.
        may_keep: whether a stage may stash.
        may_recompute: whether it may run its forward twice.
        phases: whether all forwards run before all backwards.
    """

    num_microbatches: int
    moments: int
    weight: Floats
    total: float
    exposed: float
    may_keep: bool
    may_recompute: bool
    phases: bool


@njit
def meets(rows: Masks, row: int, stage: Masks) -> bool:
    """Whether the set in a row shares a member with a stage. (Slices would double the time that
    it takes to compile the kernels.)
    """
    for w in range(stage.shape[0]):
        if rows[row, w] & stage[w]:
            return True
    return False


@njit
def leaves(rows: Masks, row: int, masks: Masks, j: int) -> bool:
    """Whether the set in a row has a member outside downset j."""
    for w in range(masks.shape[1]):
        if rows[row, w] & ~masks[j, w]:
            return True
    return False


@njit
def pair_bytes(masks: Masks, sets: Sets) -> Pairs:
    """Sizes of every stage that is a difference of two downsets.

    Args:
        masks: (n, words) the downsets.
    """
    n, words = masks.shape
    inside = np.zeros((n, n), np.bool_)
    kept, inputs, entering = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    held, trained, workspace = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    stage = np.zeros(words, np.uint64)
    for i in range(n):
        for j in range(i + 1, n):
            subset = True
            for w in range(words):
                subset = subset and (masks[i, w] & ~masks[j, w]) == 0
                stage[w] = masks[j, w] & ~masks[i, w]
            inside[i, j] = subset
            if not subset:
                continue
            for t in range(sets.size.shape[0]):
                own = meets(sets.made, t, stage)
                enters = not own and meets(sets.read, t, stage)
                if enters:
                    inputs[i, j] += sets.size[t]
                    for w in range(words):
                        if sets.made[t, w]:
                            entering[i, j] += sets.size[t]
                stashed = meets(sets.kept, t, stage)
                if stashed or enters or (own and leaves(sets.read, t, masks, j)):
                    kept[i, j] += sets.size[t]
            for p in range(sets.parameter_size.shape[0]):
                if meets(sets.parameter_users, p, stage):
                    held[i, j] += sets.parameter_size[p]
                    trained[i, j] += sets.parameter_size[p] * sets.parameter_trained[p]
            for b in range(sets.private.shape[0]):
                if stage[b // 64] >> np.uint64(b % 64) & np.uint64(1):
                    kept[i, j] += sets.private[b]
                    workspace[i, j] = max(workspace[i, j], sets.workspace[b])
    return Pairs(inside, kept, inputs, entering, held, trained, workspace)


@njit
def cut_bytes(masks: Masks, sets: Sets) -> Cuts:
    """What crosses the cut behind every downset."""
    n, words = masks.shape
    found = Cuts(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n))
    for i in range(n):
        for t in range(sets.size.shape[0]):
            made = False
            for w in range(words):
                made = made or (sets.made[t, w] & masks[i, w]) != 0
            if made and leaves(sets.read, t, masks, i):
                found.bytes[i] += sets.size[t]
                found.messages[i] += 1
                found.gradient_bytes[i] += sets.size[t] * sets.gradient[t]
                found.gradients[i] += sets.gradient[t]
    return found


@njit
def search(
    pairs: Pairs,
    cuts: Cuts,
    forward: Floats,
    backward: Floats,
    ahead: Floats,
    machine: Machine,
    moves: Moves,
    training: Training,
    widths: Ints,
    num_devices: int,
    max_labels: int,
    incumbent: float,
) -> tuple[float, Ints, bool]:
    """The best pipeline.

    Args:
        forward: (types, n) time of the forward of each downset, in s.
        backward: (types, n) likewise.
        ahead: (n,) both, each operator where it is fastest: what a downset costs at least, in s.
        widths: numbers of replicas that a stage may have, ascending.
        num_devices: K.
        max_labels: the most labels that a state keeps.
        incumbent: only what is better counts.

    Returns:
        The objective (the incumbent if nothing is better), the stages from the first to the last
        as rows (downset before, downset behind, combination, recomputation), and whether labels
        had to be dropped, so that a better one may exist.
    """
    n, num_moves = pairs.inside.shape[0], moves.k.shape[0]
    num_types = forward.shape[0]
    count = np.zeros((n, num_moves), np.int64)
    value = np.zeros((n, num_moves, max_labels, 4))
    origin = np.zeros((n, num_moves, max_labels, 4), np.int64)
    dropped = False
    best, best_c, best_label = incumbent, -1, -1
    count[n - 1, 0] = 1
    for j in range(n - 1, 0, -1):
        for i in range(j - 1, -1, -1):
            if not pairs.inside[i, j]:
                continue
            for c in range(num_moves):
                k, r = moves.k[c], moves.r[c]
                for label in range(count[j, c]):
                    for width in widths:
                        if k + width > num_devices:
                            break
                        f = b = 0.0
                        for kind in range(num_types):
                            slow = machine.factor[kind, k + width, width]
                            f = max(f, slow * (forward[kind, j] - forward[kind, i]))
                            b = max(b, slow * (backward[kind, j] - backward[kind, i]))
                        send = back = 0.0
                        if k > 0:
                            send = (
                                machine.latency[k, r, width] * cuts.messages[j]
                                + cuts.bytes[j] / machine.rate[k, r, width]
                            )
                            back = (
                                machine.back_latency[k, r, width] * cuts.gradients[j]
                                + cuts.gradient_bytes[j] / machine.back_rate[k, r, width]
                            )
                        trained = pairs.trained[i, j]
                        static = pairs.held[i, j] + (1 + training.moments) * trained
                        tail = machine.step[k + width, width] * trained
                        if width > 1 and trained > 0:
                            tail += ring_allreduce_s(
                                trained, width,
                                machine.ring_latency[k + width, width],
                                machine.ring_rate[k + width, width],
                            )  # fmt: skip
                        rounds = -(-training.num_microbatches // width)
                        for extra in range(2):
                            then = moves.then[c, width, extra]
                            if then < 0 or (extra == 1 and send + back == 0.0):
                                continue
                            warmup = moves.w[then]
                            limit = machine.limit[k + width, width]
                            again = 0
                            need = search_bytes(
                                static, pairs.kept[i, j], pairs.entering[i, j],
                                cuts.gradient_bytes[j], pairs.workspace[i, j], warmup,
                            )  # fmt: skip
                            if not training.may_keep or need > limit:
                                if not training.may_recompute:
                                    continue
                                again = 1
                                need = search_recompute_bytes(
                                    static, pairs.kept[i, j], pairs.inputs[i, j] + cuts.bytes[j],
                                    pairs.entering[i, j], cuts.gradient_bytes[j],
                                    pairs.workspace[i, j], warmup,
                                )  # fmt: skip
                                if need > limit:
                                    continue
                            # A bottleneck is asked for as if enough were in flight.
                            limited = warmup if training.total > 0.0 else rounds
                            total, worst, worst_back, exposed = extend(
                                value[j, c, label, 0], value[j, c, label, 1],
                                value[j, c, label, 2], value[j, c, label, 3],
                                f, b + again * f, send, back, tail,
                                rounds, limited, training.weight[width], training.phases,
                            )  # fmt: skip
                            if i == 0:
                                objective = (
                                    training.total * total
                                    + worst
                                    + worst_back
                                    + training.exposed * exposed
                                )
                                if objective < best:
                                    best = objective
                                    best_c, best_label = then, 0
                                    value[0, then, 0, 0] = total
                                    origin[0, then, 0, 0] = j
                                    origin[0, then, 0, 1] = c
                                    origin[0, then, 0, 2] = label
                                    origin[0, then, 0, 3] = again
                                continue
                            left = num_devices - k - width
                            if left == 0:
                                continue
                            # What the rest costs at least: its work once, and its share of the
                            # other microbatches spread evenly over the devices that are left.
                            rest = training.total * (total + ahead[i])
                            spread = 0.0
                            if training.exposed > 0:
                                m = training.num_microbatches
                                spread = max(0.0, (m - left) / left) * ahead[i]
                            elif training.total == 0.0:
                                spread = ahead[i] / left
                            if rest + max(worst + worst_back, spread) >= best:
                                continue
                            full = _insert(
                                count, value, origin, i, then,
                                total, worst, worst_back, exposed, training.exposed == 0.0,
                                j, c, label, again,
                            )  # fmt: skip
                            dropped = dropped or full
    return best, _stages(origin, best_c, best_label, n), dropped


@njit
def _insert(
    count: Ints,
    value: Floats,
    origin: Ints,
    i: int,
    c: int,
    total: float,
    worst: float,
    worst_back: float,
    exposed: float,
    blind: bool,
    from_j: int,
    from_c: int,
    from_label: int,
    again: int,
) -> bool:
    """Adds a label unless another is as good in everything; drops those that it beats. True if
    the labels were full, so that the worst of them had to go.

    Args:
        blind: whether the exposed end decides nothing. The round trip always does, because it
            bounds the periods of stages in front.
    """
    kept = 0
    for x in range(count[i, c]):
        no_better = value[i, c, x, 0] <= total and value[i, c, x, 1] <= worst
        no_better = no_better and value[i, c, x, 2] <= worst_back
        if no_better and (blind or value[i, c, x, 3] <= exposed):
            return False
    for x in range(count[i, c]):
        beaten = total <= value[i, c, x, 0] and worst <= value[i, c, x, 1]
        beaten = beaten and worst_back <= value[i, c, x, 2]
        if beaten and (blind or exposed <= value[i, c, x, 3]):
            continue
        for y in range(4):
            value[i, c, kept, y] = value[i, c, x, y]
            origin[i, c, kept, y] = origin[i, c, x, y]
        kept += 1
    full = bool(kept == value.shape[2])
    slot = kept
    count[i, c] = kept if full else kept + 1
    if full:
        slot, largest = -1, total + worst + worst_back + exposed
        for x in range(kept):
            objective = value[i, c, x, 0] + value[i, c, x, 1]
            objective += value[i, c, x, 2] + value[i, c, x, 3]
            if objective > largest:
                slot, largest = x, objective
        if slot < 0:
            return True
    value[i, c, slot, 0], value[i, c, slot, 1] = total, worst
    value[i, c, slot, 2], value[i, c, slot, 3] = worst_back, exposed
    origin[i, c, slot, 0], origin[i, c, slot, 1] = from_j, from_c
    origin[i, c, slot, 2], origin[i, c, slot, 3] = from_label, again
    return full


@njit
def _stages(origin: Ints, c: int, label: int, n: int) -> Ints:
    """The rows of the best pipeline, first stage first."""
    rows = np.zeros((n, 4), np.int64)
    i, size = 0, 0
    while c >= 0 and i < n - 1:
        rows[size, 0], rows[size, 1], rows[size, 2] = i, origin[i, c, label, 0], c
        rows[size, 3] = origin[i, c, label, 3]
        i, c, label = rows[size, 1], origin[i, c, label, 1], origin[i, c, label, 2]
        size += 1
    return rows[:size]
