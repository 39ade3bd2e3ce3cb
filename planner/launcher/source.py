"""The file that a launch reads its model from, and whether it is the one that was planned for.

The annotated model beside strategy.json is read. Where there is none, or --model names another
file, that one is, or the original. All that are there must be the plan's model. Weights stay in
their files until a stage asks for its own; one rank of each host compares all of them.
"""

import shlex
from pathlib import Path

from planner.artefacts.options import LossOptions
from planner.artefacts.plan import Plan
from planner.model.annotated import check_agreement, refers_to
from planner.model.load import Model, ReadOptions, load_trained
from planner.model.source import hash_of, open_source
from planner.support.errors import FileError, LaunchError
from planner.support.outputs import same_file


def read_model(plan: Plan, path: Path, model_path: Path | None, *, hashes: bool) -> Model:
    """The model that a plan was made for, trained as the profile said.

    Args:
        plan: the content of strategy.json.
        path: of strategy.json.
        model_path: of the file to read instead of the annotated one.
        hashes: whether this rank reads all weights that are in the files, to compare their hash
            with the plan's; the others rely on the one of their host that does.

    Raises:
        LaunchError: if there is no file.
        FileError: if one is not the plan's model, or has not the plan's stages.
    """
    # Hashing all weights takes about 1 s per GB. A hash per initializer would be a second hash of a
    # model beside the one that profiles and strategies have, and one of time and size would differ
    # for equal input.
    file = _checked(plan, path, model_path, hashes=hashes)
    options = ReadOptions(
        dimensions=plan.dimensions, tie=plan.tie, untie=plan.untie, batch_norm=plan.batch_norm,
        loss=LossOptions.of(plan.losses),
    )  # fmt: skip
    return load_trained(open_source(file), options, plan.train, known_hash=plan.model_hash)


def _checked(plan: Plan, path: Path, model_path: Path | None, *, hashes: bool) -> Path:
    """The file to read, after all that are there were compared with the plan; arguments as of
    `read_model`.
    """
    partition = path.with_suffix(".onnx")
    original = model_path or _original(plan, path)
    if not partition.is_file():
        if original is None:
            raise LaunchError(f"{path}: names no model; give --model FILE")
        if model_path is None and not original.is_file():
            raise LaunchError(f"{path}: made for {original}, which is not there; give --model FILE")
        if hashes:
            _check_hash(plan, path, original)
        return original
    check_agreement(plan, partition, weights=hashes)
    if hashes and original is not None and (model_path is not None or original.is_file()):
        _check_original(plan, path, partition, original)
    return model_path or partition


def _check_original(plan: Plan, path: Path, partition: Path, original: Path) -> None:
    """Checks the file that an annotated model was made of, unless both are one."""
    if not same_file(original, partition) and not refers_to(partition, original):
        _check_hash(plan, path, original)


def _original(plan: Plan, path: Path) -> Path | None:
    return None if plan.model_path is None else path.parent / plan.model_path


def _check_hash(plan: Plan, path: Path, file: Path) -> None:
    found = hash_of(file)
    if plan.model_hash not in (None, found):
        raise FileError(
            f"{path}: made for model {str(plan.model_hash)[:12]}, but {file} is {found[:12]}; run:"
            f" planner profile {shlex.quote(str(file))} and planner solve, or give the right one"
            " with --model FILE"
        )
