"""Losses of outputs whose classes are cut over an axis of a mesh: each device compares the scores
of its own classes, and the devices of a line agree on two figures per score: the largest, and then
the sum of exponentials with the score of the true class (`operators/parts`). The gradient needs no
other device.
"""

from collections.abc import Iterator, Mapping
from math import prod

from planner.artefacts.graph import ITEM_BYTES, Graph, loss_outputs, tensors_by_name
from planner.artefacts.losses import losses
from planner.artefacts.sharding import Spec, dim_of, local_shape
from planner.artefacts.strategy import Stage
from planner.resharding.conversion import Collective, Step

_LEAST_BYTES = 4
"""Of a score while it is compared: shorter floats become float32."""


def vocabulary_parallel_steps(graph: Graph, stage: Stage) -> Mapping[str, tuple[Step, ...]]:
    """By output, the all-reduces of its loss in a forward, where its classes are cut."""
    if stage.sharding is None:
        return {}
    found = {}
    for name in loss_outputs(graph):
        spec = stage.sharding.outputs.get(name, ())
        if any(part.startswith("S") for part in spec):
            classes = _class_dim(graph, name)
            axes = _cut_axes(spec, classes)
            shape = local_shape(tensors_by_name(graph)[name].shape, spec, stage.sharding.mesh)
            count = prod(size for dim, size in enumerate(shape) if dim != classes)
            if axes:
                found[name] = tuple(_steps(graph, name, axes, count))
    return found


def _cut_axes(spec: Spec, dim: int | None) -> list[int]:
    """The axes of a mesh along which a dimension is cut; none for None."""
    return [] if dim is None else [axis for axis, part in enumerate(spec) if dim_of(part) == dim]


def _steps(graph: Graph, name: str, axes: list[int], count: int) -> Iterator[Step]:
    size = count * max(_LEAST_BYTES, round(ITEM_BYTES[tensors_by_name(graph)[name].dtype]))
    for axis in axes:
        for figures in (1, 2):
            yield Step(Collective.ALL_REDUCE, axis, "P", "R", figures * size)


def _class_dim(graph: Graph, name: str) -> int | None:
    """The dimension of the classes of an output."""
    return next(one.class_dim for one in losses(graph) if one.output.name == name)
