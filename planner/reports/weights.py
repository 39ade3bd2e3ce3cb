"""What `planner weights` wrote, as lines of text and as JSON."""

from typing import TYPE_CHECKING, Any

from planner.reports.tables import count

if TYPE_CHECKING:
    from planner.training.checkpoints.into_onnx import Weights


def weights_lines(done: "Weights") -> tuple[str, ...]:
    """What was learned, the form of the model, and the files."""
    learned = count(done.num_parameters, "trained parameter")
    if done.num_statistics:
        learned += f" and {count(done.num_statistics, 'running statistic')}"
    changed = f": {count(done.num_changed, 'operator')} changed" if done.num_changed else ""
    return (
        f"{learned} after {count(done.step, 'step')}",
        *(() if done.form is None else (f"in {done.form} form{changed}",)),
        *(f"note: {note}" for note in done.notes),
        f"wrote {' and '.join(map(str, done.files))}",
    )


def weights_json(done: "Weights") -> dict[str, Any]:
    """The same as one object."""
    return {
        "step": done.step,
        "parameters": done.num_parameters,
        "statistics": done.num_statistics,
        "form": done.form,
        "changed": done.num_changed,
        "files": [str(path) for path in done.files],
        "notes": list(done.notes),
    }
