"""Rules that running an operator on parts cannot find, because its parts need other devices: they
are listed here, and run by the functions of `planner.operators.parts`.

@rows     Gather from a table whose rows are cut: zeros for rows that are elsewhere
@halo     windows over an image that is cut: rows at the edges come from the neighbours
@moments  normalizations and softmax along a dimension that is cut: the devices add up their sums
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import HALO, MOMENTS, ROWS, AxisRule
from planner.model.scopes import NEXT_STATE, OWN_DOMAIN
from planner.operators.binding import Call, Read
from planner.operators.parts import MARKED
from planner.operators.parts.halo import fits, window
from planner.profilers.rules.template import Shape

_OF_INPUT = ("InstanceNormalization", "LogSoftmax", "Softmax")
"""Operators that call what they normalise `input`."""


def communicating_rules(
    kind: str, call: Call, shapes: Mapping[str, Shape], floats: frozenset[str], made: Shape
) -> Iterator[SplitRule]:  # fmt: skip
    """The rules with marks of an operator with one output.

    Args:
        kind: its ONNX type.
        call: of its function.
        shapes: of what it reads, by name.
        floats: names of floats among them.
        made: shape of its output.
    """
    if (MOMENTS, kind) in MARKED:
        yield from _moments(kind, call, shapes)
    if (ROWS, kind) in MARKED:
        data, indices = call.kwargs["data"], call.kwargs["indices"]
        if isinstance(data, Read) and isinstance(indices, Read) and data.name in floats:
            axis = call.kwargs["axis"]
            assert isinstance(axis, int)
            part = f"S{axis % len(shapes[data.name])}"
            yield SplitRule(str(AxisRule(_inputs(call, data.name, part), ("P",), (ROWS,))))
    if (HALO, kind) in MARKED and call.kwargs.get("num_outputs", 1) == 1:
        yield from _windows(kind, call, shapes, made)


def with_statistics(kind: str, call: Call, rules: Iterable[SplitRule]) -> Iterator[SplitRule]:
    """The rules of an operator, those of a batch normalization in training with its running
    statistics cut as its scale is: it updates them, so each device has those of its channels. Its
    output does not depend on them, so running it does not tell. New values of state are made whole.

    Args:
        kind: its ONNX type.
        call: of its function.
        rules: found by running it.
    """
    for one in () if kind == f"{OWN_DOMAIN}.{NEXT_STATE}" else rules:
        inputs = dict(zip(call.reads, one.rule.inputs, strict=True))
        if kind == "BatchNormalization" and call.kwargs.get("training_mode"):
            scale, *kept = (call.kwargs[name] for name in ("scale", "mean", "var"))
            if isinstance(scale, Read) and inputs[scale.name].startswith("S"):
                inputs |= {own.name: inputs[scale.name] for own in kept if isinstance(own, Read)}
        yield replace(one, line=str(replace(one.rule, inputs=tuple(inputs.values()))))


def _moments(kind: str, call: Call, shapes: Mapping[str, Shape]) -> Iterator[SplitRule]:
    """The rules along the dimensions that statistics are of. What has a number for each place along
    them, such as the scale of a layer normalization, is cut, too.
    """
    x = call.kwargs["input" if kind in _OF_INPUT else "x"]
    assert isinstance(x, Read)
    rank = len(shapes[x.name])
    for dim in _dims_of_statistics(kind, call, rank):
        parts = {x.name: f"S{dim}"}
        if kind in ("LayerNormalization", "RMSNormalization"):
            axis = _axis(call, rank)
            with_it = [own for n in ("scale", "b") if isinstance(own := call.kwargs.get(n), Read)]
            if any(shapes[one.name] != shapes[x.name][axis:] for one in with_it):
                return
            parts |= {one.name: f"S{dim - axis}" for one in with_it}
        inputs = tuple(parts.get(one, "R") for one in call.reads)
        yield SplitRule(str(AxisRule(inputs, (f"S{dim}",), (MOMENTS,))))


def _dims_of_statistics(kind: str, call: Call, rank: int) -> Iterable[int]:
    match kind:
        case "BatchNormalization":
            return (0, *range(2, rank)) if call.kwargs.get("training_mode") else ()
        case "GroupNormalization" | "InstanceNormalization":
            return range(2, rank)
        case "LayerNormalization" | "RMSNormalization":
            return range(_axis(call, rank), rank)
    # Up to version 12 it is over all dimensions from the axis on.
    version = call.kwargs["version"]
    return (_axis(call, rank),) if isinstance(version, int) and version >= 13 else ()


def _axis(call: Call, rank: int) -> int:
    axis = call.kwargs.get("axis", -1)
    assert isinstance(axis, int)
    return axis % rank


def _windows(
    kind: str, call: Call, shapes: Mapping[str, Shape], made: Shape
) -> Iterator[SplitRule]:  # fmt: skip
    x = call.kwargs["x"]
    assert isinstance(x, Read)
    shape = shapes[x.name]
    w = call.kwargs.get("w")
    kernel = shapes[w.name][2:] if isinstance(w, Read) else call.kwargs["kernel_shape"]
    assert isinstance(kernel, tuple)
    for i, one in enumerate(window(shape[2:], kernel, dict(call.kwargs))):
        rows, stride, before = one
        if not before and rows <= stride:
            continue  # windows that do not overlap need nobody
        size, out = shape[2 + i], made[2 + i]
        sizes = tuple(n for n in range(2, size + 1) if fits(size, out, n, one))
        if sizes:
            part = f"S{2 + i}"
            yield SplitRule(str(AxisRule(_inputs(call, x.name, part), (part,), (HALO,))), sizes)


def _inputs(call: Call, name: str, part: str) -> tuple[str, ...]:
    return tuple(part if one == name else "R" for one in call.reads)
