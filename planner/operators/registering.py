"""Operators that the user adds: a function, and the types of its outputs.

def scaled_swish(x: Tensor, bias: Tensor | None = None, *, beta: float = 1.0) -> Tensor: ...

planner.operators.register("ScaledSwish", scaled_swish, domain="my.domain")
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.artefacts.operator_types import OPERATOR_TYPES, OperatorType, facts, function_of
from planner.model.load import Node
from planner.model.output_types import CustomNode, Described, ShapeFunction
from planner.operators.binding import Known, call
from planner.support.errors import OperatorError


def register(
    operator: str,
    function: Callable[..., Any],
    *,
    domain: str,
    shapes: ShapeFunction | None = None,
    without_gradient: Collection[int] = (),
) -> None:
    """Gives an operator its function, for this process: for profiling, planning and training.

    A parameter of the function before the star is an input, in the operator's order; one behind it
    is an attribute, named as in the model but in lower case, with Python's default. The annotation
    of an input decides on its argument: `Tensor` is a tensor (`Tensor | None` one that may be
    absent); anything else is a number or a tuple of numbers, taken from a constant. Parameters
    behind the star may also be called `num_outputs`, `version` or `device`; with `num_outputs`, the
    function returns a tuple if there are several.

    Args:
        operator: its type, as in the model.
        function: made of differentiable functions of torch; it must not write to its inputs.
        domain: the operator's domain, as in the model; "" for an operator of ONNX that the planner
            has no function for.
        shapes: the dtype and shape of each output of a node. Without it, the function is run on
            tensors of torch's meta device, which have shapes and no numbers.
        without_gradient: positions of float inputs through which no gradient flows.

    Raises:
        ValueError: if the operator has another function already, or a parameter's name is not in
            lower case.
    """
    kind = f"{domain}.{operator}" if domain else operator
    if function_of(kind) not in (None, function):
        raise ValueError(f"{kind}: expected an operator without a function, it has one already")
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # a function of torch that is written in C
        names = []
    wrong = [name for name in names if name != name.lower()]
    if wrong:
        raise ValueError(f"{kind}: expected parameters in lower case, got {', '.join(wrong)}")
    OPERATOR_TYPES[kind] = replace(facts(kind), function=function)
    if domain:
        OPERATOR_TYPES[kind] = OperatorType(
            function,
            source=_source(function),
            shapes=shapes or _by_running(function),
            no_gradient=tuple(without_gradient),
        )


def _source(function: Callable[..., Any]) -> bytes:
    """What a change of the function changes: its file, so that old measurements are not taken."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # written in C
        file = None
    return Path(file).read_bytes() if file and Path(file).exists() else repr(function).encode()


def _by_running(function: Callable[..., Any]) -> ShapeFunction:
    """The types of the outputs, read off what the function makes of meta tensors."""

    def shapes(node: CustomNode) -> Sequence[Described]:
        domain, _, operator = node.type.rpartition(".")
        names = tuple(f"input {i}" if one else "" for i, one in enumerate(node.inputs))
        outputs = tuple(f"output {i}" for i in range(len(node.outputs)))
        like = Node("", operator, domain, node.version, names, outputs, node.attributes)
        values = {names[i]: value for i, value in node.values.items()}
        tensors = {n: _meta(*one) for n, one in zip(names, node.inputs, strict=True) if one}
        made = call(like, function, Known(values, ()), {"device": "meta"})
        args, kwargs = made.fill(tensors.__getitem__)
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise OperatorError(
                f"its function does not run on meta tensors: {str(error).splitlines()[0]}; register"
                " it with shapes=, a function that gives the types of its outputs"
            ) from error
        every = (result,) if isinstance(result, Tensor) else tuple(result)
        return [(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in every]

    return shapes


def _meta(dtype: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
