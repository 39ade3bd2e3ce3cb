"""A PyTorch module as an ONNX file, and what the file says."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.artefacts.options import LossOptions, ModelOptions
from planner.support.errors import FileError, ModelError, OptionError
from planner.support.options import options_from
from planner.support.reading import File
from planner.training.options import WeightsOptions

if TYPE_CHECKING:
    from torch import nn

    from planner.artefacts.profile import Profile
    from planner.model.export.export import Exported
    from planner.model.inspection import Inspection
    from planner.model.load import Model, ReadOptions
    from planner.training.checkpoints.folder import Checkpoint
    from planner.training.checkpoints.into_onnx import Weights


def export(
    module: "nn.Module",
    inputs: object,
    path: File,
    dynamic_shapes: object = None,
    *,
    check: bool = True,
    verbose: bool = False,
) -> "Exported":
    """Writes a PyTorch module as an ONNX file whose training is the module's training.

    Every parameter is an initializer of its own with its name in the module; a parameter that
    several submodules share is one. The module is exported in its own mode: in training mode,
    BatchNormalization and Dropout are in training form. It is left as it was.

    Args:
        module: a torch module.
        inputs: example inputs: a tensor, a tuple of tensors, or a dict of tensors by argument.
            Their shapes become those of the file.
        path: the file to write; weights of 2 GB or more are written to PATH.data beside it.
        dynamic_shapes: as in torch.onnx.export; arguments that a dict leaves out are static.
        check: whether the file is run on the example inputs, and its outputs and the gradients of
            all parameters are compared with the module's own.
        verbose: whether what torch prints is shown.

    Raises:
        ExportError: if torch cannot trace or translate the module, the inputs do not fit, or the
            file computes something else than the module, or has other gradients.
        FileError: if the file cannot be written.
    """
    from planner.model.export.export import export_module
    from planner.operators.gradients.check import check_gradients

    checker = check_gradients if check else None
    return export_module(module, inputs, Path(path), dynamic_shapes, check=checker, verbose=verbose)


def call_factory(name: str) -> "tuple[nn.Module, object]":
    """The module and example inputs that a function of yours makes, for `export`.

    Args:
        name: "module:function" of a function without required arguments that returns both; the
            module may be the path of a .py file.

    Raises:
        ExportError: if there is no such function, or it fails or returns something else.
    """
    from planner.model.export.inputs import call_factory as called

    return called(name)


def load_operators(modules: Sequence[str]) -> None:
    """Imports modules that register operators (`planner.operators.register`).

    Args:
        modules: their names; each may be the path of a .py file.

    Raises:
        OptionError: if one cannot be imported.
    """
    from planner.support.named import module_named

    for name in modules:
        module_named(name, "--operators", OptionError)


def read_model(path: File, **how: Any) -> "Model":
    """The model in an ONNX file, its dimensions bound and its constants folded.

    Args:
        how: the options of the command line, called after the fields of
            `planner.artefacts.options.ModelOptions` (`batch`, `dims`, `train`, `freeze`, `tie`,
            `untie`, `batch_norm`) and `planner.artefacts.options.LossOptions` (`output`, `loss`,
            `class_dim`).

    Raises:
        FileError: if the file is missing or no ONNX model.
        OptionError: if a value is wrong, or an output cannot have the loss that was chosen.
        ModelError: if the model cannot be bound or planned.
        TypeError: if there is no option of that name.
    """
    options, losses = options_from("read_model", how, ModelOptions, LossOptions)
    return read_with(path, options, losses)


def read_with(path: File, options: ModelOptions, losses: LossOptions) -> "Model":
    """The same with values of the options."""
    from planner.model.load import load

    return load(Path(path), _read_options(options, losses))


def _read_options(options: ModelOptions, losses: LossOptions) -> "ReadOptions":
    from planner.artefacts.profile import BatchNorm
    from planner.model.load import ReadOptions

    return ReadOptions(
        batch=options.batch,
        dimensions=options.dims or {},
        train=options.train,
        freeze=options.freeze,
        tie=options.tie,
        untie=options.untie,
        batch_norm=None if options.batch_norm is None else BatchNorm(options.batch_norm),
        loss=losses,
    )


def inspect(path: File, **how: Any) -> "Inspection":
    """The content of an ONNX file: operators, parameters, what is trained and why. Torch is not
    loaded, and weights in external data are not read.

    Args:
        path: of the file.
        how: `batch`, `dims`, `tie` and `untie`: see `read_model`. Without sizes, only the structure
            is known.

    Raises:
        FileError: if the file is missing or no ONNX model.
        OptionError: if a value is wrong.
        TypeError: if there is no option of that name.
    """
    from planner.model.inspection import inspect as inspected

    (options,) = options_from(
        "inspect", how, ModelOptions, without={"train", "freeze", "batch_norm"}
    )
    return inspected(Path(path), _read_options(options, LossOptions()))


def find_model(
    profile: "Profile", path: File | None = None, *, name: str = "the profile"
) -> "Model | None":
    """The model that a profile was made for; None if it is not where the profile says.

    Args:
        path: of the ONNX file; None takes the profile's, from the current folder.
        name: of the profile, for messages.

    Raises:
        FileError: if the file is missing, or holds another model.
    """
    if path is None and (profile.model_path is None or not Path(profile.model_path).is_file()):
        return None
    place = Path(str(profile.model_path)) if path is None else Path(path)
    try:
        model = read_model(place, dims=profile.dimensions)
    except ModelError as error:
        raise FileError(
            f"{name}: was not made for {place}, or with another version of it: {error}"
        ) from error
    check_model(model, profile.model_hash, name)
    return model


def check_model(model: "Model", expected_hash: str | None, name: str) -> None:
    """Refuses a model that a profile or plan was not made for.

    Args:
        expected_hash: of the right one.
        name: of the profile or plan, for the message.
    """
    if model.hash != expected_hash:
        raise FileError(
            f"{name}: made for model {str(expected_hash)[:12]}, but {model.path} is"
            f" {model.hash[:12]}; run: planner profile"
            f" {shlex.quote(str(model.path))}"
        )


def find_checkpoint(path: File) -> "Checkpoint":
    """The checkpoint in a folder, or the newest whole one of several.

    Raises:
        FileError: if there is none.
    """
    from planner.training.checkpoints.folder import find

    return find(Path(path))


def write_weights(
    checkpoint: "File | Checkpoint", path: File | None, state_dict: File | None = None, **how: Any
) -> "Weights":
    """Writes the ONNX file that was trained, with the weights and running statistics of a
    checkpoint, or a state dict, or both.

    Args:
        checkpoint: see `find_checkpoint`, which gets a path.
        path: of the new ONNX file; weights of 1.8 GB or more are written to PATH.data beside it.
        state_dict: file for a dict of tensors by names of initializers, by torch.save.
        how: the fields of `planner.training.options.WeightsOptions`: `model` and `form`.

    Raises:
        OptionError: if a value is wrong, or no file is to be written.
        FileError: if there is no whole checkpoint, the model is not there or another one, or a file
            cannot be written.
        ModelError: if the model cannot hold the weights, or has no evaluation form.
        TypeError: if there is no option of that name.
    """
    from planner.training.checkpoints import into_onnx

    (options,) = options_from("write_weights", how, WeightsOptions)
    if path is None and state_dict is None:
        raise OptionError("expected a file to write, got none; give -o FILE.onnx, or --state-dict")
    return into_onnx.write_weights(
        find_checkpoint(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint,
        None if path is None else Path(path),
        None if state_dict is None else Path(state_dict),
        model_path=options.model,
        form=options.form,
        allow_nan=options.allow_nan,
    )
