"""Rules that running an operator on parts cannot find, because its parts need other devices: they
are listed here, and run by the functions of `planner.operators.parts`.

@rows   Gather from a table whose rows are cut: zeros for rows that are elsewhere
@halo   windows over an image that is cut: rows at the edges come from the neighbours
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import HALO, ROWS, AxisRule
from planner.model.scopes import NEXT_STATE, OWN_DOMAIN
from planner.operators.binding import Call, Read
from planner.operators.parts import MARKED
from planner.operators.parts.halo import fits, window
from planner.profilers.rules.template import Shape


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
