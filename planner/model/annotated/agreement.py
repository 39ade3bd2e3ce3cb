"""Whether an annotated file still belongs to a plan."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto

from planner.artefacts.plan import Plan
from planner.artefacts.strategy import Stage
from planner.model.annotated.annotations import (
    CONFIGURATION,
    STAGE_DEVICES,
    NodeNote,
    device_names,
    read_note,
    stage_devices,
    stages_of,
    transfers,
)
from planner.model.annotated.shards import Shards, replica_ranks, shards_of
from planner.model.annotated.write import MODEL_HASH, short
from planner.model.load import content_hash, read_proto
from planner.model.protos import metadata
from planner.model.weights import ModelFile
from planner.support.errors import FileError

MAX_DIFFERENCES = 5


def check_agreement(plan: Plan, path: Path, *, weights: bool = True) -> None:
    """Checks that an annotated file is the plan's model with the plan's stages, devices and
    transfers.

    Args:
        plan: strategy.json.
        path: of the annotated file.
        weights: whether the model's content is hashed, for which all weights in it are read.
            Otherwise the hash that the file names is compared: enough for all ranks of a host but
            one.

    Raises:
        FileError: if the file is missing or no ONNX model, or with all differences.
    """
    differences = list(_differences(plan, ModelFile(path), weights=weights))
    if differences:
        shown, more = differences[:MAX_DIFFERENCES], len(differences) - MAX_DIFFERENCES
        shown += [f"and {more} more differences"] if more > 0 else []
        lines = "\n".join(f"{path}: {one}" for one in shown)
        raise FileError(f"{lines}\nto write both files anew, run: planner solve")


def refers_to(path: Path, original: Path) -> bool:
    """Whether an annotated file and a model are one, by their messages and by the places of their
    weights, which are not read. Never so if one has weights that the other has not.

    Raises:
        FileError: if a file is missing or no ONNX model.
        ModelError: if one holds fields that stand for nothing.
    """
    if path.absolute().parent.resolve() != original.absolute().parent.resolve():
        return False
    return content_hash(read_proto(path)) == content_hash(read_proto(original))


def _read(file: ModelFile) -> ModelProto:
    try:
        return file.proto()
    except FileNotFoundError:
        raise FileError(f"{file.path}: there is no such file; run: planner solve") from None
    except (OSError, DecodeError) as error:
        raise FileError(
            f"{file.path}: expected a partitioned ONNX model, cannot read it: {error};"
            " run: planner solve"
        ) from None


def _differences(plan: Plan, file: ModelFile, *, weights: bool) -> Iterator[str]:
    proto = _read(file)
    notes = metadata(proto)
    found_hash = content_hash(proto, file) if weights else notes.get(MODEL_HASH)
    if found_hash != plan.model_hash:
        yield f"it is model {short(found_hash)}, the strategy is for {short(plan.model_hash)}"
    said = {node.name: read_note(node) for node in proto.graph.node}
    yield from _other_devices(plan, proto)
    yield from _other_stages(plan, said, is_model=found_hash == plan.model_hash)
    nodes = {node.name: node for node in proto.graph.node}
    for name, stage in stages_of(plan).items():
        if name in nodes:
            shards = {one.tensor: one for one in said[name].shards}
            yield from _other_shards(plan, plan.strategy.stages[stage], nodes[name], shards)
    if STAGE_DEVICES in notes:  # older files have neither these nor transfers
        yield from _other_transfers(plan, notes[STAGE_DEVICES], said)


def _other_devices(plan: Plan, proto: ModelProto) -> Iterator[str]:
    configuration = next((c for c in proto.configuration if c.name == CONFIGURATION), None)
    names = list(configuration.device) if configuration else []
    if names != device_names(plan):
        wanted = ", ".join(device_names(plan))
        yield f"its devices are {', '.join(names) or 'not named'}, the strategy's {wanted}"


def _other_stages(
    plan: Plan, said: Mapping[str, NodeNote], *, is_model: bool
) -> Iterator[str]:  # fmt: skip
    found: dict[str, int | None] = {name: note.stage for name, note in said.items()}
    for note in said.values():
        found |= note.inner
    for name, stage in stages_of(plan).items():
        if name not in found and is_model:
            continue  # an operator that reading the model adds, such as a tied weight's Transpose
        if found.get(name) is None:
            yield f"it puts {name} in no stage, the strategy in stage {stage}"
        elif found[name] != stage:
            yield f"it puts {name} in stage {found[name]}, the strategy in stage {stage}"


def _other_shards(
    plan: Plan, stage: Stage, node: NodeProto, found: Mapping[str, Shards]
) -> Iterator[str]:
    """Whether a node's tensors do not lie as a rule of the strategy says. Which of a node's inputs
    a spec is of is known to the graph alone; outputs have the node's order.
    """
    rule = stage.sharding and stage.sharding.rules.get(node.name)
    if stage.sharding is None or rule is None:
        whole = stage.sharding is not None
        odd = next((one for one in found.values() if one.cuts or not whole), None)
        if odd is not None:
            yield f"{node.name} cuts {odd.tensor}, the strategy does not"
        return
    replicas = replica_ranks(plan, stage)
    wanted = {
        spec: shards_of("", spec, stage.sharding, replicas)
        for spec in (*rule.inputs, *rule.outputs)
    }
    # An operator may stand for several nodes: what a SplitToSequence makes is no tensor of its.
    alike = len(node.output) == len(rule.outputs)
    made = dict(zip(node.output, rule.outputs, strict=True)) if alike else {}
    for tensor in sorted({*found, *made}):
        one = found.get(tensor)
        allowed = [wanted[made[tensor]]] if tensor in made else list(wanted.values())
        if (one and replace(one, tensor="")) not in allowed:
            yield f"{node.name} cuts {tensor} {_cut(one)}, the strategy {_cut(allowed[0])}"


def _cut(shards: Shards | None) -> str:
    """How a tensor lies, in words."""
    if shards is None:
        return "in no way that ONNX can say"
    if not shards.cuts:
        return "nowhere"
    parts = [f"in {count} along dimension {dim}" for dim, count in shards.cuts]
    return f"{' and '.join(parts)} for devices {[list(group) for group in shards.devices]}"


def _other_transfers(plan: Plan, devices: str, said: Mapping[str, NodeNote]) -> Iterator[str]:
    if devices != json.dumps(stage_devices(plan)):
        yield f"its stages are on {devices}, the strategy's on {json.dumps(stage_devices(plan))}"
    wanted = {one["tensor"]: one for one in transfers(plan)}
    found = {
        str(one.get("tensor")) if isinstance(one, dict) else "?": one
        for note in said.values()
        for one in note.sends
    }
    for tensor in sorted(wanted.keys() | found.keys()):
        one, other = found.get(tensor), wanted.get(tensor)
        if one != other:
            yield f"it sends {tensor} {_told(one)}, the strategy {_told(other)}"


def _told(one: Any) -> str:
    """A transfer in words, such as "from stage 0 to 1: 96 bytes of float32"."""
    if one is None:
        return "nowhere"
    try:
        stages = ", ".join(str(end["stage"]) for end in one["to"])
        back = " and back" if one["gradient"] else ""
        size = f"{one['bytes']} bytes of {one['dtype']}"
        return f"from stage {one['from']['stage']} to {stages}{back}: {size}"
    except (KeyError, TypeError):
        return "in an entry that is damaged"
