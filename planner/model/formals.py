"""Nodes against ONNX's definition of their operator: number of inputs and outputs, types of
attributes. ONNX's inference and the conversion to torch look for them without asking.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from onnx import AttributeProto, NodeProto
from onnx.defs import OpSchema

from planner.support.errors import ModelError

MAX_LINES = 5
"""Problems of one graph that are listed."""
MAX_NAMED = 1000
"""An operator with more inputs or outputs takes any number of them."""


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
def _formals(schema: OpSchema) -> _Formals:
    single = OpSchema.FormalParameterOption.Single
    return _Formals(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(i for i, one in enumerate(schema.inputs) if one.option is single),
        {name: str(one.type).rpartition(".")[2] for name, one in schema.attributes.items()},
        tuple(name for name, one in schema.attributes.items() if one.required),
    )


def check_nodes(nodes: Iterable[tuple[NodeProto, OpSchema]]) -> None:
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
