"""Classes of operators that cost the same: one type, attributes, shapes, layouts, surroundings.

One operator of each class is measured, and all share its figures. The name of a class is a hash of
everything that the cost depends on, so the class is found again in another model (cache.py). GPT-2
has 527 operators in 43 classes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.artefacts.graph import (
    Graph,
    Operator,
    consumers,
    differentiated,
    loss_outputs,
    parameters_by_name,
    tensors_by_name,
)
from planner.model.load import Model

if TYPE_CHECKING:
    from planner.profilers.facts import Facts

MAX_CONSTANT_ELEMENTS = 1024
"""Larger constants of integers are tables and masks, whose values do not change the cost; nor do
those of floats, except single ones such as an exponent."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor as it arrives at an operator.

    Attributes:
        shape: size of each dimension.
        dtype: torch's name of the element type, such as "float32".
        stride: distance from one index to the next in elements, by dimension.
        requires_grad: whether autograd follows the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool


def contiguous(shape: tuple[int, ...], dtype: str, *, requires_grad: bool = False) -> TensorLayout:
    """The layout of a tensor whose elements lie in order.

    >>> contiguous((2, 3, 4), "float32").stride
    (12, 4, 1)
    """
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorLayout(shape, dtype, stride, requires_grad)


@dataclass(frozen=True, slots=True)
class GradientContext:
    """The gradients that the backward pass of an operator finds, and those that it has to sum.

    Attributes:
        reached: outputs at which a gradient arrives.
        summed: inputs and trained parameters that have a gradient from another operator already;
            the new one is added to it.
        complete: trained parameters that no earlier operator reads; their gradient is complete here
            and is added to that of the microbatches before.
        arriving: strides of the gradient that arrives at an output; without, those of the output.
    """

    reached: frozenset[str]
    summed: frozenset[str]
    complete: frozenset[str]
    arriving: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _differentiated_readers(graph: Graph) -> Mapping[str, list[int]]:
    """By trained parameter, the operators that read it and have a backward."""
    readers: dict[str, list[int]] = {p.name: [] for p in graph.parameters if p.trainable}
    for v in sorted(differentiated(graph)):
        for name in readers.keys() & graph.operators[v].parameters:
            readers[name].append(v)
    return readers


def surroundings(graph: Graph, facts: Sequence["Facts"] = ()) -> tuple[GradientContext, ...]:
    """The surroundings of every operator of a graph, in its order.

    Args:
        facts: one per operator; without, an arriving gradient lies as its tensor does.
    """
    tensors, trained_readers = tensors_by_name(graph), _differentiated_readers(graph)
    read_by, with_losses = consumers(graph), loss_outputs(graph)
    reached = [
        frozenset(n for n in one.outputs if tensors[n].gradient or n in with_losses)
        for one in graph.operators
    ]

    def around(v: int, operator: Operator) -> GradientContext:
        weights = {n: trained_readers.get(n, []) for n in operator.parameters}
        users: dict[str, Sequence[int]] = {
            n: read_by[n] for n in operator.inputs if tensors[n].gradient
        }
        users |= {n: readers for n, readers in weights.items() if v in readers}
        # Backward runs from the end, so that operators behind v have left their gradients.
        later = (n for n, readers in users.items() if any(w > v and reached[w] for w in readers))
        first = (n for n, readers in weights.items() if readers[:1] == [v])
        arriving = facts[v].arriving if facts else {}
        return GradientContext(reached[v], frozenset(later), frozenset(first), arriving)

    return tuple(map(around, range(len(graph.operators)), graph.operators))


def class_name(
    model: Model, operator: int, layouts: Mapping[str, TensorLayout], around: GradientContext
) -> str:
    """The hash of everything that the cost of an operator depends on, except the machine.

    Args:
        model: the model.
        operator: index of the operator.
        layouts: layouts of tensors by name; those of the operator's inputs are among them.
        around: the operator's surroundings.
    """
    node, parameters = model.nodes[operator], parameters_by_name(model.graph)
    tensors = tensors_by_name(model.graph)
    # In place of names, which differ between models: x * x and x * y are different classes.
    first = {n: i for i, n in reversed([*enumerate(node.inputs)])}

    def described(name: str) -> object:
        marks = [name in part for part in (around.reached, around.summed, around.complete)]
        if name in layouts:
            return [first[name], asdict(layouts[name]), marks]
        if name in parameters:
            held = parameters[name]
            value = _constant(model.values[name]) if not held.trainable else None
            return [first[name], held.shape, held.dtype, held.trainable, value, marks]
        return [first[name], _constant(model.values[name])] if name else None

    content = {
        "operator": [node.domain, node.type, node.version],
        "attributes": {name: _plain(value) for name, value in node.attributes.items()},
        "inputs": [described(name) for name in node.inputs],
        "outputs": [
            [
                tensors[name].shape,
                tensors[name].dtype,
                name in around.reached,
                around.arriving.get(name),
            ]
            if name
            else None
            for name in node.outputs
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _constant(value: np.ndarray) -> object:
    """A constant by its value if that has an influence on the work, else by its shape."""
    small = value.size <= (MAX_CONSTANT_ELEMENTS if value.dtype.kind in "biu" else 1)
    digest = hashlib.sha256(value.tobytes()).hexdigest() if small else None
    return [list(value.shape), value.dtype.name, digest]


def _plain(value: object) -> object:
    """An attribute as a value that JSON can hold."""
    if isinstance(value, np.ndarray):
        return [list(value.shape), value.dtype.name, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value
