"""The paths of what is written: nothing that is read may be overwritten."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.errors import OptionError


def check_output(written: Sequence[Path], read: Mapping[str, Path | None]) -> None:
    """Refuses to overwrite a file that is read.

    Args:
        written: the files that will be written.
        read: the files that are read, by what they are.
    """
    for path in written:
        if path.is_dir():
            raise OptionError(f"{path} is a folder; name a file in it")
        for name, other in read.items():
            if other is not None and path.resolve() == other.resolve():
                raise OptionError(
                    f"{path} is the {name} itself, and would be overwritten; choose another name"
                )


def check_strategy_output(output: Path, read: Mapping[str, Path | None]) -> None:
    """The same for a strategy and for the annotated model beside it."""
    if output.suffix.lower() == ".onnx":
        raise OptionError(
            f"-o {output}: expected a name such as {output.with_suffix('.json')}; the annotated"
            " model is written beside the strategy and has the ending .onnx"
        )
    check_output([output], read)
    check_output([output.with_suffix(".onnx")], read)
