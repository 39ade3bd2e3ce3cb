"""The paths of what is written: nothing that is read or foreign may be overwritten, and what cannot
be written is refused before the work.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner import api
from planner.commands.terminal import say
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.api import Plan, Profile


def check_output(
    written: Mapping[str, Path | None],
    read: Mapping[str, Path | None],
    strategy: Path | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Refuses to overwrite a file that is read or foreign, and paths that cannot be written.

    Args:
        written: the files that will be written, by their kinds; None for those not asked for.
        read: the files that are read, by what they are; None for those not given.
        strategy: is read, too, and so are the files that it names.
        checkpoint: is read, too, and so is the model that it names.
    """
    outputs = {kind: path for kind, path in written.items() if path is not None}
    if outputs:
        api.check_outputs(outputs, read, strategy, checkpoint)


def check_strategy_output(output: Path, read: Mapping[str, Path | None]) -> None:
    """The same for a strategy and for the annotated model beside it."""
    if output.suffix.lower() == ".onnx":
        raise OptionError(
            f"-o {output}: expected a name such as {output.with_suffix('.json')}; the annotated"
            " model is written beside the strategy and has the ending .onnx"
        )
    check_output({"strategy": output}, read)
    check_output({"annotated model": output.with_suffix(".onnx")}, read)


def say_overwritten(path: Path, artefacts: "Sequence[Profile] | Plan") -> None:
    """Says on standard error what an older file answers, if that is another question."""
    line = api.other_question(path, artefacts)
    if line is not None:
        say(f"note: {line}", err=True)
