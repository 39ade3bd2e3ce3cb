"""Strategies that differ from one in a single decision: what a search over the simulator tries."""

from dataclasses import replace

from planner.artefacts.graph import consumers, predecessors
from planner.artefacts.strategy import operator_indices, stage_of
from planner.schedules.orders import default_warmups


def with_operator(strategy, graph, operator, stage):
    """The strategy with an operator, by index, in another stage."""
    index, name = operator_indices(graph), graph.operators[operator].name
    stages = []
    for s, one in enumerate(strategy.stages):
        names = [other for other in one.operators if other != name] + [name] * (s == stage)
        stages.append(replace(one, operators=tuple(sorted(names, key=index.__getitem__))))
    return replace(strategy, stages=tuple(stages))


def with_devices(strategy, stage, devices):
    """The strategy with other replicas of a stage, and the default warm-up depths for them."""
    stages = list(strategy.stages)
    stages[stage] = replace(stages[stage], groups=tuple((d,) for d in devices))
    widths = [one.num_replicas for one in stages]
    depths = default_warmups(widths, strategy.num_microbatches, schedule=strategy.schedule)
    stages = [replace(s, warmup=w) for s, w in zip(stages, depths, strict=True)]
    return replace(strategy, stages=tuple(stages))


def operator_moves(strategy, graph, *, neighbours):
    """(operator, stage) such that no tensor goes back if the operator is there: in the stage before
    or after its own or, if not `neighbours`, in any other.
    """
    stages, feeds, reads = stage_of(strategy, graph), predecessors(graph), consumers(graph)
    moves = []
    for v, operator in enumerate(graph.operators):
        if len(strategy.stages[stages[v]].operators) == 1:
            continue
        low = max((stages[u] for u in feeds[v]), default=0)
        later = [stages[w] for name in operator.outputs for w in reads[name]]
        high = min(later, default=len(strategy.stages) - 1)
        for s in range(low, high + 1):
            if s != stages[v] and (abs(s - stages[v]) == 1 or not neighbours):
                moves.append((v, s))
    return moves


def replication_moves(strategy, num_devices):
    """(stage, devices) with a replica more, on any device that is free, or the last one less."""
    used = {device for stage in strategy.stages for device in stage.devices}
    free = [device for device in range(num_devices) if device not in used]
    moves = []
    for s, stage in enumerate(strategy.stages):
        if stage.num_replicas < strategy.num_microbatches:
            moves += [(s, (*stage.devices, device)) for device in free]
        if stage.num_replicas > 1:
            moves.append((s, stage.devices[:-1]))
    return moves
