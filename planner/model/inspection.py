"""What an ONNX file holds, read without its weights: operators, parameters, work, what is in doubt.

With all dimensions bound everything is exact. Without, or where an operator has no shape, the
structure is told alone: operators as the file has them, and what is trained by the rules that need
no shapes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from onnx.defs import SchemaError

from planner.artefacts.graph import ITEM_BYTES, parameters_by_name, tensors_by_name
from planner.artefacts.modules import block_of
from planner.model import trainable
from planner.model.canonical import domain_of, own_domain, true_inputs
from planner.model.constants import Uses
from planner.model.expansion.control_flow import CONTROL_FLOW
from planner.model.expansion.sequences import SEQUENCE_OPERATORS
from planner.model.folding import operator_type, some
from planner.model.load import Model, Node, ReadOptions, model_of, modules_of
from planner.model.record import ModuleRecord
from planner.model.repair import repaired
from planner.model.scopes import scope_of
from planner.model.source import Source, open_source
from planner.model.trainable import Choice, Evidence, doubts
from planner.support.errors import ModelError

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
class OperatorType:
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
        flops: as of an `OperatorType`.
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
    operators: tuple[OperatorType, ...]
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


def inspect(
    path: Path, supported: Collection[str], options: ReadOptions = ReadOptions()
) -> Inspection:
    """What an ONNX file holds. Weights are not read.

    Args:
        path: of the file.
        supported: the operator types that plans can have.
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
        opsets={own_domain(one.domain): one.version for one in proto.opset_import},
        inputs=tuple(map(_value, true_inputs(proto.graph))),
        outputs=tuple(map(_value, proto.graph.output)),
        dimensions=dict(dimensions),
        unbound=unbound,
        operators=_by_type(known, supported),
        parts=_by_module(known),
        parameters=tuple(_parameters(known)),
        unsupported=tuple(_unsupported(known, proto, supported)),
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


def _by_type(known: _Structure, supported: Collection[str]) -> tuple[OperatorType, ...]:
    counts = Counter(node.type for node in known.nodes)
    flops: Counter[str] = Counter()
    for node, work in zip(known.nodes, known.flops, strict=False):
        flops[node.type] += work
    return tuple(
        OperatorType(
            kind, count, flops[kind] if known.flops else None, kind in supported or kind in READ
        )
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


def _unsupported(
    known: _Structure, proto: ModelProto, supported: Collection[str]
) -> Iterable[str]:  # fmt: skip
    users: dict[str, list[_Operator]] = {}
    for node in known.nodes:
        users.setdefault(node.type, []).append(node)
    opsets = {own_domain(one.domain): one.version for one in proto.opset_import}
    domains = {operator_type(node): domain_of(node) for node in proto.graph.node}
    for kind, nodes in sorted(users.items()):
        if kind in supported or kind in READ or _is_function(kind, domains.get(kind, ""), opsets):
            continue
        where = some(sorted({node.module for node in nodes if node.module}))
        names = some([node.name for node in nodes])
        yield f"{kind}: {names}{f', in {where}' if where else ''}"


def _is_function(kind: str, domain: str, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX defines an operator by others, which take its place."""
    try:
        schema = onnx.defs.get_schema(kind.rpartition(".")[2], opsets.get(domain, 1), domain)
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


# ------------------------------------------------------------------------------ the work

# Counted are products, two operations for each multiplication with its addition: everything else is
# nothing beside them. B samples, S positions, T positions that are looked at, N heads, K heads of
# keys and values.

Shape = tuple[int, ...]
Shapes = Sequence[Shape]


def flops_of(node: Node, shapes: Mapping[str, Shape]) -> int:
    """The operations of one node; 0 for types whose products are not counted.

    Args:
        node: an operator.
        shapes: of its inputs and outputs, by name.
    """
    count = _COUNTS.get(f"{node.domain}.{node.type}" if node.domain else node.type)
    if count is None:
        return 0
    inputs = [shapes.get(name, ()) for name in node.inputs]
    outputs = [shapes.get(name, ()) for name in node.outputs]
    return count(node, inputs, outputs)


def _at(inputs: Shapes, position: int) -> Shape:
    """The shape of an input; () where it is absent."""
    return inputs[position] if position < len(inputs) else ()


def _number(node: Node, name: str, default: int) -> int:
    value = node.attributes.get(name)
    return value if isinstance(value, int) else default


def _matmul(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * inputs[0][-1]


def _fused_matmul(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """The first factor may be transposed; transBatch moves its first dimension before the last."""
    first = inputs[0]
    if len(first) > 2 and _number(node, "transBatchA", 0):
        first = (*first[1:-1], first[0], first[-1])
    inner = first[-2] if len(first) > 1 and _number(node, "transA", 0) else first[-1]
    return 2 * prod(outputs[0]) * inner


def _gemm(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * inputs[0][0 if node.attributes.get("transA") else 1]


def _conv(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def _conv_transpose(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def _einsum(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """One product after the other, from the left. What only one factor has is summed up before, and
    without a sum a product has no additions: it counts as little as a Mul.
    """
    terms, result = _labels(str(node.attributes.get("equation", "")), inputs)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=False):
        for label, size in zip(term, shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))  # 1 is repeated
    count, made = 0, set(terms[0])
    for i, term in enumerate(terms[1:], 2):
        factors = made, set(term)
        kept = set(result).union(*terms[i:])
        summed = factors[0] & factors[1] - kept
        made = (factors[0] | factors[1]) & kept
        if summed:
            count += 2 * prod(sizes.get(label, 1) for label in made | summed)
    return count


def _labels(equation: str, inputs: Shapes) -> tuple[list[Sequence[str]], Sequence[str]]:
    """The dimensions of each factor and of the result of an Einsum, by label; those that an
    ellipsis stands for are labelled by their distance from its end.

    >>> _labels("...ij, jk", [(5, 2, 3), (3, 4)])
    ([['-1', 'i', 'j'], ['j', 'k']], ['-1', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    hidden = [
        len(shape) - len(text.replace("...", "")) if "..." in text else 0
        for text, shape in zip(texts, inputs, strict=False)
    ]
    if not arrow:  # the labels that are there once, in order
        named = [label for text in texts for label in text.replace("...", "")]
        right = "..." + "".join(sorted(label for label in named if named.count(label) == 1))

    def spread(text: str, count: int) -> list[str]:
        before, dots, behind = text.partition("...")
        return [*before, *(str(i) for i in range(-count, 0) if dots), *behind]

    terms = [spread(text, count) for text, count in zip(texts, hidden, strict=False)]
    return [*terms], spread(right, max(hidden, default=0))


def _attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Scores and mixing, for queries of (B, S, N width) or (B, N, S, width)."""
    query, key, value = inputs[:3]
    past = _at(inputs, 4)[2] if _at(inputs, 4) else 0
    if len(query) == 4:
        return 2 * prod(query[:3]) * (past + key[2]) * (query[3] + value[3])
    heads = _number(node, "q_num_heads", 1)
    kept = _number(node, "kv_num_heads", heads)
    return _looked(query, past + key[1], query[2], heads * (value[2] // kept))


def _looked(query: Shape, others: int, width: int, width_out: int) -> int:
    """Scores and mixing.

    Args:
        query: (B, S, ...).
        others: T.
        width: of all heads of queries.
        width_out: of all heads of the result.
    """
    return 2 * prod(query[:2]) * others * (width + width_out)


def _projecting_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """com.microsoft.Attention: (B, S, in) times the weights of queries, keys and values."""
    given, weights = inputs[:2]
    made = node.attributes.get("qkv_hidden_sizes")
    query, _, value = made if isinstance(made, tuple) and len(made) == 3 else (weights[1] // 3,) * 3
    past = _at(inputs, 4)[3] if _at(inputs, 4) else 0
    return 2 * prod(given) * weights[1] + _looked(given, past + given[1], query, value)


def _multi_head_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Queries (B, S, N width) with keys and values, alike or (B, N, T, width); with both in one,
    (B, T, N, 2, width); or all in one, (B, S, N, 3, width).
    """
    query, key, value = (_at(inputs, i) for i in range(3))
    past = _at(inputs, 6)[2] if _at(inputs, 6) else 0
    if not key:
        width = query[2] * query[4]
        return _looked(query, past + query[1], width, width)
    if not value:
        return _looked(query, past + key[1], query[2], query[2])
    wide = value[1] * value[3] if len(value) == 4 else value[2]
    return _looked(query, past + key[2 if len(key) == 4 else 1], query[2], wide)


def _group_query_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Queries (B, S, N width) with keys and values (B, S, K width), or all three in one; there is
    no past.
    """
    query, width = inputs[0], inputs[0][2]
    if not _at(inputs, 1):
        heads, others = (_number(node, name, 1) for name in ("num_heads", "kv_num_heads"))
        width = width // (heads + 2 * others) * heads
    return _looked(query, query[1], width, width)


def _recurrent(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Two products per time step and direction: (steps, batch, in) and (directions, gates, in)."""
    steps, batch = inputs[0][:2]
    return 2 * steps * batch * (prod(inputs[1]) + prod(inputs[2]))


_COUNTS: Mapping[str, Callable[[Node, Shapes, Shapes], int]] = {
    "Attention": _attention,
    "CausalConvWithState": _conv,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _conv,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "RNN": _recurrent,
    "com.microsoft.Attention": _projecting_attention,
    "com.microsoft.FusedConv": _conv,
    "com.microsoft.FusedGemm": _gemm,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.GemmFastGelu": _matmul,
    "com.microsoft.GroupQueryAttention": _group_query_attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
    "com.microsoft.TransposeMatMul": _fused_matmul,
}
"""Operator, with its domain in front, -> the count of its products."""
