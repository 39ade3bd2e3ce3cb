"""`Template`: an operator at small sizes, so that it can be run many times to see how it splits.

Each dimension is a product of *factors*, and most factors are free: they may have any size as long
as all dimensions with the same factor agree. A free factor gets a small multiple of the number of
parts that is tried, so that every free dimension can be cut. Factors are

    the size itself     by default: equal sizes of an operator's tensors are one factor
    position            of Reshape and Flatten, the sizes that input and output are both made of
    count, rest         where an attribute counts heads or groups

A factor keeps its real size where the operator does not run at another one, or makes an output
that does not follow: the length of what a Slice takes, the pixels under a window with a stride.
What is found there holds at the real size only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import copysign, gcd, isinf, prod
from operator import mul
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

from planner.artefacts.operator_types import CHANNELS, DATA, facts
from planner.model.protos import FLOATS
from planner.operators.binding import Call, Read

IN_PLACE_OF_INFINITY = 1.7
"""Masks fill with minus infinity, of which sums and differences tell nothing."""
MULTIPLES = (2, 3, 4, 5)
"""A free factor is one of these times the number of parts: parts of one element would hide a
dimension of size 1, which is repeated where it does not fit. Four of them, so that few factors have
one size by chance; for more than two parts only two, because tensors of several factors would have
too many elements."""

Shape = tuple[int, ...]
Factors = tuple["Factor", ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of the sizes of some dimensions.

    Attributes:
        name: factors with the same name have the same size.
        real: its size in the model.
        free: whether it may have another one.
        tried: the size that it is tried with where it is not free; None for its own.
    """

    name: object
    real: int
    free: bool = True
    tried: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an operator reads.

    Attributes:
        dims: factors of each dimension.
        kind: "float", "int" or "bool".
        below: one more than the largest number, of integers; a tensor that is indexed has as many.
        constant: the numbers, where they are part of the operator; it is never cut.
    """

    dims: tuple[Factors, ...]
    kind: str
    below: Factors = ()
    constant: Tensor | None = None


@dataclass(frozen=True)
class Template:
    """An operator with tensors of sizes yet to be chosen.

    Attributes:
        call: with the attributes that it has in the model.
        values: what it reads, in the order of `call.reads`.
        outputs: factors of each dimension of each output.
        made: positions of these outputs among the results of the call.
        attributes: by keyword, functions from the sizes of factors to the value of the attribute;
            others stay.
        counts: attributes that count heads or groups, with the number in the model.
        inside: whether floats are places in an image, which begins at 0.
    """

    call: Call
    values: tuple[Value, ...]
    outputs: tuple[tuple[Factors, ...], ...]
    made: tuple[int, ...]
    attributes: Mapping[str, Callable[["Sizes"], object]]
    counts: Mapping[str, int]
    inside: bool = False

    @cached_property
    def free(self) -> tuple[Factor, ...]:
        """The free factors, the largest first."""
        named = {
            factor
            for dims in (*(value.dims for value in self.values), *self.outputs)
            for dim in dims
            for factor in dim
            if factor.free
        }
        return tuple(sorted(named, key=lambda one: (-one.real, str(one.name))))

    def sizes(self, parts: int) -> "Sizes":
        """Sizes for `parts` parts: every free factor can be cut, the smallest are the smallest."""
        multiples = MULTIPLES if parts == 2 else MULTIPLES[:2]
        ascending = reversed(self.free)
        return {one.name: parts * multiples[i % len(multiples)] for i, one in enumerate(ascending)}


Sizes = Mapping[object, int]


def size_of(factors: Factors, sizes: Sizes) -> int:
    """The size of a dimension."""
    return prod(sizes.get(one.name, one.tried or one.real) for one in factors)


def shape_of(dims: Sequence[Factors], sizes: Sizes) -> Shape:
    """The shape of a tensor."""
    return tuple(size_of(factors, sizes) for factors in dims)


def call_at(template: Template, sizes: Sizes) -> Call:
    """The operator's call with the attributes that fit these sizes."""
    changed = {name: value(sizes) for name, value in template.attributes.items()}
    return replace(template.call, kwargs={**template.call.kwargs, **changed})


# ---- making one


def template(
    operator_type: str,
    call: Call,
    reads: Sequence[tuple[Shape, str, Tensor | None]],
    outputs: Sequence[tuple[int, Shape]],
) -> Template:
    """The template of an operator, with as many free factors as it allows.

    Args:
        operator_type: its ONNX type.
        call: of its function.
        reads: shape, kind and, if they belong to the operator, numbers of what it reads.
        outputs: position and shape of the results that are read.
    """
    shapes = [shape for shape, _, _ in reads]
    made = [shape for _, shape in outputs]
    dims, out_dims, attributes, counts = _factors(operator_type, call, shapes, made)
    values = tuple(
        Value(tuple(own), kind, constant=constant)
        for own, (_, kind, constant) in zip(dims, reads, strict=True)
    )
    values = _with_ranges(operator_type, call, values)
    every = Template(
        _tamed(operator_type, call), values, tuple(map(tuple, out_dims)),
        tuple(position for position, _ in outputs), attributes, counts,
        facts(operator_type).places,
    )  # fmt: skip
    for value in values:  # numbers that belong to the operator are as many as they are
        if value.constant is not None:
            for factors in value.dims:
                every = _fixed(every, factors)
    if _runs(every):
        return every
    # One factor after the other, the largest first: it stays free where the operator runs.
    chosen = _fixed(every, every.free)
    for one in every.free:
        freed = _freed(every, {*(free.name for free in chosen.free), one.name})
        if _runs(freed):
            chosen = freed
    return chosen


def _fixed(template: Template, factors: Sequence[Factor]) -> Template:
    fixed = {one.name for one in factors}
    return _freed(template, {one.name for one in template.free} - fixed)


def _freed(template: Template, names: Collection[object]) -> Template:
    """The template with only the factors of these names free, as far as they were."""

    def changed(dims: Sequence[Factors]) -> tuple[Factors, ...]:
        return tuple(
            tuple(replace(one, free=one.free and one.name in names) for one in factors)
            for factors in dims
        )

    values = tuple(
        replace(one, dims=changed(one.dims), below=changed([one.below])[0])
        for one in template.values
    )
    return replace(
        template,
        values=values,
        outputs=tuple(map(changed, template.outputs)),
    )


def _runs(template: Template) -> bool:
    """Whether the operator runs at small sizes and makes what follows from them, on tensors without
    numbers. Two sets of sizes, because one may be the real sizes by chance.
    """
    return all(_runs_at(template, template.sizes(parts)) for parts in (2, 3))


def _runs_at(template: Template, sizes: Sizes) -> bool:
    call = call_at(template, sizes)
    tensors = {
        name: torch.empty(shape_of(one.dims, sizes), dtype=_META[one.kind], device="meta")
        for name, one in zip(call.reads, template.values, strict=True)
    }
    args, kwargs = call.fill(tensors.__getitem__)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    try:
        result = call.function(*args, **kwargs)
    except Exception:  # whatever a function raises that the user has registered
        return False
    every = (result,) if isinstance(result, Tensor) else tuple(result)
    return all(
        every[position] is not None and tuple(every[position].shape) == shape_of(dims, sizes)
        for position, dims in zip(template.made, template.outputs, strict=True)
    )


_META = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


# ---- factors by operator

_Dims = list[list[Factors]]
_Parts = tuple[_Dims, _Dims, dict[str, Callable[[Sizes], object]], dict[str, int]]


def _factors(
    kind: str, call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]
) -> _Parts:  # fmt: skip
    """Factors of what is read and made, attributes that follow from sizes, and counts."""
    known = facts(kind)
    if kind in _BY_TYPE and not (kind in _CONVOLUTIONS and len(reads[0]) != len(reads[1])):
        return _BY_TYPE[kind](call, reads, outputs)
    if known.heads:
        return _counted(kind, call, reads, outputs)
    if isinstance(unit := call.kwargs.get(known.unit), int):
        return _by_unit(known.unit, unit, reads, outputs)
    return *_by_size(reads, outputs), {}, {}


def _expanded(call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    dims = [[_plain(size) for size in shape] for shape in reads]
    made = [[_plain(n) for n in outputs[0]]]
    return dims, made, {"shape": _shape_attribute(call.kwargs["shape"], made[0])}, {}


def _plain(size: int) -> Factors:
    """A dimension by its size; one of 1 is repeated where it does not fit, and stays."""
    return (Factor(size, size),) if size > 1 else _own(size)


def _own(size: int) -> Factors:
    """A size that cannot be another."""
    return (Factor(("own", size), size, free=False),) if size != 1 else ()


def reshaped(call: Call, read: Shape, made: Shape) -> _Parts:
    """The sizes of input and output taken apart until both are products of the same factors, in
    the same order: (6, 4) and (24,) are of 6 and 4. Where there are none, as of (6, 4) and (4, 6),
    the dimensions that hang together keep their sizes.
    """
    # Marks are products of the first sizes. Of (6, 4) -> (24,) they are 1, 6 and 24, of which both
    # shapes have 1 and 24; between these, 6 = 6 / 1 and 4 = 24 / 6 are the factors. Of (6, 4) ->
    # (4, 6) they are 1, 4, 6 and 24: 6 / 4 is no whole number, so no factor is known between 1 and
    # 24 (None), and each dimension in there keeps its size.
    if 0 in read:
        return [list(map(_own, read))], [list(map(_own, made))], {}, {}
    before, after = (list(accumulate(shape, mul)) for shape in (read, made))
    apart = _between_marks({1, *before}, {1, *after})

    def dims(shape: Shape, products: list[int]) -> list[Factors]:
        made = []
        for size, low, high in zip(shape, [1, *products], products, strict=False):
            inside = [one for (a, b), one in apart.items() if low <= a and b <= high]
            known = tuple(one for one in inside if one is not None)
            made.append(known if len(known) == len(inside) else _own(size))
        return made

    out = dims(made, after)
    attributes = {}
    if "shape" in call.kwargs:
        attributes["shape"] = _shape_attribute(call.kwargs["shape"], out)
    return [dims(read, before)], [out], attributes, {}


def _between_marks(
    before: Collection[int], after: Collection[int]
) -> dict[tuple[int, int], Factor | None]:
    """The factor between each two marks that follow each other; None where it is not known."""
    marks = sorted({*before, *after})
    common = [one for one in marks if one in before and one in after]
    apart: dict[tuple[int, int], Factor | None] = {}
    for low, high in pairwise(common):
        pairs = list(pairwise(one for one in marks if low <= one <= high))
        whole = all(b % a == 0 for a, b in pairs)
        for a, b in pairs:
            apart[a, b] = Factor(("position", a), b // a, free=whole) if whole else None
    return apart


def _shape_attribute(shape: object, dims: Sequence[Factors]) -> Callable[[Sizes], object]:
    """The attribute with the sizes of an output: the last of it where it is shorter."""
    assert isinstance(shape, tuple)

    def at(sizes: Sizes) -> object:
        last = dims[len(dims) - len(shape) :]
        return tuple(
            size_of(d, sizes) if n > 1 else n for n, d in zip(shape, last, strict=True)
        )  # fmt: skip

    return at


def _resized(call: Call, made: Sequence[Factors]) -> dict[str, Callable[[Sizes], object]]:
    given = call.kwargs.get("sizes")
    if not isinstance(given, tuple):
        return {}
    axes = call.kwargs.get("axes") or tuple(range(len(made)))
    assert isinstance(axes, tuple)
    return {"sizes": lambda sizes: tuple(size_of(made[axis], sizes) for axis in axes)}


def _split(call: Call, read: Shape, outputs: Sequence[Shape]) -> _Parts:
    axis = call.kwargs.get("axis", 0)
    assert isinstance(axis, int)
    axis %= len(read)
    parts = [shape[axis] for shape in outputs]
    equal = len(set(parts)) == 1 and len(parts) == call.kwargs["num_outputs"]
    part = (Factor("part", parts[0]),)
    dims = [_plain(n) for n in read]
    dims[axis] = (*_own(len(parts)), *part) if equal else _own(read[axis])
    made = [[*dims[:axis], part if equal else _own(n), *dims[axis + 1 :]] for n in parts]
    attributes: dict[str, Callable[[Sizes], object]] = {}
    if equal and call.kwargs.get("split") is not None:
        attributes["split"] = lambda sizes: (size_of(part, sizes),) * len(parts)
    return [dims], made, attributes, {}


def _sliced(read: Shape, made: Shape) -> _Parts:
    """What is cut off keeps its sizes: at another one a slice might take everything."""
    pairs = list(zip(read, made, strict=True))
    ins = [_plain(n) if n == out else _own(n) for n, out in pairs]
    outs = [_plain(n) if n == out else _own(out) for n, out in pairs]
    return [ins], [outs], {}, {}


def _conv(call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    """(samples, groups x channels, ...) by (groups x filters, channels, ...)."""
    group = call.kwargs.get("group", 1)
    assert isinstance(group, int)
    x, w = reads[0], reads[1]
    groups = (Factor("group", group),) if group > 1 else ()
    ins, outs = ((Factor((i, n), n),) if n > 1 else () for i, n in ((0, w[1]), (1, w[0] // group)))
    before, after = _pixels(call, x, w[2:], outputs[0])
    dims = [[_plain(x[0]), (*groups, *ins), *before]]
    dims.append([(*groups, *outs), ins, *map(_own, w[2:])])
    made = [[_plain(x[0]), (*groups, *outs), *after] for _ in outputs]
    for more in reads[2:]:
        # A bias, or something that is added to the result.
        dims.append([(*groups, *outs)] if len(more) == 1 else made[0])
    if not groups:
        return dims, made, {}, {}
    return dims, made, {"group": lambda sizes: size_of(groups, sizes)}, {"group": group}


def _pool(call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    kernel = call.kwargs["kernel_shape"]
    assert isinstance(kernel, tuple)
    before, after = _pixels(call, reads[0], kernel, outputs[0])
    first = [_plain(n) for n in reads[0][:2]]
    return [[*first, *before]], [[*first, *after] for _ in outputs], {}, {}


def _pixels(
    call: Call, read: Shape, kernel: Shape, made: Shape
) -> tuple[list[Factors], list[Factors]]:
    """The dimensions under windows. Where input and output have equal sizes any size will do, else
    fewer pixels that leave the same remainder: whether n parts fit depends on no more for the n
    that are tried.
    """
    strides, gaps = (call.kwargs.get(name) or (1,) * len(kernel) for name in _STEPS)
    assert isinstance(strides, tuple)
    assert isinstance(gaps, tuple)
    before, after = [], []
    for n, out, k, s, d in zip(read[2:], made[2:], kernel, strides, gaps, strict=True):
        if n == out and s == 1:
            before.append(_plain(n))
            after.append(_plain(n))
            continue
        least = max(_MOST_PARTS * s, (k - 1) * d + 1)
        cycle = _CYCLE * s
        fewer = max(0, (n - least) // cycle) * cycle
        before.append((Factor(("pixels", n, s, k), n, free=False, tried=n - fewer),))
        after.append((Factor(("pixels", out), out, free=False, tried=max(1, out - fewer // s)),))
    return before, after


_STEPS = ("strides", "dilations")
_MOST_PARTS, _CYCLE = 8, 24
"""Numbers of parts that are tried (2, 3, 4 and 8) are at most the first and divide the second,
their least common multiple. So a size that is smaller by cycles of 24 strides leaves the remainder
of the real one, whatever the number of parts."""


def _by_unit(name: str, unit: int, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    """Sizes that are multiples of an attribute are this number and the rest."""
    named = Factor("unit", unit)

    def parts(size: int) -> Factors:
        return (named, *_own(size // unit)) if size % unit == 0 else _plain(size)

    dims, made = ([[parts(n) for n in shape] for shape in some] for some in (reads, outputs))
    return dims, made, {name: lambda sizes: sizes.get("unit", unit)}, {}


def _by_dimension(call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    """Dimensions of the first input that keep their size, and those with a size of their own."""
    dims = [[_plain(size) for size in shape] for shape in reads]
    made = [
        [a if a == _plain(n) else _own(n) for a, n in zip(dims[0], shape, strict=True)]
        for shape in outputs
    ]
    dims[0] = [a if a == b else _own(n) for a, b, n in zip(dims[0], made[0], reads[0], strict=True)]
    return dims, made, _resized(call, made[0]), {}


def _counts(kind: str, call: Call) -> dict[str, int]:
    """The numbers of heads or groups above 1, by attribute."""
    given: dict[str, Any] = {name: call.kwargs.get(name) for name in reversed(facts(kind).heads)}
    return {name: n for name, n in given.items() if isinstance(n, int) and n > 1}


def _heads(kind: str, given: Mapping[str, int], reads: Sequence[Shape]) -> list[int]:
    """The numbers of heads or groups above 1: by attributes, or the sizes of the second dimension
    of four.
    """
    if given or kind != "Attention" or len(reads[0]) != 4:
        return [*given.values()]
    return sorted({reads[0][1], reads[1][1]} - {1})


def _size_of_head(kind: str, reads: Sequence[Shape], most: int) -> int:
    """The part of one head of a model's width; 0 where there is none.

    Args:
        most: number of heads.
    """
    width = reads[0][-1] if len(reads[0]) == 3 else 0
    head = width // most if width and width % most == 0 else 0
    if kind.endswith("RotaryEmbedding"):  # of which the tables have a half, or less
        turned = reads[-1][-1] if kind.startswith("com.") else reads[1][-1]
        head = turned if head and head % turned == 0 else 0
    return head


def _counted(kind: str, call: Call, reads: Sequence[Shape], outputs: Sequence[Shape]) -> _Parts:
    """Sizes that are multiples of a number of heads or groups are this number and the rest."""
    given = _counts(kind, call)
    heads = _heads(kind, given, reads)
    if not heads:
        return *_by_size(reads, outputs), {}, {}
    least = gcd(*heads)
    common = Factor("count", least) if least > 1 else None
    named: dict[int, Factors] = {}
    for count in heads:
        rest = _plain_part(("times", count // least), count // least)
        named[count] = (*([common] if common else ()), *rest)
    head = _size_of_head(kind, reads, max(heads))

    def apart(size: int) -> Factors:
        if size in (head, 1):
            return _plain_part(("rest", size), size)
        fitting = [count for count in sorted(named, reverse=True) if size % count == 0]
        for count in fitting:
            rest = size // count
            if head > 1 and rest % head == 0:
                return (*named[count], Factor(("rest", head), head), *_own(rest // head))
        if not fitting:
            return _plain(size)
        rest = size // fitting[0]
        return (*named[fitting[0]], *_plain_part(("rest", rest), rest))

    known = {n for shape in reads for n in shape}
    grouped = facts(kind).grouped

    def places_in(shape: Shape, made: bool) -> set[int]:
        """Heads and groups are in the last dimension of three, or the second of four; in weights
        and biases anywhere. Tables of positions and masks have none.
        """
        if len(shape) < 3:
            return set() if grouped is DATA else set(range(len(shape)))
        if kind == "ConvTranspose" and shape == reads[1] and not made:
            return {0}
        return {1} if grouped is CHANNELS or len(shape) == 4 else {len(shape) - 1}

    def by_place(shape: Shape, made: bool) -> list[Factors]:
        places = places_in(shape, made)
        return [
            _own(n) if made and n not in known else apart(n) if d in places or n == head
            else _plain(n)
            for d, n in enumerate(shape)
        ]  # fmt: skip

    dims = [by_place(shape, made=False) for shape in reads]
    made = [by_place(shape, made=True) for shape in outputs]
    return dims, made, {name: partial(size_of, named[n]) for name, n in given.items()}, given


def _plain_part(name: object, size: int) -> Factors:
    return (Factor(name, size),) if size > 1 else ()


def _by_size(reads: Sequence[Shape], outputs: Sequence[Shape]) -> tuple[_Dims, _Dims]:
    known = {n for shape in reads for n in shape}
    return (
        [[_plain(n) for n in shape] for shape in reads],
        [[_plain(n) if n in known else _own(n) for n in shape] for shape in outputs],
    )


_CONVOLUTIONS = ("Conv", "com.microsoft.FusedConv")
_BY_TYPE: Mapping[str, Callable[[Call, Sequence[Shape], Sequence[Shape]], _Parts]] = {
    "Reshape": lambda call, reads, outputs: reshaped(call, reads[0], outputs[0]),
    "Flatten": lambda call, reads, outputs: reshaped(call, reads[0], outputs[0]),
    "Split": lambda call, reads, outputs: _split(call, reads[0], outputs),
    "Slice": lambda _, reads, outputs: _sliced(reads[0], outputs[0]),
    "Expand": _expanded,
    **dict.fromkeys(_CONVOLUTIONS, _conv),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Resize", "Upsample"), _by_dimension),
}
"""Factors of the operators whose sizes follow from more than equal numbers."""


# ---- numbers that are indices, and attributes with limits


def _with_ranges(kind: str, call: Call, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """The values with the range of those that are indices. Others are below the smallest size of
    the floats, so that they point into every tensor.
    """
    places = {name: i for i, name in enumerate(call.reads)}
    arguments = (*call.args, *call.kwargs.values())  # in the order of the function's parameters
    formals = [places[v.name] for v in arguments if isinstance(v, Read)]
    indices = facts(kind).indices
    floats = [dim for one in values if one.kind == "float" for dim in one.dims if dim]
    least = min(floats, key=lambda dim: prod(f.real for f in dim), default=_own(_FEW))
    below = dict.fromkeys(range(len(values)), least)
    usual = None if indices is None else indices.axis
    if indices and usual is not None and len(formals) > max(indices.position, indices.table):
        axis = call.kwargs.get("axis", usual)
        dims = values[formals[indices.table]].dims
        below[formals[indices.position]] = dims[axis if isinstance(axis, int) else usual]
    return tuple(
        replace(one, below=below[i]) if one.kind == "int" else one for i, one in enumerate(values)
    )


_FEW = 11  # integers that point into nothing are below this


def _tamed(kind: str, call: Call) -> Call:
    """The call in double precision, with limits that numbers reach and windows that end inside."""
    kwargs: dict[str, Any] = {name: _finite(value) for name, value in call.kwargs.items()}
    known = facts(kind)
    for name, limit in known.limits.items():
        if isinstance(kwargs.get(name), int | float):
            kwargs[name] = limit
    for name in known.windows:
        if isinstance(window := kwargs.get(name), int):
            kwargs[name] = max(-1, min(1, window))
    if kind == "Cast" and kwargs.get("to") in FLOATS:
        kwargs["to"] = TensorProto.DOUBLE
    if kind == "Attention":
        kwargs["softmax_precision"] = None
    dtype: Any = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        kwargs["dtype"] = torch.float64
    return replace(call, kwargs=kwargs)


def _finite(value: object) -> object:
    if isinstance(value, float) and isinf(value):
        return copysign(IN_PLACE_OF_INFINITY, value)
    return value
