"""What an ONNX file holds, read without its weights: operators, parameters, work, what is in doubt.

With all dimensions bound everything is exact. Without, or where an operator has no shape, the
structure is told alone: operators as the file has them, and what is trained by the rules that need
no shapes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from onnx.defs import SchemaError

from planner.artefacts.graph import ITEM_BYTES, parameters_by_name, tensors_by_name
from planner.artefacts.modules import block_of
from planner.artefacts.operator_types import facts
from planner.model import trainable
from planner.model.constants import Uses
from planner.model.expansion.control_flow import CONTROL_FLOW
from planner.model.expansion.sequences import SEQUENCE_OPERATORS
from planner.model.flops import flops_of
from planner.model.load import Model, ReadOptions, model_of, modules_of
from planner.model.protos import domain_of, operator_type, opsets, true_inputs
from planner.model.record import ModuleRecord
from planner.model.repair import repaired
from planner.model.scopes import scope_of
from planner.model.source import Source, open_source
from planner.model.trainable import Choice, Evidence, doubts
from planner.support.errors import ModelError
from planner.support.printable import few

# Read by the model's reader itself, and folded or written as plain operators.
READ = frozenset({"Constant", "Shape", "Size", *CONTROL_FLOW, *SEQUENCE_OPERATORS})


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output of the model.

    Attributes:
        name: of the tensor.
        dtype: numpy's name of the element type.
        shape: sizes as text: numbers, names of symbolic dimensions, "?" for nameless ones.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TypeSummary:
    """The operators of one type.

    Attributes:
        type: with the domain in front if that is not ONNX's own.
        count: number of operators.
        flops: of the products of one microbatch, forward; None where shapes are not known.
        supported: whether plans can have it.
    """

    type: str
    count: int
    flops: int | None
    supported: bool


@dataclass(frozen=True, slots=True)
class Part:
    """The operators of one module of the network.

    Attributes:
        module: its path up to the first number, "" for the whole network.
        count: number of operators.
        elements: of the parameters that it is the first to read.
        flops: as of an `TypeSummary`.
    """

    module: str
    count: int
    elements: int
    flops: int | None


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A float that the model holds.

    Attributes:
        name: of the initializer.
        shape: of it.
        dtype: numpy's name of the element type.
        bytes: size.
        choice: whether it is trained, and why.
        readers: names of the operators that read it.
        source: the initializer of the file that its value comes from, where it has another name;
            "zeros" for a bias that the exporter left out; None for the file's own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    choice: Choice
    readers: tuple[str, ...]
    source: str | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file holds.

    Attributes:
        path: of the file.
        exporter: the software that wrote it, with its version.
        module: class of the network, "" where the file does not say it.
        opsets: version of each operator set.
        inputs: without the initializers.
        outputs: of the model.
        dimensions: sizes that symbolic dimensions were bound to.
        unbound: why there are no shapes, in words; "" where there are.
        operators: by type, the most frequent first.
        parts: by module, in order; () where the file names none.
        parameters: all floats with a dimension, and the single numbers that are trained.
        unsupported: types that plans cannot have, each with its nodes and the modules they are in.
        warnings: what was repaired or is in doubt.
    """

    path: Path
    exporter: str
    module: str
    opsets: dict[str, int]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    dimensions: dict[str, int]
    unbound: str
    operators: tuple[TypeSummary, ...]
    parts: tuple[Part, ...]
    parameters: tuple[HeldParameter, ...]
    unsupported: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Structure:
    """What is known of a model, with or without shapes.

    Attributes:
        nodes: type, name and module of each operator; inputs that it reads.
        flops: per operator; () where shapes are not known.
        choices: for each float initializer.
        shapes: shape and type of each float initializer.
        sources: of initializers that the file does not have.
        warnings: what was repaired or is in doubt.
    """

    nodes: tuple["_Operator", ...]
    flops: tuple[int, ...]
    choices: Mapping[str, Choice]
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Operator:
    name: str
    type: str
    module: str
    inputs: tuple[str, ...]


def inspect(path: Path, options: ReadOptions = ReadOptions()) -> Inspection:
    """What an ONNX file holds. Weights are not read.

    Args:
        path: of the file.
        options: how it is read, with or without sizes.

    Raises:
        FileError: if the file is missing or no ONNX model.
    """
    source = open_source(path)
    proto, dimensions, unbound = source.proto, options.dimensions, ""
    try:
        model = model_of(source, options, known_hash="")
        known = _with_shapes(model)
        dimensions = model.dimensions
    except ModelError as error:
        unbound = str(error).replace(f"{path}: ", "")
        known = _without_shapes(repaired(source, options.ties))
    return Inspection(
        path=path,
        exporter=f"{proto.producer_name} {proto.producer_version}".strip(),
        module=_module(proto, source.record),
        opsets=opsets(proto),
        inputs=tuple(map(_value, true_inputs(proto.graph))),
        outputs=tuple(map(_value, proto.graph.output)),
        dimensions=dict(dimensions),
        unbound=unbound,
        operators=_by_type(known),
        parts=_by_module(known),
        parameters=tuple(_parameters(known)),
        unsupported=tuple(_unsupported(known, proto)),
        warnings=known.warnings,
    )


def _with_shapes(model: Model) -> _Structure:
    graph = model.graph
    shapes = {name: one.shape for name, one in tensors_by_name(graph).items()}
    shapes |= {name: one.shape for name, one in parameters_by_name(graph).items()}
    paths = modules_of(model) or ("",) * len(graph.operators)
    return _Structure(
        nodes=tuple(
            _Operator(one.name, one.type, path, (*one.inputs, *one.parameters))
            for one, path in zip(graph.operators, paths, strict=True)
        ),
        flops=tuple(flops_of(node, shapes) for node in model.nodes),
        choices=model.choices,
        shapes={
            **_held(model.proto.graph.initializer),
            **{one.name: (one.shape, one.dtype) for one in graph.parameters},
        },
        sources=model.sources,
        warnings=(*model.warnings, *(f"note: {note}" for note in model.notes)),
    )


def _without_shapes(source: Source) -> _Structure:
    """The structure alone: every tensor counts as a float."""
    nodes = source.proto.graph.node
    choices = trainable.choices(_evidence(source), (), ())
    return _Structure(
        nodes=tuple(
            _Operator(n.name, operator_type(n), scope_of(n).module or "", tuple(n.input))
            for n in nodes
            if n.op_type not in ("Constant", "Shape", "Size")
        ),
        flops=(),
        choices=choices,
        shapes=_held(source.proto.graph.initializer),
        sources=source.sources,
        warnings=(
            *source.warnings,
            *doubts(choices, source.record, source.named, source.origins),
        ),
    )


def _held(tensors: Iterable[TensorProto]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tuple(tensor.dims), _dtype(tensor.data_type)) for tensor in tensors}


def _evidence(source: Source) -> Evidence:
    graph = source.proto.graph
    nodes, tensors = graph.node, graph.initializer
    floats = {tensor.name for tensor in tensors if _dtype(tensor.data_type).find("float") >= 0}
    integers = {tensor.name for tensor in tensors} - floats
    names = {name for node in nodes for name in (*node.input, *node.output)} - integers
    loss = graph.output[0].name
    return Evidence(
        shapes={t.name: tuple(t.dims) for t in tensors if t.name in floats},
        reaching=trainable.reaching(nodes, loss, names),
        loss=loss,
        uses=Uses(nodes, {node.name: scope_of(node).kind for node in nodes}),
        origins=source.origins,
        record=source.record,
        values=source.values,
    )


def _by_type(known: _Structure) -> tuple[TypeSummary, ...]:
    counts = Counter(node.type for node in known.nodes)
    flops: Counter[str] = Counter()
    for node, work in zip(known.nodes, known.flops, strict=False):
        flops[node.type] += work
    return tuple(
        TypeSummary(kind, count, flops[kind] if known.flops else None, _is_supported(kind))
        for kind, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    )


def _by_module(known: _Structure) -> tuple[Part, ...]:
    if not any(node.module for node in known.nodes):
        return ()
    sizes = {name: prod(shape) for name, (shape, _) in known.shapes.items()}
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    seen: set[str] = set()
    for i, node in enumerate(known.nodes):
        block = block_of(node.module)
        counts[block] += 1
        flops[block] += known.flops[i] if known.flops else 0
        for name in node.inputs:
            if name in sizes and name not in seen:
                seen.add(name)
                elements[block] += sizes[name]
    return tuple(
        Part(block, count, elements[block], flops[block] if known.flops else None)
        for block, count in counts.items()
    )


def _parameters(known: _Structure) -> Iterable[HeldParameter]:
    readers: dict[str, list[str]] = {}
    for node in known.nodes:
        for name in dict.fromkeys(node.inputs):
            readers.setdefault(name, []).append(node.name)
    for name, choice in known.choices.items():
        shape, dtype = known.shapes.get(name, ((), ""))
        if not shape and not choice.trained:
            continue
        yield HeldParameter(
            name, shape, dtype, int(prod(shape) * ITEM_BYTES.get(dtype, 1)), choice,
            tuple(readers.get(name, ())), known.sources.get(name),
        )  # fmt: skip


def _is_supported(kind: str) -> bool:
    return facts(kind).function is not None or kind in READ


def _unsupported(known: _Structure, proto: ModelProto) -> Iterable[str]:
    users: dict[str, list[_Operator]] = {}
    for node in known.nodes:
        users.setdefault(node.type, []).append(node)
    versions = opsets(proto)
    domains = {operator_type(node): domain_of(node) for node in proto.graph.node}
    for kind, nodes in sorted(users.items()):
        if _is_supported(kind) or _is_function(kind, domains.get(kind, ""), versions):
            continue
        where = few(sorted({node.module for node in nodes if node.module}))
        names = few([node.name for node in nodes])
        yield f"{kind}: {names}{f', in {where}' if where else ''}"


def _is_function(kind: str, domain: str, versions: Mapping[str, int]) -> bool:
    """Whether ONNX defines an operator by others, which take its place."""
    try:
        schema = onnx.defs.get_schema(kind.rpartition(".")[2], versions.get(domain, 1), domain)
    except SchemaError:
        return False
    made_of_others: bool = schema.has_function or schema.has_context_dependent_function  # type: ignore[attr-defined]
    return made_of_others


def _module(proto: ModelProto, record: ModuleRecord | None) -> str:
    if record is not None:
        return record.module
    kinds = (scope_of(node).root for node in proto.graph.node)
    return next((kind for kind in kinds if kind), "")


def _value(value: ValueInfoProto) -> Value:
    tensor = value.type.tensor_type
    return Value(
        value.name,
        _dtype(tensor.elem_type),
        tuple(
            str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in tensor.shape.dim
        ),
    )


def _dtype(kind: int) -> str:
    if kind in (TensorProto.UNDEFINED, TensorProto.STRING):
        return "unknown"
    return str(helper.tensor_dtype_to_np_dtype(kind).name)
