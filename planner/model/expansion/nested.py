"""From the names of nested graphs to the tensors of one flat graph.

An `Expander` visits the nodes of a graph and of the graphs inside it. Each name stands for a value:
a tensor, by its name in the flat graph, or a list of tensors that is known while folding. Plain
nodes get their flat names and go to the folding pass; other nodes have a handler, which visits
graphs in scopes of their own and gives back the values of the node's outputs.

Names of the outermost graph stay. A node Add_2 in iteration 7 of Loop_3 is "Loop_3/7/Add_2". An
output of a graph gets the name that the node around it gives it, as far as a node makes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import GraphProto, NodeProto, ValueInfoProto, helper

from planner.model.canonical import unique_names
from planner.model.expansion.inlining import inherit_metadata
from planner.model.folding import Pass
from planner.model.protos import metadata, operator_type, subgraphs
from planner.model.scopes import is_next_state, module_names
from planner.model.values import shape_of
from planner.support.errors import ModelError
from planner.support.printable import few

MAX_UNROLLED_NODES = 10_000  # of all loops of a model together


@dataclass(frozen=True, eq=False)
class Part:
    """An output of a Split, which gets its name when it is first read.

    Attributes:
        split: the operator.
        position: of the output.
        axis: along which it is split; not negative.
        size: of the part along the axis.
    """

    split: NodeProto
    position: int
    axis: int
    size: int


@dataclass(frozen=True)
class Row:
    """What a Gather takes out of a tensor at one position, without the axis.

    Attributes:
        source: the tensor.
        axis: that the row does not have; not negative.
        position: along the axis.
    """

    source: str
    axis: int
    position: int


Element: TypeAlias = str | Part | Row


@dataclass(frozen=True)
class TensorSequence:
    """A sequence: tensors, or parts of one that have no name yet."""

    elements: tuple[Element, ...]


@dataclass(frozen=True)
class Maybe:
    """An optional: what it holds, or None."""

    content: str | TensorSequence | None


Value: TypeAlias = str | TensorSequence | Maybe


@dataclass(frozen=True)
class Body:
    """A graph, and what is asked about it in every iteration.

    Attributes:
        graph: its nodes in topological order.
        names: unique, one for each node.
        reads: names that its nodes and the graphs inside them read, or that it returns.
    """

    graph: GraphProto
    names: Sequence[str]
    reads: frozenset[str]


def names_read(graph: GraphProto) -> set[str]:
    """Names that the graph, or a graph inside it, reads or returns; the next microbatch reads new
    values of its state.
    """
    names = {output.name for output in graph.output}
    for node in graph.node:
        names |= names_read_by(node)
        if is_next_state(node):
            names.update(node.output)
    return names


def names_read_by(node: NodeProto) -> set[str]:
    """Names that a node or a graph inside it reads."""
    inner = (names_read(graph) for graph in subgraphs(node))
    return {name for name in node.input if name}.union(*inner)


@dataclass(frozen=True, eq=False)
class Scope:
    """The names of a graph while its nodes are visited.

    Attributes:
        path: in front of the names of nodes and tensors; "" in the outermost graph.
        place: the path without numbers of iterations.
        reads: names of the graph's own tensors that are read.
        outer: the scope in which a name is looked up that is not found here.
        wanted: names in the flat graph for tensors of this graph.
        metadata: of the nodes around the graph.
        values: what each name stands for, so far.
    """

    path: str
    place: str
    reads: frozenset[str]
    outer: "Scope | None" = None
    wanted: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)

    def find(self, name: str) -> Value | None:
        """What a name stands for, here or further out; None if it is unknown."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        return None


@dataclass(frozen=True, eq=False)
class Call:
    """A node that is being visited.

    Attributes:
        node: as it stands in its graph.
        name: of the node, with the path in front.
        place: the name without numbers of iterations.
        scope: that of its graph.
        inputs: None where an optional one is absent.
    """

    node: NodeProto
    name: str
    place: str
    scope: Scope
    inputs: tuple[Value | None, ...]

    def integer(self, name: str, default: int = 0) -> int:
        """The value of an attribute that is one integer."""
        return next((int(a.i) for a in self.node.attribute if a.name == name), default)

    def integers(self, name: str, default: Sequence[int]) -> Sequence[int]:
        """The value of an attribute that is a list of integers."""
        return next((list(a.ints) for a in self.node.attribute if a.name == name), default)

    def graph(self, name: str) -> GraphProto:
        """The graph that an attribute holds.

        Raises:
            ModelError: if there is none.
        """
        found: list[GraphProto] = [a.g for a in self.node.attribute if a.name == name]
        if not found:
            raise ModelError(f"{self}: expected a graph {name!r}, got none; export the model again")
        return found[0]

    def tensor(self, position: int) -> str:
        """The name of an input in the flat graph.

        Raises:
            ModelError: if the input is absent, or no tensor.
        """
        value = self.inputs[position] if position < len(self.inputs) else None
        if not isinstance(value, str):
            got = "nothing" if value is None else "a sequence or optional"
            raise ModelError(f"{self}: expected a tensor as input {position}, got {got}")
        return value

    def __str__(self) -> str:
        """The node for a message: its name, and the module that it came from."""
        marked = NodeProto()
        inherit_metadata(marked, {**self.scope.metadata, **metadata(self.node)})
        modules = module_names([marked])
        return f"{self.name} (in {modules[0]})" if modules else self.name


Handler: TypeAlias = "Callable[[Expander, Call], Sequence[Value | None]]"


class Expander:
    """The nodes visited so far, and the names given.

    Attributes:
        tensors: the folding pass, which gets the plain nodes.
        origins: node of the outermost graph from which an operator of another name came.
    """

    def __init__(self, graph: GraphProto, tensors: Pass, handlers: Mapping[str, Handler]) -> None:
        self.tensors = tensors
        self.origins: dict[str, str] = {}
        self._handlers = handlers
        self._origin = ""
        self._unrolled = 0
        # By place and name, the name in the flat graph of an initializer or a Constant. A place has
        # no numbers of iterations, so that 1,000 iterations share one.
        self._shared: dict[tuple[str, str], str] = {}
        self._names = {node.name for node in graph.node}
        self._tensors = {*tensors.types, *(name for node in graph.node for name in node.output)}

    def run(self, graph: GraphProto) -> None:
        """Visits the outermost graph."""
        body = self.body(graph)
        self.tensors.read |= body.reads
        scope = Scope("", "", body.reads, values={name: name for name in self.tensors.types})
        for node, name in zip(graph.node, body.names, strict=True):
            self._origin = name
            self.visit(node, name, scope)
        makers = {name: node for node in graph.node for name in node.output}
        for output in dict.fromkeys(output.name for output in graph.output):
            value = scope.find(output)
            if isinstance(value, str) and value != output:
                self._origin = makers[output].name
                call = Call(makers[output], self._origin, self._origin, scope, ())
                self.emit(call, "Identity", [value], [output], f"Identity_{output}")

    # ---- graphs inside nodes

    def body(self, graph: GraphProto) -> Body:
        """The graph as a `Body`; its operators are looked up."""
        self.tensors.learn(graph.node)
        return Body(graph, unique_names(graph.node), frozenset(names_read(graph)))

    def open(self, call: Call, body: Body, branch: str = "") -> Scope:
        """A scope with the initializers of a graph inside a node, equal for all iterations.

        Args:
            call: the node.
            body: the graph.
            branch: tells the graphs of one node apart.
        """
        if body.graph.sparse_initializer:
            raise ModelError(
                f"{call}: expected dense initializers, got sparse ones; make them dense"
            )
        place = f"{call.place}/{branch}" + ("/" if branch else "")
        inherited = {**call.scope.metadata, **metadata(call.node)}
        scope = Scope(f"{call.name}/", place, body.reads, call.scope, metadata=inherited)
        for tensor in body.graph.initializer:
            key = (place, tensor.name)
            if key not in self._shared:
                free = tensor.name not in self._tensors
                flat = self.fresh(tensor.name if free else f"{place}{tensor.name}")
                self._shared[key] = flat
                self.tensors.values.hold(tensor, flat)
                self.tensors.hold(tensor, flat)
            scope.values[tensor.name] = self._shared[key]
        return scope

    def open_function(self, call: Call, body: Body) -> Scope:
        """A scope for the function of a call, which sees nothing of what is around it."""
        inherited = {**call.scope.metadata, **metadata(call.node)}
        return Scope(f"{call.name}/", f"{call.name}/", body.reads, metadata=inherited)

    def walk(
        self,
        body: Body,
        opened: Scope,
        values: Mapping[str, Value | None] = {},
        wanted: Mapping[str, str] = {},
        iteration: int | None = None,
    ) -> list[Value]:
        """Visits the nodes of a graph.

        Args:
            body: the graph.
            opened: the scope that `open` made.
            values: of the graph's inputs.
            wanted: names in the flat graph for tensors that the graph makes; in a loop given to the
                last iteration alone, because earlier ones make other tensors.
            iteration: its number, in a loop.

        Returns:
            The values of its outputs.
        """
        path = opened.path if iteration is None else f"{opened.path}{iteration}/"
        scope = Scope(path, opened.place, body.reads, opened, wanted, opened.metadata)
        scope.values.update((name, value) for name, value in values.items() if value is not None)
        for node, name in zip(body.graph.node, body.names, strict=True):
            self.visit(node, name, scope)
        results = [scope.find(output.name) for output in body.graph.output]
        unknown = [o.name for o, v in zip(body.graph.output, results, strict=True) if v is None]
        if unknown:
            raise ModelError(f"{path}: returns {few(unknown)}, which no node in it makes")
        return [value for value in results if value is not None]

    def charge(self, call: Call, body: Body, iterations: int) -> None:
        """Counts the nodes of iterations that are to be unrolled.

        Raises:
            ModelError: if they are too many.
        """
        nodes = len(body.names)
        self._unrolled += iterations * max(nodes, 1)
        if self._unrolled > MAX_UNROLLED_NODES:
            raise ModelError(
                f"{call}: {call.node.op_type} is unrolled, which makes {self._unrolled} nodes or"
                f" more with those of other loops ({nodes} nodes per iteration); the limit is"
                f" {MAX_UNROLLED_NODES}: export the model with a shorter sequence, or with fewer"
                " iterations"
            )

    # ---- nodes

    def visit(self, node: NodeProto, name: str, scope: Scope) -> None:
        """Visits a node of the graph of a scope."""
        inputs = [scope.find(one) if one else None for one in node.input]
        inner = name.removeprefix("/") if scope.path else name
        call = Call(node, scope.path + inner, scope.place + inner, scope, tuple(inputs))
        unknown = [o for o, v in zip(node.input, inputs, strict=True) if o and v is None]
        if unknown:
            raise ModelError(
                f"{call}: reads {few(unknown)}, which no earlier node makes; "
                "nodes must be in topological order"
            )
        again = [one for one in node.output if one in scope.values]
        if again:
            raise ModelError(f"{call}: makes {few(again)}, which exists already")
        handler = self._handlers.get(operator_type(node), Expander.plain)
        results = handler(self, call)
        for output, value in zip(node.output, results, strict=False):
            if output and value is not None:
                scope.values[output] = value

    def plain(self, call: Call) -> Sequence[Value | None]:
        """A node of tensors only goes to the folding pass."""
        if operator_type(call.node) == "Identity" and not isinstance(call.inputs[0], str):
            return call.inputs
        key = (call.scope.place, next(iter(call.node.output), ""))
        constant = call.scope.path and operator_type(call.node) == "Constant"
        if constant and key in self._shared:
            return [self._shared[key]]
        node = self.flat_node(call)
        if constant:
            node.output[0] = self._shared[key] = self.fresh("".join(key))
            self.tensors.read.add(node.output[0])
        self.tensors.visit(node)
        return list(node.output)

    def flat_node(self, call: Call) -> NodeProto:
        """A node with the names that it has in the flat graph.

        Raises:
            ModelError: if it reads a sequence or an optional.
        """
        others = [o for o, v in zip(call.node.input, call.inputs, strict=True)
                  if not isinstance(v, str | None)]  # fmt: skip
        if others:
            raise ModelError(
                f"{call}: {operator_type(call.node)} takes {few(others)}, a sequence or optional,"
                " which only operators on sequences can: export the model without it"
            )
        inputs = ["" if value is None else str(value) for value in call.inputs]
        if not call.scope.path and inputs == list(call.node.input):
            return call.node
        node = NodeProto()
        node.CopyFrom(call.node)
        node.input[:] = inputs
        node.output[:] = [self.flat(call.scope, name) for name in call.node.output]
        self._label(node, call, call.name)
        return node

    def emit(
        self,
        call: Call,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        suffix: str = "",
        **attributes: Any,
    ) -> NodeProto:
        """Visits a new plain node in place of a call.

        Args:
            call: whose name, or that and a suffix, the node gets.
            operator: its type.
            inputs: names in the flat graph.
            outputs: names in the flat graph; they are read.
            suffix: tells several nodes of a call apart.
            attributes: of the node.

        Returns:
            The node.
        """
        node = helper.make_node(operator, inputs, outputs, **attributes)
        self.tensors.learn([node])
        self.tensors.read.update(filter(None, outputs))
        self._label(node, call, f"{call.name}/{suffix}" if suffix else call.name)
        inherit_metadata(node, metadata(call.node))
        self.tensors.visit(node)
        return node

    def _label(self, node: NodeProto, call: Call, name: str) -> None:
        """Names a node that is new in the flat graph, and says where it came from."""
        node.name = name
        if name != self._origin:
            while node.name in self._names:
                node.name += "_"
            self._names.add(node.name)
            self.origins[node.name] = self._origin
        inherit_metadata(node, call.scope.metadata)

    # ---- tensors

    def fresh(self, name: str) -> str:
        """A name for a tensor that no other has: this one, or with "_" behind it."""
        while name in self._tensors:
            name += "_"
        self._tensors.add(name)
        return name

    def flat(self, scope: Scope, name: str) -> str:
        """The name in the flat graph of a tensor that a node makes."""
        if not name:
            return ""
        flat = name if not scope.path else scope.wanted.get(name)
        flat = flat or self.fresh(scope.path + name)
        if name in scope.reads:
            self.tensors.read.add(flat)
        return flat

    def output(self, call: Call, position: int = 0) -> str:
        """The name in the flat graph of an output of a call; "" where it is absent."""
        names = call.node.output
        return self.flat(call.scope, names[position]) if position < len(names) else ""

    def wanted(self, call: Call, outputs: Iterable[ValueInfoProto]) -> dict[str, str]:
        """Names for outputs of a graph: those of the first outputs of the node around it."""
        names: dict[str, str] = {}
        for i, output in enumerate(outputs):
            if output.name not in names and (flat := self.output(call, i)):
                names[output.name] = flat
        return names

    def constant(self, name: str, value: np.ndarray) -> str:
        """A constant of that name, which is free."""
        self.tensors.add_constant(name, value)
        return name

    def evaluate_now(self, call: Call, name: str) -> np.ndarray | None:
        """The value of a tensor that a call needs; None if it depends on data."""
        return self.tensors.evaluate_now(name, call.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return shape_of(self.tensors.types[name])

    def element(self, call: Call, element: Element, name: str, suffix: str = "") -> str:
        """The name of an element of a sequence.

        Args:
            call: that reads it, and names the Gather if one is needed.
            element: of a sequence.
            name: for the element, if it has none.
            suffix: of the Gather's name.
        """
        match element:
            case str():
                return element
            case Part(split, position, axis, size):
                if not split.output[position]:
                    source = self.tensors.types[split.input[0]].tensor_type.elem_type
                    shape = list(self.shape(split.input[0]))
                    shape[axis] = size
                    type_ = helper.make_tensor_type_proto(source, shape)
                    self.tensors.name_output(split, position, name, type_)
                return str(split.output[position])
            case Row(source, axis, position):
                at = self.constant(self.fresh(f"{name}.position"), np.array(position))
                self.emit(call, "Gather", [source, at], [name], suffix, axis=axis)
                return name

    def elements(self, call: Call, elements: Iterable[Element]) -> list[str]:
        """Names of all elements of a sequence that a call reads."""
        return [
            one
            if isinstance(one, str)
            else self.element(call, one, self.fresh(f"{call.name}/{i}"), f"Gather_{i}")
            for i, one in enumerate(elements)
        ]

    def split(
        self,
        call: Call,
        name: str,
        axis: int,
        sizes: Sequence[int],
        outputs: Sequence[str],
        suffix: str = "",
    ) -> NodeProto:
        """Emits a Split; its sizes are an attribute before operator set 13.

        Args:
            call: that asks for it.
            name: of the tensor that is split.
            axis: along which it is split.
            sizes: of the parts.
            outputs: names of the parts; "" where they are named later.
            suffix: of the operator's name.
        """
        if self.tensors.opsets[""] < 13:
            return self.emit(call, "Split", [name], outputs, suffix, axis=axis, split=list(sizes))
        known = self.constant(self.fresh(f"{call.name}/sizes"), np.array(sizes, dtype=np.int64))
        return self.emit(call, "Split", [name, known], outputs, suffix, axis=axis)

    def with_axis(self, call: Call, name: str, axis: int, output: str, suffix: str) -> None:
        """Emits an Unsqueeze of one axis."""
        self._change_axis(call, "Unsqueeze", name, axis, output, suffix)

    def without_axis(self, call: Call, name: str, axis: int, output: str, suffix: str) -> None:
        """Emits a Squeeze of one axis."""
        self._change_axis(call, "Squeeze", name, axis, output, suffix)

    def _change_axis(
        self, call: Call, operator: str, name: str, axis: int, output: str, suffix: str
    ) -> None:
        if self.tensors.opsets[""] < 13:
            self.emit(call, operator, [name], [output], suffix, axes=[axis])
        else:
            axes = self.constant(self.fresh(f"{output}.axes"), np.array([axis]))
            self.emit(call, operator, [name, axes], [output], suffix)

    def stack(
        self, call: Call, names: Sequence[str], axis: int, output: str, suffix: str = ""
    ) -> None:
        """Emits what puts equal tensors beside each other along a new axis.

        Args:
            call: that asks for it.
            names: of the tensors; at least one.
            axis: the new one; negative from the end.
            output: name of the result.
            suffix: of the names of the operators.
        """
        axis %= len(self.shape(names[0])) + 1
        raised = [output] if len(names) == 1 else [
            self.fresh(f"{output}.{i}") for i in range(len(names))
        ]  # fmt: skip
        for i, (name, one) in enumerate(zip(names, raised, strict=True)):
            self.with_axis(call, name, axis, one, f"Unsqueeze{suffix}_{i}")
        if len(names) > 1:
            self.emit(call, "Concat", raised, [output], f"Concat{suffix}", axis=axis)
