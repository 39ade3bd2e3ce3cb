"""Tensors that a device may still hold because they have not reached other devices, however slow
these and the links are.

A computation that waits for sends (`actions.waiting_for_sends`) begins when all results of the
second one before it of its kind have been sent. So the results of one may wait while the next is
made, and those of two while the device does something else. Where some device runs several stages
no computation waits for sends. The other devices are counted as if theirs did, though they may hold
more behind slow links.
"""

import math
from dataclasses import replace

import numpy as np

from planner.artefacts.graph import Graph, Tensor, tensors_by_name
from planner.artefacts.sharding import local_shape
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, crossings
from planner.support.arrays import Bools, Ints


def held_bytes(stage: Stage, tensor: Tensor) -> int:
    """Bytes of a tensor from outside on each device of a stage."""
    sharding = stage.sharding
    if sharding is None or tensor.name not in sharding.inputs:
        return tensor.bytes
    shape = local_shape(tensor.shape, sharding.inputs[tensor.name], sharding.mesh)
    return replace(tensor, shape=shape).bytes


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
            waiting = np.clip(ahead - 1 - (begun - ended), 0, most)
            waiting_bytes += waiting * held_bytes(strategy.stages[s], size[one.tensor])
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
    if strategy.schedule is ScheduleName.GPIPE:
        return np.where(latest < 0, np.minimum(ahead, np.where(forward, 1, 2)), 0)
    readers = [strategy.stages[t] for t in targets]
    most = min((one.warmup - 1) * one.num_replicas for one in readers) // width
    num_waiting: Ints = ahead.copy()
    for i in range(1, min(most, int(ahead.max(initial=0))) + 1):
        # The i-th output after the microbatch whose gradient came last: has every reader taken it?
        come = (latest >= 0) & (i <= ahead)
        for reader in readers:
            turns = math.lcm(width, reader.num_replicas) // width
            before = -(-i // turns) * turns  # to the last gradient of the same replica
            run = before * width <= (reader.warmup - 1) * reader.num_replicas
            come &= (latest + i >= before) & run
        num_waiting -= come
    return num_waiting
