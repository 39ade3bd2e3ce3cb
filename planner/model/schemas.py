"""ONNX's schemas, and nodes against them.

A node must have the inputs, outputs and attributes of its operator's schema: ONNX's inference and
the conversion to torch look for them without asking. `operators/` computes the operators.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import onnx
from onnx import AttributeProto, NodeProto, defs, helper

from planner.artefacts.operator_types import facts
from planner.support.errors import ModelError

MAX_LINES = 5
"""Problems of one graph that are listed."""
MAX_NAMED = 1000
"""An operator with more inputs or outputs takes any number of them."""


_PROCESSORS = (
    "ONNX Runtime writes this domain for one kind of processor; optimise the model at level basic"
    " or extended instead of all"
)
REFUSED_DOMAINS: Mapping[str, str] = {
    "ai.onnx.ml": "its operators are trees, encoders and the like, through which no gradient flows",
    "com.microsoft.dml": _PROCESSORS,
    "com.microsoft.nchwc": _PROCESSORS,
    "com.ms.internal.nhwc": _PROCESSORS,
}
"""Domain -> why none of its operators can be trained."""


REGISTER = 'planner.operators.register (docs/operators.md, "Custom operators")'
"""Where errors send the user for an operator that nobody knows."""


@lru_cache(maxsize=1024)
def definition(operator: str, version: int, domain: str) -> defs.OpSchema | None:
    """ONNX's schema of an operator; None where ONNX does not define it, or withdrew it.

    Args:
        operator: the type without its domain.
        version: of the operator set that the model imports; 0 if it imports none.
        domain: "" for ONNX's own.
    """
    kind = f"{domain}.{operator}" if domain else operator
    same = facts(kind).onnx
    if same is not None and (domain or version < same[1]):
        domain, (operator, version) = "", same
    newest = defs.onnx_opset_version() if not domain else version
    if not 0 < version <= newest:
        return None
    try:
        schema = defs.get_schema(operator, version, domain)
    except defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def without_activation(node: NodeProto, operator: str, version: int) -> NodeProto:
    """A fused node as that of ONNX's operator, in this version, without the activation."""
    schema = defs.get_schema(operator, version)
    plain = NodeProto()
    plain.CopyFrom(node)
    plain.op_type, plain.domain = operator, ""
    del plain.input[len(schema.inputs) :]
    kept = [one for one in node.attribute if one.name in schema.attributes]
    del plain.attribute[:]
    plain.attribute.extend(kept)
    return plain


def attributes_of(node: NodeProto) -> dict[str, object]:
    """The attributes of a node as int, float, str, tuples of these, or arrays.

    Raises:
        ModelError: if one has no value, or a text that is no UTF-8.
    """
    known = {}
    for one in node.attribute:
        try:
            known[one.name] = _attribute(one)
        except ValueError as error:
            raise ModelError(
                f"{node.name}: {node.op_type}: attribute {one.name!r}: expected a value, got"
                f" {str(error).splitlines()[0]}; export the model again"
            ) from None
    return known


def _attribute(attribute: AttributeProto) -> object:
    if attribute.ref_attr_name:
        raise ValueError(f"that of {attribute.ref_attr_name!r}, which is around no function")
    value = helper.get_attribute_value(attribute)
    if value is None:
        raise ValueError("none")
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return tuple(_plain(one) for one in value)
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode()
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


class _Formals(NamedTuple):
    """What ONNX's schema of an operator says of the nodes.

    Attributes:
        inputs: least and largest number.
        outputs: least and largest number.
        required: positions of inputs that must have a name.
        attributes: their types by name.
        given: names of attributes that every node has.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    required: tuple[int, ...]
    attributes: Mapping[str, str]
    given: tuple[str, ...]


@lru_cache(maxsize=1024)
def _formals(schema: defs.OpSchema) -> _Formals:
    single = defs.OpSchema.FormalParameterOption.Single
    return _Formals(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(i for i, one in enumerate(schema.inputs) if one.option is single),
        {name: str(one.type).rpartition(".")[2] for name, one in schema.attributes.items()},
        tuple(name for name, one in schema.attributes.items() if one.required),
    )


def check_nodes(nodes: Iterable[tuple[NodeProto, defs.OpSchema]]) -> None:
    """Refuses nodes whose inputs, outputs or attributes are not those of their operator. Attributes
    that ONNX does not know are left to the conversion.

    Args:
        nodes: each with ONNX's definition of its operator.

    Raises:
        ModelError: a line for each of the first problems.
    """
    problems = [
        f"{node.name}: {node.op_type}: {problem}; export the model again"
        for node, schema in nodes
        for problem in _misfits(node, _formals(schema))
    ]
    if problems:
        raise ModelError("\n".join(problems[:MAX_LINES]))


def _misfits(node: NodeProto, formals: _Formals) -> Iterator[str]:
    for what, names, (least, most) in (
        ("inputs", node.input, formals.inputs),
        ("outputs", node.output, formals.outputs),
    ):
        if not least <= len(names) <= most:
            limit = str(least) if least == most else f"{least} to {most}"
            limit = f"at least {least}" if most > MAX_NAMED else limit
            yield f"expected {limit} {what}, got {len(names)}"
    absent = [i for i in formals.required if i < len(node.input) and not node.input[i]]
    if absent:
        yield f"expected input {absent[0]}, got none"
    yield from _misfitting_attributes(node, formals)


def _misfitting_attributes(node: NodeProto, formals: _Formals) -> Iterator[str]:
    given = [one.name for one in node.attribute]
    for one in node.attribute:
        kind, expected = one.type, formals.attributes.get(one.name)
        if given.count(one.name) > 1:
            yield f"expected attribute {one.name!r} once, got it {given.count(one.name)} times"
        elif expected is not None and kind != AttributeProto.AttributeType.Value(expected):
            got = AttributeProto.AttributeType.Name(kind)
            yield f"attribute {one.name!r}: expected {expected}, got {got}"
    missing = [name for name in formals.given if name not in given]
    if missing:
        yield f"expected the attribute {missing[0]!r}, got none"
