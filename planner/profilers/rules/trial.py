"""`Trial`: an operator at one set of small sizes, run whole and run on parts.

Numbers are fresh and normal, in double precision, never a model's own: biases of zero would make
sums look right that are not. Integers point anywhere into what they index, booleans are random.
Summands of a tensor are drawn by another seed than the tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from planner.artefacts.sharding import AxisRule, dim_of
from planner.operators.binding import Call
from planner.operators.parts.attributes import divided
from planner.operators.parts.slices import part_of
from planner.profilers.rules.template import (
    IN_PLACE_OF_INFINITY,
    Shape,
    Template,
    call_at,
    shape_of,
    size_of,
)

TOLERANCE = 1e-9
"""Relative to the largest number of a tensor. Sums in another order differ by 1e-15."""
MAX_ELEMENTS = 4_000_000
"""All tensors of a trial together have no more; where fixed sizes are larger, nothing is tried."""

_REDRAWS = 4

Given = tuple[str, ...]
"""A part of a spec for each value that an operator reads: R, P, S<d> or S<d>/<c>."""


class TooLargeError(Exception):
    """The sizes that an operator does not run without are too large to be tried."""


@dataclass(frozen=True)
class Trial:
    """An operator whose tensors have numbers.

    Attributes:
        template: the operator.
        parts: the number of parts, n.
        seed: of the numbers.
        scale: deviation of normal numbers.
        blocks: what can be cut can also be cut in as many blocks.
    """

    template: Template
    parts: int
    seed: int = 0
    scale: float = 1.0
    blocks: int = 1

    @cached_property
    def sizes(self) -> dict[object, int]:
        """The size of each free factor."""
        return dict(self.template.sizes(self.parts * self.blocks))

    @cached_property
    def call(self) -> Call:
        """The call at these sizes."""
        return call_at(self.template, self.sizes)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of what is read.

        Raises:
            TooLargeError: if there are too many elements.
        """
        shapes = tuple(shape_of(one.dims, self.sizes) for one in self.template.values)
        outs = [shape_of(dims, self.sizes) for dims in self.template.outputs]
        if sum(torch.Size(one).numel() for one in (*shapes, *outs)) > MAX_ELEMENTS:
            raise TooLargeError
        return shapes

    @cached_property
    def _draw(self) -> "_Draw":
        """The way to draw numbers for which the operator gives finite ones that differ."""
        for draw in _DRAWS[1:] if self.template.inside else _DRAWS:
            values = self._drawn(draw)
            made = self.run(self.call, values)
            if made is not None and all(map(_telling, made)):
                return draw
        raise TooLargeError

    def _drawn(self, draw: "_Draw") -> list[Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.parts)
        return [self._value(i, draw, generator) for i in range(len(self.shapes))]

    def _value(self, i: int, draw: "_Draw", generator: torch.Generator) -> Tensor:
        one, shape = self.template.values[i], self.shapes[i]
        if one.constant is not None and (one.constant.numel() <= 1 or one.kind != "float"):
            return _finite(one.constant.double()) if one.kind == "float" else one.constant
        if one.kind == "float":
            return draw(shape, generator, self.scale)
        if one.kind == "bool":
            return torch.rand(shape, generator=generator) < 0.5
        below = max(1, size_of(one.below, self.sizes))
        drawn = torch.randint(below, shape, generator=generator)
        ignored = self.template.call.kwargs.get("ignore_index")
        if isinstance(ignored, int):
            some = torch.rand(shape, generator=generator) < 0.2
            drawn = torch.where(some, ignored, drawn)
        return drawn

    @cached_property
    def values(self) -> list[Tensor]:
        """The numbers."""
        return self._drawn(self._draw)

    @cached_property
    def whole(self) -> list[Tensor]:
        """What the operator makes of them.

        Raises:
            TooLargeError: if it makes nothing of which anything can be told.
        """
        made = self.run(self.call, self.values)
        assert made is not None, "the draw was chosen so that the operator runs"
        return made

    def run(
        self, call: Call, values: Sequence[Tensor], *, gradients: bool = False
    ) -> list[Tensor] | None:
        """What a call makes of numbers; None where it refuses them.

        Args:
            gradients: whether autograd records it.
        """
        tensors = dict(zip(self.template.call.reads, values, strict=True))
        args, kwargs = call.fill(tensors.__getitem__)
        try:
            with torch.set_grad_enabled(gradients):
                result = call.function(*args, **kwargs)
        except Exception:  # whatever a function raises that the user has registered
            return None
        every = (result,) if isinstance(result, Tensor) else tuple(result)
        return [every[position] for position in self.template.made]

    # ---- what depends on what

    def reached(self, i: int, dim: int | None) -> list[Tensor] | None:
        """Per output, where it changes if the first part of a value along a dimension is drawn
        anew; all of the value, if the dimension is None. Where nothing changes it is drawn again,
        a few times: the sign of a few numbers may stay by chance.
        """
        generator = torch.Generator().manual_seed(7 + self.seed)
        for _ in range(_REDRAWS):
            new = self._value(i, self._draw, generator)
            if dim is not None:
                old, size = self.values[i], self.shapes[i][dim] // self.parts
                first, rest = new.narrow(dim, 0, size), old.narrow(dim, size, old.shape[dim] - size)
                new = torch.cat([first, rest], dim)
            made = self.run(self.call, [*self.values[:i], new, *self.values[i + 1 :]])
            if made is None:
                return None
            changed = [~_near(a, b) for a, b in zip(made, self.whole, strict=True)]
            if any(bool(one.any()) for one in changed):
                break
        return changed

    # ---- on parts

    def localized(self, local: Sequence[str]) -> Call | None:
        """The call with local attributes; None where one cannot be divided."""
        try:
            return replace(self.call, kwargs=divided(self.call.kwargs, local, self.parts))
        except ValueError:
            return None

    def part(self, i: int, spec: str, rank: int) -> Tensor:
        """The part of a value that a rank has."""
        value = self.values[i]
        if spec == "R":
            return value
        if spec == "P":
            return self._summands(i)[rank]
        return part_of(value, self.parts, spec, rank)

    def _summands(self, i: int) -> list[Tensor]:
        value = self.values[i]
        generator = torch.Generator().manual_seed(524_287 * (self.seed + 1) + i)
        others = [
            torch.randn(value.shape, generator=generator, dtype=torch.float64) * self.scale
            for _ in range(self.parts - 1)
        ]
        return [value - sum(others), *others]

    def made_by(self, given: Given, local: Sequence[str], rank: int) -> list[Tensor] | None:
        """What a rank makes of its parts, with local attributes; None where it cannot."""
        call = self.localized(local)
        if call is None:
            return None
        return self.run(call, [self.part(i, spec, rank) for i, spec in enumerate(given)])

    def outcome(
        self, given: Given, local: Sequence[str], first: Callable[[Tensor], bool] | None = None
    ) -> tuple[str, ...] | None:
        """How the ranks' outputs make up the whole ones: a part of a spec for each (A for a mean),
        None if one of them does not.

        Args:
            first: whether the first rank's first output may be right; None does not ask.
        """
        ranks = []
        for rank in range(self.parts):
            made = self.made_by(given, local, rank)
            if made is None or (rank == 0 and first is not None and not first(made[0])):
                return None
            ranks.append(made)
        parts = []
        for o, whole in enumerate(self.whole):
            part = joined([made[o] for made in ranks], whole)
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)

    def makes(self, rule: AxisRule) -> bool:
        """Whether each rank makes its parts of the outputs: cut, whole, or summands."""
        ranks = []
        for rank in range(self.parts):
            own = self.made_by(rule.inputs, rule.local, rank)
            if own is None:
                return False
            ranks.append(own)
        every = zip(*ranks, strict=True)
        for part, whole, parts in zip(rule.outputs, self.whole, every, strict=True):
            if dim_of(part) is None:
                if joined(parts, whole) != part:
                    return False
            elif not all(
                _alike(one, part_of(whole, self.parts, part, k)) for k, one in enumerate(parts)
            ):
                return False
        return True


def joined(parts: Sequence[Tensor], whole: Tensor) -> str | None:
    """How parts make up a tensor: R, S<d>, P, A for a mean, or None."""
    if parts[0].shape == whole.shape:
        if all(_alike(one, whole) for one in parts):
            return "R"
        if not whole.is_floating_point():
            return None
        total = sum(parts[1:], parts[0])
        if _alike(total, whole):
            return "P"
        return "A" if _alike(total / len(parts), whole) else None
    dims = _cut_dims(parts[0].shape, whole.shape, len(parts))
    return next((f"S{d}" for d in dims if _alike(torch.cat(list(parts), d), whole)), None)


def _cut_dims(part: Sequence[int], whole: Sequence[int], parts: int) -> list[int]:
    """The dimension along which parts may make up a whole of these sizes."""
    if len(part) != len(whole):
        return []
    differ = [d for d in range(len(part)) if part[d] != whole[d]]
    return differ if len(differ) == 1 and part[differ[0]] * parts == whole[differ[0]] else []


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(_near(a, b).all())


def _near(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal but for rounding."""
    if not a.is_floating_point():
        return a == b
    fine = TOLERANCE if a.dtype == torch.float64 else 1e-5 if a.dtype == torch.float32 else 1e-2
    top = b[torch.isfinite(b)]
    scale = float(top.abs().max()) if top.numel() else 1.0
    # Beside the relative term an absolute one, because sums of large numbers may be nearly zero. It
    # is at most `fine`: numbers of 1e6 would hide differences of 1e-3 elsewhere. Infinities are
    # equal where a == b says so; elsewhere their difference is infinite or no number, and not near.
    return (a == b) | ((a - b).abs() <= fine * (b.abs() + min(scale, 1.0)))


def _finite(constant: Tensor) -> Tensor:
    return torch.where(constant.isinf(), constant.sign() * IN_PLACE_OF_INFINITY, constant)


def _telling(made: Tensor) -> bool:
    """Whether numbers can tell right from wrong: finite, and not all the same."""
    if not made.numel() or not made.is_floating_point():
        return bool(made.numel())
    if not torch.isfinite(made).all():
        return False
    return made.numel() == 1 or bool((made != made.flatten()[0]).any())


# ---- ways to draw numbers

_Draw = Callable[[Shape, torch.Generator, float], Tensor]


def _normal(shape: Shape, generator: torch.Generator, scale: float) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def _positive(shape: Shape, generator: torch.Generator, scale: float) -> Tensor:
    return _normal(shape, generator, scale).abs() + 0.5


def _above_one(shape: Shape, generator: torch.Generator, scale: float) -> Tensor:
    return _normal(shape, generator, scale).abs() + 1.1


def _inside_one(shape: Shape, generator: torch.Generator, scale: float) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


# Whole numbers would have exact sums, but also ties, with which wrong rules for ReduceMax and TopK
# look right.
_DRAWS: tuple[_Draw, ...] = (_normal, _positive, _inside_one, _above_one)
