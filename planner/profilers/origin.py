"""What a profile says of the model that it is of, whichever engine made it; and that model."""

import shlex
from pathlib import Path
from typing import TypedDict

from planner.artefacts.graph import Graph, retyped
from planner.artefacts.options import LossOptions
from planner.artefacts.profile import BatchNorm, Profile
from planner.model.load import Model, ReadOptions, load_trained, modules_of
from planner.model.modes import batch_norm_form
from planner.model.source import open_source
from planner.support.errors import FileError


class ModelFields(TypedDict):
    """The fields of `Profile` that follow from the model alone."""

    model_path: str | None
    model_hash: str
    dimensions: dict[str, int]
    modules: tuple[str, ...]
    tie: tuple[str, ...]
    untie: tuple[str, ...]
    batch_norm: BatchNorm
    microbatch_size: int


def model_fields(model: Model, path: str | None) -> ModelFields:
    """These fields.

    Args:
        path: of the model, as the profile says it.
    """
    return ModelFields(
        model_path=path,
        model_hash=model.hash,
        dimensions=dict(model.dimensions),
        modules=modules_of(model),
        tie=model.tie,
        untie=model.untie,
        batch_norm=batch_norm_form(model.nodes),
        microbatch_size=model.batch,
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
    """Whether two graphs are the same but for the types that autocast gives to tensors."""
    alike = retyped(graph, {one.name: one.dtype for one in other.tensors})
    fields = ("operators", "tensors", "parameters", "inputs", "outputs")
    return all(getattr(alike, name) == getattr(other, name) for name in fields)
