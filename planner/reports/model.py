"""The contents of an ONNX file, and the files that `planner export` and `planner weights` wrote, as
tables, lines of text and JSON.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from planner.artefacts.graph import ITEM_BYTES
from planner.reports.tables import (
    MAX_ROWS,
    Column,
    Table,
    count,
    first_rows,
    json_rows,
    listed,
    table,
)
from planner.support.units import format_bytes

if TYPE_CHECKING:
    from planner.model import export, inspection
    from planner.model.export.export import Exported
    from planner.model.inspection import HeldParameter, Inspection, Part, TypeSummary
    from planner.model.record import ModuleRecord
    from planner.training.checkpoints.into_onnx import Weights

MAX_NAMES = 6


def _value_text(value: "inspection.Value | export.export.Value") -> str:
    """An input or output, such as "x: float32 [batch, 4]"."""
    return f"{value.name}: {value.dtype} [{', '.join(map(str, value.shape))}]"


# ---------------------------------------------------------------------- planner inspect

TYPE_COLUMNS: "tuple[Column[TypeSummary], ...]" = (
    Column("type", lambda kind: kind.type, "operator", left=True),
    Column("count", lambda kind: kind.count, "count"),
    Column("flops", lambda kind: kind.flops, "FLOPs", lambda number: _flops_text(number)),
    Column("", lambda kind: "" if kind.supported else "not supported", "", left=True),
    Column("supported", lambda kind: kind.supported),
)
PART_COLUMNS: "tuple[Column[Part], ...]" = (
    Column("module", lambda part: part.module, "module", lambda name: name or "the whole network",
           left=True),
    Column("count", lambda part: part.count, "operators"),
    Column("elements", lambda part: part.elements, "elements", "{:,}".format),
    Column("flops", lambda part: part.flops, "FLOPs", lambda number: _flops_text(number)),
)  # fmt: skip
GROUP_COLUMNS: "tuple[Column[Sequence[HeldParameter]], ...]" = (
    Column("", lambda held: "trained" if held[0].choice.trained else "not trained", "", left=True),
    Column("", len, "tensors"),
    Column("", lambda held: _elements(held), "elements", "{:,}".format),
    Column("", lambda held: sum(one.bytes for one in held), "size", format_bytes),
    Column("", lambda held: held[0].choice.reason, "reason", left=True),
    Column("", lambda held: held[0].name + (" .." if len(held) > 1 else ""), "example", left=True,
           gives_way=1),
)  # fmt: skip


def type_table(model: "Inspection") -> Table:
    """Operators by type."""
    return table(*first_rows("Operators by type", model.operators, "types"), TYPE_COLUMNS)


def module_table(model: "Inspection") -> Table:
    """Operators by module."""
    title = "Operators by module; elements of the parameters that a module reads first"
    return table(*first_rows(title, model.parts, "modules"), PART_COLUMNS)


def parameter_table(model: "Inspection") -> Table:
    """Parameters by whether they are trained and why."""
    groups: dict[tuple[bool, str], list[HeldParameter]] = {}
    for one in model.parameters:
        groups.setdefault((one.choice.trained, one.choice.reason), []).append(one)
    rows = sorted(groups.values(), key=lambda held: (not held[0].choice.trained, -len(held)))
    return table(*first_rows("Floats in the model", rows, "groups"), GROUP_COLUMNS)


def inspect_lines(model: "Inspection") -> tuple[str, ...]:
    """Where the file comes from, its inputs and outputs, and the sums."""
    trained = [one for one in model.parameters if one.choice.trained]
    frozen = [one for one in model.parameters if not one.choice.trained]
    operators = sum(one.count for one in model.operators)
    work = _flops_text(flops(model))
    known = f", {work} FLOPs forward in products and convolutions" if work else ""
    opsets = ", ".join(f"{name or 'ONNX'} {version}" for name, version in model.opsets.items())
    lines = [
        f"{model.path.name}: {model.module or 'a model'} by {model.exporter or 'unknown software'},"
        f" operator sets {opsets}",
        *(f"input {_value_text(one)}" for one in model.inputs),
        *(f"output {_value_text(one)}" for one in model.outputs),
        f"{count(operators, 'operator')} of {count(len(model.operators), 'type')}{known}",
        f"trained: {count(len(trained), 'tensor')}, {_elements(trained):,} elements,"
        f" {format_bytes(sum(one.bytes for one in trained))}; not trained:"
        f" {count(len(frozen), 'tensor')}, {_elements(frozen):,} elements",
    ]
    if model.dimensions:
        bound = ", ".join(f"{name} = {size}" for name, size in model.dimensions.items())
        lines.append(f"bound: {bound}")
    if model.unbound:
        lines += ["shapes and FLOPs are unknown:",
                  *(f"  {line}" for line in model.unbound.splitlines())]  # fmt: skip
    lines += [f"read by several operators: {_shared(one)}" for one in ties(model)[:MAX_ROWS]]
    lines += [f"not supported: {one}" for one in model.unsupported]
    return tuple(lines)


def _shared(one: "HeldParameter") -> str:
    more = " .." if len(one.readers) > 3 else ""
    return f"{one.name} ({', '.join(one.readers[:3])}{more})"


def ties(model: "Inspection") -> tuple["HeldParameter", ...]:
    """The trained parameters that several operators read."""
    return tuple(one for one in model.parameters if one.choice.trained and len(one.readers) > 1)


def flops(model: "Inspection") -> int | None:
    """Of all products of one microbatch, forward; None where shapes are not known."""
    known = [one.flops for one in model.operators if one.flops is not None]
    return sum(known) if len(known) == len(model.operators) else None


def _elements(held: "Sequence[HeldParameter]") -> int:
    """The number of floats in some parameters."""
    return sum(prod(one.shape) for one in held)


def _flops_text(number: int | None) -> str:
    """A number of operations; empty if it is 0 or unknown.

    >>> _flops_text(1_234_567_890), _flops_text(0), _flops_text(None)
    ('1.23 G', '', '')
    """
    if not number:
        return ""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def inspect_json(model: "Inspection") -> dict[str, Any]:
    """The object that `inspect --json` prints."""
    trained = [one for one in model.parameters if one.choice.trained]
    return {
        "model": str(model.path),
        "exporter": model.exporter,
        "module": model.module,
        "opsets": model.opsets,
        "inputs": [asdict(one) for one in model.inputs],
        "outputs": [asdict(one) for one in model.outputs],
        "dimensions": model.dimensions,
        "unbound": model.unbound or None,
        "num_operators": sum(one.count for one in model.operators),
        "operators": json_rows(model.operators, TYPE_COLUMNS),
        "modules": json_rows(model.parts, PART_COLUMNS),
        "flops": flops(model),
        "num_trained": len(trained),
        "trained_elements": _elements(trained),
        "trained_bytes": sum(one.bytes for one in trained),
        "parameters": [
            {
                "name": one.name, "shape": list(one.shape), "dtype": one.dtype, "bytes": one.bytes,
                **asdict(one.choice), "readers": list(one.readers), "source": one.source,
            }
            for one in model.parameters
        ],
        "ties": [one.name for one in ties(model)],
        "not_supported": list(model.unsupported),
        "warnings": list(model.warnings),
    }  # fmt: skip


# ---------------------------------------------------------- planner export and weights


def export_lines(exported: "Exported") -> tuple[str, ...]:
    """Operators, parameters, inputs, what was set and compared, and the next command."""
    mode = "training" if exported.record.training else "evaluation"
    lines = [
        f"{exported.record.module.rpartition('.')[2]} in {mode} mode:"
        f" {count(sum(exported.operators.values()), 'operator')} of"
        f" {count(len(exported.operators), 'type')}",
        *_parameter_lines(_parameters(exported.record)),
        *(f"input {_value_text(value)}" for value in exported.inputs),
        *(f"output {_value_text(value)}" for value in exported.outputs),
        *(f"exported with {one}" for one in exported.settings),
        *(f"note: {one}" for one in exported.notes),
    ]
    if exported.check is not None and exported.check.difference is not None:
        lines.append(
            f"outputs agree with the module's on the example inputs: largest difference"
            f" {exported.check.difference:.1e}, relative"
        )
    elif exported.check is not None:
        lines.append(f"outputs were not compared with the module's: {exported.check.reason}")
    lines += _gradient_lines(exported)
    lines.append(f"wrote {' and '.join(map(str, exported.files))}")
    lines.append(f"next: planner profile {shlex.quote(str(exported.path))}{_bindings(exported)}")
    return tuple(lines)


def _gradient_lines(exported: "Exported") -> list[str]:
    gradients = exported.gradients
    if gradients is None:
        return ["not compared with the module (--no-check), which the file records"]
    if gradients.difference is None:
        return [f"gradients were not compared with the module's: {gradients.reason}"]
    return [
        f"gradients of {count(gradients.num_parameters, 'parameter')} agree with the module's:"
        f" largest difference {gradients.difference:.1e}, relative, in {gradients.dtype}"
    ]


def _parameters(record: "ModuleRecord") -> dict[str, Any]:
    """The parameters of a module, each tensor once: counts, and names of those that the file holds
    and the module trains or does not train, that no output depends on, and that have several.
    """
    held = [one for one in record.parameters if one.initializer is not None]
    sizes = [(prod(one.shape), ITEM_BYTES[one.dtype]) for one in record.parameters]
    return {
        "num_tensors": len(record.parameters),
        "num_elements": sum(number for number, _ in sizes),
        "num_bytes": sum(int(number * item) for number, item in sizes),
        "trained": [one.name for one in held if one.requires_grad],
        "frozen": [one.name for one in held if not one.requires_grad],
        "unused": [one.name for one in record.parameters if one.initializer is None],
        "ties": [[one.name, *one.aliases] for one in record.parameters if one.aliases],
    }


def _parameter_lines(parameters: dict[str, Any]) -> list[str]:
    lines = [
        f"{count(parameters['num_tensors'], 'parameter')} of"
        f" {count(parameters['num_elements'], 'element')}, {format_bytes(parameters['num_bytes'])}:"
        f" {len(parameters['trained'])} trained, {len(parameters['frozen'])} frozen,"
        f" {len(parameters['unused'])} unused"
    ]
    reasons = {
        "frozen": "frozen (requires_grad is False)",
        "unused": "unused (no output depends on it)",
    }
    for key, reason in reasons.items():
        if parameters[key]:
            lines.append(f"{reason}: {listed(parameters[key], MAX_NAMES)}")
    lines += [f"tied: {' = '.join(names)}" for names in parameters["ties"]]
    return lines


def _bindings(exported: "Exported") -> str:
    """The options of `planner profile` that bind the symbolic dimensions but the batch, which takes
    sizes that fit.
    """
    names = dict.fromkeys(
        size for value in exported.inputs for size in value.shape if isinstance(size, str)
    )
    first = exported.inputs[0].shape[0] if exported.inputs and exported.inputs[0].shape else None
    return "".join(f" --dim {name}=N" for name in names if name != first)


def export_json(exported: "Exported") -> dict[str, Any]:
    """The object that `export --json` prints."""
    return {
        "files": [str(path) for path in exported.files],
        "module": exported.record.module,
        "training": exported.record.training,
        "operators": exported.operators,
        "parameters": _parameters(exported.record),
        "inputs": [asdict(value) for value in exported.inputs],
        "outputs": [asdict(value) for value in exported.outputs],
        "settings": list(exported.settings),
        "notes": list(exported.notes),
        "check": None if exported.check is None else asdict(exported.check),
        "gradients": None if exported.gradients is None else asdict(exported.gradients),
    }


def weights_lines(weights: "Weights") -> tuple[str, ...]:
    """What was learned, the form of the model, and the files."""
    learned = count(weights.num_parameters, "trained parameter")
    if weights.num_statistics:
        learned += f" and {count(weights.num_statistics, 'running statistic')}"
    changed = f": {count(weights.num_changed, 'operator')} changed" if weights.num_changed else ""
    return (
        f"{learned} after {count(weights.step, 'step')}",
        *(() if weights.form is None else (f"in {weights.form} form{changed}",)),
        *(f"note: {note}" for note in weights.notes),
        f"wrote {' and '.join(map(str, weights.files))}",
    )


def weights_json(weights: "Weights") -> dict[str, Any]:
    """The object that `weights --json` prints."""
    return {
        "step": weights.step,
        "parameters": weights.num_parameters,
        "statistics": weights.num_statistics,
        "form": weights.form,
        "changed": weights.num_changed,
        "files": [str(path) for path in weights.files],
        "notes": list(weights.notes),
    }
