"""The evaluation form of an ONNX model: BatchNormalization by its running statistics, Dropout off.

`model/modes.py` says how each version of the two operators writes its mode. Graphs within nodes,
the bodies of loops and branches, are changed as the outermost one.
"""

from collections.abc import Iterator, MutableSequence

from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto, helper

from planner.model.canonical import domain_of, own_domain
from planner.model.expansion.inlining import subgraphs
from planner.model.expansion.nested import names_read
from planner.model.record import METADATA_KEY
from planner.model.scopes import MARKS
from planner.support.errors import ModelError

_KEPT = {METADATA_KEY, *MARKS}
_RUNNING = {1: 3, 2: 4}
"""Outputs of BatchNormalization that are its running statistics in evaluation, and the inputs that
they are then equal to."""


def to_evaluation(proto: ModelProto) -> int:
    """Brings a model into its evaluation form, in place.

    Args:
        proto: with functions inlined.

    Returns:
        The number of nodes that were in training form.

    Raises:
        ModelError: if an output is read that there is in training alone.
    """
    versions = {own_domain(one.domain): one.version for one in proto.opset_import}
    before = names_read(proto.graph)
    changed = sum(_evaluate(graph, versions.get("", 1)) for graph in _graphs(proto.graph))
    _remove(proto.graph, before - names_read(proto.graph))
    return changed


def remove_annotations(proto: ModelProto) -> None:
    """Removes the stages and devices of a strategy, and older marks of the planner; the record of
    the module and the marks of its export stay.
    """
    del proto.configuration[:]
    _remove_notes(proto.metadata_props)
    for graph in _graphs(proto.graph):
        for node in graph.node:
            del node.device_configurations[:]
            _remove_notes(node.metadata_props)


def _remove_notes(entries: MutableSequence[StringStringEntryProto]) -> None:
    for at in reversed(range(len(entries))):
        if entries[at].key.startswith("planner.") and entries[at].key not in _KEPT:
            del entries[at]


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _remove(graph: GraphProto, names: set[str]) -> None:
    """Removes initializers, which older files have among the inputs, too."""
    held = {tensor.name for tensor in graph.initializer} & names
    for values in (graph.initializer, graph.input):
        for at in reversed(range(len(values))):
            if values[at].name in held:
                del values[at]


def _evaluate(graph: GraphProto, version: int) -> int:
    """Changes the nodes of one graph, and gives the number of those that it changed."""
    read = names_read(graph)
    nodes: list[NodeProto] = []
    changed = 0
    for node in graph.node:
        before = node.SerializeToString()
        nodes.append(node)
        if node.op_type == "BatchNormalization" and not domain_of(node):
            nodes += _batch_norm(node, version, read)
        elif node.op_type == "Dropout" and not domain_of(node):
            _drop_nothing(node, version)
        changed += before != node.SerializeToString()
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return changed


def _batch_norm(node: NodeProto, version: int, read: set[str]) -> list[NodeProto]:
    """Gives the node its one output, and gives nodes that make the others that are read."""
    _set(node, "training_mode", None)
    if version < 7:
        _set(node, "is_test", 1)
    others = []
    for position, name in enumerate(node.output):
        if position == 0 or not name or name not in read:
            continue
        if position not in _RUNNING:
            raise ModelError(
                f"{node.name}: the statistics of a batch, {name!r}, are read; they are there in"
                " training only: write the weights with --form training"
            )
        source = node.input[_RUNNING[position]]
        others.append(helper.make_node("Identity", [source], [name], f"{node.name}/{name}"))
    del node.output[1:]
    return others


def _drop_nothing(node: NodeProto, version: int) -> None:
    if version < 7:
        _set(node, "is_test", 1)
    elif version >= 12:
        del node.input[2:]
    _set(node, "seed", None)


def _set(node: NodeProto, name: str, value: int | None) -> None:
    """Sets an attribute, or removes it."""
    for at in reversed(range(len(node.attribute))):
        if node.attribute[at].name == name:
            del node.attribute[at]
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))
