"""What `planner export` wrote, as lines of text and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.model.export.summary import Parameters, parameters_of
from planner.reports.tables import count
from planner.support.units import format_bytes

if TYPE_CHECKING:
    from planner.model.export.export import Exported, Value

MAX_NAMES = 6


def export_lines(done: "Exported") -> tuple[str, ...]:
    """Operators, parameters, inputs, what was set and compared, and the next command."""
    parameters = parameters_of(done.record)
    mode = "training" if done.record.training else "evaluation"
    lines = [
        f"{done.record.module.rpartition('.')[2]} in {mode} mode:"
        f" {count(sum(done.operators.values()), 'operator')} of"
        f" {count(len(done.operators), 'type')}",
        *_parameter_lines(parameters),
        *(f"input {_text(value)}" for value in done.inputs),
        *(f"output {_text(value)}" for value in done.outputs),
        *(f"exported with {one}" for one in done.settings),
        *(f"note: {one}" for one in done.notes),
    ]
    if done.check is not None and done.check.difference is not None:
        lines.append(
            f"outputs agree with the module's on the example inputs: largest difference"
            f" {done.check.difference:.1e}, relative"
        )
    elif done.check is not None:
        lines.append(f"outputs were not compared with the module's: {done.check.reason}")
    lines += _gradient_lines(done)
    lines.append(f"wrote {' and '.join(map(str, done.files))}")
    lines.append(f"next: planner profile {done.path}{_bindings(done)}")
    return tuple(lines)


def _gradient_lines(done: "Exported") -> list[str]:
    if done.gradients is None:
        return ["not compared with the module (--no-check), which the file records"]
    if done.gradients.difference is None:
        return [f"gradients were not compared with the module's: {done.gradients.reason}"]
    return [
        f"gradients of {count(done.gradients.num_parameters, 'parameter')} agree with the module's:"
        f" largest difference {done.gradients.difference:.1e}, relative, in {done.gradients.dtype}"
    ]


def _parameter_lines(parameters: Parameters) -> list[str]:
    lines = [
        f"{count(parameters.num_tensors, 'parameter')} of"
        f" {count(parameters.num_elements, 'element')}, {format_bytes(parameters.num_bytes)}:"
        f" {len(parameters.trained)} trained, {len(parameters.frozen)} frozen,"
        f" {len(parameters.unused)} unused"
    ]
    for names, reason in (
        (parameters.frozen, "frozen (requires_grad is False)"),
        (parameters.unused, "unused (no output depends on it)"),
    ):
        if names:
            lines.append(f"{reason}: {_some(names)}")
    lines += [f"tied: {' = '.join(names)}" for names in parameters.ties]
    return lines


def _some(names: tuple[str, ...]) -> str:
    """The first few names.

    >>> _some(("a", "b"))
    'a, b'
    """
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"


def _text(value: "Value") -> str:
    return f"{value.name}: {value.dtype} [{', '.join(map(str, value.shape))}]"


def _bindings(done: "Exported") -> str:
    """The options of `planner profile` that bind the symbolic dimensions."""
    names = dict.fromkeys(
        size for value in done.inputs for size in value.shape if isinstance(size, str)
    )
    first = done.inputs[0].shape[0] if done.inputs and done.inputs[0].shape else None
    options = [" --batch N" if name == first else f" --dim {name}=N" for name in names]
    return "".join(options)


def export_json(done: "Exported") -> dict[str, Any]:
    """The same as one object."""
    parameters = parameters_of(done.record)
    return {
        "files": [str(path) for path in done.files],
        "module": done.record.module,
        "training": done.record.training,
        "operators": done.operators,
        "parameters": asdict(parameters),
        "inputs": [asdict(value) for value in done.inputs],
        "outputs": [asdict(value) for value in done.outputs],
        "settings": list(done.settings),
        "notes": list(done.notes),
        "check": None if done.check is None else asdict(done.check),
        "gradients": None if done.gradients is None else asdict(done.gradients),
    }
