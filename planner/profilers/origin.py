"""What a profile says of the model that it is of, whichever engine made it."""

from typing import TypedDict

from planner.model import Model
from planner.model.modes import batch_norm_form
from planner.model.modules import modules_of
from planner.profiles import BatchNorm


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
