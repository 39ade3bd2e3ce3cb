"""The evaluation form of an ONNX model: BatchNormalization by its running statistics, Dropout off,
everywhere else what the marks of `planner export` say (`model/scopes.py`), and no initializer or
node that nobody reads, such as the mode of a Dropout.

`model/modes.py` says how each version of the two operators writes its mode. Graphs within nodes,
the bodies of loops and branches, are changed as the outermost one.
"""

from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto, helper

from planner.model.expansion.nested import names_read
from planner.model.protos import domain_of, opsets, subgraphs
from planner.model.record import METADATA_KEY
from planner.model.scopes import ALWAYS, EVALUATION_MARK, MARKS, MODE_MARK, STATE_MARK, mark_of
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
    versions = opsets(proto)
    changed = sum(_evaluate(graph, versions.get("", 1)) for graph in _graphs(proto.graph))
    changed += _obey_marks(proto.graph)
    for graph in reversed([*_graphs(proto.graph)]):  # inner ones read values of outer ones
        _remove_unread(graph)
    return changed


def _obey_marks(graph: GraphProto) -> int:
    """Gives marked nodes what they have in evaluation, and takes away those that make new state.
    Gives the number of both.
    """
    changed = 0
    for at in reversed(range(len(graph.node))):
        node = graph.node[at]
        if mark_of(node, STATE_MARK):
            del graph.node[at]
        elif evaluation := mark_of(node, EVALUATION_MARK):
            node.input[:] = [evaluation]
            _remove_notes(node.metadata_props, {EVALUATION_MARK})
        else:
            continue
        changed += 1
    return changed


def remove_annotations(proto: ModelProto) -> None:
    """Removes the stages and devices of a strategy, and older marks of the planner; the record of
    the module and the marks of its export stay.
    """
    del proto.configuration[:]
    _remove_old_notes(proto.metadata_props)
    for graph in _graphs(proto.graph):
        for node in graph.node:
            del node.device_configurations[:]
            _remove_old_notes(node.metadata_props)


def _remove_old_notes(entries: MutableSequence[StringStringEntryProto]) -> None:
    own = {entry.key for entry in entries if entry.key.startswith("planner.")}
    _remove_notes(entries, own - _KEPT)


def _remove_notes(entries: MutableSequence[StringStringEntryProto], keys: Collection[str]) -> None:
    """Removes some entries of metadata."""
    for at in reversed(range(len(entries))):
        if entries[at].key in keys:
            del entries[at]


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _remove_unread(graph: GraphProto) -> None:
    """Removes nodes and initializers that nobody reads."""
    while dead := _dead_nodes(graph):
        for at in reversed(dead):
            del graph.node[at]
    unread = {tensor.name for tensor in graph.initializer} - names_read(graph)
    for values in (graph.initializer, graph.input):  # older files have them among the inputs, too
        for at in reversed(range(len(values))):
            if values[at].name in unread:
                del values[at]


def _dead_nodes(graph: GraphProto) -> list[int]:
    read = names_read(graph)
    return [at for at, node in enumerate(graph.node) if read.isdisjoint(node.output)]


def _evaluate(graph: GraphProto, version: int) -> int:
    """Changes the nodes of one graph, and gives the number of those that it changed."""
    read = names_read(graph)
    nodes: list[NodeProto] = []
    changed = 0
    for node in graph.node:
        before = node.SerializeToString()
        nodes.append(node)
        if mark_of(node, MODE_MARK) == ALWAYS:
            nodes[-1:] = _as_always(node, graph)
        elif node.op_type == "BatchNormalization" and not domain_of(node):
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


def normalized_by_batch(node: NodeProto, rank: int) -> Sequence[NodeProto]:
    """BatchNormalization in training form, without the running statistics:

        (x - mean) / sqrt(variance + epsilon) * scale + bias

    with the mean and the variance of the batch over all dimensions but the channels.

    Args:
        rank: of x.
    """
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    x, scale, bias = node.input[:3]
    prefix = node.output[0]
    nodes: list[NodeProto] = []

    def then(kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"{prefix}/{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(value: list[int] | float) -> str:
        if isinstance(value, list):
            return then("Constant", value_ints=value)
        return then("Constant", value_float=value)

    others = constant([dim for dim in range(rank) if dim != 1])
    behind = constant(list(range(1, rank - 1))) if rank > 2 else ""
    centred = then("Sub", x, then("ReduceMean", x, others))
    variance = then("ReduceMean", then("Mul", centred, centred), others)
    small = then("CastLike", constant(attributes.get("epsilon", 1e-5)), x)
    normal = then("Div", centred, then("Sqrt", then("Add", variance, small)))
    wide: Callable[[str], str] = lambda one: then("Unsqueeze", one, behind) if behind else one  # noqa: E731
    then("Add", then("Mul", normal, wide(scale)), wide(bias), out=node.output[0])
    return nodes


def ranks_in(graph: GraphProto) -> dict[str, int]:
    """Ranks of the tensors that a graph describes."""
    values = (*graph.value_info, *graph.input)
    return {one.name: len(one.type.tensor_type.shape.dim) for one in values}


def _as_always(node: NodeProto, graph: GraphProto) -> Sequence[NodeProto]:
    """A node that computes as in training, for programs that have no training form of it."""
    if node.op_type != "BatchNormalization":
        return [node]
    rank = ranks_in(graph).get(node.input[0])
    if rank is None:
        raise ModelError(
            f"{node.name}: it normalizes by the batch in evaluation, too, and the file does not say"
            f" which shape {node.input[0]!r} has: write the weights with --form training"
        )
    return normalized_by_batch(node, rank)


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
