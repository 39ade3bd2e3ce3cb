"""Strategy -> annotated ONNX: the model as it was, with ONNX's own multi-device annotations (IR
version 11 and later): one device configuration that names the devices in the order of the ranks,
and the pipeline stage of every node.

A node that is unrolled or replaced by other operators (Loop, Scan, If, a function) stands there as
in the model, at the first of their stages; its metadata has the stage of each.

Replicas, schedule and warm-up exist only in strategy.json, which is the authority;
`check_agreement` says whether an annotated file still belongs to it.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from planner.errors import FileError, ModelError
from planner.files import artefact_hash
from planner.model import Model, content_hash, first_consumers
from planner.model.metadata import metadata_of
from planner.model.record import ANNOTATION_KEY
from planner.plan import Plan
from planner.support.module_paths import from_to
from planner.support.outputs import Kind
from planner.support.reading import MAX_MODEL_BYTES, check_mapped, read_bytes
from planner.support.writing import explained, writing

CONFIGURATION = "planner"
MODEL_HASH, STRATEGY_HASH = "planner.model_hash", ANNOTATION_KEY
STAGE_MODULES = "planner.stage_modules"  # the first and last module of each stage, as a JSON list
# JSON in a node's metadata: stages of operators that came out of it.
INNER_STAGES = "planner.stages"

# ONNX Runtime 1.31 reads nothing newer; annotations exist from IR version 11 on.
MIN_IR_VERSION, MAX_IR_VERSION, MAX_OPSET = 11, 13, 26
MAX_DIFFERENCES = 5

ANNOTATED_FILE = Kind(
    "an annotated model", lambda path: STRATEGY_HASH in metadata_of(path), is_model=True
)


def write_partition(
    model: Model, plan: Plan, path: Path, also: Mapping[Path, bytes] | None = None
) -> None:
    """Writes the model with the stages and devices of a plan.

    Nodes that were folded away take the stage of the operator that needs them first, nodes from
    which other operators came the first stage of these, nodes of subgraphs that of the node around
    them. Annotations that the model had are replaced.

    Args:
        path: of the new file. Files with the model's external data are copied beside it.
        also: files that are written with it, or not at all: their contents.

    Raises:
        FileError: if the plan was made for another model, or a file cannot be written.
        ModelError: if the model's operator set is newer than ONNX Runtime takes.
    """
    if plan.model_hash != model.hash:
        raise FileError(
            f"{model.path}: the plan was made for model {_short(plan.model_hash)}, this one is"
            f" {_short(model.hash)}; run: planner profile {model.path.name}, then planner solve"
        )
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    proto.ir_version = _ir_version(model)
    del proto.configuration[:]
    devices = _device_names(plan)
    proto.configuration.add(name=CONFIGURATION, num_devices=len(devices), device=devices)
    stages, needed_by = _stages(plan), first_consumers(model)
    inner: dict[str, dict[str, int]] = {}
    for operator in model.graph.operators:
        if operator.name not in stages:
            raise FileError(
                f"{model.path}: {operator.name} is in no stage of the plan; run: planner profile"
                f" {model.path.name}, then planner solve"
            )
        if origin := model.expanded.get(operator.name):
            inner.setdefault(origin, {})[operator.name] = stages[operator.name]
    for node in proto.graph.node:
        own = stages[needed_by.get(node.name, node.name)]
        within = {node.name: own} | inner[node.name] if node.name in inner else {}
        _annotate(node, min(within.values(), default=own))
        _note_inner(node, within)
    notes = {MODEL_HASH: model.hash, STRATEGY_HASH: artefact_hash(plan.strategy)}
    if plan.modules:
        notes[STAGE_MODULES] = json.dumps([from_to(paths) for paths in plan.modules])
    _describe(proto, notes)
    contents = {path: proto.SerializeToString(deterministic=True), **(also or {})}
    copies = _copies(model, path)
    with writing(*copies, *contents) as files:
        for file, (target, source) in zip(files, copies.items(), strict=False):
            _copy(source, file, target, model.path)
        for file, (target, content) in zip(files[len(copies) :], contents.items(), strict=True):
            with explained(target):
                file.write(content)


def check_agreement(plan: Plan, path: Path) -> None:
    """Checks that an annotated file is the plan's model with the plan's stages and devices.

    Raises:
        FileError: if the file is missing or no ONNX model, or with all differences.
    """
    differences = list(_differences(plan, _read(path)))
    if differences:
        shown, more = differences[:MAX_DIFFERENCES], len(differences) - MAX_DIFFERENCES
        shown += [f"and {more} more differences"] if more > 0 else []
        lines = "\n".join(f"{path}: {one}" for one in shown)
        raise FileError(f"{lines}\nto write both files anew, run: planner solve")


def _short(content: str | None) -> str:
    return content[:6] if content else "(unknown)"


def _copies(model: Model, path: Path) -> dict[Path, Path]:
    """The files with the model's weights that are to be copied beside an annotated model in another
    folder: the copies, and what they are copied from. ONNX lets no location lead out of the model's
    folder, not even by a link.

    Raises:
        FileError: if other data lies there.
    """
    source, target = model.path.absolute().parent, path.absolute().parent
    if source.resolve() == target.resolve():
        return {}
    locations = {
        entry.value
        for tensor in _external(model.proto.graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return {
        target / location: source / location
        for location in sorted(locations)
        if _is_to_copy(source / location, target / location, model.path)
    }


def _is_to_copy(source: Path, target: Path, model: Path) -> bool:
    """Whether a file of weights has not been copied before."""
    if not os.path.lexists(target):
        return True
    if not target.exists() or not (target.samefile(source) or _same(source, target)):
        raise FileError(
            f"{target}: is not the data of {model}, and would be overwritten; write the plan into"
            " another folder with -o, or delete the file"
        )
    return False


def _copy(source: Path, file: BinaryIO, target: Path, model: Path) -> None:
    """Copies a file of weights with its time, by which `_same` knows it again."""
    check_mapped(source)
    try:
        with source.open("rb") as weights:
            shutil.copyfileobj(weights, file)
            file.flush()
            status = os.fstat(weights.fileno())
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    except OSError as error:
        raise FileError(
            f"{target}: cannot copy {source}, the weights of {model}: {error.strerror or error}"
        ) from None


def _same(one: Path, other: Path) -> bool:
    """Whether two files have the same size and time, as a copy has."""
    first, second = one.stat(), other.stat()
    return first.st_size == second.st_size and first.st_mtime_ns == second.st_mtime_ns


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _external(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors whose content lies in another file."""
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor
    for node in graph.node:
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                if tensor.data_location == TensorProto.EXTERNAL:
                    yield tensor
        for inner in _graphs(node):
            yield from _external(inner)


def _ir_version(model: Model) -> int:
    for opset in model.proto.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > MAX_OPSET:
            raise ModelError(
                f"{model.path}: expected opset {MAX_OPSET} or older, because ONNX Runtime takes no"
                f" more, got {opset.version}; export the model with an older opset"
            )
    return min(max(model.proto.ir_version, MIN_IR_VERSION), MAX_IR_VERSION)


def _device_names(plan: Plan) -> list[str]:
    names = {one.device: one.name for one in plan.prediction.devices}
    return [names[device] for device in plan.ranks]


def _stages(plan: Plan) -> dict[str, int]:
    return {name: s for s, stage in enumerate(plan.strategy.stages) for name in stage.operators}


def _annotate(node: NodeProto, stage: int) -> None:
    del node.device_configurations[:]
    node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)
    for graph in _graphs(node):
        for inner in graph.node:
            _annotate(inner, stage)


def _note_inner(node: NodeProto, stages: Mapping[str, int]) -> None:
    """Writes the stages of the operators that came out of a node into its metadata."""
    for at in reversed(range(len(node.metadata_props))):
        if node.metadata_props[at].key == INNER_STAGES:
            del node.metadata_props[at]
    if stages:
        node.metadata_props.add(key=INNER_STAGES, value=json.dumps(stages, sort_keys=True))


def _inner_stages(node: NodeProto) -> dict[str, int]:
    """The stages that `_note_inner` wrote; none if the entry is damaged."""
    text = next((one.value for one in node.metadata_props if one.key == INNER_STAGES), "{}")
    try:
        stages = json.loads(text)
    except ValueError:
        return {}
    return stages if isinstance(stages, dict) else {}


def _describe(proto: ModelProto, properties: Mapping[str, str]) -> None:
    kept = {one.key: one.value for one in proto.metadata_props}
    del proto.metadata_props[:]
    for key, value in (kept | {**properties}).items():
        proto.metadata_props.add(key=key, value=value)


def _read(path: Path) -> ModelProto:
    try:
        proto: ModelProto = ModelProto.FromString(read_bytes(path, MAX_MODEL_BYTES))
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such file; run: planner solve") from None
    except (OSError, DecodeError) as error:
        raise FileError(
            f"{path}: expected a partitioned ONNX model, cannot read it: {error};"
            " run: planner solve"
        ) from None
    return proto


def _differences(plan: Plan, proto: ModelProto) -> Iterator[str]:
    found_hash = content_hash(proto)
    if found_hash != plan.model_hash:
        yield f"it is model {_short(found_hash)}, the strategy is for {_short(plan.model_hash)}"
    configuration = next((c for c in proto.configuration if c.name == CONFIGURATION), None)
    names = list(configuration.device) if configuration else []
    if names != _device_names(plan):
        wanted = ", ".join(_device_names(plan))
        yield f"its devices are {', '.join(names) or 'not named'}, the strategy's {wanted}"
    found_stages = {node.name: _stage(node) for node in proto.graph.node}
    for node in proto.graph.node:
        found_stages |= _inner_stages(node)
    for name, stage in _stages(plan).items():
        if name not in found_stages and found_hash == plan.model_hash:
            continue  # an operator that reading the model adds, such as a tied weight's Transpose
        found_stage = found_stages.get(name)
        if found_stage is None:
            yield f"it puts {name} in no stage, the strategy in stage {stage}"
        elif found_stage != stage:
            yield f"it puts {name} in stage {found_stage}, the strategy in stage {stage}"


def _stage(node: NodeProto) -> int | None:
    for one in node.device_configurations:
        if one.configuration_id == CONFIGURATION and one.HasField("pipeline_stage"):
            return int(one.pipeline_stage)
    return None
