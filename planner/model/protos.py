"""Small walks over ONNX's messages: operator types, versions, subgraphs, metadata."""

from collections.abc import Iterable, Iterator, Mapping

from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
)

FLOATS = frozenset({
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16,
})  # fmt: skip
"""Element types that are trained."""


Described = ModelProto | GraphProto | NodeProto | TensorProto
"""A message with metadata."""


def own_domain(domain: str) -> str:
    """The domain as written here: "" for ONNX's own, which models also call "ai.onnx"."""
    return "" if domain == "ai.onnx" else domain


def domain_of(node: NodeProto) -> str:
    """The domain of the node's operator; "" for ONNX's own."""
    return own_domain(node.domain)


def operator_type(node: NodeProto) -> str:
    """The operator type, with its domain in front if that is not ONNX's own."""
    domain = domain_of(node)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def opsets(model: ModelProto) -> dict[str, int]:
    """The version of each operator set that a model imports, by its domain."""
    return {own_domain(one.domain): one.version for one in model.opset_import}


def true_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs without initializers, which models before IR 4 list among them."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs among the attributes of a node."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def nodes_of(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, each before those of the graphs among its attributes."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_of(graph.node)


def metadata(message: Described) -> dict[str, str]:
    """The metadata of a message by key."""
    return {entry.key: entry.value for entry in message.metadata_props}


def set_metadata(message: Described, entries: Mapping[str, str | None]) -> None:
    """Puts entries into the metadata of a message, in place of older ones; None removes one."""
    kept = {**metadata(message), **entries}
    del message.metadata_props[:]
    for key, value in kept.items():
        if value is not None:
            message.metadata_props.add(key=key, value=value)
