"""torch.onnx.export with the right options, quietly, and its failures in one sentence."""

import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from planner.errors import ExportError
from planner.exporting.inputs import Inputs
from planner.exporting.translations import TRANSLATIONS

# Loggers of the exporter and of what it calls.
LOGGERS = ("torch", "onnxscript", "onnx_ir")
# Packages whose lines of code are not the user's.
MACHINERY = ("torch", "onnxscript", "onnx_ir", "planner")

DATA_DEPENDENT = (
    "a branch or a size depends on the value of a tensor, which a graph cannot have; use"
    " torch.where, or take the decision out of forward"
)


def traced(
    module: nn.Module, inputs: Inputs, dynamic_shapes: object, verbose: bool = False
) -> torch.onnx.ONNXProgram:
    """The module as torch exports it, before any clean-up.

    `optimize=False` leaves each initializer a tensor of the module: the exporter's optimizer merges
    those of equal value, such as the weights of all fresh normalizations.

    Args:
        module: in the mode that is exported.
        inputs: example inputs.
        dynamic_shapes: as torch.onnx.export takes them.
        verbose: whether what torch prints is shown.

    Raises:
        ExportError: if torch cannot.
    """
    try:
        with _quiet(not verbose):
            program = torch.onnx.export(
                module,
                inputs.positional,
                kwargs=inputs.named,
                dynamo=True,
                optimize=False,
                verbose=verbose,
                dynamic_shapes=dynamic_shapes,  # type: ignore[arg-type]
                custom_translation_table=TRANSLATIONS,
            )
    except Exception as error:
        raise ExportError(f"{type(module).__name__}: {_reason(error)}") from error
    assert program is not None
    return program


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Hides what is printed, warned and logged: a failed trace prints its whole graph."""
    if not wanted:
        yield
        return
    loggers = [logging.getLogger(name) for name in LOGGERS]
    loggers += [
        one
        for name, one in logging.root.manager.loggerDict.items()
        if isinstance(one, logging.Logger) and name.split(".")[0] in LOGGERS
    ]
    levels = [one.level for one in loggers]
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)


def _reason(error: Exception) -> str:
    """Why torch failed, where, and what to do."""
    causes = _causes(error)
    root = causes[-1]
    missing = next((one for one in causes if "No ONNX function found" in str(one)), None)
    if missing is not None:
        operator = _first_line(missing).partition("found for ")[2].partition(". ")[0]
        return f"torch has no ONNX translation of {operator}; write the operation with others"
    traced_error = causes[1] if len(causes) > 1 else root
    kind = type(traced_error).__name__
    if "DataDependent" in kind:
        reason = f"cannot be traced: {DATA_DEPENDENT} ({_first_line(traced_error)})"
    else:
        reason = f"torch.export failed: {kind}: {_first_line(traced_error)}"
    line = _line_of_user(causes)
    return f"{reason}{f'; at {line}' if line else ''}"


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _line_of_user(causes: list[BaseException]) -> str:
    """The innermost line of code that is neither torch's nor the planner's, with its place."""
    found = ""
    for error in causes:
        for frame in traceback.extract_tb(error.__traceback__):
            if not _is_machinery(Path(frame.filename)) and frame.line:
                found = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line.strip()}"
    return found


def _is_machinery(path: Path) -> bool:
    """Whether a file belongs to one of the packages of the exporter."""
    here = Path(__file__).resolve().parent.parent
    roots = [Path(torch.__file__).parent, Path(ir.__file__).parent, here]
    return any(root in path.parents for root in roots) or "<" in path.name


__all__ = ["traced"]
