"""What an ONNX file holds, as tables, as lines of text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from planner.reports.tables import Table, count
from planner.support.units import format_bytes

if TYPE_CHECKING:
    from planner.model.inspection import HeldParameter, Inspection, Value

MAX_ROWS = 24
"""Number of lines in a table; the JSON has all."""


def type_table(found: "Inspection") -> Table:
    """Operators by type."""
    rows = tuple(
        (one.type, str(one.count), _flops(one.flops), "" if one.supported else "not supported")
        for one in found.operators
    )
    columns = ("operator", ">count", ">FLOPs", "")
    return _short("Operators by type", columns, rows, "type")


def module_table(found: "Inspection") -> Table:
    """Operators by module."""
    rows = tuple(
        (one.module or "the whole network", str(one.count), f"{one.elements:,}", _flops(one.flops))
        for one in found.parts
    )
    columns = ("module", ">operators", ">elements", ">FLOPs")
    return _short("Operators by module, with the elements that each is the first to read",
                  columns, rows, "module")  # fmt: skip


def parameter_table(found: "Inspection") -> Table:
    """Parameters by whether they are trained and why."""
    groups: dict[tuple[bool, str], list[HeldParameter]] = {}
    for one in found.parameters:
        groups.setdefault((one.choice.trained, one.choice.reason), []).append(one)
    ordered = sorted(groups.items(), key=lambda group: (not group[0][0], -len(group[1])))
    rows = tuple(
        (
            "trained" if trained else "not trained",
            str(len(held)),
            f"{_elements(held):,}",
            format_bytes(sum(one.bytes for one in held)),
            reason,
            held[0].name + (" .." if len(held) > 1 else ""),
        )
        for (trained, reason), held in ordered
    )
    columns = ("", ">tensors", ">elements", ">size", "why", "such as")
    return _short("Floats that the model holds", columns, rows, "reason", ("such as",))


def _short(
    title: str,
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
    what: str,
    optional: tuple[str, ...] = (),
) -> Table:
    """A table of the first rows, which says how many are left out."""
    if len(rows) > MAX_ROWS:
        title += f" (the first {MAX_ROWS} of {count(len(rows), what)}; --json has all)"
    return Table(title, columns, rows[:MAX_ROWS], optional=optional)


def inspect_lines(found: "Inspection") -> tuple[str, ...]:
    """Where the file comes from, its inputs and outputs, and the sums."""
    trained = [one for one in found.parameters if one.choice.trained]
    frozen = [one for one in found.parameters if not one.choice.trained]
    operators = sum(one.count for one in found.operators)
    opsets = ", ".join(f"{name or 'ONNX'} {version}" for name, version in found.opsets.items())
    lines = [
        f"{found.path.name}: {found.module or 'a model'} by {found.exporter or 'unknown software'},"
        f" operator sets {opsets}",
        *(f"input {_text(one)}" for one in found.inputs),
        *(f"output {_text(one)}" for one in found.outputs),
        f"{count(operators, 'operator')} of {count(len(found.operators), 'type')}"
        f"{_work_text(found)}",
        f"trained: {count(len(trained), 'tensor')}, {_elements(trained):,} elements,"
        f" {format_bytes(sum(one.bytes for one in trained))}; not trained:"
        f" {count(len(frozen), 'tensor')}, {_elements(frozen):,} elements",
    ]
    if found.dimensions:
        bound = ", ".join(f"{name} = {size}" for name, size in found.dimensions.items())
        lines.append(f"bound: {bound}")
    if found.unbound:
        lines += ["without shapes and FLOPs, because:",
                  *(f"  {line}" for line in found.unbound.splitlines())]  # fmt: skip
    lines += [f"read by several operators: {_shared(one)}" for one in ties(found)[:MAX_ROWS]]
    lines += [f"not supported: {one}" for one in found.unsupported]
    return tuple(lines)


def _shared(one: "HeldParameter") -> str:
    more = " .." if len(one.readers) > 3 else ""
    return f"{one.name} ({', '.join(one.readers[:3])}{more})"


def ties(found: "Inspection") -> tuple["HeldParameter", ...]:
    """The trained parameters that several operators read."""
    return tuple(one for one in found.parameters if one.choice.trained and len(one.readers) > 1)


def flops(found: "Inspection") -> int | None:
    """Of all products of one microbatch, forward; None where shapes are not known."""
    known = [one.flops for one in found.operators if one.flops is not None]
    return sum(known) if len(known) == len(found.operators) else None


def _work_text(found: "Inspection") -> str:
    work = flops(found)
    return "" if work is None else f", {_flops(work)} FLOPs forward in products and convolutions"


def _elements(held: "Sequence[HeldParameter]") -> int:
    return sum(prod(one.shape) for one in held)


def _flops(number: int | None) -> str:
    """A number of operations.

    >>> _flops(1_234_567_890), _flops(0), _flops(None)
    ('1.23 G', '', '')
    """
    if not number:
        return ""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _text(value: "Value") -> str:
    return f"{value.name}: {value.dtype}[{', '.join(value.shape)}]"


def inspect_json(found: "Inspection") -> dict[str, Any]:
    """The object that `inspect --json` prints."""
    trained = [one for one in found.parameters if one.choice.trained]
    return {
        "model": str(found.path),
        "exporter": found.exporter,
        "module": found.module,
        "opsets": found.opsets,
        "inputs": [asdict(one) for one in found.inputs],
        "outputs": [asdict(one) for one in found.outputs],
        "dimensions": found.dimensions,
        "unbound": found.unbound or None,
        "num_operators": sum(one.count for one in found.operators),
        "operators": [asdict(one) for one in found.operators],
        "modules": [asdict(one) for one in found.parts],
        "flops": flops(found),
        "num_trained": len(trained),
        "trained_elements": _elements(trained),
        "trained_bytes": sum(one.bytes for one in trained),
        "parameters": [
            {
                "name": one.name, "shape": list(one.shape), "dtype": one.dtype, "bytes": one.bytes,
                **asdict(one.choice), "readers": list(one.readers), "source": one.source,
            }
            for one in found.parameters
        ],
        "ties": [one.name for one in ties(found)],
        "not_supported": list(found.unsupported),
        "warnings": list(found.warnings),
    }  # fmt: skip
