"""How the tensors of split operators lie, in ONNX's own words.

A node of a split operator has a `ShardingSpecProto` for each tensor that it reads or makes, as its
rule says: the dimensions that are cut, into how many shards, and per shard, in row-major order of
the cut dimensions, the devices that have it, as positions in the device configuration. Replicas of
the stage hold the same shards. ONNX has no words for summands (P) and for cuts in blocks (S1/3);
such a tensor is left out, and strategy.json says how it lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from onnx import NodeDeviceConfigurationProto, NodeProto

from planner.artefacts.graph import Graph, Operator, parameters_by_name, tensors_by_name
from planner.artefacts.plan import Plan
from planner.artefacts.sharding import Sharding, Spec, blocks_of, dim_of, reads, rule_by
from planner.artefacts.strategy import Stage


@dataclass(frozen=True, slots=True)
class Shards:
    """How a tensor lies on devices.

    Attributes:
        tensor: its name.
        cuts: dimensions that are cut, ascending, and into how many shards.
        devices: per shard, row-major over the cut dimensions, the devices that have it, ascending.
    """

    tensor: str
    cuts: tuple[tuple[int, int], ...]
    devices: tuple[tuple[int, ...], ...]


def shards_of(
    tensor: str, spec: Spec, sharding: Sharding, replicas: Sequence[Sequence[int]]
) -> Shards | None:
    """How a tensor of a spec lies; None where ONNX cannot say it.

    Args:
        replicas: per replica of the stage, its devices in the mesh's order.

    >>> two = Sharding((2, 2), {}, {}, {}, {})
    >>> shards_of("x", ("R", "S1"), two, [(0, 1, 2, 3)])
    Shards(tensor='x', cuts=((1, 2),), devices=((0, 2), (1, 3)))
    """
    if "P" in spec or any(blocks_of(part) > 1 for part in spec):
        return None
    axes: dict[int, list[int]] = {}
    for axis, part in enumerate(spec):
        if (dim := dim_of(part)) is not None:
            axes.setdefault(dim, []).append(axis)
    cuts = tuple((dim, prod(sharding.mesh[a] for a in axes[dim])) for dim in sorted(axes))
    holders: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    # Row-major, as devices stand.
    for index, at in enumerate(product(*map(range, sharding.mesh))):
        shard = tuple(tuple(at[a] for a in axes[dim]) for dim in sorted(axes))
        holders.setdefault(shard, []).extend(replica[index] for replica in replicas)
    return Shards(tensor, cuts, tuple(tuple(sorted(holders[shard])) for shard in sorted(holders)))


def shards_by_operator(plan: Plan, stage: Stage, operator: Operator) -> Iterator[Shards]:
    """How the tensors and parameters lie that an operator reads and makes, each once."""
    if stage.sharding is None:
        return
    rule = rule_by(stage.sharding, operator)
    names = (*reads(operator), *operator.outputs)
    for name, spec in zip(names, (*rule.inputs, *rule.outputs), strict=True):
        shards = shards_of(name, spec, stage.sharding, replica_ranks(plan, stage))
        if shards is not None:
            yield shards


def replica_ranks(plan: Plan, stage: Stage) -> list[list[int]]:
    """Per replica of a stage, its devices as positions in the device configuration."""
    ranks = {device: rank for rank, device in enumerate(plan.ranks)}
    return [[ranks[device] for device in group] for group in stage.groups]


def write_shards(
    proto: NodeDeviceConfigurationProto, node: NodeProto, shards: Shards, graph: Graph
) -> None:
    """Adds what is said of a tensor to a node's configuration, if the node has the tensor."""
    if shards.tensor not in (*node.input, *node.output):
        return
    one = proto.sharding_spec.add(tensor_name=shards.tensor)
    for group in shards.devices:
        if len(group) == 1:
            one.device.append(group[0])
        else:
            label = -1 - len(one.index_to_device_group_map)  # no device has a number below 0
            one.device.append(label)
            one.index_to_device_group_map.add(key=label, value=group)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    shape = (parameters.get(shards.tensor) or tensors[shards.tensor]).shape
    for dim, count in shards.cuts:
        cut = one.sharded_dim.add(axis=dim)
        cut.simple_sharding.add(dim_value=shape[dim], num_shards=count)


def read_shards(node: NodeProto, configuration: str) -> dict[str, Shards]:
    """What a node says of its tensors, by name."""
    found = {}
    for proto in node.device_configurations:
        for one in proto.sharding_spec if proto.configuration_id == configuration else ():
            groups = {entry.key: tuple(entry.value) for entry in one.index_to_device_group_map}
            cuts = [
                (cut.axis, prod(simple.num_shards for simple in cut.simple_sharding))
                for cut in one.sharded_dim
            ]
            devices = tuple(groups.get(device, (device,)) for device in one.device)
            found[one.tensor_name] = Shards(one.tensor_name, tuple(cuts), devices)
    return found
