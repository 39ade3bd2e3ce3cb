"""What every profile says of its model and operators, whichever engine made it; and that model."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from planner.artefacts.graph import Graph, View, parameters_by_name, retyped, tensors_by_name
from planner.artefacts.options import LossOptions
from planner.artefacts.profile import BatchNorm, OperatorCost, Profile
from planner.model.load import Model, ReadOptions, load_trained, modules_of
from planner.model.modes import batch_norm_form
from planner.model.source import open_source
from planner.support.errors import FileError

if TYPE_CHECKING:
    from planner.profilers.facts import Facts
    from planner.profilers.runnable import Stash


@dataclass(frozen=True, slots=True)
class TimedOperator:
    """The work of an operator, and its times by some engine.

    Attributes:
        stash, flops, bytes_moved: as of `Facts`.
        forward_s, backward_s, workspace_bytes, interval, backward_weight_s, host_forward_s,
            host_backward_s: as of `OperatorCost`.
    """

    stash: "Stash"
    flops: int
    bytes_moved: int
    forward_s: float
    backward_s: float
    workspace_bytes: int = 0
    interval: float = 0.0
    backward_weight_s: float | None = None
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0


class ProfileFields(TypedDict):
    """The fields of `Profile` that every engine fills in the same way."""

    graph: Graph
    operators: tuple[OperatorCost, ...]
    views: tuple[View, ...]
    gradient_views: tuple[View, ...]
    model_path: str | None
    model_hash: str
    dimensions: dict[str, int]
    modules: tuple[str, ...]
    tie: tuple[str, ...]
    untie: tuple[str, ...]
    batch_norm: BatchNorm
    microbatch_size: int


def profile_fields(
    model: Model,
    path: str | None,
    graph: Graph,
    operators: Sequence[TimedOperator],
    facts: Sequence["Facts"],
) -> ProfileFields:
    """These fields.

    Args:
        path: of the model, as the profile says it.
        graph: the model's, with the element types that its tensors have under autocast.
        operators: one per operator of the graph.
        facts: one per operator; none where the shapes of one depend on numbers.
    """
    return ProfileFields(
        graph=graph,
        operators=tuple(_cost(graph, v, one) for v, one in enumerate(operators)),
        views=tuple(view for one in operators for view in one.stash.views),
        gradient_views=tuple(view for one in facts for view in one.gradient_views),
        model_path=path,
        model_hash=model.hash,
        dimensions=dict(model.dimensions),
        modules=modules_of(model),
        tie=model.tie,
        untie=model.untie,
        batch_norm=batch_norm_form(model.nodes),
        microbatch_size=model.batch,
    )


def _cost(graph: Graph, v: int, timed: TimedOperator) -> OperatorCost:
    operator, tensors, parameters = (
        graph.operators[v], tensors_by_name(graph), parameters_by_name(graph)
    )  # fmt: skip
    return OperatorCost(
        name=operator.name,
        forward_s=round(float(timed.forward_s), 9),
        backward_s=round(float(timed.backward_s), 9),
        output_bytes=sum(tensors[name].bytes for name in operator.outputs),
        parameter_bytes=sum(parameters[name].bytes for name in operator.parameters),
        flops=timed.flops,
        bytes_moved=timed.bytes_moved,
        stash_tensors=timed.stash.tensors,
        stash_private_bytes=timed.stash.private_bytes,
        workspace_bytes=timed.workspace_bytes,
        interval=timed.interval,
        backward_weight_s=timed.backward_weight_s,
        host_forward_s=timed.host_forward_s,
        host_backward_s=timed.host_backward_s,
    )


def profiled_model(profile: Profile, path: Path) -> Model:
    """The model that a profile was made of, with the same parameters trained and the same losses.

    Args:
        path: of the ONNX file.

    Raises:
        FileError: if it is missing, or is another model.
        ModelError: if the model cannot be bound as the profile says.
    """
    source = open_source(path)
    found = source.hash
    if found != profile.model_hash:
        raise FileError(
            f"{path}: the profile was made for model {str(profile.model_hash)[:12]}, but this is"
            f" {found[:12]}; run: planner profile {shlex.quote(str(path))}"
        )
    options = ReadOptions(
        batch=profile.microbatch_size,
        dimensions=profile.dimensions,
        tie=profile.tie,
        untie=profile.untie,
        batch_norm=profile.batch_norm,
        loss=LossOptions.of(profile.graph.losses),
    )
    trained = [one.name for one in profile.graph.parameters if one.trainable]
    model = load_trained(source, options, trained, known_hash=found)
    if not _same(model.graph, profile.graph):
        raise FileError(
            f"{path}: its operators are not those of the profile, which another version may have"
            f" made; run: planner profile {shlex.quote(str(path))}"
        )
    return model


def _same(graph: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for the types that autocast gives to tensors, and those
    of trained parameters.
    """
    alike = retyped(graph, {one.name: one.dtype for one in other.tensors})
    types = {one.name: (one.dtype, one.gradient_dtype) for one in other.parameters}
    own = (
        replace(one, dtype=types[one.name][0], gradient_dtype=types[one.name][1])
        if one.trainable and one.name in types
        else one
        for one in alike.parameters
    )
    alike = replace(alike, parameters=tuple(own))
    fields = ("operators", "tensors", "parameters", "inputs", "outputs")
    return all(getattr(alike, name) == getattr(other, name) for name in fields)
