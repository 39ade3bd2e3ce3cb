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
from dataclasses import dataclass, field, replace
from typing import Any

from onnx import ModelProto, NodeProto

from planner.artefacts.graph import Graph, consumers, producers
from planner.artefacts.modules import from_to
from planner.artefacts.plan import Plan
from planner.model.annotated.shards import Shards, read_shards, shards_by_operator, write_shards
from planner.model.load import Model, first_consumers
from planner.model.protos import metadata, nodes_of, set_metadata
from planner.support.errors import FileError

CONFIGURATION = "planner"
STAGE_MODULES, STAGE_DEVICES = "planner.stage_modules", "planner.stage_devices"
INNER_STAGES, SENDS, RECEIVES = "planner.stages", "planner.sends", "planner.receives"


@dataclass(frozen=True, slots=True)
class NodeNote:
    """What an annotated file says at a node.

    Attributes:
        stage: of the pipeline; None where it has none of ours.
        inner: the stages of the operators that came out of it, by name.
        shards: how the tensors lie that it reads and makes, where its operator is split.
        sends: the tensors that it makes and other stages read, as `transfers` has them.
        receives: names of the tensors that it reads and other stages make.
    """

    stage: int | None
    inner: Mapping[str, int] = field(default_factory=dict)
    shards: tuple[Shards, ...] = ()
    sends: tuple[Any, ...] = ()
    receives: tuple[str, ...] = ()


def _write_note(node: NodeProto, note: NodeNote, graph: Graph) -> None:
    """Puts a note into a node's message, in place of an older one; the nodes of its subgraphs get
    its stage.
    """
    for one in nodes_of([node]):
        del one.device_configurations[:]
        one.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=note.stage)
    for shards in note.shards:
        write_shards(node.device_configurations[0], node, shards, graph)
    contents = {INNER_STAGES: note.inner, SENDS: note.sends, RECEIVES: note.receives}
    set_metadata(node, dict.fromkeys(contents))  # older ones may have stood in another order
    set_metadata(
        node, {key: json.dumps(one, sort_keys=True) for key, one in contents.items() if one}
    )


def read_note(node: NodeProto) -> NodeNote:
    """The note in a node's message. What is damaged counts as not there."""
    notes = metadata(node)

    def content(key: str, kind: type) -> Any:
        try:
            found = json.loads(notes.get(key, "null"))
        except ValueError:
            found = None
        return found if isinstance(found, kind) else kind()

    stages = (
        int(one.pipeline_stage)
        for one in node.device_configurations
        if one.configuration_id == CONFIGURATION and one.HasField("pipeline_stage")
    )
    return NodeNote(
        stage=next(stages, None),
        inner=content(INNER_STAGES, dict),
        shards=tuple(read_shards(node, CONFIGURATION).values()),
        sends=tuple(content(SENDS, list)),
        receives=tuple(content(RECEIVES, list)),
    )


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
    notes = _notes(proto, model, plan)
    for node in proto.graph.node:
        _write_note(node, notes[node.name], model.graph)
    entries = {STAGE_DEVICES: json.dumps(stage_devices(plan))}
    if plan.modules:
        entries[STAGE_MODULES] = json.dumps([from_to(paths) for paths in plan.modules])
    set_metadata(proto, entries)


def _notes(proto: ModelProto, model: Model, plan: Plan) -> dict[str, NodeNote]:
    """The note of each node."""
    stages, needed_by, inner = stages_of(plan), first_consumers(model), _inner(model, plan)
    operators = {operator.name: operator for operator in model.graph.operators}
    notes = {}
    for node in proto.graph.node:
        own = stages[needed_by.get(node.name, node.name)]
        within = {node.name: own} | inner[node.name] if node.name in inner else {}
        stage, shards = min(within.values(), default=own), tuple[Shards, ...]()
        if node.name in operators:
            shards = tuple(
                shards_by_operator(plan, plan.strategy.stages[stage], operators[node.name])
            )
        notes[node.name] = NodeNote(stage, within, shards)
    _add_transfers(notes, model, plan)
    return notes


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


def _add_transfers(notes: dict[str, NodeNote], model: Model, plan: Plan) -> None:
    """Adds what the nodes send and receive to their notes.

    A tensor that no node makes, because reading the model adds its operator, stands at the first
    node of its stage.
    """
    graph, stages = model.graph, stages_of(plan)
    made_by, read_by = producers(graph), consumers(graph)
    first: dict[int | None, str] = {}
    for name, note in notes.items():
        first.setdefault(note.stage, name)

    def node_of(operator: int | None) -> str:
        name = "" if operator is None else graph.operators[operator].name
        return model.expanded.get(name, name)

    for one in transfers(plan):
        tensor, source = one["tensor"], one["from"]["stage"]
        maker = node_of(made_by.get(tensor))
        if maker not in notes:
            maker = first.get(source, next(iter(notes)))
        notes[maker] = replace(notes[maker], sends=(*notes[maker].sends, one))
        for reader in read_by.get(tensor, ()):
            there = notes.get(node_of(reader))
            if there is not None and stages[graph.operators[reader].name] != source:
                names = tuple(dict.fromkeys((*there.receives, tensor)))
                notes[node_of(reader)] = replace(there, receives=names)
