"""Marks of `planner export` for state and for modes, which ONNX cannot express.

They are metadata of nodes that ONNX has, so that every other program reads the file as if they were
not there:

    at an Identity    planner.state       a buffer: the node makes its value after this microbatch
    at an Identity    planner.evaluation  a tensor: in evaluation the node gives this one
    at a BatchNormalization or Dropout    planner.mode = "always": in evaluation, too, it computes
                                          as in training

While a model is read, marked identities become operators of the planner's own domain, with all that
they read among their inputs.
"""

from collections.abc import Iterable, Mapping

from onnx import ModelProto, NodeProto, helper

from planner.model.foreign import Described, ForeignNode
from planner.model.scopes import EVALUATION_MARK, STATE_MARK

ALWAYS = "always"
OWN_DOMAIN = "planner"
NEXT_STATE, BY_MODE = "NextState", "ByMode"
"""Operators (value, state) -> value, and (in training, in evaluation) -> one of them."""


def like_the_first(node: ForeignNode) -> tuple[Described]:
    """The type of the output of an operator of the planner's own."""
    first = node.inputs[0]
    assert first is not None
    return (first,)


def is_next_state(node: NodeProto) -> bool:
    """Whether a node makes the next value of a state, which the next microbatch reads."""
    return node.op_type == NEXT_STATE and node.domain == OWN_DOMAIN


def mark_of(node: NodeProto, key: str) -> str:
    """The value of a mark; "" without it."""
    return next((one.value for one in node.metadata_props if one.key == key), "")


def states_in(nodes: Iterable[NodeProto]) -> frozenset[str]:
    """The initializers that some nodes make new values of."""
    return frozenset(filter(None, (mark_of(node, STATE_MARK) for node in nodes)))


def explicit(proto: ModelProto) -> ModelProto:
    """A copy of a model with operators of the planner's own in place of marked identities; itself
    without any.
    """
    if not any(_own_operator(node) for node in proto.graph.node):
        return proto
    marked, proto = proto, ModelProto()
    proto.CopyFrom(marked)
    for node in proto.graph.node:
        if own := _own_operator(node):
            node.op_type, node.domain = own[0], OWN_DOMAIN
            node.input.append(own[1])
    proto.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))
    return proto


def _own_operator(node: NodeProto) -> tuple[str, str] | None:
    """The operator that a marked Identity stands for, and its second input."""
    if node.op_type != "Identity" or node.domain:
        return None
    kinds: Mapping[str, str] = {STATE_MARK: NEXT_STATE, EVALUATION_MARK: BY_MODE}
    return next(((kind, mark_of(node, key)) for key, kind in kinds.items() if mark_of(node, key)),
                None)  # fmt: skip
