"""Operators that cost the same: one type, attributes, shapes, layouts and surroundings.

Of each class one operator is measured, and all share what was found. A class has a name that says
all that its cost depends on, so that it can be found again in another model (cache.py).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod

import numpy as np

from planner.graph import Graph, consumers, parameters_by_name, tensors_by_name
from planner.model import Model

MAX_CONSTANT_ELEMENTS = 1024
"""Larger constants of integers are tables and masks, whose values cost the same whatever they are;
so do floats, but for single ones such as an exponent."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor as it arrives at an operator.

    Attributes:
        shape: its sizes.
        dtype: torch's name of its elements, such as "float32".
        stride: elements from one index to the next, by dimension.
        requires_grad: whether autograd follows it.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool


def contiguous(shape: tuple[int, ...], dtype: str, *, requires_grad: bool = False) -> Flow:
    """A tensor with its elements in order.

    >>> contiguous((2, 3, 4), "float32").stride
    (12, 4, 1)
    """
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Flow(shape, dtype, stride, requires_grad)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the backward pass of an operator finds, and what it has to do with what it makes.

    Attributes:
        reached: outputs at which a gradient arrives.
        summed: inputs and trained parameters for which another operator's gradient is there
            already, to which it is added.
        complete: trained parameters that no operator before it reads: their gradient is added to
            that of the microbatches before.
        arriving: by output, how the gradient lies that arrives there: elements from one index to
            the next, by dimension; as the output itself where nothing is said.
    """

    reached: frozenset[str]
    summed: frozenset[str]
    complete: frozenset[str]
    arriving: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def surroundings(graph: Graph) -> tuple[Surroundings, ...]:
    """Of every operator of a graph, in its order."""
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    readers: dict[str, list[int]] = {}
    for v, operator in enumerate(graph.operators):
        for name in operator.parameters:
            readers.setdefault(name, []).append(v)
    trained = {p.name for p in graph.parameters if p.trainable}
    reached = [
        frozenset(n for n in o.outputs if tensors[n].gradient or n == graph.outputs[0])
        for o in graph.operators
    ]
    found = []
    for v, operator in enumerate(graph.operators):
        weights = [n for n in operator.parameters if n in trained]
        later = {n: [w for w in readers[n] if w > v] for n in weights} | {
            n: [w for w in read_by[n] if w > v] for n in operator.inputs if tensors[n].gradient
        }
        found.append(
            Surroundings(
                reached=reached[v],
                summed=frozenset(n for n, users in later.items() if any(reached[w] for w in users)),
                complete=frozenset(n for n in weights if readers[n][0] == v),
            )
        )
    return tuple(found)


def class_name(model: Model, operator: int, flows: Mapping[str, Flow], around: Surroundings) -> str:
    """The content hash of all that the cost of an operator depends on, besides the machine.

    Args:
        operator: its index.
        flows: its inputs by name, among others.
        around: of the operator.
    """
    node, parameters = model.nodes[operator], parameters_by_name(model.graph)
    tensors, first = (
        tensors_by_name(model.graph),
        {n: i for i, n in reversed([*enumerate(node.inputs)])},
    )

    def described(name: str) -> object:
        marks = [name in part for part in (around.reached, around.summed, around.complete)]
        if name in flows:
            return [first[name], asdict(flows[name]), marks]
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
    """A constant by its value where that decides what is computed, else by its shape."""
    small = value.size <= (MAX_CONSTANT_ELEMENTS if value.dtype.kind in "biu" else 1)
    digest = hashlib.sha256(value.tobytes()).hexdigest() if small else None
    return [list(value.shape), value.dtype.name, digest]


def _plain(value: object) -> object:
    """An attribute as JSON can hold it."""
    if isinstance(value, np.ndarray):
        return [list(value.shape), value.dtype.name, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value
