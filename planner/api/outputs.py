"""The kinds of files that commands write, by their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.files import read_strategy
from planner.support.outputs import Kind
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.artefacts.profile import Profile


def kind_called(name: str) -> Kind:
    """A kind, which is defined beside its writer; some of these take long to load."""
    match name:
        case "strategy":
            from planner.artefacts.files import STRATEGY_FILE as KIND
        case "profile":
            from planner.artefacts.files import PROFILE_FILE as KIND
        case "calibration":
            from planner.artefacts.files import CALIBRATION_FILE as KIND
        case "annotated model":
            from planner.model.annotated import ANNOTATED_FILE as KIND
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
    written: Mapping[str, File],
    read: Mapping[str, File | None],
    strategy: File | None = None,
    checkpoint: File | None = None,
) -> None:
    """Refuses to overwrite files that are read, and such as the planner did not write.

    Args:
        written: paths of the outputs by their kinds: "profile", "strategy", "annotated model",
            "trace", "picture", "topology", "table", "calibration", "exported model", "trained
            model" or "state dict".
        read: the files that are read, by what they are; None for those that were not given.
        strategy: is read, too, and so are the model and the profile that it names.
        checkpoint: is read, too, and so is the model that it names.

    Raises:
        OptionError: if a file would be overwritten that must not be.
        FileError: if a path cannot be written, or the strategy or checkpoint cannot be read.
    """
    from planner.api.lookup import files_named
    from planner.api.outputs import kind_called
    from planner.support import outputs
    from planner.training.checkpoints.folder import find

    inputs = {what: Path(path) for what, path in read.items() if path is not None}
    if strategy is not None:
        inputs["strategy"] = Path(strategy)
        outputs.check_inputs([Path(path) for path in written.values()], inputs)
        named = files_named(read_strategy(strategy), Path(strategy))
        inputs |= {f"strategy's {what}": path for what, path in named.items()}
    if checkpoint is not None:
        inputs["checkpoint's model"] = find(Path(checkpoint)).model_path
    outputs.check_outputs(
        [(Path(path), kind_called(kind)) for kind, path in written.items()], inputs
    )


def other_question(path: File, artefacts: "Sequence[Profile] | Plan") -> str | None:
    """A line for people about a file that is to be overwritten: in what its profile or strategy
    differs from the new one, such as another microbatch size; None where there is nothing to say.

    Args:
        artefacts: to be written there.
    """
    from planner.artefacts import files

    return files.other_question(Path(path), artefacts)
