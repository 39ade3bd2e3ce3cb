"""The kinds of files that commands write, by their names."""

from planner.support.outputs import Kind


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
            from planner.reports.compare import TABLE_FILE as KIND
        case "log":
            from planner.training.log import LOG_FILE as KIND
        case _:
            raise ValueError(f"{name} is no kind of file that a command writes")
    return KIND
