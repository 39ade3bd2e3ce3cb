"""`Strategy`: which operators form a stage, which devices run it, and in which rhythm.

`violations` checks its structure; `costs/evaluate.py` says whether it fits in memory.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf

from planner.artefacts.graph import (
    LEFT_OUT_AS_DEFAULT,
    Graph,
    Parameter,
    consumers,
    holders,
    joint_operators,
    producers,
    tensors_by_name,
)
from planner.artefacts.operator_types import ATTENTION, PRODUCTS
from planner.artefacts.sharding import Sharding
from planner.support.memo import remembered

KEEPABLE = PRODUCTS | ATTENTION
"""Types of operators that a segment may leave out."""


class ScheduleName(StrEnum):
    """The order in which a device runs its forwards and backwards; see `schedules/orders.py`."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    PIPEDREAM = "pipedream"

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline is never emptied: a stage steps after every minibatch of each of its
        replicas, and keeps the versions of its parameters that minibatches in flight began with.
        """
        return self is ScheduleName.PIPEDREAM

    @property
    def has_phases(self) -> bool:
        """Whether a device runs all forwards of an iteration before its first backward."""
        return self is ScheduleName.GPIPE


@dataclass(frozen=True, slots=True)
class Stage:
    """Operators that run as one unit, on one or more devices.

    Attributes:
        operators: names, in the graph's order.
        groups: per replica, its devices as indices into the topology; microbatch m runs on replica
            m mod R. A replica is dealt whole microbatches; a mesh splits them further.
        warmup: W, the microbatches in flight per replica.
        recompute: whether forward passes are run again instead of being stashed: the whole one, or
            that of `recomputed`.
        sharding: how the operators are split over the devices of a replica; None for replicas of
            one device.
        over: g, how many replicas behind each other share what they hold (ZeRO); 1 for none.
        zero: what these hold in parts: 0 nothing, 1 the optimizer's state, 2 gradients, too, 3
            parameters, too; see `resharding/over_replicas.py`.
        zero_of: the same of single parameters, by name.
        prefetch: bytes of converted copies that may be held ahead of the operators that read them
            (`resharding/overlap.py`); None where no collective inside the stage runs beside its
            computations.
        gathered_ahead: bytes of parameters that are gathered behind a step and may be on their way
            at once (`resharding/sums.py`), so that other collectives come between; None where all
            are started with the step.
        recomputed: segments of operators, each behind the one before; of each only what it reads
            is kept, and it is run again as a whole where its backward begins (Chen et al. 2016,
            arXiv:1604.06174). None are listed where the whole stage is one. A product or an
            attention that a segment leaves out between its first operator and its last one is not
            computed again: what it makes is kept, too.
        offloaded: segments of operators, in the same way; the large activations that such a segment
            keeps (`costs/offloading.py`) wait in the host's memory from its forward to its backward
            (Rhu et al. 2016, arXiv:1602.08124). Of one that is run again, which may leave out
            operators here, too, these are what it reads.
    """

    operators: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    warmup: int
    recompute: bool
    sharding: Sharding | None = None
    over: int = field(default=1, metadata=LEFT_OUT_AS_DEFAULT)
    zero: int = field(default=0, metadata=LEFT_OUT_AS_DEFAULT)
    zero_of: Mapping[str, int] = field(
        hash=False, default_factory=dict, metadata=LEFT_OUT_AS_DEFAULT
    )
    prefetch: int | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    gathered_ahead: int | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    recomputed: tuple[tuple[str, ...], ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    offloaded: tuple[tuple[str, ...], ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)

    @classmethod
    def whole(
        cls, operators: tuple[str, ...], devices: Iterable[int], warmup: int, recompute: bool
    ) -> "Stage":
        """A stage whose replicas have one device each."""
        return cls(operators, tuple((device,) for device in devices), warmup, recompute)

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices, one replica after the other."""
        return tuple(device for group in self.groups for device in group)

    @property
    def num_replicas(self) -> int:
        """R, the number of data-parallel copies."""
        return len(self.groups)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the axes that its operators are split along; none of an unsplit stage."""
        return () if self.sharding is None else self.sharding.mesh

    @property
    def segment_by_operator(self) -> Mapping[str, int]:
        """The index in `recomputed` of the segment that an operator is in, also of one that the
        segment leaves out.
        """
        place = {name: i for i, name in enumerate(self.operators)}
        return {
            name: k
            for k, some in enumerate(self.recomputed)
            for name in self.operators[place[some[0]] : place[some[-1]] + 1]
        }

    @property
    def reruns_whole(self) -> bool:
        """Whether a backward runs the whole forward again, with the losses."""
        return self.recompute and not self.recomputed


def shared_level(stage: Stage) -> int:
    """The highest level of what lies over the replicas of a stage; 0 where nothing does. From 2 on
    these exchange gradients in their backwards, at 3 parameters in their forwards, too.
    """
    return max((stage.zero, *stage.zero_of.values())) if stage.over > 1 else 0


def in_parts(stage: Stage) -> bool:
    """Whether a stage is split over a mesh, or keeps parts over its replicas."""
    return stage.sharding is not None or shared_level(stage) > 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """A solver's decisions.

    Attributes:
        stages: in the order of the flow: a tensor never goes to an earlier stage.
        schedule: the rhythm.
        num_microbatches: M, per iteration, over all replicas. Under PipeDream's schedule each of
            them is a minibatch of PipeDream's, and an iteration is M of these.
        vertical_sync: whether a minibatch meets in every stage the version of the parameters that
            its first stage had when it entered; of PipeDream's schedule only.
    """

    stages: tuple[Stage, ...]
    schedule: ScheduleName
    num_microbatches: int
    vertical_sync: bool = field(default=False, metadata=LEFT_OUT_AS_DEFAULT)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that is made in one stage and read in later ones.

    Attributes:
        tensor: its name.
        source: the stage that makes it.
        targets: the stages that read it, ascending.
        bytes: of one microbatch.
        gradient: whether a gradient of the same size comes back.
        dtype: type of its elements where it crosses.
    """

    tensor: str
    source: int
    targets: tuple[int, ...]
    bytes: int
    gradient: bool
    dtype: str


# The size of a bucket, that of DistributedDataParallel, or a 32nd of all gradients of the same
# devices: smaller ones would hide next to nothing more, because only the last one is exposed.
BUCKET_BYTES, MAX_BUCKETS = 25 * 2**20, 32
# The first buckets are smaller, so that a slow link is busy soon after the backward has begun.
FIRST_BUCKET_BYTES, BUCKET_GROWTH = 2**20, 4


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A bucket of parameters whose gradients are summed over the same devices at once.

    Attributes:
        devices: all that hold them, ascending, at least two.
        parameters: names, in the order in which a backward makes their gradients.
        bytes: of their gradients together, on each device.
        shards: where each device keeps a part of the sum, those that keep the same part, part by
            part: a reduce-scatter over the n parts, and an all-reduce of each part over those that
            keep it. Empty for an all-reduce over all devices.
    """

    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    bytes: int
    shards: tuple[tuple[int, ...], ...] = ()


@remembered
def operator_indices(graph: Graph) -> Mapping[str, int]:
    """The index of every operator by its name."""
    return {operator.name: i for i, operator in enumerate(graph.operators)}


def indices_of(stage: Stage, graph: Graph) -> list[int]:
    """The operators of a stage as indices into the graph, in the stage's order."""
    index = operator_indices(graph)
    return [index[name] for name in stage.operators]


def stage_of(strategy: Strategy, graph: Graph) -> tuple[int, ...]:
    """Per operator of the graph, the stage that runs it."""
    stages = {name: s for s, stage in enumerate(strategy.stages) for name in stage.operators}
    return tuple(stages[operator.name] for operator in graph.operators)


@remembered
def crossings(strategy: Strategy, graph: Graph) -> tuple[Crossing, ...]:
    """The tensors that cross stages, in the order in which they are made."""
    return tuple(_crossings_among(producers(graph), graph, stage_of(strategy, graph)))


def _crossings_among(
    names: Iterable[str], graph: Graph, stages: Sequence[int]
) -> Iterator[Crossing]:  # fmt: skip
    """Those of some tensors that cross stages.

    Args:
        names: of tensors that operators make.
        stages: per operator, its stage.
    """
    made_by, read_by, tensors = producers(graph), consumers(graph), tensors_by_name(graph)
    for name in names:
        source = stages[made_by[name]]
        targets = sorted({stages[v] for v in read_by[name]} - {source})
        if targets:
            one = tensors[name]
            yield Crossing(name, source, tuple(targets), one.bytes, one.gradient, one.dtype)


def gradient_sums(strategy: Strategy, graph: Graph) -> tuple[GradientSum, ...]:
    """The all-reduces of an iteration, in their one global order: first those among the replicas of
    a stage, which are ready early, then, for tied parameters, those over several stages, which wait
    for the slowest. Parameters of the same devices are parted into buckets in the order in which a
    backward makes their gradients, so that the sum of one bucket runs beside the rest of the
    backward.
    """
    stages, users = stage_of(strategy, graph), holders(graph)
    groups: dict[tuple[int, tuple[int, ...]], list[Parameter]] = {}
    known: dict[frozenset[int], tuple[int, ...]] = {}
    for parameter in graph.parameters:
        used_in = frozenset(stages[v] for v in users[parameter.name])
        if used_in not in known:
            together = {d for s in used_in for d in strategy.stages[s].devices}
            known[used_in] = tuple(sorted(together))
        devices = known[used_in]
        if parameter.trainable and len(devices) > 1:
            groups.setdefault((len(used_in), devices), []).append(parameter)
    return tuple(
        GradientSum(key[1], tuple(p.name for p in bucket), sum(p.gradient_bytes for p in bucket))
        for key in sorted(groups)
        # A gradient is there when the first operator that reads the parameter has run its backward.
        for bucket in buckets(sorted(groups[key], key=lambda p: -min(users[p.name])))
    )


def buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters in their order, parted; one that is above the limit is alone."""
    most = max(BUCKET_BYTES, sum(p.bytes for p in parameters) / MAX_BUCKETS)
    limit = min(most, FIRST_BUCKET_BYTES)
    bucket: list[Parameter] = []
    filled = 0
    for parameter in parameters:
        if bucket and filled + parameter.bytes > limit:
            yield bucket
            bucket, filled = [], 0
            limit = min(most, BUCKET_GROWTH * limit)
        bucket.append(parameter)
        filled += parameter.bytes
    yield bucket


def used_devices(strategy: Strategy) -> tuple[int, ...]:
    """The devices that run something, ascending."""
    return tuple(sorted({d for stage in strategy.stages for d in stage.devices}))


def stages_by_device(strategy: Strategy) -> Mapping[int, tuple[int, ...]]:
    """Per used device, ascending, the stages that it runs, ascending."""
    by_device: dict[int, list[int]] = {device: [] for device in used_devices(strategy)}
    for s, stage in enumerate(strategy.stages):
        for device in stage.devices:
            by_device[device].append(s)
    return {device: tuple(stages) for device, stages in by_device.items()}


def shares_devices(strategy: Strategy) -> bool:
    """Whether a device runs several stages."""
    devices = [d for stage in strategy.stages for d in stage.devices]
    return len(set(devices)) < len(devices)


def deliveries(strategy: Strategy, crossing: Crossing) -> tuple[int, ...]:
    """The stages that a crossing tensor is sent to: none on the device that makes it, and of
    several on one device the first, which runs each microbatch before the others.
    """
    stages = strategy.stages
    first = {stages[crossing.source].devices: crossing.source}
    for target in crossing.targets:
        first.setdefault(stages[target].devices, target)
    return tuple(t for t in crossing.targets if first[stages[t].devices] == t)


def not_runnable(stage: Stage) -> str | None:
    """Why a stage can be neither priced nor run, by its groups and its sharding; None if it can."""
    size = 1 if stage.sharding is None else stage.sharding.num_devices
    if any(len(group) != size for group in stage.groups):
        sizes = ", ".join(str(len(group)) for group in stage.groups)
        mesh = "has no mesh" if stage.sharding is None else f"has a mesh of {size} devices"
        return f"{mesh}, and its replicas have {sizes} devices; expected {size} each"
    return None


def violations(strategy: Strategy, graph: Graph, num_devices: int) -> tuple[str, ...]:
    """Everything that is wrong with the structure of a strategy; empty if it is sound.

    A device may run several stages if each of them has one replica on one device. Others have their
    devices to themselves: which of a device's microbatches are whose would depend on the stage.

    Args:
        num_devices: the devices that there are; indices run below it.
    """
    wrong = (
        *_operator_violations(strategy, graph),
        *_device_violations(strategy, num_devices),
        *_stage_violations(strategy, graph),
    )
    if wrong:
        return wrong
    return (
        *(
            f"{c.tensor} goes back from stage {c.source} to {c.targets[0]}"
            for c in crossings(strategy, graph)
            if c.targets[0] < c.source
        ),
        *_parted_states(strategy, graph),
        *asynchronous_violations(strategy, graph),
    )


def _operator_violations(strategy: Strategy, graph: Graph) -> Iterator[str]:
    names = [name for stage in strategy.stages for name in stage.operators]
    known = {operator.name for operator in graph.operators}
    if len(set(names)) < len(names):
        yield "an operator is in two stages"
    if set(names) != known:
        yield f"operators missing or unknown: {sorted(set(names) ^ known)[:5]}"


def _device_violations(strategy: Strategy, num_devices: int) -> Iterator[str]:
    devices = [d for stage in strategy.stages for d in stage.devices]
    if any(not 0 <= d < num_devices for d in devices):
        yield f"a device index is not in 0..{num_devices - 1}"
    shared = {d for d, count in Counter(devices).items() if count > 1}
    for s, stage in enumerate(strategy.stages):
        if stage.num_replicas > 1 or stage.sharding is not None:
            for d in sorted(shared.intersection(stage.devices)):
                yield (
                    f"device {d} runs a replica of stage {s} and another one; only stages with one"
                    " replica that is not split share a device"
                )
        elif stage.offloaded and shared.intersection(stage.devices):
            yield (
                f"stage {s}: offloaded: expected none where its device"
                f" {min(shared.intersection(stage.devices))} runs other stages, too"
            )


def _stage_violations(strategy: Strategy, graph: Graph) -> Iterator[str]:
    types = {operator.name: operator.type for operator in graph.operators}
    if strategy.num_microbatches < 1:
        yield "there is no microbatch"
    for s, stage in enumerate(strategy.stages):
        for name in ("prefetch", "gathered_ahead"):
            if (held := getattr(stage, name) or 0) < 0:
                yield f"stage {s}: {name}: expected bytes of at least 0, got {held}"
        if not stage.operators or not stage.devices:
            yield f"stage {s} is empty or has no device"
        elif not 1 <= stage.warmup <= most_in_flight(strategy, s):
            yield f"stage {s} has {stage.warmup} microbatches in flight"
        elif stage.num_replicas > strategy.num_microbatches:
            yield f"stage {s} has more replicas than there are microbatches"
        if obstacle := not_runnable(stage):
            yield f"stage {s} {obstacle}"
        if stage.recomputed and not stage.recompute:
            yield f"stage {s}: recomputed: expected none where `recompute` is false"
        for obstacle in _segment_violations(stage, stage.recomputed, types):
            yield f"stage {s}: recomputed: {obstacle}"
        for obstacle in _offload_violations(stage, types):
            yield f"stage {s}: offloaded: {obstacle}"
        for obstacle in _sharing_violations(stage, strategy.num_microbatches):
            yield f"stage {s}: {obstacle}"


def _sharing_violations(stage: Stage, num_microbatches: int) -> Iterator[str]:
    """Of what lies over replicas."""
    replicas = stage.num_replicas
    if stage.over < 1 or replicas % stage.over:
        yield f"over: expected a divisor of its {replicas} replicas, got {stage.over}"
    levels = {"zero": stage.zero, **{f"zero_of.{n}": one for n, one in stage.zero_of.items()}}
    for name, level in levels.items():
        if level not in range(4):
            yield f"{name}: expected a level from 0 to 3, got {level}"
        elif level and stage.over == 1:
            yield f"{name}: expected 0 where nothing lies over replicas (over is 1), got {level}"
    if shared_level(stage) >= 2 and num_microbatches % replicas:
        yield (
            f"its {replicas} replicas exchange gradients in every backward, and {num_microbatches}"
            " microbatches cannot be dealt to them evenly"
        )


def _parted_states(strategy: Strategy, graph: Graph) -> Iterator[str]:
    """States whose operators are in several stages."""
    stages, users = stage_of(strategy, graph), holders(graph)
    for inside in joint_operators(graph):
        used = sorted({stages[v] for v in inside})
        if len(used) > 1:
            names = [one.name for one in graph.parameters if one.state]
            here = [name for name in names if set(users[name]) <= {*inside}]
            yield (
                f"forward changes {', '.join(here)}, and the operators from the first that reads it"
                f" to {graph.operators[inside[-1]].name} are in stages"
                f" {', '.join(map(str, used))}: put them into one stage"
            )


def _offload_violations(stage: Stage, types: Mapping[str, str]) -> Iterator[str]:
    yield from _segment_violations(stage, stage.offloaded, types)
    if stage.offloaded and stage.reruns_whole:
        yield "expected none where the whole stage is recomputed"
    again = {name: some for some in stage.recomputed for name in some}
    place = {name: i for i, name in enumerate(stage.operators)}
    for k, some in enumerate(stage.offloaded):
        if some in stage.recomputed or not place.keys() >= set(some):
            continue
        every = stage.operators[place[some[0]] : place[some[-1]] + 1]
        if some != every or not again.keys().isdisjoint(every):
            yield f"segment {k}: expected a recomputed segment, or a run of operators of none"


def _segment_violations(
    stage: Stage, segments: Sequence[tuple[str, ...]], types: Mapping[str, str]
) -> Iterator[str]:
    """Of segments.

    Args:
        types: of operators, by name.
    """
    place, behind = {name: i for i, name in enumerate(stage.operators)}, 0
    for k, some in enumerate(segments):
        if not some or not place.keys() >= set(some):
            yield f"segment {k}: expected operators of the stage"
            return
        places = [place[name] for name in some]
        if any(a >= b for a, b in pairwise(places)):
            yield f"segment {k}: expected operators in the order of the stage"
        elif places[0] < behind:
            yield f"segment {k}: expected operators behind those of the segment before"
        for name in stage.operators[places[0] : places[-1]]:
            if name not in some and types.get(name) not in KEEPABLE:
                yield (
                    f"segment {k}: operator {name} ({types.get(name)}) inside it is left out;"
                    " expected only products and attention to be"
                )
        behind = places[-1] + 1


def most_in_flight(strategy: Strategy, s: int) -> float:
    """The most microbatches that a replica of a stage can have in flight: all of an iteration, or
    any number where iterations follow each other without a gap.
    """
    if strategy.schedule.is_asynchronous:
        return inf
    return -(-strategy.num_microbatches // strategy.stages[s].num_replicas)


def asynchronous_violations(strategy: Strategy, graph: Graph) -> Iterator[str]:
    """What an asynchronous schedule cannot run, of a strategy that any other one can."""
    if not strategy.schedule.is_asynchronous:
        if strategy.vertical_sync:
            yield f"vertical sync is of the schedule pipedream, not of {strategy.schedule.value}"
        return
    if shares_devices(strategy):
        yield "a device runs several stages, which the schedule pipedream cannot do"
    stages, users = stage_of(strategy, graph), holders(graph)
    if any(shared_level(stage) for stage in strategy.stages):
        yield "something lies in parts over replicas, which the schedule pipedream cannot run"
    if any(stage.recomputed for stage in strategy.stages):
        yield "segments are recomputed, and the schedule pipedream recomputes whole stages only"
    if any(stage.offloaded for stage in strategy.stages):
        yield "activations wait in host memory, which the schedule pipedream cannot run"
    for parameter in graph.parameters:
        tied = sorted({stages[v] for v in users[parameter.name]})
        if parameter.trainable and len(tied) > 1:
            yield (
                f"parameter {parameter.name} is used in stages {', '.join(map(str, tied))}; under"
                " the schedule pipedream each stage steps by itself, so put them into one stage"
            )
    for s, stage in enumerate(strategy.stages):
        if strategy.num_microbatches % stage.num_replicas:
            yield (
                f"stage {s} has {stage.num_replicas} replicas, and {strategy.num_microbatches}"
                " minibatches cannot be dealt to them evenly; the schedule pipedream sums one of"
                " each replica before a step"
            )
