"""An ONNX node and the function that computes it -> the call to make.

Inputs and attributes find the function's parameters by the names that ONNX's own schema gives
them, in lower case, so one function serves every opset version: `axes` is an attribute of Squeeze
up to version 12 and an input from 13 on, and `def squeeze(data, axes)` never notices.

What a parameter is annotated with decides what it gets:

    Tensor            a tensor, read while the module runs
    Tensor | float    a number where the input is a constant of rank 0 that is not trained, else a
                      tensor
    anything else     a Python value, taken from a constant while the module is built

Four parameter names are answered by the node itself and not by its inputs: `version` (the opset),
`num_outputs` (a function that has it returns a tuple if there are several), `dtype` (of the first
output) and `device`. Functions of torch that have no signature get their inputs in order.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, get_args

import numpy as np
import torch
from onnx import defs, helper
from torch import Tensor

from planner.errors import OperatorError
from planner.graph import parameters_by_name, tensors_by_name
from planner.model import Model, Node

# Inputs and attributes that have another name in some version than the function's parameter.
RENAMED = {"input_mean": "mean", "input_var": "var", "constant_value": "value"}


@dataclass(frozen=True, slots=True)
class Read:
    """Stands in a call for the tensor or parameter of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """`function(*args, **kwargs)`, with a `Read` wherever a tensor belongs."""

    function: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors and parameters that it reads, each once, in order."""
        values = (*self.args, *self.kwargs.values())
        return tuple(dict.fromkeys(value.name for value in values if isinstance(value, Read)))

    def fill(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every `Read` replaced by what `tensors` gives for its name."""

        def filled(value: object) -> Any:
            return tensors(value.name) if isinstance(value, Read) else value

        return tuple(map(filled, self.args)), {k: filled(v) for k, v in self.kwargs.items()}


def bind(model: Model, node: Node, function: Callable[..., Any], device: str) -> Call:
    """The call that computes the node.

    Raises:
        OperatorError: if the node has an input, an output or an attribute that the function does
            not know, or computes at run time what must be known before.
    """
    schema = _schema(node)
    parameters = _parameters(function)
    if parameters is None:
        _refuse(f"attribute {name!r} is not supported" for name in sorted(node.attributes))
        return Call(function, tuple(Read(name) for name in node.inputs), {})
    if len(node.outputs) > 1 and "num_outputs" not in parameters:
        raise OperatorError(f"only the first of its {len(node.outputs)} outputs is supported")
    found = _defaults(schema, parameters) | _attributes(node, parameters)
    args: tuple[object, ...] = ()
    for formal, names in _formal_inputs(schema, node.inputs):
        if formal in parameters:
            found[formal] = _value(model, formal, names[0], parameters[formal].annotation)
        elif any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            args = tuple(Read(name) for name in names)
        else:
            raise OperatorError(f"input {formal!r} is not supported")
    found.update(_context(model, node, parameters, device))
    _refuse(
        f"{name!r} is missing"
        for name, p in parameters.items()
        if p.default is p.empty and p.kind is p.KEYWORD_ONLY | p.POSITIONAL_OR_KEYWORD
        if name not in found
    )
    return Call(function, args, found)


def _refuse(problems: Any) -> None:
    lines = list(problems)
    if lines:
        raise OperatorError("; ".join(lines))


@lru_cache(maxsize=1024)
def _find_schema(operator: str, version: int, domain: str) -> defs.OpSchema:
    return defs.get_schema(operator, version, domain)


def _schema(node: Node) -> defs.OpSchema:
    try:
        schema = _find_schema(node.type, node.version, node.domain)
    except defs.SchemaError:
        raise OperatorError(f"ONNX knows no such operator at version {node.version}") from None
    if schema.deprecated:
        raise OperatorError(f"ONNX withdrew this operator in version {schema.since_version}")
    return schema


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a function of torch that is written in C
        return None
