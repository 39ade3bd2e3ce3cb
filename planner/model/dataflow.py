"""The operators that are left after folding, and the flow of values and gradients through them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onnx import GraphProto, ModelProto, NodeProto

from planner.artefacts import losses
from planner.artefacts.graph import (
    ITEM_BYTES,
    MAX_TENSOR_BYTES,
    Graph,
    LossChoice,
    Operator,
    Parameter,
    Tensor,
)
from planner.artefacts.operator_types import facts
from planner.artefacts.options import LossOptions
from planner.model import trainable
from planner.model.constants import Uses
from planner.model.expansion.expand import Folded
from planner.model.protos import domain_of, operator_type, opsets
from planner.model.schemas import attributes_of
from planner.model.scopes import (
    ALWAYS,
    MODE_MARK,
    OPEN_MARK,
    is_next_state,
    mark_of,
    scope_of,
    stops_gradient,
)
from planner.model.source import Source
from planner.model.trainable import Choice
from planner.model.values import dtype_of, is_float, shape_of
from planner.support.errors import ModelError

MAX_STATIC_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Node:
    """An ONNX node that is left after folding.

    Attributes:
        name: unique; the operator's in the graph.
        type: the operator type without its domain.
        domain: "" for ONNX's own.
        version: of the domain's operator set that the model imports.
        inputs: in formal order; "" where an optional one is absent.
        outputs: in formal order; "" where one is absent or nobody reads it.
        attributes: of the node, as int, float, str, tuples of these, or arrays.
    """

    name: str
    type: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The operator type with its domain in front, if that is not ONNX's own."""
        return f"{self.domain}.{self.type}" if self.domain else self.type


def live_nodes(nodes: Sequence[NodeProto], graph: GraphProto) -> list[NodeProto]:
    """Copies of the nodes that the outputs of the graph and new values of its state need, without
    outputs that nobody reads.
    """
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(nodes):
        outputs = [name if name in needed or is_next_state(node) else "" for name in node.output]
        if any(outputs):
            live = NodeProto()
            live.CopyFrom(node)
            live.output[:] = outputs
            kept.append(live)
            needed.update(name for name in node.input if name)
    if not kept:
        raise ModelError("expected operators that work on the inputs, got constants only")
    return kept[::-1]


def nodes_of(kept: Iterable[NodeProto], proto: ModelProto) -> tuple[Node, ...]:
    """The nodes as `Node`s.

    Args:
        proto: of the model that they are of, whose operator sets they have.
    """
    versions = opsets(proto)
    return tuple(
        Node(
            name=node.name,
            type=node.op_type,
            domain=domain_of(node),
            version=versions[domain_of(node)],
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attributes={**attributes_of(node), **_marks(node)},
        )
        for node in kept
    )


def _marks(node: NodeProto) -> dict[str, object]:
    """What ONNX cannot say: the row of an embedding that gets no gradient, a stop, bounds whose
    gradient is zero, and that a node computes as in training in evaluation, too.
    """
    row = scope_of(node).padding if node.op_type == "Gather" else None
    padding: dict[str, object] = {} if row is None else {"padding_idx": row}
    stop: dict[str, object] = {"stop_gradient": 1} if stops_gradient(node) else {}
    bounds: dict[str, object] = {"open_bounds": 1} if mark_of(node, OPEN_MARK) else {}
    always: dict[str, object] = {ALWAYS: 1} if mark_of(node, MODE_MARK) == ALWAYS else {}
    return padding | stop | bounds | always


class Dataflow:
    """The flow of values and gradients through the operators that are left after folding."""

    def __init__(
        self, source: Source, folded: Folded, nodes: Sequence[NodeProto], states: Collection[str]
    ) -> None:
        self.source, self.nodes, self.states = source, nodes, states
        self.types, self.values = folded.types, folded.values
        self.floats = {name for name, type_ in self.types.items() if is_float(type_)}
        names = dict.fromkeys(output.name for output in source.proto.graph.output)
        self.outputs = [name for name in names if name not in self.values]
        self.losses: tuple[LossChoice, ...] = ()
        self.reaching: set[str] = set()

    def choose_losses(self, inputs: Sequence[str], options: LossOptions) -> None:
        """Chooses the outputs that have a loss, and puts them first."""
        floats = [name for name in self.outputs if name in self.floats]
        if options.output:
            losses.check_outputs(options.output, self.outputs, floats)
            choices = [LossChoice(name) for name in options.output]
        else:
            shapes = {name: shape_of(self.types[name]) for name in floats}
            choices = [
                losses.default_choice(floats, inputs, self.nodes, shapes, self._has_gradient)
            ]
        self.losses = losses.chosen(choices, options)
        lost = [one.output for one in self.losses]
        self.outputs = [*lost, *(name for name in self.outputs if name not in lost)]
        self.reaching = set().union(
            *(trainable.reaching(self.nodes, name, self.floats) for name in lost)
        )

    @property
    def _lost(self) -> str:
        """The outputs that have a loss, for messages."""
        return " and ".join(one.output for one in self.losses)

    def _has_gradient(self, output: str) -> bool:
        """Whether a gradient flows from an output to a value that may be trained."""
        reached = trainable.reaching(self.nodes, output, self.floats)
        return any(
            name in self.values and not self.values.folded(name) and shape_of(self.types[name])
            for name in reached
        )

    def choices(self, train: Collection[str], freeze: Collection[str]) -> dict[str, Choice]:
        """For each float initializer, whether it is trained, and why."""
        evidence = trainable.Evidence(
            shapes={
                name: shape_of(type_)
                for name, type_ in self.types.items()
                if name in self.floats and name in self.values and not self.values.folded(name)
            },
            reaching=self.reaching,
            loss=self._lost,
            uses=Uses(self.nodes, {node.name: scope_of(node).kind for node in self.nodes}),
            origins=self.source.origins,
            record=self.source.record,
            values=self.values,
        )
        choices = trainable.choices(evidence, train, freeze)
        if not any(one.trained for one in choices.values()):
            raise ModelError(
                f"expected a trainable parameter (a float initializer of rank 1 or more that "
                f"{self._lost!r} depends on differentiably), found none; name one with --train"
            )
        return choices

    def graph(self, inputs: Sequence[str], trained: Collection[str]) -> Graph:
        """The operators with their tensors and parameters."""
        carrying = trainable.depending(self.nodes, trained, self.floats) & self.reaching
        for one in self.losses:
            if one.output not in carrying:
                raise ModelError(
                    f"--output {one.output}: expected an output that depends differentiably on a"
                    " trained parameter, got one that does not; choose another"
                )
        operators = tuple(self._operator(node, trained) for node in self.nodes)
        tensors = [*inputs, *(name for operator in operators for name in operator.outputs)]
        parameters = dict.fromkeys(name for operator in operators for name in operator.parameters)
        return Graph(
            operators=operators,
            tensors=tuple(Tensor(n, *self._described(n), n in carrying) for n in tensors),
            parameters=tuple(
                Parameter(n, *self._described(n), n in trained, n in self.states)
                for n in parameters
            ),
            inputs=tuple(inputs),
            outputs=tuple(self.outputs),
            losses=self.losses,
        )

    def _operator(self, node: NodeProto, trained: Collection[str]) -> Operator:
        held = [
            name
            for i, name in enumerate(node.input)
            if name in self.values
            and (name in trained or name in self.states or not self._is_static(node, i))
        ]
        return Operator(
            name=node.name,
            type=operator_type(node),
            inputs=tuple(dict.fromkeys(n for n in node.input if n and n not in self.values)),
            outputs=tuple(name for name in node.output if name),
            parameters=tuple(dict.fromkeys(held)),
        )

    def _is_static(self, node: NodeProto, position: int) -> bool:
        """Whether a constant configures the operator, as an attribute would.

        So does an integer or boolean of at most 64 elements, a float of rank 0, and every input at
        a position in `OperatorType.settings`.
        """
        shape = shape_of(self.types[node.input[position]])
        if node.input[position] in self.floats:
            return not shape or position in facts(operator_type(node)).settings
        return prod(shape) <= MAX_STATIC_ELEMENTS

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        dtype = dtype_of(self.types[name])
        if dtype not in ITEM_BYTES:
            raise ModelError(
                f"{name}: expected a dtype among {', '.join(ITEM_BYTES)}, got {dtype}; "
                "convert the model"
            )
        shape = shape_of(self.types[name])
        if prod(shape) * ITEM_BYTES[dtype] > MAX_TENSOR_BYTES:
            raise ModelError(
                f"{name}: expected at most {MAX_TENSOR_BYTES:.0e} bytes, got {dtype}{list(shape)};"
                " give smaller dimensions"
            )
        return shape, dtype
