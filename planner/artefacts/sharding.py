"""`Sharding`: how the operators of a stage are split over the devices of a mesh.

A mesh numbers the devices of one replica in named axes, row-major, the outer axis first. A *spec*
says of a tensor, for each axis of the mesh:

    S<d>    cut along dimension d, one part per coordinate of the axis
    S<d>/<c>  the same, where dimension d is made of c blocks that are cut each for itself: queries,
            keys and values that one weight makes, side by side
    C       cut along the first dimension in chunks of ceil(size / n) rows, whatever its size: the
            last ones are shorter, or empty (as torch.chunk cuts). For what only lies there:
            parameters, gradients and optimizer state
    R       whole on every coordinate
    P       a summand on every coordinate; the tensor is their sum
    M       whole, and another one on every coordinate: of its own microbatch. Only where replicas
            are an axis (`resharding/over_replicas.py`), never in a file

A *rule* is one way to run an operator: a spec for everything that it reads and makes. As text it
has a line for each axis: "S2,S0->P shape[2]" reads a tensor that is cut along dimension 2 and one
that is cut along dimension 0, makes a summand, and runs with its attribute shape[2] divided by the
size of the axis. An output "A" is a summand of a mean: P, after division by the size of the axis.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from planner.artefacts.graph import Operator

Spec = tuple[str, ...]
Box = tuple[tuple[int, int], ...]
"""Per dimension, the first index of a part and the one behind its last."""

_PART = re.compile(r"R|P|M|C|S(?P<dim>0|[1-9][0-9]*)(/(?P<blocks>[2-9]|[1-9][0-9]+))?")
_LINE = re.compile(r"(?P<inputs>[A-Z0-9/,]*)->(?P<outputs>[A-Z0-9/,]+)(?P<local>( [^ ]+)*)")
_MEAN = "A"
CHUNKS, OWN = "C", "M"
HALO, MOMENTS, ROWS = "@halo", "@moments", "@rows"
"""Words of rules that name functions of `operators/parts`, which ask the other devices."""
CACHED = 2**14
"""Specs, rules and local shapes that are remembered: layers repeat, so a model has few of them."""


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One way to run an operator on one axis of a mesh.

    Attributes:
        inputs: a part of a spec for each tensor and parameter that the operator reads, such as
            "S0".
        outputs: for each output; "A" is a summand of a mean.
        local: the attributes that are divided by the size of the axis, such as "shape[2]". A word
            that begins with @ names another function than the operator's own, one that asks the
            other devices.

    Raises:
        ValueError: if there is no output, or a part is none of a spec.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    local: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.outputs:
            raise ValueError("expected the spec of an output, got none")
        for part in (*self.inputs, *(one for one in self.outputs if one != _MEAN)):
            _check_part(part)

    @classmethod
    @lru_cache(maxsize=CACHED)
    def parse(cls, line: str) -> "AxisRule":
        """The rule of a line.

        Raises:
            ValueError: if the line is none.

        >>> AxisRule.parse("S2,S0->P shape[2]")
        AxisRule(inputs=('S2', 'S0'), outputs=('P',), local=('shape[2]',))
        """
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ValueError(f"expected a rule such as 'S0,R->S0', got {line!r}")
        inputs = tuple(parts["inputs"].split(",")) if parts["inputs"] else ()
        return cls(inputs, tuple(parts["outputs"].split(",")), tuple(parts["local"].split()))

    def __str__(self) -> str:
        """The line that `parse` reads."""
        return " ".join((f"{','.join(self.inputs)}->{','.join(self.outputs)}", *self.local))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of inputs and outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def is_split(self) -> bool:
        """Whether the devices do different work."""
        return any(part != "R" for part in self.parts)

    @property
    def cuts(self) -> bool:
        """Whether anything is cut."""
        return any(part.startswith("S") for part in self.parts)

    @property
    def shares_work(self) -> bool:
        """Whether each device does its share of the work. Where nothing is cut each does all of it,
        and to look up rows of a table that is cut is the work of looking up all.
        """
        return self.cuts and ROWS not in self.local

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes that are divided."""
        return tuple(word for word in self.local if not word.startswith("@"))

    @property
    def marks(self) -> tuple[str, ...]:
        """The words that name a function that asks the other devices."""
        return tuple(word for word in self.local if word.startswith("@"))


@dataclass(frozen=True)
class Rule:
    """One way to run an operator on a mesh.

    Attributes:
        axes: its rule on each axis.

    Raises:
        ValueError: if there is no axis, the axes speak of different numbers of tensors, they name
            several functions, or two of them cut a dimension of which one cuts blocks or reads
            beyond its part.
    """

    axes: tuple[AxisRule, ...]

    def __post_init__(self) -> None:
        if len({(len(one.inputs), len(one.outputs)) for one in self.axes}) != 1:
            raise ValueError("expected a line for each axis, all with the same numbers of tensors")
        for spec in (*self.inputs, *self.outputs):
            check_spec(spec, len(self.axes))
        if len(marks := {mark for axis in self.axes for mark in axis.marks}) > 1:
            raise ValueError(f"expected one mark, got {', '.join(sorted(marks))}")
        beyond = [k for k, axis in enumerate(self.axes) if HALO in axis.marks]
        for spec in self.inputs if beyond else ():
            dims = [dim_of(part) for part in spec]
            if any(dims[k] is not None and dims.count(dims[k]) > 1 for k in beyond):
                raise ValueError(
                    f"{HALO}: expected a dimension to be cut along one axis, got {','.join(spec)}"
                )

    @cached_property
    def inputs(self) -> tuple[Spec, ...]:
        """Specs of the tensors and parameters that the operator reads, in its own order."""
        return tuple(zip(*(axis.inputs for axis in self.axes), strict=True))

    @cached_property
    def outputs(self) -> tuple[Spec, ...]:
        """Specs of its outputs."""
        rows = zip(*(axis.outputs for axis in self.axes), strict=True)
        return tuple(tuple("P" if part == _MEAN else part for part in row) for row in rows)

    @property
    def lines(self) -> tuple[str, ...]:
        """The rule as text, a line for each axis."""
        return tuple(map(str, self.axes))

    def num_means(self, mesh: Sequence[int]) -> tuple[int, ...]:
        """Per output, the number of devices whose means it is the mean of; 1 where it is none.

        >>> rule_of(["S0->A,P", "S1->P,A", "R->A,R"]).num_means((2, 3, 4))
        (8, 3)
        """
        return tuple(
            prod(size for size, part in zip(mesh, row, strict=True) if part == _MEAN)
            for row in zip(*(axis.outputs for axis in self.axes), strict=True)
        )


AT_REST = ("parameters", "inputs", "outputs", "gradients", "states")
"""The fields of `Sharding` with specs by name."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a stage is split; what is left out is whole (R) on every axis.

    Attributes:
        mesh: size of each axis.
        rules: by operator.
        parameters: by name, how each parameter of the stage lies on the mesh.
        inputs: by name, how each tensor from outside the stage lies there.
        outputs: by name, how each tensor lies there that leaves the stage.
        gradients: by name, how the gradients of parameters are added up over the microbatches,
            where that is not as the parameter lies: cut further under ZeRO-2.
        states: by name, how the optimizer's state of parameters lies and is stepped, where that is
            not as the parameter lies: cut further under ZeRO-1 and ZeRO-2. After the step the
            parameter is gathered again.

    Raises:
        ValueError: if the mesh is none, a spec is none or of another mesh, or a tensor at the
            edge of the stage, a parameter, its gradient or its state is a summand.
    """

    mesh: tuple[int, ...]
    rules: Mapping[str, Rule] = field(hash=False)
    parameters: Mapping[str, Spec] = field(hash=False)
    inputs: Mapping[str, Spec] = field(hash=False)
    outputs: Mapping[str, Spec] = field(hash=False)
    gradients: Mapping[str, Spec] = field(hash=False, default_factory=dict)
    states: Mapping[str, Spec] = field(hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.mesh or min(self.mesh) < 1:
            raise ValueError(f"mesh: expected sizes of at least 1, got {list(self.mesh)}")
        for name, rule in self.rules.items():
            if len(rule.axes) != len(self.mesh):
                raise ValueError(
                    f"rules.{name}: expected a line for each of the {len(self.mesh)} axes, got"
                    f" {len(rule.axes)}"
                )
        for kind in AT_REST:
            for name, spec in getattr(self, kind).items():
                try:
                    check_spec(spec, len(self.mesh))
                except ValueError as error:
                    raise ValueError(f"{kind}.{name}: {error}") from None
                if "P" in spec:
                    raise ValueError(f"{kind}.{name}: expected S or R for each axis, got P")

    @property
    def num_devices(self) -> int:
        """The devices of one replica."""
        return prod(self.mesh)


@lru_cache(maxsize=CACHED)
def dim_of(part: str) -> int | None:
    """The dimension that a spec cuts on an axis; None where it cuts none.

    >>> dim_of("S2"), dim_of("S1/3"), dim_of("C"), dim_of("P")
    (2, 1, 0, None)
    """
    if part == CHUNKS:
        return 0
    return int(part[1:].partition("/")[0]) if part.startswith("S") else None


@lru_cache(maxsize=CACHED)
def blocks_of(part: str) -> int:
    """The number of blocks that are cut each for itself; 1 for all but S<d>/<c>.

    >>> blocks_of("S1/3"), blocks_of("S1")
    (3, 1)
    """
    return int(part.partition("/")[2] or 1)


@lru_cache(maxsize=CACHED)
def check_spec(spec: Spec, num_axes: int) -> None:
    """Checks that a spec is one of a mesh with `num_axes` axes.

    Raises:
        ValueError: if it is not.
    """
    if len(spec) != num_axes:
        raise ValueError(f"expected a spec for each of the {num_axes} axes, got {len(spec)}")
    for part in spec:
        _check_part(part)
    for part in spec:
        same = [other for other in spec if dim_of(other) == dim_of(part) and other != CHUNKS]
        if blocks_of(part) > 1 and len(same) > 1:
            raise ValueError(f"{part}: expected no other axis to cut dimension {dim_of(part)}")


@lru_cache(maxsize=CACHED)
def _check_part(part: str) -> None:
    if not _PART.fullmatch(part):
        raise ValueError(f"expected R, P or S with a dimension, such as S0, got {part!r}")


def tiles(
    shape: Sequence[int], spec: Spec, mesh: Sequence[int], index: int
) -> tuple[Box, ...]:  # fmt: skip
    """The parts of a tensor that one device of a mesh has, in the order in which they lie there
    along the dimension whose blocks are cut; one where none are. Of a summand, the whole box.

    Where two axes cut one dimension, the first is the outer one: it cuts the dimension, the second
    cuts each part.

    Args:
        index: position of the device in the mesh, row-major.

    Raises:
        ValueError: if a dimension is not there or cannot be cut into equal parts.

    >>> tiles((6, 8), ("S1", "R"), (2, 2), 3)
    (((0, 6), (4, 8)),)
    >>> tiles((12,), ("S0/3",), (2,), 1)
    (((2, 4),), ((6, 8),), ((10, 12),))
    >>> [tiles((5,), ("C",), (4,), device) for device in range(4)]
    [(((0, 2),),), (((2, 4),),), (((4, 5),),), (((5, 5),),)]
    """
    check_spec(spec, len(mesh))
    boxes: list[list[tuple[int, int]]] = [[(0, size) for size in shape]]
    remaining = prod(mesh)
    for part, size in zip(spec, mesh, strict=True):
        remaining //= size
        coordinate = index // remaining % size  # of the device along this axis
        dim, blocks = dim_of(part), blocks_of(part)
        if dim is None:
            continue
        if dim >= len(shape):
            raise ValueError(f"{part}: expected one of the {len(shape)} dimensions")
        if part == CHUNKS:
            boxes = _chunk(boxes, size, coordinate)
            continue
        start, end = boxes[0][dim]
        if (end - start) % (size * blocks):
            cuts = f"{size} equal parts" if blocks == 1 else f"{blocks} blocks of {size} parts"
            raise ValueError(f"{part}: {end - start} cannot be cut into {cuts}")
        width = (end - start) // (size * blocks)
        boxes = [
            [*box[:dim], (first, first + width), *box[dim + 1 :]]
            for box in boxes
            for block in range(blocks)
            for first in [start + (block * size + coordinate) * width]
        ]
    return tuple(tuple(box) for box in boxes)


def _chunk(
    boxes: list[list[tuple[int, int]]], n: int, k: int
) -> list[list[tuple[int, int]]]:  # fmt: skip
    """What the k-th of n chunks has of boxes that lie behind each other along the first dimension:
    at least one box, which may be empty.
    """
    rows = sum(end - start for (start, end), *_ in boxes)
    width = -(-rows // n)
    first, last = min(k * width, rows), min((k + 1) * width, rows)
    found, before = [], 0
    for (start, end), *others in boxes:
        here = start + max(first - before, 0), start + min(last - before, end - start)
        if here[0] < here[1]:
            found.append([here, *others])
        before += end - start
    (_, end), *others = boxes[-1]
    return found or [[(end, end), *others]]


def tile(shape: Sequence[int], spec: Spec, mesh: Sequence[int], index: int) -> Box:
    """The part of a tensor that one device of a mesh has, under a spec without blocks.

    Raises:
        ValueError: as `tiles` does, or if the device has several parts.
    """
    box, *others = tiles(shape, spec, mesh, index)
    if others:
        raise ValueError(f"{','.join(spec)}: expected a spec without blocks")
    return box


def local_shape(shape: Sequence[int], spec: Spec, mesh: Sequence[int]) -> tuple[int, ...]:
    """The shape of what each device has; where some have less, of the largest.

    Raises:
        ValueError: as `tiles` does.

    >>> local_shape((12, 8), ("S0/3", "S1"), (2, 4))
    (6, 2)
    """
    return _local_shape(tuple(shape), spec, tuple(mesh))


def local_shape_at(
    shape: Sequence[int], spec: Spec, mesh: Sequence[int], index: int
) -> tuple[int, ...]:
    """The shape of what one device has.

    Args:
        index: position of the device in the mesh, row-major.

    Raises:
        ValueError: as `tiles` does.

    >>> local_shape_at((5, 3), ("C",), (4,), 2)
    (1, 3)
    """
    boxes = tiles(shape, spec, mesh, index)
    sizes = [end - start for start, end in boxes[0]]
    for dim in {dim_of(part) for part in spec if blocks_of(part) > 1}:
        if dim is not None:
            sizes[dim] = sum(box[dim][1] - box[dim][0] for box in boxes)
    return tuple(sizes)


@lru_cache(maxsize=CACHED)
def _local_shape(shape: tuple[int, ...], spec: Spec, mesh: tuple[int, ...]) -> tuple[int, ...]:
    return local_shape_at(shape, spec, mesh, 0)


def rule_of(lines: Iterable[str]) -> Rule:
    """The rule that lines say, one for each axis.

    Raises:
        ValueError: if a line is none, or they speak of different numbers of tensors.
    """
    return _rule_of(tuple(lines))


@lru_cache(maxsize=CACHED)
def _rule_of(lines: tuple[str, ...]) -> Rule:
    return Rule(tuple(map(AxisRule.parse, lines)))


def whole_rule(operator: Operator) -> AxisRule:
    """The rule of an operator that every device runs whole."""
    return AxisRule(("R",) * len(reads(operator)), ("R",) * len(operator.outputs))


def reads(operator: Operator) -> tuple[str, ...]:
    """What an operator reads, in the order of a rule's inputs: its tensors, then its parameters."""
    return (*operator.inputs, *operator.parameters)


def rule_by(sharding: Sharding, operator: Operator) -> Rule:
    """The rule that an operator of a stage runs by: whole where the stage names none."""
    rule = sharding.rules.get(operator.name)
    return Rule((whole_rule(operator),) * len(sharding.mesh)) if rule is None else rule
