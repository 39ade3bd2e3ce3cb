"""ONNX graph -> plain nodes with static types: control flow, sequences and functions expanded, all
that is known before the model runs folded.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onnx import NodeProto, TypeProto

from planner.model.expansion.control_flow import CONTROL_FLOW
from planner.model.expansion.nested import Expander
from planner.model.expansion.sequences import SEQUENCE_OPERATORS
from planner.model.folding import Pass
from planner.model.source import Source
from planner.model.values import Values
from planner.support.errors import ModelError
from planner.support.printable import few


@dataclass(frozen=True)
class Folded:
    """The result of a pass over the nodes.

    Attributes:
        types: of inputs, initializers and every tensor that a node makes and another one reads, or
            the graph returns; all static.
        nodes: without those that became constants.
        origins: for each node that is not among those of the model, the node that it came from.
        shape_determining: initializers whose values shape the graph, such as conditions, and a node
            for each that depends on it.
        values: the model's, with the folded constants and the initializers of graphs inside nodes.
    """

    types: Mapping[str, TypeProto]
    nodes: tuple[NodeProto, ...]
    origins: Mapping[str, str]
    shape_determining: Mapping[str, str]
    values: Values


def fold(source: Source, inputs: Mapping[str, TypeProto], trained: Collection[str]) -> Folded:
    """Expands and folds the nodes that are known before the model runs, and infers the types of
    all others.

    Args:
        source: the model.
        inputs: static types of the graph's inputs.
        trained: names that are no constants, because the user wants them trained.

    Raises:
        ModelError: naming the node whose output has no static shape, or whose control flow depends
            on data.
        OperatorError: if ONNX does not define operators.
    """
    values, graph = source.values.copy(), source.proto.graph
    tensors = Pass(source.proto, inputs, values, trained)
    expander = Expander(graph, tensors, {**CONTROL_FLOW, **SEQUENCE_OPERATORS})
    expander.run(graph)
    missing = [one.name for one in graph.output if one.name not in tensors.types]
    if missing:
        raise ModelError(f"expected the model's outputs to be tensors, got: {few(missing)}")
    nodes = tensors.remaining()
    names = {node.name for node in nodes}
    origins = {name: origin for name, origin in expander.origins.items() if name in names}
    return Folded(tensors.types, nodes, origins, tensors.shape_determining, values)
