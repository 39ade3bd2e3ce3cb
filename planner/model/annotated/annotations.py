"""The annotations of a partitioned model, written and read.

One device configuration names the devices in the order of the ranks, and every node has its
pipeline stage; one whose operator is split says how its tensors lie (`shards.py`). A node that is
unrolled or replaced by other operators (Loop, Scan, If, a function) stands there as in the model,
at the first of their stages.

Everything else is metadata, which other tools skip:

    model  planner.stage_devices  per stage, the devices of its replicas, by name
           planner.stage_modules  per stage, its first and last module of the network
    node   planner.stages         the stages of the operators that came out of it
           planner.sends          the tensors that it makes and other stages read: NetSplit's
                                  transfer nodes, at the near end of a cut edge
           planner.receives       names of tensors that it reads and other stages make: the far end
"""

import json
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto, NodeProto

from planner.artefacts.graph import consumers, producers
from planner.artefacts.modules import from_to
from planner.artefacts.plan import Plan
from planner.model.annotated.shards import shards_by_operator, write_shards
from planner.model.load import Model, first_consumers
from planner.model.protos import metadata, set_metadata, subgraphs
from planner.support.errors import FileError

CONFIGURATION = "planner"
STAGE_MODULES, STAGE_DEVICES = "planner.stage_modules", "planner.stage_devices"
INNER_STAGES, SENDS, RECEIVES = "planner.stages", "planner.sends", "planner.receives"


def annotate(proto: ModelProto, model: Model, plan: Plan) -> None:
    """Annotates a copy of a model's message. Annotations that it had are replaced.

    Nodes that were folded away take the stage of the operator that needs them first, nodes from
    which other operators came the first stage of these, nodes of subgraphs that of the node around
    them.

    Raises:
        FileError: if the plan leaves operators out.
    """
    del proto.configuration[:]
    devices = device_names(plan)
    proto.configuration.add(name=CONFIGURATION, num_devices=len(devices), device=devices)
    stages, needed_by, inner = stages_of(plan), first_consumers(model), _inner(model, plan)
    operators = {operator.name: operator for operator in model.graph.operators}
    node_stages: dict[str, int] = {}
    for node in proto.graph.node:
        own = stages[needed_by.get(node.name, node.name)]
        within = {node.name: own} | inner[node.name] if node.name in inner else {}
        node_stages[node.name] = min(within.values(), default=own)
        _annotate(node, node_stages[node.name])
        if node.name in operators:
            stage = plan.strategy.stages[node_stages[node.name]]
            for shards in shards_by_operator(plan, stage, operators[node.name]):
                write_shards(node.device_configurations[0], node, shards, model.graph)
        _note(node, INNER_STAGES, within)
    sends, receives = _transfers(model, plan, node_stages)
    for node in proto.graph.node:
        _note(node, SENDS, sends.get(node.name, []))
        _note(node, RECEIVES, receives.get(node.name, []))
    notes: dict[str, str | None] = {STAGE_DEVICES: json.dumps(stage_devices(plan))}
    if plan.modules:
        notes[STAGE_MODULES] = json.dumps([from_to(paths) for paths in plan.modules])
    set_metadata(proto, notes)


def device_names(plan: Plan) -> list[str]:
    """The devices in the order of the ranks."""
    names = _names(plan)
    return [names[device] for device in plan.ranks]


def stage_devices(plan: Plan) -> list[list[str]]:
    """Per stage, the devices of its replicas."""
    names = _names(plan)
    return [[names[device] for device in stage.devices] for stage in plan.strategy.stages]


def stages_of(plan: Plan) -> dict[str, int]:
    """The stage of each operator."""
    return {name: s for s, stage in enumerate(plan.strategy.stages) for name in stage.operators}


def transfers(plan: Plan) -> list[dict[str, Any]]:
    """The tensors that cross stages, as files have them."""
    devices = stage_devices(plan)

    def end(stage: int) -> dict[str, Any]:
        return {"stage": stage, "devices": devices[stage]}

    return [
        {
            "tensor": one.tensor, "dtype": one.dtype, "bytes": one.bytes, "gradient": one.gradient,
            "from": end(one.source), "to": [end(target) for target in one.targets],
        }
        for one in plan.crossings
    ]  # fmt: skip


# ---------------------------------------------------------------------------------- reading


def note_of(node: NodeProto, key: str) -> Any:
    """The JSON in an entry of a node's metadata; None if there is none, or it is damaged."""
    text = metadata(node).get(key, "null")
    try:
        return json.loads(text)
    except ValueError:
        return None


def stage_of(node: NodeProto) -> int | None:
    """The pipeline stage of a node; None if it has none of ours."""
    for one in node.device_configurations:
        if one.configuration_id == CONFIGURATION and one.HasField("pipeline_stage"):
            return int(one.pipeline_stage)
    return None


# ---------------------------------------------------------------------------------- writing


def _names(plan: Plan) -> dict[int, str]:
    return {one.device: one.name for one in plan.prediction.devices}


def _inner(model: Model, plan: Plan) -> dict[str, dict[str, int]]:
    """For each node from which other operators came, these with their stages."""
    stages = stages_of(plan)
    inner: dict[str, dict[str, int]] = {}
    for operator in model.graph.operators:
        if operator.name not in stages:
            raise FileError(
                f"{model.path}: {operator.name} is in no stage of the plan; run: planner profile"
                f" {model.path.name}, then planner solve"
            )
        if origin := model.expanded.get(operator.name):
            inner.setdefault(origin, {})[operator.name] = stages[operator.name]
    return inner


def _transfers(
    model: Model, plan: Plan, node_stages: Mapping[str, int]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """Per node, what it sends, and names of what it receives.

    A tensor that no node makes, because reading the model adds its operator, stands at the first
    node of its stage.
    """
    graph, stages = model.graph, stages_of(plan)
    made_by, read_by = producers(graph), consumers(graph)
    first: dict[int, str] = {}
    for name, stage in node_stages.items():
        first.setdefault(stage, name)

    def node_of(operator: int | None) -> str:
        name = "" if operator is None else graph.operators[operator].name
        return model.expanded.get(name, name)

    sends: dict[str, list[dict[str, Any]]] = {}
    receives: dict[str, list[str]] = {}
    for one in transfers(plan):
        tensor, source = one["tensor"], one["from"]["stage"]
        maker = node_of(made_by.get(tensor))
        if maker not in node_stages:
            maker = first.get(source, next(iter(node_stages)))
        sends.setdefault(maker, []).append(one)
        for reader in read_by.get(tensor, ()):
            if stages[graph.operators[reader].name] != source:
                names = receives.setdefault(node_of(reader), [])
                names += [] if tensor in names else [tensor]
    return sends, receives


def _annotate(node: NodeProto, stage: int) -> None:
    del node.device_configurations[:]
    node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)
    for graph in subgraphs(node):
        for inner in graph.node:
            _annotate(inner, stage)


def _note(node: NodeProto, key: str, content: Any) -> None:
    """Writes an entry into a node's metadata in place of an older one; none if it is empty."""
    set_metadata(node, {key: json.dumps(content, sort_keys=True) if content else None})
