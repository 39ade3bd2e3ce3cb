"""Which operators there are: ONNX's own, those of ONNX Runtime's optimisers, and registered ones.

Here is what a model needs to know of an operator: ONNX's schema, or the function that tells the
types of its outputs. `operators/` computes them.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx
from onnx import AttributeProto, NodeProto, defs, helper

from planner.model.foreign import ShapeFunction
from planner.model.marks import BY_MODE, NEXT_STATE, OWN_DOMAIN, like_the_first
from planner.model.microsoft import SHAPES
from planner.support.errors import ModelError


@dataclass(frozen=True, slots=True)
class Foreign:
    """An operator that ONNX does not define.

    Attributes:
        shapes: the types of its outputs.
        without_gradient: positions of float inputs through which no gradient flows.
        source: of the function that computes it; empty if that is the planner's own.
    """

    shapes: ShapeFunction
    without_gradient: tuple[int, ...] = ()
    source: bytes = b""


# Cosines and sines are tables, not parameters.
_TABLES = {"com.microsoft.RotaryEmbedding": (2, 3), "com.microsoft.GroupQueryAttention": (7, 8)}

FOREIGN: dict[str, Foreign] = {
    **{kind: Foreign(shapes, _TABLES.get(kind, ())) for kind, shapes in SHAPES.items()},
    f"{OWN_DOMAIN}.{NEXT_STATE}": Foreign(like_the_first, (0, 1)),
    f"{OWN_DOMAIN}.{BY_MODE}": Foreign(like_the_first, (1,)),
}
"""Operator that ONNX does not define, with its domain in front -> what a model needs of it."""

AS_ONNX: Mapping[str, tuple[str, int]] = {
    "LayerNormalization": ("LayerNormalization", 17),
    "com.microsoft.GatherND": ("GatherND", 13),
    "com.microsoft.GridSample": ("GridSample", 16),
    "com.microsoft.Pad": ("Pad", 13),
    "com.microsoft.Trilu": ("Trilu", 14),
}
"""Operators that are one of ONNX's under another name, or before the version that brought it: ONNX
Runtime writes LayerNormalization into models of any version.
"""

FUSED: Mapping[str, tuple[str, int]] = {
    "com.microsoft.FusedConv": ("Conv", 11),
    "com.microsoft.FusedGemm": ("Gemm", 13),
}
"""Operators of ONNX with an activation behind them, which changes no shape."""

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
    if kind in AS_ONNX and (domain or version < AS_ONNX[kind][1]):
        operator, version = AS_ONNX[kind]
        domain = ""
    newest = defs.onnx_opset_version() if not domain else version
    if not 0 < version <= newest:
        return None
    try:
        schema = defs.get_schema(operator, version, domain)
    except defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def without_activation(node: NodeProto, kind: str) -> NodeProto:
    """The node of `FUSED` as the one of ONNX that it was."""
    operator, version = FUSED[kind]
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


def modules_of(nodes: Iterable[NodeProto]) -> list[str]:
    """The modules that nodes came from, each once, as torch's exporter wrote them.

    >>> node = NodeProto(op_type="Foo")
    >>> scopes, classes = "['', 'mlp', 'foo']", "['m.Net', 'm.Mlp', 'foo']"
    >>> _ = node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    >>> _ = node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=classes)
    >>> modules_of([node, NodeProto(op_type="Foo")])
    ['mlp (Mlp)']
    """
    return list(dict.fromkeys(filter(None, map(_module_of, nodes))))


def _module_of(node: NodeProto) -> str:
    """The innermost module; "" where the node has none. The last scope is the node's own."""
    known = {one.key: one.value for one in node.metadata_props}
    scopes, classes = (
        _texts(known.get(f"pkg.torch.onnx.{key}", "[]"))
        for key in ("name_scopes", "class_hierarchy")
    )
    if len(scopes) < 2:
        return ""
    kind = classes[len(scopes) - 2].rpartition(".")[2] if len(classes) >= len(scopes) else ""
    name = scopes[-2] or "the whole model"
    return f"{name} ({kind})" if kind else name


def _texts(written: str) -> list[str]:
    """A list of texts as Python writes it; empty if it is none."""
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return []
    return [str(one) for one in value] if isinstance(value, list) else []
