"""What a module computes in evaluation, in the graph that it was exported as in training.

The module is traced in both modes, and both graphs are walked from their outputs. Where they call
the same operators they stay one. Differences that every reader of ONNX knows need no mark: Dropout,
and the form of BatchNormalization. Everywhere else a marked node stands before the reader
(`model/scopes.py`): in evaluation it gives the value of the other graph, whose nodes are copied as
far as they differ.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from planner.model.scopes import ALWAYS, EVALUATION_MARK, MODE_MARK, STOP_MARK

_SCOPES = "pkg.torch.onnx.name_scopes"
Use = tuple[ir.Node | None, int]
"""Where a value is read: a node and the position of its input, or None and that of an output."""


def mark_modes(graph: ir.Graph, other: ir.Graph, held: frozenset[str]) -> str:
    """Marks in a graph what its module computes in evaluation.

    Args:
        graph: of the module in training, changed in place.
        other: of the module in evaluation, which is used up.
        held: names of parameters and buffers.

    Returns:
        Why that cannot be said, and nothing is marked; else empty.
    """
    if len(graph.outputs) < len(other.outputs):
        return (
            f"it has {len(other.outputs)} outputs in evaluation, {len(graph.outputs)} in training"
        )
    for mine, its in zip(graph.outputs, other.outputs, strict=False):
        if (mine.dtype, _dims(mine)) != (its.dtype, _dims(its)):
            return f"its output {mine.name} has another shape or type in evaluation"
    walk = _Walk(held, _hints(graph, other), _leaves(graph, other, held))
    walk.run([(None, i) for i in range(len(other.outputs))], graph, other)
    copies = _copies(walk, graph)
    if isinstance(copies, str):
        return copies
    mark_dropout(walk.partner)
    return _insert(walk, graph, copies)


def mark_dropout(nodes: Iterable[ir.Node]) -> None:
    """Marks the Dropouts among some nodes that drop in evaluation, too."""
    for node in nodes:
        if node.op_type == "Dropout":
            node.metadata_props[MODE_MARK] = ALWAYS


def mark_norms(graph: ir.Graph, held: frozenset[str]) -> None:
    """Marks normalizations by the batch that have no running statistics: they have but one mode.

    Args:
        held: names of parameters and buffers.
    """
    for node in graph.all_nodes():
        if node.op_type == "BatchNormalization" and _attributes(node).get("training_mode"):
            mean = node.inputs[3]
            if mean is None or mean.name not in held:
                node.metadata_props[MODE_MARK] = ALWAYS


def _dims(value: ir.Value) -> list[object] | None:
    shape = value.shape
    return None if shape is None else [one if isinstance(one, int) else None for one in shape]


@dataclass
class _Walk:
    """Nodes of both graphs that are one, and where values of both differ.

    Attributes:
        held: names of parameters and buffers.
        hints: by node in evaluation, a node in training that may be the same one.
        values: by value in evaluation, the one in training that is equal to it in evaluation.
        partner: by node in training, the node in evaluation.
        differing: where a value is read in training, the value that is read in evaluation.
    """

    held: frozenset[str]
    hints: Mapping[ir.Node, ir.Node]
    values: dict[ir.Value, ir.Value]
    partner: dict[ir.Node, ir.Node] = field(default_factory=dict)
    differing: dict[Use, ir.Value] = field(default_factory=dict)

    def run(self, uses: list[Use], graph: ir.Graph, other: ir.Graph) -> None:
        """Walks from outputs to inputs."""
        pending = [(use, other.outputs[use[1]]) for use in reversed(uses)]
        while pending:
            use, theirs = pending.pop()
            mine = graph.outputs[use[1]] if use[0] is None else use[0].inputs[use[1]]
            assert mine is not None
            theirs = _behind_copies(theirs)
            if self._same_leaf(mine, theirs):
                continue
            node, its = mine.producer(), theirs.producer()
            if node is not None and its is not None and self._one(node, its, mine, theirs):
                if node not in self.partner:
                    pending += self._join(node, its)
            elif node is not None and _is_copy(node):
                pending.append(((node, 0), theirs))
            else:
                self.differing[use] = theirs
                pending += self._below(theirs)

    def _join(self, node: ir.Node, its: ir.Node) -> list[tuple[Use, ir.Value]]:
        """Takes two nodes for one; gives where their inputs are read."""
        self.partner[node] = its
        self.values |= zip(its.outputs, node.outputs, strict=False)
        return [((node, i), value) for i, value in enumerate(its.inputs) if value is not None]

    def _below(self, value: ir.Value) -> list[tuple[Use, ir.Value]]:
        """Joins nodes that a value in evaluation depends on with those in training that seem to be
        the same; gives where their inputs are read.
        """
        found, pending, done = list[tuple[Use, ir.Value]](), [value], set[ir.Value]()
        while pending:
            one = _behind_copies(pending.pop())
            its = one.producer()
            if its is None or one in done or one in self.values:
                continue
            done.add(one)
            node = self.hints.get(its)
            if node is not None and node not in self.partner and self._alike(node, its):
                found += self._join(node, its)
            else:
                pending += [each for each in its.inputs if each is not None]
        return found

    def _same_leaf(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether both are the same input, parameter or buffer, or equal constants."""
        if mine.producer() is not None or theirs.producer() is not None:
            return self._equal(mine, theirs)
        return self.values.get(theirs) is mine or self._equal(mine, theirs)

    def _one(self, node: ir.Node, its: ir.Node, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether two values are made in the same way, up to the form of normalizations."""
        if node in self.partner:
            return self.partner[node] is its and mine.index() == theirs.index()
        return mine.index() == theirs.index() and self._alike(node, its)

    def _alike(self, node: ir.Node, its: ir.Node) -> bool:
        """Whether two nodes do the same with inputs that are the same."""
        if _kind(node) != _kind(its):
            return False
        if [one is None for one in node.inputs] != [one is None for one in its.inputs]:
            return False
        attributes, others = _attributes(node), _attributes(its)
        if node.op_type == "BatchNormalization":
            if not attributes.get("training_mode") and others.get("training_mode"):
                return False
            attributes["training_mode"] = others["training_mode"] = None
            attributes["momentum"] = others["momentum"] = None
        if attributes != others or _captured(node):
            return False
        pairs = zip(node.inputs, its.inputs, strict=True)
        return all(a is None or b is None or self._equal_if_constant(a, b) for a, b in pairs)

    def _equal_if_constant(self, one: ir.Value, other: ir.Value) -> bool:
        """Whether two values are equal constants, or none of them is a constant."""
        if self._number(one) is None and self._number(other) is None:
            return True
        return self._equal(one, other)

    def _equal(self, one: ir.Value, other: ir.Value) -> bool:
        """Whether two values are equal constants."""
        a, b = self._number(one), self._number(other)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.tobytes() == b.tobytes()

    def _number(self, value: ir.Value) -> np.ndarray | None:
        """The content of a constant; None of everything else, such as parameters and buffers."""
        made = None if value.name in self.held else ir.convenience.get_const_tensor(value)
        return None if made is None else made.numpy()


def _leaves(graph: ir.Graph, other: ir.Graph, held: frozenset[str]) -> dict[ir.Value, ir.Value]:
    """Inputs, parameters and buffers of the second graph, and those of the first one."""
    both = zip(other.inputs, graph.inputs, strict=True)
    shared = held & graph.initializers.keys() & other.initializers.keys()
    return dict(both) | {other.initializers[name]: graph.initializers[name] for name in shared}


def _hints(graph: ir.Graph, other: ir.Graph) -> dict[ir.Node, ir.Node]:
    """Nodes of the second graph, each with the node of the first one that has the same type and the
    same place among those of its module.
    """
    first, second = _by_module(graph), _by_module(other)
    return {
        its: node
        for key in first.keys() & second.keys()
        if len(first[key]) == len(second[key])
        for node, its in zip(first[key], second[key], strict=True)
    }


def _by_module(graph: ir.Graph) -> dict[tuple[str, str], list[ir.Node]]:
    found = defaultdict(list)
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        found[str(scopes[:-1]), node.op_type].append(node)
    return found


def _kind(node: ir.Node) -> tuple[str, str, int]:
    return node.domain, node.op_type, len(node.inputs)


_LARGE = frozenset({ir.AttributeType.TENSOR, ir.AttributeType.GRAPH})


def _attributes(node: ir.Node) -> dict[str, object]:
    """Attributes in a form that can be compared."""
    return {
        name: ir.serde.serialize_attribute(one).SerializeToString(deterministic=True)
        if one.type in _LARGE
        else one.value
        for name, one in node.attributes.items()
    }


def _captured(node: ir.Node) -> bool:
    """Whether graphs inside of a node read something from around it."""
    return any(
        value is not None and value.producer() is not None and value.producer() not in inner
        for one in node.attributes.values()
        if one.type is ir.AttributeType.GRAPH
        for inner in [set(one.as_graph().all_nodes())]
        for each in inner
        for value in each.inputs
    )


def _is_copy(node: ir.Node) -> bool:
    """Whether a node gives its first input in evaluation."""
    return not node.domain and node.op_type in ("Identity", "Dropout")


def _behind_copies(value: ir.Value) -> ir.Value:
    """The value that a plain Identity was made of."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and not node.domain:
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def _copies(walk: _Walk, graph: ir.Graph) -> dict[ir.Value, ir.Value] | str:
    """By value in evaluation that training does not have, its copy for the graph, or why it cannot
    be copied. Nodes are made, and not inserted.
    """
    known = dict(walk.values)
    for wanted in dict.fromkeys(walk.differing.values()):
        for value in _cone(wanted, known):
            node = value.producer()
            if node is None:
                made = graph.initializers.get(str(value.name)) if value.name in walk.held else None
                if made is None and value.const_value is not None:
                    made = ir.val(
                        f"{value.name}/evaluation", value.dtype, value.shape,
                        const_value=value.const_value,
                    )  # fmt: skip
                if made is None:
                    return f"it reads {value.name} in evaluation alone"
                known[value] = made
            elif why := _not_copied(node):
                return f"{node.op_type} {why}"
            else:
                known |= zip(node.outputs, _copy(node, known).outputs, strict=True)
    return known


def _not_copied(node: ir.Node) -> str:
    """Why a node of the evaluation cannot be copied; empty where it can."""
    if any(one.type is ir.AttributeType.GRAPH for one in node.attributes.values()):
        return "differs in evaluation"
    if _attributes(node).get("training_mode") and MODE_MARK not in node.metadata_props:
        return "is in training form in evaluation alone"
    return ""


def _copy(node: ir.Node, known: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """A copy of a node of the evaluation that reads the graph's values."""
    copy = ir.Node(
        node.domain, node.op_type,
        [None if one is None else known[one] for one in node.inputs],
        node.attributes.values(), num_outputs=len(node.outputs),
        name=f"{node.name}/evaluation",
        metadata_props={k: v for k, v in node.metadata_props.items() if k != STOP_MARK},
    )  # fmt: skip
    mark_dropout([copy])
    for mine, its in zip(copy.outputs, node.outputs, strict=True):
        mine.name = f"{its.name}/evaluation" if its.name else its.name
        mine.type, mine.shape = its.type, its.shape
    return copy


def _cone(wanted: ir.Value, known: Mapping[ir.Value, ir.Value]) -> Iterator[ir.Value]:
    """Values that have to be made for one, each behind those that it is made of; of the outputs of
    a node only one.
    """
    done: set[object] = set()
    pending = [(wanted, False)]
    while pending:
        value, ready = pending.pop()
        node = value.producer()
        key = value if node is None else node
        if value in known or key in done:
            continue
        if ready:
            done.add(key)
            yield value
            continue
        pending.append((value, True))
        if node is not None:
            pending += [(one, False) for one in node.inputs if one is not None]


def _insert(walk: _Walk, graph: ir.Graph, known: Mapping[ir.Value, ir.Value]) -> str:
    """Puts copies and marked nodes into the graph, in an order in which all is made before it is
    read; gives why there is none.
    """
    marked: dict[tuple[ir.Value, ir.Value], ir.Node] = {}
    for (node, at), theirs in walk.differing.items():
        mine = graph.outputs[at] if node is None else node.inputs[at]
        assert mine is not None
        if (mine, theirs) not in marked:
            marked[mine, theirs] = _marked(
                graph, mine, known[theirs], f"{mine.name}/by_mode_{len(marked)}"
            )
        made = marked[mine, theirs].outputs[0]
        if node is None:
            made.name, mine.name = mine.name, f"{mine.name}/training"
            graph.outputs[at] = made
        else:
            node.replace_input_with(at, made)
    try:
        graph.sort()
    except ValueError:  # a circle
        for (mine, _), one in marked.items():
            name = one.outputs[0].name
            ir.convenience.replace_all_uses_with(one.outputs[0], mine, replace_graph_outputs=True)
            if mine.is_graph_output():
                mine.name = name
            graph.remove(one, safe=True)
        return "values of its training and of its evaluation depend on each other"
    for one in marked.values():
        evaluation = one.inputs[1]
        assert evaluation is not None
        one.metadata_props[EVALUATION_MARK] = str(evaluation.name)
        one.resize_inputs(1)
    return ""


def _marked(graph: ir.Graph, mine: ir.Value, theirs: ir.Value, name: str) -> ir.Node:
    """A new node that gives one value in training, and another in evaluation; for the time being,
    it reads both.
    """
    for one in _new(theirs):
        if isinstance(one, ir.Node):
            graph.append(one)
        else:
            graph.initializers[str(one.name)] = one
    node = ir.Node("", "Identity", [mine, theirs], name=name)
    made = node.outputs[0]
    made.name, made.type, made.shape = name, mine.type, mine.shape
    graph.append(node)
    return node


def _new(value: ir.Value) -> list[ir.Node | ir.Value]:
    """Nodes and constants that a value is made of, and that are in no graph yet."""
    pending, found = [value], dict[ir.Node | ir.Value, None]()
    while pending:
        one = pending.pop()
        node = one.producer()
        if node is None:
            if one.const_value is not None and not one.is_initializer():
                found[one] = None
        elif node.graph is None and node not in found:
            found[node] = None
            pending += [each for each in node.inputs if each is not None]
    return [*found]
