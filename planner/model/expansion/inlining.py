"""Functions in place of their calls: the model's own, and those that define ONNX's operators.

Both are inlined by onnx itself. Functions of the model are inlined before anything else is done
with it; an operator is replaced by its function while the graph is folded, when the types of its
inputs are known, because the function may depend on them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TypeProto,
    ValueInfoProto,
    defs,
    helper,
)
from onnx.checker import ValidationError

from planner.artefacts.operator_types import OPERATOR_TYPES
from planner.model.protos import metadata, nodes_of
from planner.support.errors import ModelError

INLINED_OPERATORS = frozenset(
    kind for kind, row in OPERATOR_TYPES.items() if row.function is None and not row.refused
)
"""Standard operators that are replaced by the function that defines them: all that have one, and no
function in torch."""


def inlined(proto: ModelProto) -> ModelProto:
    """The model with calls of its own functions replaced by their bodies; itself without any.

    A node of a body has the metadata of the call, unless it brings its own under that key.

    Raises:
        ModelError: if onnx cannot inline them, because they call each other in a circle, or a call
            has more inputs or outputs than the function.
    """
    if not proto.functions:
        return proto
    import onnx.inliner

    if any(node.metadata_props for node in _all_nodes(proto)):
        proto = _with_metadata_of_calls(proto)
    try:
        return onnx.inliner.inline_local_functions(proto)
    except (ValidationError, RuntimeError) as error:
        # Of a failed assertion, only the explanation is for people.
        why = str(error).rpartition("failed: ")[2]
        raise ModelError(
            f"functions: expected some that can be inlined: {why}; export the model without them"
        ) from None


def inherit_metadata(node: NodeProto, inherited: Mapping[str, str]) -> None:
    """Adds to a node the metadata that it has no own entries for."""
    own = {entry.key for entry in node.metadata_props}
    for key, value in inherited.items():
        if key not in own:
            node.metadata_props.add(key=key, value=value)


def _all_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    yield from nodes_of(proto.graph.node)
    for function in proto.functions:
        yield from nodes_of(function.node)


Called = tuple[tuple[str, str, str], ...]  # domains, names and overloads, from the outermost on


def _with_metadata_of_calls(proto: ModelProto) -> ModelProto:
    """A model in which each call has a function of its own, whose nodes have the call's metadata.

    The copies differ in their overload, which names of nodes and tensors do not depend on.
    """
    copied = ModelProto()
    copied.CopyFrom(proto)
    known = {(f.domain, f.name, f.overload): f for f in proto.functions}
    del copied.functions[:]
    waiting: deque[tuple[NodeProto, dict[str, str], Called]] = deque(
        (node, {}, ()) for node in nodes_of(copied.graph.node)
    )
    while waiting:
        node, inherited, called = waiting.popleft()
        inherit_metadata(node, inherited)
        key = (node.domain, node.op_type, node.overload)
        if key not in known or key in called:  # onnx refuses circles
            continue
        body: FunctionProto = copied.functions.add()
        body.CopyFrom(known[key])
        body.overload = node.overload = f"{node.overload}call{len(copied.functions)}"
        waiting += [(one, metadata(node), (*called, key)) for one in nodes_of(body.node)]
    copied.functions.extend(proto.functions)  # those that call themselves
    return copied


def function_graph(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    opset_imports: Sequence[OperatorSetIdProto],
    ir_version: int,
) -> GraphProto:
    """The function of a standard operator, as a graph with the node's inputs and outputs.

    Args:
        node: of a type that ONNX defines by a function.
        types: of its inputs; static.
        opset_imports: those of the model.
        ir_version: that of the model.
    """
    import onnx.inliner

    opset = next(o for o in opset_imports if o.domain in ("", "ai.onnx"))
    function = _definition(node, types, opset.version)
    function.domain = "function"
    del function.opset_import[:]
    function.opset_import.add(domain="", version=opset.version)
    call = NodeProto()
    call.CopyFrom(_with_defaults(node, opset.version))
    call.domain = function.domain
    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [helper.make_value_info(name, types[name]) for name in names]
    outputs = [ValueInfoProto(name=name) for name in node.output if name]
    model = helper.make_model(
        helper.make_graph([call], "function", inputs, outputs),
        opset_imports=[*opset_imports, helper.make_opsetid(function.domain, 1)],
        ir_version=ir_version,
        functions=[function],
    )
    return onnx.inliner.inline_local_functions(model).graph


def _definition(node: NodeProto, types: Mapping[str, TypeProto], opset: int) -> FunctionProto:
    """The function that defines an operator for inputs of these types."""
    schema: Any = defs.get_schema(node.op_type, opset)  # onnx's types leave out functions
    function = FunctionProto()
    if schema.has_function:
        version = max(v for v in schema.function_opset_versions if v <= opset)
        function.ParseFromString(schema.get_function_with_opset_version(version))
        return function
    version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
    arriving = [(types[n] if n else TypeProto()).SerializeToString() for n in node.input]
    function.ParseFromString(
        schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), arriving
        )
    )
    return function


def _with_defaults(node: NodeProto, opset: int) -> NodeProto:
    """The node with the attributes that have a default and are not given."""
    full = NodeProto()
    full.CopyFrom(node)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in defs.get_schema(node.op_type, opset).attributes.items():
        if name not in given and attribute.default_value.name:
            full.attribute.add().CopyFrom(attribute.default_value)
    return full
