"""Nodes of operators that ONNX does not define; functions that tell the types of their outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Described = tuple[str, tuple[int, ...]]
"""The dtype, as in `graph.ITEM_BYTES`, and the shape of a tensor."""


@dataclass(frozen=True, slots=True)
class ForeignNode:
    """A node, as far as the types of its outputs may depend on it.

    Attributes:
        type: the operator's, with its domain in front.
        version: of the domain's operator set that the model imports.
        inputs: in order; None where an optional one is absent.
        values: of the inputs that are constants, by position.
        attributes: by name, as int, float, str, tuples of these, or arrays.
        outputs: per output, whether somebody reads it.
    """

    type: str
    version: int
    inputs: tuple[Described | None, ...]
    values: Mapping[int, np.ndarray]
    attributes: Mapping[str, object]
    outputs: tuple[bool, ...]


ShapeFunction = Callable[[ForeignNode], Sequence[Described]]
"""The types of the first outputs in order, all that are read among them.

An `OperatorError` of it says what the operator cannot do.
"""
