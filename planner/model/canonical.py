"""The identity of an ONNX model: unique names for its nodes, and a hash of its computation.

Annotations do not change the hash: device configurations, metadata, documentation, declared
intermediate shapes, the IR version, and how an inline tensor is stored. Names do, because
strategies refer to operators by name. So do marks of `planner export` in the metadata of nodes,
which say what a gradient is.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from planner.model.expansion.inlining import inlined
from planner.model.protos import domain_of, nodes_of, own_domain, true_inputs
from planner.model.scopes import MARKS
from planner.model.weights import ModelFile, is_inline, is_stored, place_of


def unique_names(nodes: Sequence[NodeProto]) -> list[str]:
    """A name for each node: its own, or "Conv_12" where that is empty or taken by an earlier one.

    A model that has these names written in gets the same ones.

    >>> unique_names([NodeProto(name="a", op_type="Add"), NodeProto(op_type="Mul")])
    ['a', 'Mul_1']
    """
    reserved = {node.name for node in nodes}
    used = {""}
    names = []
    for i, node in enumerate(nodes):
        name = node.name
        if name in used:
            name = f"{node.op_type}_{i}"
            while name in reserved or name in used:
                name += "_"
        used.add(name)
        names.append(name)
    return names


def content_hash(proto: ModelProto, file: ModelFile | None = None) -> str:
    """sha256 (hex) of the model's computation; equal for a model and its annotated copies.

    It covers the operator sets in use, types of inputs and outputs, nodes with their unique
    names and attributes, and initializers: inline ones by content, external ones by name,
    location, offset and length.

    Args:
        proto: the model.
        file: that it was read from. Without it, inline initializers that were left in a file count
            as external ones, and the hash serves to compare two models of that file only.

    Raises:
        FileError: if inline initializers cannot be read.
    """
    proto = inlined(proto)
    digest = hashlib.sha256()
    for piece in _model_pieces(proto):
        if isinstance(piece, TensorProto) and file is not None:
            digest.update(place_of(piece).length.to_bytes(8, "little"))
            file.copy(piece, digest.update)
            continue
        text = _place(piece) if isinstance(piece, TensorProto) else piece
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


def _text(*values: object) -> bytes:
    return json.dumps(values).encode()


Piece = bytes | TensorProto
"""What is hashed: the bytes, or the content of an inline tensor that was left in a file."""


def _model_pieces(proto: ModelProto) -> Iterator[Piece]:
    used = {domain_of(node) for node in nodes_of(proto.graph.node)}
    imports = sorted((own_domain(o.domain), o.version) for o in proto.opset_import)
    yield _text("opsets", [entry for entry in imports if entry[0] in used])
    yield from _graph_pieces(proto.graph, unique_names(proto.graph.node))


def _graph_pieces(graph: GraphProto, names: Iterable[str]) -> Iterator[Piece]:
    for what, values in (("inputs", true_inputs(graph)), ("outputs", list(graph.output))):
        yield _text(what, len(values))
        for value in values:
            yield from _value_pieces(value)
    yield _text("initializers", len(graph.initializer), len(graph.sparse_initializer))
    for tensor in sorted(graph.initializer, key=lambda t: t.name):
        yield _text(tensor.name)
        yield from _tensor_pieces(tensor)
    for sparse in sorted(graph.sparse_initializer, key=lambda s: s.values.name):
        yield sparse.SerializeToString(deterministic=True)
    yield _text("nodes", len(graph.node))
    for node, name in zip(graph.node, names, strict=True):
        yield from _node_pieces(node, name)


def _value_pieces(value: ValueInfoProto) -> Iterator[bytes]:
    kind = value.type.WhichOneof("value")
    yield _text(value.name, kind)
    if kind != "tensor_type":
        yield value.type.SerializeToString(deterministic=True)
        return
    tensor = value.type.tensor_type
    dims = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None)
            for dim in tensor.shape.dim] if tensor.HasField("shape") else None  # fmt: skip
    yield _text(tensor.elem_type, dims)


def _node_pieces(node: NodeProto, name: str) -> Iterator[Piece]:
    yield _text(name, node.op_type, domain_of(node), node.overload,
                _without_trailing_gaps(node.input), _without_trailing_gaps(node.output),
                len(node.attribute))  # fmt: skip
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        yield from _attribute_pieces(attribute)
    for entry in node.metadata_props:
        if entry.key in MARKS:
            yield _text(entry.key, entry.value)


def _without_trailing_gaps(names: Iterable[str]) -> list[str]:
    kept = list(names)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _attribute_pieces(attribute: AttributeProto) -> Iterator[Piece]:
    tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    graphs = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    numbers = [attribute.f, attribute.i, list(attribute.floats), list(attribute.ints)]
    counts = [len(attribute.strings), len(tensors), len(graphs)]
    yield _text(attribute.name, attribute.type, numbers, counts)
    yield from (attribute.s, *attribute.strings)
    for tensor in tensors:
        yield from _tensor_pieces(tensor)
    for graph in graphs:
        yield from _graph_pieces(graph, (node.name for node in graph.node))
    for rare in (attribute.tp, attribute.sparse_tensor, *attribute.type_protos):
        yield rare.SerializeToString(deterministic=True)


def _tensor_pieces(tensor: TensorProto) -> Iterator[Piece]:
    yield _text(tensor.data_type, list(tensor.dims))
    if is_inline(tensor):
        yield tensor
    elif is_stored(tensor):
        yield _place(tensor)
    elif tensor.data_type == TensorProto.STRING:
        yield from tensor.string_data
    elif tensor.HasField("raw_data"):
        yield tensor.raw_data
    else:
        yield onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data


def _place(tensor: TensorProto) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return _text(*(entries.get(key) for key in ("location", "offset", "length")))
