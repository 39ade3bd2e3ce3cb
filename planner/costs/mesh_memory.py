"""Bytes that conversions take while they run, as the launcher does them on CPUs
(`launcher/mesh/convert.py`): what was cut along another dimension than the first lies in another
order in the buffers of a collective, so that it is copied on its way there or from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from planner.artefacts.graph import Graph, Parameter, Tensor, parameters_by_name
from planner.artefacts.sharding import Spec, blocks_of, dim_of, local_shape
from planner.artefacts.strategy import Stage
from planner.resharding.conversion import Collective, Step
from planner.resharding.over_replicas import over_replicas
from planner.resharding.sums import (
    gathered_together,
    parameter_specs,
    scattered_buckets,
    state_steps,
    steps_key,
)


class ConversionBytes(NamedTuple):
    """Bytes beside what is converted.

    Attributes:
        most: while it is converted.
        result: of what comes out; 0 where that lies in what went in.
    """

    most: int
    result: int


def conversion_bytes(
    shape: Sequence[int], item_bytes: float, mesh: Sequence[int], steps: Sequence[Step]
) -> ConversionBytes:
    """The bytes that steps take.

    Args:
        shape: of the local tensor before them.
        item_bytes: of one element.
        mesh: size of each axis.

    >>> from planner.resharding.conversion import conversion
    >>> gather = conversion((8, 6), 4, (2,), ("S1",), ("R",))
    >>> conversion_bytes((8, 3), 4, (2,), gather)  # the buffer and, in another order, the result
    ConversionBytes(most=384, result=192)
    >>> gather = conversion((8, 6), 4, (2,), ("S0",), ("R",))
    >>> conversion_bytes((4, 6), 4, (2,), gather)
    ConversionBytes(most=192, result=192)
    """
    here, most, held = _Local(tuple(shape), is_dense=True), 0, 0
    for step in steps:
        n = mesh[step.axis]
        if n > 1:
            here, one = _step(here, item_bytes, n, step)
            most = max(most, held + one.most)
            held = one.result or held
    return ConversionBytes(most, held)


class _Local(NamedTuple):
    """A local tensor; what is not dense is a view with gaps."""

    shape: tuple[int, ...]
    is_dense: bool


def _step(local: _Local, item_bytes: float, n: int, step: Step) -> tuple[_Local, ConversionBytes]:
    """What there is after a step, and the bytes that it takes."""
    shape = local.shape
    after = _shape_after(shape, n, step)
    before, size = (round(prod(one) * item_bytes) for one in (shape, after))
    gaps = before * (not local.is_dense)
    match step.kind:
        case Collective.SLICE:
            copied = size * _is_scattered(shape, n, step.target)
            is_dense = bool(copied) or (local.is_dense and not _moves(shape, step.target))
            return _Local(after, is_dense), ConversionBytes(copied, copied)
        case Collective.FIRST | Collective.ALL_REDUCE:
            return _Local(after, is_dense=True), ConversionBytes(size, size)
        case Collective.REDUCE_SCATTER:
            sent = gaps or before * _moves(shape, step.target)
            return _Local(after, is_dense=True), ConversionBytes(sent + before + size, size)
        case Collective.ALL_TO_ALL:
            sent = gaps or before * _moves(shape, step.target)
        case Collective.ALL_GATHER:
            sent = gaps
        case Collective.SCATTER:
            sent = 0
    # What has come lies in the order of the devices. A view joins parts of a width of one.
    moves, dim = _moves(after, step.source), dim_of(step.source)
    is_view = not moves or (blocks_of(step.source) == 1 and dim is not None and after[dim] == n)
    joined = 0 if is_view else size
    return _Local(after, not (moves and is_view)), ConversionBytes(size + max(sent, joined), size)


def _shape_after(shape: tuple[int, ...], n: int, step: Step) -> tuple[int, ...]:
    after = list(shape)
    # Put into zeros, a part is as large as the whole, and a summand.
    if (dim := dim_of(step.source)) is not None:
        after[dim] *= n
    if (dim := dim_of(step.target)) is not None:
        after[dim] //= n
    return tuple(after)


def _moves(shape: Sequence[int], cut: str) -> bool:
    """Whether a tensor is cut into parts that do not lie one after the other."""
    dim = dim_of(cut)
    return dim is not None and (blocks_of(cut) > 1 or prod(shape[:dim]) > 1)


def _is_scattered(shape: Sequence[int], n: int, cut: str) -> bool:
    """Whether one of n parts is in pieces that no view of a tensor joins."""
    dim, blocks = dim_of(cut), blocks_of(cut)
    return dim is not None and blocks > 1 and shape[dim] > n * blocks


def scatter_bytes(stage: Stage, graph: Graph) -> int:
    """The most bytes that are taken when the gradients of a bucket become those of parts that are
    stepped.
    """
    return max((size for _, size in bucket_scatters(stage, graph)), default=0)


def bucket_scatters(stage: Stage, graph: Graph) -> Iterator[tuple[tuple[str, ...], int]]:
    """The parameters of each bucket whose gradients become those of parts that are stepped, and the
    most bytes that this takes (`launcher/mesh/shards.py`): all that are cut in the same way go
    together, in a buffer to send, one that comes, and the sum of its parts.
    """
    steps, mesh = state_steps(stage, graph), over_replicas(stage, graph).mesh
    for bucket in scattered_buckets(stage, graph):
        alike: dict[tuple[tuple[tuple[str, int, str, str], ...], str], int] = {}
        for one in bucket:
            key = (steps_key(steps[one.name].scatter), one.dtype)
            alike[key] = alike.get(key, 0) + one.gradient_bytes
        most = 0
        for (kinds, _), total in alike.items():
            held, size = 0, total
            for kind, axis, *_ in kinds:
                part = size // mesh[axis]
                if kind == Collective.REDUCE_SCATTER:
                    most, held = max(most, held + 2 * size + part), part
                size = part
        yield tuple(one.name for one in bucket), most


def gather_bytes(stage: Stage, graph: Graph) -> int:
    """The most bytes that are taken when parameters are gathered from the parts that were stepped:
    the parts of this device in one buffer, those of all, and of parameters that are gathered along
    several axes what is gathered along one.
    """
    steps, mesh, most = state_steps(stage, graph), over_replicas(stage, graph).mesh, 0
    known, lies = parameters_by_name(graph), parameter_specs(stage, graph)
    for names in gathered_together(stage, graph):
        size = sum(local_bytes(known[name], lies[name].state, mesh) for name in names)
        held, gather = 0, steps[names[0]].gather
        for step in gather:
            every = size * mesh[step.axis]
            joined = every if step is not gather[-1] else 0
            most = max(most, held + max(size + every, every + joined))
            size = held = every
    return most


def local_bytes(one: Tensor | Parameter, spec: Spec, mesh: tuple[int, ...]) -> int:
    """Bytes of a tensor or parameter on each device of a mesh."""
    if not mesh:
        return one.bytes
    return replace(one, shape=local_shape(one.shape, spec, mesh)).bytes


def local_gradient_bytes(one: Parameter, spec: Spec, mesh: tuple[int, ...]) -> int:
    """Bytes of the gradient of a parameter on each device of a mesh."""
    return replace(one, shape=local_shape(one.shape, spec, mesh)).gradient_bytes
