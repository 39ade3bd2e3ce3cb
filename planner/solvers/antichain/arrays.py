"""The arrays that `antichain_kernels.py` works on; their indices are told there."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.support.arrays import Bools, Floats, Ints, Masks


class Lattice(NamedTuple):
    """Downsets of blocks, as in `order.Downsets`, with what each of them takes.

    Attributes:
        masks: (n, words).
        start: (n + 1,) where the covers of a downset begin.
        cover: (e,) downsets with one block more.
        added: (e,) that block.
        forward: (types, n) time of the forward of all its blocks, in s.
        backward: (types, n) likewise.
        ahead: (n,) both, each operator where it is fastest: what a downset costs at least, in s.
    """

    masks: Masks
    start: Ints
    cover: Ints
    added: Ints
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
        tensors: those.
        parameter_size: (P,) bytes.
        parameter_trained: (P,) 1 where it is trained.
        parameter_users: (P, words) blocks that use it.
        parameter_start: (blocks + 1,) where the parameters of a block begin.
        parameters: those.
        tied: trained parameters that several blocks use.
        private: (blocks,) bytes that a block keeps besides.
        workspace: (blocks,) bytes that live inside one pass of a block.
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


class Cuts(NamedTuple):
    """What crosses the cut behind D_i, (n,) each: bytes and messages, there and back."""

    bytes: Floats
    messages: Floats
    gradient_bytes: Floats
    gradients: Floats


class Moves(NamedTuple):
    """The combinations, what their first stage runs on, and how they follow each other.

    Attributes:
        k: (C,) devices in use.
        r: (C,) width of the first stage.
        w: (C,) its warm-up depth.
        weight: (C,) of its period in the objective; 0 for no stage.
        factor: (types, C) slowdown of a type in it, 0 where it has none.
        limit: (C,) bytes per device, reserve deducted.
        ring_latency: (C,) s.
        ring_rate: (C,) bytes/s.
        step: (C,) s of the optimizer's step per byte of trained parameters.
        tie_latency: (C,) s, the least between its devices and those behind it.
        tie_rate: (C,) bytes/s, the largest likewise.
        start: (C + 1,) where the moves from a combination begin.
        to: (E,) the combination that a move leads to.
        latency: (E,) s, from the new stage to the one behind it.
        rate: (E,) bytes/s, likewise.
        back_latency: (E,) s, the other direction.
        back_rate: (E,) bytes/s, likewise.
    """

    k: Ints
    r: Ints
    w: Ints
    weight: Floats
    factor: Floats
    limit: Floats
    ring_latency: Floats
    ring_rate: Floats
    step: Floats
    tie_latency: Floats
    tie_rate: Floats
    start: Ints
    to: Ints
    latency: Floats
    rate: Floats
    back_latency: Floats
    back_rate: Floats


class Training(NamedTuple):
    """What the options say, as numbers.

    Attributes:
        num_devices: K.
        num_microbatches: M.
        moments: optimizer state per trained parameter.
        total: weight of the round trip in the objective.
        exposed: weight of the exposed end.
        may_keep: whether a stage may stash.
        may_recompute: whether it may run its forward twice.
        phases: whether all forwards run before all backwards.
    """

    num_devices: int
    num_microbatches: int
    moments: int
    total: float
    exposed: float
    may_keep: bool
    may_recompute: bool
    phases: bool


class Limits(NamedTuple):
    """What bounds a search.

    Attributes:
        incumbent: only what is better counts.
        labels: the most labels that a state keeps.
        work: the most labels that are extended by a stage.
    """

    incumbent: float
    labels: int
    work: int


class Labels(NamedTuple):
    """Ways to run what lies behind a cut. Label 0 runs nothing.

    Attributes:
        value: (room, 4) round trip, slowest period there (or of both) and back, exposed end, in s.
        link: (room, 5) the next label of the same state, the label behind, downset, combination,
            recomputation.
        head: (n, C) the first label of every state, -1 for none.
    """

    value: Floats
    link: Ints
    head: npt.NDArray[np.int32]


class Scratch(NamedTuple):
    """Memory of the search.

    Attributes:
        visited: (n,) the downset j for which a downset i was last reached.
        stage: (6, n) see `grow`.
        active: (C,) combinations that have labels.
    """

    visited: Ints
    stage: Floats
    active: Ints
