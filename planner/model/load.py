"""ONNX file -> `Model`: its `Graph`, and everything that converting and annotating it needs.

    open_source: read, check, inline functions, name nodes
      -> bind dimensions -> repaired: what the exporter merged -> fold: constants, shapes
      -> drop dead operators -> Dataflow: choose losses and trained parameters -> Graph

Weights are left in their files. Those in the model's own are all read for its hash, some where a
rule of `constants.py` asks for their content. Each mistake in the file or the options is an error
whose every line begins with the path.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto, TypeProto

from planner.artefacts import losses
from planner.artefacts.graph import Graph, LossChoice
from planner.artefacts.options import LossOptions
from planner.artefacts.profile import BatchNorm
from planner.model import trainable
from planner.model.binding import batch_dimensions, bind
from planner.model.canonical import content_hash
from planner.model.dataflow import Dataflow, Node, live_nodes, nodes_of
from planner.model.expansion.expand import fold
from planner.model.expansion.nested import names_read_by
from planner.model.modes import batch_norm_form, evaluation_notes, with_mode
from planner.model.origins import Origin, OriginKind
from planner.model.protos import true_inputs
from planner.model.record import Checked, ModuleRecord
from planner.model.repair import Ties, repaired
from planner.model.scopes import STATE_MARK, explicit, scope_of, states_in
from planner.model.source import Source, hash_of, of_file, open_source, read_proto
from planner.model.trainable import Choice, doubts
from planner.model.values import Values, shape_of
from planner.model.weights import ModelFile
from planner.support.errors import ModelError

__all__ = [
    "Model", "Node", "ReadOptions", "content_hash", "first_consumers", "hash_of", "load",
    "read_proto",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a model is read.

    Attributes:
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
    """

    batch: int | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)
    train: Collection[str] = ()
    freeze: Collection[str] = ()
    tie: Collection[str] = ()
    untie: Collection[str] = ()
    batch_norm: BatchNorm | None = None
    loss: LossOptions = LossOptions()

    @property
    def ties(self) -> Ties:
        """What stays one parameter, and what is parted."""
        return Ties.of(self.tie, self.untie)


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
        batch_dimensions: the symbolic dimensions that have this size because it is the batch's;
            none where the file fixes the batch.
        graph: the operators that are left after folding. Outputs that are constants are not in it.
        nodes: one per operator of the graph, in its order.
        values: initializers and folded constants by name, read when asked for.
        choices: for each float initializer, whether it is trained, and why.
        record: of the module, by `planner export`; None in other files.
        sources: of initializers that the file does not have, the one that the value comes from.
        warnings: what was repaired or is in doubt, for people.
        expanded: for each operator that came out of a node of another name (an unrolled Loop, a
            function), the node of `proto`.
        notes: what is left out when it is trained, in words.
        tie: the user's choices, see `ReadOptions`.
        untie: the user's choices, see `ReadOptions`.
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
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tie: tuple[str, ...] = ()
    untie: tuple[str, ...] = ()
    expanded: Mapping[str, str] = field(default_factory=dict)
    batch_dimensions: frozenset[str] = frozenset()


def load(
    path: Path, options: ReadOptions = ReadOptions(), *, known_hash: str | None = None
) -> Model:
    """Reads a model, binds its dimensions, folds its constants and chooses the trained parameters.

    Args:
        path: of an ONNX file; external data is expected beside it, and not read.
        options: how it is read.
        known_hash: its content hash; None computes it, for which all weights in it are read once.

    Raises:
        FileError: if the file is missing or no ONNX model.
        OptionError: if an output cannot have the loss that was chosen.
        ModelError: if it cannot be bound, folded or trained; one line per problem.
        OperatorError: if it uses operators that ONNX does not define.
    """
    return model_of(open_source(path), options, known_hash=known_hash)


def load_trained(
    source: Source, options: ReadOptions, trained: Collection[str], *, known_hash: str | None
) -> Model:
    """The model of which exactly these parameters are trained, as a profile or a plan says.

    Raises:
        OptionError: as of `load`, which has the other errors, too.
    """
    model = model_of(source, options, known_hash=known_hash)
    usual = {one.name for one in model.graph.parameters if one.trainable}
    train, freeze = sorted({*trained} - usual), sorted(usual - {*trained})
    if not train and not freeze:
        return model
    options = replace(options, train=train, freeze=freeze)
    return model_of(source, options, known_hash=known_hash)


def resized(model: Model, batch: int) -> Model:
    """The same model with another batch: the file is not read again.

    Raises:
        ModelError: if the batch is fixed in the file, or the model cannot be bound or planned.
    """
    if not model.batch_dimensions:
        raise ModelError(
            f"{model.path}: the batch of {model.batch} is written into the file; export it with a"
            " symbolic first dimension for others"
        )
    file = ModelFile(model.path)
    values = Values(model.proto.graph.initializer, file)
    others = model.dimensions.keys() - model.batch_dimensions
    options = ReadOptions(
        batch=batch,
        dimensions={name: model.dimensions[name] for name in sorted(others)},
        tie=model.tie,
        untie=model.untie,
        batch_norm=batch_norm_form(model.nodes),
        loss=LossOptions.of(model.graph.losses),
    )
    trained = [one.name for one in model.graph.parameters if one.trainable]
    source = Source(file, model.proto, values, model.record)
    return load_trained(source, options, trained, known_hash=model.hash)


def model_of(source: Source, options: ReadOptions, *, known_hash: str | None = None) -> Model:
    """The model in a file that was read. Arguments and errors are those of `load`."""
    try:
        model = _model(source, options)
        return replace(model, hash=source.hash if known_hash is None else known_hash)
    except ModelError as error:
        raise of_file(source.file.path, error) from None


def _model(source: Source, options: ReadOptions) -> Model:
    """The model without its hash."""
    file, record = source.proto, source.record
    if file.graph.sparse_initializer:
        raise ModelError("expected dense initializers, got sparse ones; make them dense")
    inputs, dimensions = bind(true_inputs(file.graph), options.batch, options.dimensions)
    source = repaired(source, options.ties)
    states = states_in(file.graph.node)
    _check_states(states, options.train, source.values)
    source = replace(source, proto=explicit(source.proto))
    folded = fold(source, inputs, {*options.train, *states, *_scalars(source)})
    trainable.check_choices(options.train, options.freeze, folded.values)
    kept = live_nodes(folded.nodes, source.proto.graph)
    flow = Dataflow(source, folded, kept, states)
    flow.choose_losses(list(inputs), options.loss)
    _check_stopped(flow.losses, record)
    choices = flow.choices(options.train, options.freeze)
    trained = {name for name, one in choices.items() if one.trained}
    graph = flow.graph(list(inputs), trained)
    losses.losses(graph)  # raises where a choice does not fit its output
    _check_structure(folded.shape_determining, trained)
    nodes = nodes_of(kept, source.proto)
    form = None if options.batch_norm is BatchNorm.MIXED else options.batch_norm
    exported_for_training = None if record is None else record.training
    return Model(
        path=source.file.path,
        proto=file,
        hash="",  # of `model_of`
        dimensions=dimensions,
        batch=_batch_of(inputs),
        graph=graph,
        nodes=tuple(with_mode(node, form) for node in nodes),
        values=folded.values,
        choices=choices,
        record=record,
        sources=source.sources,
        warnings=(
            *_unchecked(record),
            *source.warnings,
            *doubts(choices, record, source.named, source.origins),
        ),
        notes=evaluation_notes(nodes, folded.values, form, exported_for_training),
        tie=tuple(options.tie),
        untie=tuple(options.untie),
        expanded={
            node.name: folded.origins[node.name] for node in kept if node.name in folded.origins
        },
        batch_dimensions=batch_dimensions(true_inputs(file.graph), options.dimensions),
    )


def _batch_of(inputs: Mapping[str, TypeProto]) -> int:
    """The first dimension of the first input; 1 where there is none."""
    shape = next(map(shape_of, inputs.values()), ())
    return shape[0] if shape else 1


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


def _scalars(source: Source) -> set[str]:
    """Single numbers that are parameters: no constant may be computed from them."""
    record = source.record
    trained = {one.initializer for one in record.trained} if record is not None else set()
    return {
        tensor.name
        for tensor in source.proto.graph.initializer
        if not len(tensor.dims)
        and (tensor.name in trained or _is_parameter(source.origins.get(tensor.name)))
    }


def _is_parameter(origin: Origin | None) -> bool:
    return origin is not None and origin.kind is OriginKind.PARAMETER


def _check_structure(nodes: Mapping[str, str], trained: Collection[str]) -> None:
    """The structure of the graph must not depend on values that training changes."""
    problems = [
        f"{node}: a shape or condition depends on the values of {name!r}, which is trained; keep it"
        f" as it is with --freeze {shlex.quote(name)}"
        for name, node in nodes.items()
        if name in trained
    ]
    if problems:
        raise ModelError("\n".join(problems))


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


def modules_of(model: Model) -> tuple[str, ...]:
    """Per operator of the graph, the path of its module, such as "model.layers.0.mlp", "" for the
    whole network; () where the file does not say any.

    The exporter notes it at each node. A node that has lost the note, because a rewriting made it,
    takes the module of a parameter that it reads, else that of the operator before it, else that of
    the one behind it.
    """
    noted = {node.name: scope_of(node).module for node in model.proto.graph.node}
    if not any(noted.values()):
        return ()
    operators = model.graph.operators
    paths = [
        noted[one.name] if noted.get(one.name) is not None else _of_parameter(one.parameters, model)
        for one in operators
    ]
    paths = _carried(paths, [(one.inputs, one.outputs) for one in operators], None)
    back = [(one.outputs, one.inputs) for one in reversed(operators)]
    return tuple(path or "" for path in reversed(_carried(paths[::-1], back, "")))


def _carried(
    paths: Sequence[str | None],
    tensors: Sequence[tuple[Sequence[str], Sequence[str]]],
    rest: str | None,
) -> list[str | None]:
    """Paths of operators; one without takes that of the first of its tensors whose path is known.

    Args:
        tensors: per operator, those that may have a path, and those that get the operator's.
        rest: the path where none is known.
    """
    known: dict[str, str] = {}
    found = []
    for path, (here, there) in zip(paths, tensors, strict=True):
        if path is None:
            path = next((known[name] for name in here if name in known), rest)
        if path is not None:
            known |= dict.fromkeys(there, path)
        found.append(path)
    return found


def _of_parameter(names: Iterable[str], model: Model) -> str | None:
    """The module of the first parameter whose path in the network is known."""
    for name in names:
        choice = model.choices.get(name)
        if choice is not None and choice.parameter:
            return choice.parameter.rpartition(".")[0]
    return None
