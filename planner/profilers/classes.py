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

import numpy as np

from planner.artefacts.graph import (
    Graph,
    consumers,
    differentiated,
    loss_outputs,
    parameters_by_name,
    tensors_by_name,
)
from planner.model.load import Model

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
class Surroundings:
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
    """By parameter, the operators that read it and have a backward."""
    readers: dict[str, list[int]] = {}
    for v in sorted(differentiated(graph)):
        for name in graph.operators[v].parameters:
            readers.setdefault(name, []).append(v)
    return readers


def surroundings(graph: Graph) -> tuple[Surroundings, ...]:
    """The surroundings of every operator of a graph, in its order."""
    tensors, read_by, lost = tensors_by_name(graph), consumers(graph), loss_outputs(graph)
    with_backward, readers = differentiated(graph), _differentiated_readers(graph)
    trained = {p.name for p in graph.parameters if p.trainable}
    reached = [
        frozenset(n for n in o.outputs if tensors[n].gradient or n in lost) for o in graph.operators
    ]

    def by_later(users: Sequence[int], v: int) -> bool:
        """Whether one behind v has left a gradient: backward runs from the end."""
        return any(w > v and reached[w] for w in users)

    around = []
    for v, operator in enumerate(graph.operators):
        weights = [n for n in operator.parameters if n in trained and v in with_backward]
        users = {n: readers[n] for n in weights} | {
            n: read_by[n] for n in operator.inputs if tensors[n].gradient
        }
        around.append(
            Surroundings(
                reached=reached[v],
                summed=frozenset(n for n, some in users.items() if by_later(some, v)),
                complete=frozenset(n for n in weights if readers[n][0] == v),
            )
        )
    return tuple(around)


def class_name(
    model: Model, operator: int, layouts: Mapping[str, TensorLayout], around: Surroundings
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
