"""ONNX file -> `Model`: its `Graph`, and everything that converting and annotating it needs.

    read -> inline functions, name nodes -> bind dimensions
         -> repair what the exporter merged -> fold and infer shapes -> drop dead operators
         -> choose the trained parameters -> Graph

Weights are left in their files. Those in the model's own are all read for its hash, some where a
rule of `constants.py` asks for their content. Each mistake in the file or the options is an error
whose every line begins with the path.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TypeProto

from planner.artefacts import losses
from planner.artefacts.graph import ITEM_BYTES, Graph, LossChoice, Operator, Parameter, Tensor
from planner.artefacts.operator_types import facts
from planner.artefacts.options import LossOptions
from planner.artefacts.profile import BatchNorm
from planner.model import trainable
from planner.model.binding import bind
from planner.model.canonical import (
    content_hash,
    unique_names,
)
from planner.model.constants import Uses
from planner.model.expansion.expand import fold
from planner.model.expansion.inlining import inlined
from planner.model.expansion.nested import names_read_by
from planner.model.modes import evaluation_notes, is_batch_norm, trains
from planner.model.origins import Origin, OriginKind
from planner.model.protos import domain_of, operator_type, opsets, true_inputs
from planner.model.record import Checked, ModuleRecord, read_record
from planner.model.repair import Repaired, Ties, repaired
from planner.model.schemas import attributes_of
from planner.model.scopes import (
    ALWAYS,
    MODE_MARK,
    OPEN_MARK,
    STATE_MARK,
    explicit,
    is_next_state,
    mark_of,
    scope_of,
    states_in,
    stops_gradient,
)
from planner.model.sound import check
from planner.model.trainable import Choice, doubts
from planner.model.values import Values, dtype_of, is_float, shape_of
from planner.model.weights import ModelFile
from planner.support.errors import FileError, ModelError

__all__ = ["Model", "Node", "content_hash", "first_consumers", "hash_of", "load"]

MAX_STATIC_ELEMENTS = 64
MAX_TENSOR_BYTES = 10**12
"""No device has as much. An operator moves some of them several times, and no sum of a profile may
be larger than `graph.MAX_BYTES`."""


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


@dataclass(frozen=True, eq=False)
class Model:
    """A model that is ready to be profiled, converted and annotated.

    Attributes:
        path: of the ONNX file.
        proto: the model with functions inlined and nodes named; dimensions as in the file,
            external data not loaded, large initializers left in the file (`weights.py`).
        hash: `content_hash` of it.
        dimensions: sizes that the symbolic dimensions of the inputs were bound to.
        batch: samples per microbatch, the first dimension of the first input.
        graph: the operators that are left after folding. Outputs that are constants are not in it.
        nodes: one per operator of the graph, in its order.
        values: initializers and folded constants by name, read when asked for.
        choices: for each float initializer, whether it is trained, and why.
        record: of the module, by `planner export`; None in other files.
        named: paths of the module's parameters that the exporter's notes name.
        sources: of initializers that the file does not have, the one that the value comes from.
        warnings: what was repaired or is in doubt, for people.
        expanded: for each operator that came out of a node of another name (an unrolled Loop, a
            function), the node of `proto`.
        notes: what is left out when it is trained, in words.
        tie: the user's choices, see `load`.
        untie: the user's choices, see `load`.
    """

    path: Path
    proto: ModelProto
    hash: str
    dimensions: dict[str, int]
    batch: int
    graph: Graph
    nodes: tuple[Node, ...]
    values: Values
    choices: Mapping[str, Choice] = field(default_factory=dict)
    record: ModuleRecord | None = None
    named: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tie: tuple[str, ...] = ()
    untie: tuple[str, ...] = ()
    expanded: Mapping[str, str] = field(default_factory=dict)


def load(
    path: Path,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] = {},
    train: Collection[str] = (),
    freeze: Collection[str] = (),
    tie: Collection[str] = (),
    untie: Collection[str] = (),
    batch_norm: BatchNorm | None = None,
    loss: LossOptions = LossOptions(),
    known_hash: str | None = None,
) -> Model:
    """Reads a model, binds its dimensions, folds its constants and chooses the trained parameters.

    Args:
        path: of an ONNX file; external data is expected beside it, and not read.
        batch: bound to the first dimension of each input where that is symbolic.
        dimensions: other symbolic dimensions by name.
        train: initializers to train although the graph's rules say otherwise.
        freeze: initializers not to train.
        tie: initializers that stay one parameter although the exporter's notes part them, or pairs
            A=B: B becomes A, or its transpose.
        untie: initializers of which each module that reads them gets its own.
        batch_norm: whether batch normalizations normalise by the statistics of the microbatch
            (`TRAINING`) or by their running statistics (`FROZEN`); else as the file says.
        loss: the outputs that have a loss, and which.
        known_hash: its content hash; None computes it, for which all weights in it are read once.

    Raises:
        FileError: if the file is missing or no ONNX model.
        OptionError: if an output cannot have the loss that was chosen.
        ModelError: if it cannot be bound, folded or trained; one line per problem.
        OperatorError: if it uses operators that ONNX does not define.
    """
    file = ModelFile(path)
    proto = proto_of(file)
    try:
        chosen = (train, freeze)
        model = _model(file, proto, (batch, dimensions), chosen, Ties.of(tie, untie), loss)
        known = content_hash(proto, file) if known_hash is None else known_hash
        model = replace(model, hash=known, tie=tuple(tie), untie=tuple(untie))
        return _in_mode(model, None if batch_norm is BatchNorm.MIXED else batch_norm)
    except ModelError as error:
        raise _of_file(path, error) from None


def _of_file(path: Path, error: ModelError) -> ModelError:
    """The same mistake with the path in front of each line."""
    return type(error)("\n".join(f"{path}: {line}" for line in str(error).splitlines()))


def hash_of(path: Path) -> str:
    """The content hash of the model in a file, whose dimensions need not be known.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing.
    """
    file = ModelFile(path)
    return content_hash(proto_of(file), file)


def read_proto(path: Path) -> ModelProto:
    """The content of an ONNX file, as `proto_of` gives it.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing.
    """
    return proto_of(ModelFile(path))


def proto_of(file: ModelFile) -> ModelProto:
    """The content of an ONNX file, functions inlined and nodes named. External data stays outside,
    and large initializers in the file.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing.
    """
    path = file.path
    try:
        proto = file.proto()
    except FileNotFoundError:
        raise FileError(f"{path}: expected an ONNX model, found no file; check the path") from None
    except IsADirectoryError:
        raise FileError(
            f"{path}: expected an ONNX model, this is a folder; give the .onnx file in it"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: expected an ONNX model, got: {error.strerror}") from None
    except DecodeError:
        raise FileError(
            f"{path}: expected an ONNX model, got a file that is none, or only part of one; "
            "export the model again"
        ) from None
    if not proto.ByteSize():
        raise FileError(
            f"{path}: expected an ONNX model, the file is empty; export the model again"
        )
    if not proto.graph.node:
        raise FileError(
            f"{path}: expected an ONNX model, got one without operators; export the model again"
        )
    try:
        check(proto)
        proto = inlined(proto)
    except ModelError as error:
        raise _of_file(path, error) from None
    for node, name in zip(proto.graph.node, unique_names(proto.graph.node), strict=True):
        node.name = name
    return proto


def _model(
    file: ModelFile,
    proto: ModelProto,
    sizes: tuple[int | None, Mapping[str, int]],
    chosen: tuple[Collection[str], Collection[str]],
    ties: Ties,
    loss: LossOptions,
) -> Model:
    if proto.graph.sparse_initializer:
        raise ModelError("expected dense initializers, got sparse ones; make them dense")
    inputs, dimensions = bind(true_inputs(proto.graph), *sizes)
    values = Values(proto.graph.initializer, file)
    train, freeze = chosen
    record = read_record(proto)
    module = repaired(proto, values, ties, record is not None)
    states = states_in(proto.graph.node)
    _check_states(states, train, values)
    module = replace(module, proto=explicit(module.proto))
    folded = fold(module.proto, inputs, values, {*train, *states, *_scalars(module, record)})
    trainable.check_choices(train, freeze, values)
    kept = _live(folded.nodes, module.proto.graph)
    flow = _Dataflow(module, kept, folded.types, values, states)
    flow.choose_losses(list(inputs), loss)
    _check_stopped(flow.losses, record)
    choices = flow.choices(record, train, freeze)
    graph = flow.graph(list(inputs), {name for name, one in choices.items() if one.trained})
    losses.losses(graph)  # raises where a choice does not fit its output
    _check_decisive(folded.decisive, {name for name, one in choices.items() if one.trained})
    first_shape = next((shape_of(type_) for type_ in inputs.values()), ())
    return Model(
        path=file.path,
        proto=proto,
        hash="",  # of `load`
        dimensions=dimensions,
        batch=first_shape[0] if first_shape else 1,
        graph=graph,
        nodes=_nodes(kept, module.proto),
        values=values,
        choices=choices,
        record=record,
        named=tuple(sorted(one.name for one in module.named if one.kind is OriginKind.PARAMETER)),
        sources=module.sources,
        warnings=(
            *_unchecked(record),
            *module.warnings,
            *doubts(choices, record, module.named, module.origins),
        ),
        expanded={
            node.name: folded.origins[node.name] for node in kept if node.name in folded.origins
        },
    )


def _unchecked(record: ModuleRecord | None) -> tuple[str, ...]:
    """That nothing shows that the file trains as its module does."""
    if record is None or record.checked is not Checked.NOTHING:
        return ()
    return (
        "exported without a comparison with the module (--no-check): gradients that the module"
        " changes are those of its operators",
    )


def _check_states(states: Collection[str], train: Collection[str], values: Collection[str]) -> None:
    """Refuses to train what forward changes, and marks that name no initializer."""
    problems = [f"--train {name}: forward changes it" for name in sorted({*states} & {*train})]
    problems += [
        f"metadata {STATE_MARK}: expected an initializer, got {name!r}; export the model again"
        for name in sorted(states)
        if name not in values
    ]
    if problems:
        raise ModelError("\n".join(problems))


def _check_stopped(losses: Sequence[LossChoice], record: ModuleRecord | None) -> None:
    """Refuses a loss that the module could not train by."""
    stopped = record.stopped if record is not None else ()
    for one in losses:
        if one.output in stopped:
            raise ModelError(
                f"--output {one.output}: the module lets no gradient flow through it (detach);"
                " choose another"
            )


def _scalars(module: Repaired, record: ModuleRecord | None) -> set[str]:
    """Single numbers that are parameters: no constant may be computed from them."""
    trained = {one.initializer for one in record.trained} if record is not None else set()
    return {
        tensor.name
        for tensor in module.proto.graph.initializer
        if not len(tensor.dims)
        and (tensor.name in trained or _is_parameter(module.origins.get(tensor.name)))
    }


def _is_parameter(origin: Origin | None) -> bool:
    return origin is not None and origin.kind is OriginKind.PARAMETER


def _check_decisive(decisive: Mapping[str, str], trained: Collection[str]) -> None:
    """The structure of the graph must not depend on values that training changes."""
    problems = [
        f"{node}: a shape or condition depends on the values of {name!r}, which is trained; keep it"
        f" as it is with --freeze {shlex.quote(name)}"
        for name, node in decisive.items()
        if name in trained
    ]
    if problems:
        raise ModelError("\n".join(problems))


def _live(nodes: Sequence[NodeProto], graph: GraphProto) -> list[NodeProto]:
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


def _nodes(kept: Iterable[NodeProto], proto: ModelProto) -> tuple[Node, ...]:
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


def _in_mode(model: Model, batch_norm: BatchNorm | None) -> Model:
    """The model with the mode of its batch normalizations in their attribute `training_mode`,
    whatever their version; and notes on what the modes leave out.
    """

    def moded(node: Node) -> Node:
        if not is_batch_norm(node):
            return node
        mode = trains(node, {}) if batch_norm is None else batch_norm is BatchNorm.TRAINING
        if node.attributes.get("training_mode", 0) == mode:
            return node
        return replace(node, attributes={**node.attributes, "training_mode": int(mode)})

    record = read_record(model.proto)
    exported_for_training = None if record is None else record.training
    notes = evaluation_notes(model.nodes, model.values, batch_norm, exported_for_training)
    return replace(model, nodes=tuple(map(moded, model.nodes)), notes=notes)


class _Dataflow:
    """The flow of values and gradients through the operators that are left after folding."""

    def __init__(
        self,
        module: Repaired,
        nodes: Sequence[NodeProto],
        types: Mapping[str, TypeProto],
        values: Values,
        states: Collection[str],
    ) -> None:
        self.module = module
        self.nodes = nodes
        self.types = types
        self.values = values
        self.states = states
        self.floats = {name for name, type_ in types.items() if is_float(type_)}
        names = dict.fromkeys(output.name for output in module.proto.graph.output)
        self.outputs = [name for name in names if name not in values]
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
            choices = [losses.default_choice(floats, inputs, self.nodes, shapes, self.has_gradient)]
        self.losses = losses.chosen(choices, options)
        lost = [one.output for one in self.losses]
        self.outputs = [*lost, *(name for name in self.outputs if name not in lost)]
        self.reaching = set().union(
            *(trainable.reaching(self.nodes, name, self.floats) for name in lost)
        )

    @property
    def lost(self) -> str:
        """The outputs that have a loss, for messages."""
        return " and ".join(one.output for one in self.losses)

    def has_gradient(self, output: str) -> bool:
        """Whether a gradient flows from an output to a value that may be trained."""
        reached = trainable.reaching(self.nodes, output, self.floats)
        return any(
            name in self.values and not self.values.folded(name) and shape_of(self.types[name])
            for name in reached
        )

    def choices(
        self, record: ModuleRecord | None, train: Collection[str], freeze: Collection[str]
    ) -> dict[str, Choice]:
        """For each float initializer, whether it is trained, and why."""
        evidence = trainable.Evidence(
            shapes={
                name: shape_of(type_)
                for name, type_ in self.types.items()
                if name in self.floats and name in self.values and not self.values.folded(name)
            },
            reaching=self.reaching,
            loss=self.lost,
            uses=Uses(self.nodes, {node.name: scope_of(node).kind for node in self.nodes}),
            origins=self.module.origins,
            record=record,
            values=self.values,
        )
        choices = trainable.choices(evidence, train, freeze)
        if not any(one.trained for one in choices.values()):
            raise ModelError(
                f"expected a trainable parameter (a float initializer of rank 1 or more that "
                f"{self.lost!r} depends on differentiably), found none; name one with --train"
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
        operators = tuple(self.operator(node, trained) for node in self.nodes)
        tensors = [*inputs, *(name for operator in operators for name in operator.outputs)]
        parameters = dict.fromkeys(name for operator in operators for name in operator.parameters)
        return Graph(
            operators=operators,
            tensors=tuple(Tensor(n, *self.described(n), n in carrying) for n in tensors),
            parameters=tuple(
                Parameter(n, *self.described(n), n in trained, n in self.states) for n in parameters
            ),
            inputs=tuple(inputs),
            outputs=tuple(self.outputs),
            losses=self.losses,
        )

    def operator(self, node: NodeProto, trained: Collection[str]) -> Operator:
        held = [
            name
            for i, name in enumerate(node.input)
            if name in self.values
            and (name in trained or name in self.states or not self.is_static(node, i))
        ]
        return Operator(
            name=node.name,
            type=operator_type(node),
            inputs=tuple(dict.fromkeys(n for n in node.input if n and n not in self.values)),
            outputs=tuple(name for name in node.output if name),
            parameters=tuple(dict.fromkeys(held)),
        )

    def is_static(self, node: NodeProto, position: int) -> bool:
        """Whether a constant configures the operator, as an attribute would.

        So does an integer or boolean of at most 64 elements, a float of rank 0, and every input at
        a position in `OperatorType.settings`.
        """
        shape = shape_of(self.types[node.input[position]])
        if node.input[position] in self.floats:
            return not shape or position in facts(operator_type(node)).settings
        return prod(shape) <= MAX_STATIC_ELEMENTS

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
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


def first_consumers(model: Model) -> Mapping[str, str]:
    """For each node that is no operator of the graph, the first operator that needs it, or that
    came out of it.

    Nodes are those of `model.proto`, by name. A need may go over other folded nodes; a node that
    no operator needs is given to the first operator.
    """
    order: dict[str, int] = {}
    for i, operator in enumerate(model.graph.operators):
        order.setdefault(operator.name, i)
        order.setdefault(model.expanded.get(operator.name, operator.name), i)
    own = {operator.name for operator in model.graph.operators}
    nodes = model.proto.graph.node
    needed_by: dict[str, int] = {}  # tensor -> the first operator that needs it
    consumer = {}
    for node in reversed(nodes):
        needs = [needed_by[name] for name in node.output if name in needed_by]
        first = order.get(node.name, min(needs, default=0))
        if node.name not in own:
            consumer[node.name] = model.graph.operators[first].name
        if node.name in order or needs:
            for name in names_read_by(node):
                needed_by[name] = min(first, needed_by.get(name, first))
    return dict(reversed(consumer.items()))
