"""The files that may be written. The kinds of files that commands write, by their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.support import outputs
from planner.support.errors import OptionError
from planner.support.outputs import FileKind
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.artefacts.profile import Profile


def kind_called(name: str) -> FileKind:
    """A kind, which is defined beside its writer; some of these take long to load."""
    match name:
        case "strategy":
            from planner.artefacts.files import STRATEGY_FILE as KIND
        case "profile":
            from planner.artefacts.files import PROFILE_FILE as KIND
        case "calibration":
            from planner.artefacts.files import CALIBRATION_FILE as KIND
        case "annotated model":
            from planner.model.record import ANNOTATED_FILE as KIND
        case "exported model":
            from planner.model.record import EXPORTED_FILE as KIND
        case "trained model":
            from planner.model.record import WEIGHTS_FILE as KIND
        case "state dict":
            from planner.training.checkpoints.into_onnx import STATE_DICT_FILE as KIND
        case "trace":
            from planner.simulator.traces.write import TRACE_FILE as KIND
        case "picture":
            from planner.reports.drawing.svg import PICTURE_FILE as KIND
        case "topology":
            from planner.clusters.yaml.write import TOPOLOGY_FILE as KIND
        case "table":
            from planner.reports.plans import TABLE_FILE as KIND
        case "log":
            from planner.training.log import LOG_FILE as KIND
        case _:
            raise ValueError(f"{name} is no kind of file that a command writes")
    return KIND


def check_outputs(
    written: Mapping[str, File | None], read: Mapping[str, File | None]
) -> dict[str, Any]:
    """Refuses to overwrite files that are read, and files that the planner did not write.

    Args:
        written: paths of the outputs by their kinds: "profile", "strategy", "trace", "picture",
            "topology", "table", "log", "calibration", "exported model", "trained model" or "state
            dict"; None for those that were not asked for. A strategy has the annotated model beside
            it.
        read: the files that are read, by their meaning; None for those that were not given.

    Returns:
        For `overwrite_note`: the fields of the older profile or strategy that will be replaced, by
        kind.

    Raises:
        OptionError: if a file would be overwritten that must not be.
        FileError: if a path cannot be written.
    """
    paths = {kind: Path(path) for kind, path in written.items() if path is not None}
    strategy = paths.get("strategy", Path())
    if strategy.suffix.lower() == ".onnx":
        raise OptionError(
            f"-o {strategy}: expected a name such as {strategy.with_suffix('.json')}; the annotated"
            " model is written beside the strategy and has the ending .onnx"
        )
    if strategy.name:
        paths["annotated model"] = strategy.with_suffix(".onnx")
    inputs = {name: None if path is None else Path(path) for name, path in read.items()}
    older = outputs.check_outputs(
        [(path, kind_called(kind)) for kind, path in paths.items()], inputs
    )
    return dict(zip(paths, older, strict=True))


def overwrite_note(
    path: File, older: Mapping[str, Any] | None, artefacts: "Sequence[Profile] | Plan"
) -> str | None:
    """A line for people on an older profile or strategy that is about to be replaced: the fields in
    which it differs from the new one, such as the microbatch size; None if it differs in none.

    Args:
        path: of the file.
        older: its fields, by `check_outputs`; None if there is no such file.
        artefacts: to be written there.
    """
    from planner.artefacts import files

    return None if older is None else files.overwrite_note(Path(path), older, artefacts)


def other_question(path: File, artefacts: "Sequence[Profile] | Plan") -> str | None:
    """`overwrite_note` for a file that is read for it."""
    from planner.artefacts.files import PROFILE_FILE, STRATEGY_FILE
    from planner.artefacts.plan import Plan

    kind = STRATEGY_FILE if isinstance(artefacts, Plan) else PROFILE_FILE
    older: Any = kind.recognise(Path(path))
    return overwrite_note(path, older, artefacts)
