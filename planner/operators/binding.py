"""An ONNX node and the function that computes it -> the call to make.

Inputs and attributes find the function's parameters by the names that ONNX's own schema gives
them, in lower case, so one function serves every opset version: `axes` is an attribute of Squeeze
up to version 12 and an input from 13 on, and `def squeeze(data, axes)` never notices.

The annotation of a parameter decides on its argument:

    Tensor            a tensor, read while the module runs
    Tensor | float    a number where the input is a constant of rank 0, else a tensor
    anything else     Python numbers, taken from a constant while the module is built

Six parameter names are answered by the node itself and not by its inputs: `version` (the opset),
`num_outputs` (a function that has it returns a tuple if there are several), `read_outputs` (for
each of them whether anybody reads it; None may stand for the others), `dtype` (of the first
output), `device`, and `node` (the name, from which random numbers follow). Functions of torch that
have no signature get their inputs in order; so do those whose row in `artefacts/operator_types.py`
names the order of inputs and attributes.

An operator that ONNX does not define has no names for its inputs. They are the parameters before
the star, in order; those behind it are the attributes, with Python's defaults.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import defs, helper
from torch import Tensor

from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.operator_types import facts, function_of
from planner.model.load import Model, Node
from planner.model.schemas import definition
from planner.support.errors import OperatorError

Parameters = Mapping[str, inspect.Parameter]

# Inputs that bear another name in some version than the function's parameter.
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
        """The arguments with every `Read` replaced by the value of `tensors` for its name."""

        def filled(value: object) -> Any:
            return tensors(value.name) if isinstance(value, Read) else value

        return tuple(map(filled, self.args)), {k: filled(v) for k, v in self.kwargs.items()}


def bind(model: Model, node: Node, device: str) -> Call:
    """The call that computes the node.

    Raises:
        OperatorError: if the operator has no function, the node has an input, an output or an
            attribute that the function does not know, or an input is computed at run time that must
            be known before.
    """
    function = function_of(node.kind)
    if function is None:
        raise OperatorError(f"{node.kind} has no function")
    trained = {name for name, one in parameters_by_name(model.graph).items() if one.trainable}
    first = tensors_by_name(model.graph)[next(filter(None, node.outputs))]
    context = {"dtype": getattr(torch, first.dtype), "device": device}
    return call(node, function, Known(model.values, trained), context)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a model's values before it runs.

    Attributes:
        values: by name.
        trained: those that are trained, so that nothing may depend on their numbers.
    """

    values: Mapping[str, NDArray[Any]]
    trained: Collection[str]


def call(
    node: Node, function: Callable[..., Any], known: Known, context: Mapping[str, object]
) -> Call:
    """As `bind`, without a model.

    Args:
        context: `dtype` and `device`, where they are known.
    """
    schema = definition(node.type, node.version, node.domain)
    if schema is None and not node.domain and facts(node.type).shapes is None:
        raise OperatorError(f"ONNX has no {node.type} in version {node.version}")
    if order := facts(node.kind).names.split():
        return Call(function, _in_order(schema, node, order), {})
    parameters = _parameters(function)
    if parameters is None:
        _known(node, ())
        return Call(function, tuple(Read(name) for name in node.inputs), {})
    if len(node.outputs) > 1 and "num_outputs" not in parameters:
        raise OperatorError(f"only the first of its {len(node.outputs)} outputs is supported")
    args, named = _inputs(schema, node, parameters, known)
    asked = _asked(node, parameters, context)
    kwargs = _attributes(schema, node, parameters) | named | asked
    absent = _absent_inputs(parameters) if schema is None else ()
    for name in _required(parameters):
        if name not in kwargs and name not in absent:
            raise OperatorError(f"{name!r} is missing")
        kwargs.setdefault(name, None)
    return Call(function, args, kwargs)


def _in_order(schema: defs.OpSchema | None, node: Node, order: Sequence[str]) -> tuple[object, ...]:
    """Inputs, which are tensors, and attributes by place."""
    assert schema is not None, "the operator is one of ONNX's"
    reads = {formal: Read(names[0]) for formal, names in _formal_inputs(schema, node)}
    given = _attributes(schema, node, order) | reads
    return tuple(given[name] for name in order)


def _asked(node: Node, parameters: Parameters, context: Mapping[str, object]) -> dict[str, object]:
    """The arguments that the node itself answers, as far as the function has them."""
    known = {
        "version": node.version,
        "num_outputs": len(node.outputs),
        "read_outputs": tuple(map(bool, node.outputs)),
        "node": node.name,
        **context,
    }
    return {name: value for name, value in known.items() if name in parameters}


def _inputs(
    schema: defs.OpSchema | None, node: Node, parameters: Parameters, known: Known
) -> tuple[tuple[Read, ...], dict[str, object]]:
    """The inputs as arguments: all by place of a function that takes any number, else by name."""
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    inputs = _own_inputs(parameters, node) if schema is None else _formal_inputs(schema, node)
    args: tuple[Read, ...] = ()
    kwargs = {}
    for formal, names in inputs:
        if takes_all:
            args = tuple(Read(name) for name in names)
        elif formal in parameters:
            kwargs[formal] = _value(known, formal, names[0], parameters[formal].annotation)
        else:
            raise OperatorError(f"input {formal!r} is not supported")
    return args, kwargs


def _required(parameters: Parameters) -> Iterator[str]:
    """Those that have to be given by name."""
    for name, one in parameters.items():
        if one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
            yield name


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> Parameters | None:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a function of torch that is written in C
        return None


def _attributes(
    schema: defs.OpSchema | None, node: Node, parameters: Collection[str]
) -> dict[str, object]:
    """Attributes by parameter name, the schema's defaults included."""
    defaults = {}
    for name, attribute in ({} if schema is None else schema.attributes).items():
        if name.lower() in parameters and attribute.default_value.type:
            defaults[name.lower()] = _plain(helper.get_attribute_value(attribute.default_value))
    _known(node, parameters)
    return defaults | {name.lower(): _plain(value) for name, value in node.attributes.items()}


def _known(node: Node, parameters: Collection[str]) -> None:
    unknown = [name for name in sorted(node.attributes) if name.lower() not in parameters]
    if unknown:
        old = node.version < 7  # which brought numpy's broadcasting
        mend = "; bring the model to version 13 with onnx.version_converter" if old else ""
        raise OperatorError(f"attribute {', '.join(map(repr, unknown))} is not supported{mend}")


def _plain(value: object) -> object:
    """Python numbers, strings and tuples of them: all that an fx node can hold."""
    match value:
        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case bytes():
            return value.decode()
        case list() | tuple():
            return tuple(map(_plain, value))
        case int() | float() | str():
            return value
    raise OperatorError(f"an attribute of type {type(value).__name__} is not supported")


def _own_inputs(parameters: Parameters, node: Node) -> Iterator[tuple[str, Sequence[str]]]:
    """As `_formal_inputs`, of an operator that ONNX does not define: its inputs are the parameters
    before the star, in order; a star with a name takes all.
    """
    formals = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    variadic = bool(formals) and formals[-1].kind is formals[-1].VAR_POSITIONAL
    if variadic:
        yield formals[-1].name, node.inputs
        return
    more = [name for name in node.inputs[len(formals) :] if name]
    if more:
        raise OperatorError(
            f"expected at most {len(formals)} inputs, got {', '.join(more)} besides"
        )
    for formal, name in zip(formals, node.inputs, strict=False):
        if name:
            yield formal.name, (name,)


def _absent_inputs(parameters: Parameters) -> list[str]:
    """Inputs that may be absent although inputs behind them are not: their type admits None."""
    return [
        name
        for name, p in parameters.items()
        if p.kind is not p.KEYWORD_ONLY and NoneType in get_args(p.annotation)
    ]


def _formal_inputs(schema: defs.OpSchema, node: Node) -> Iterator[tuple[str, Sequence[str]]]:
    """Parameter name and input names, absent inputs left out, all variadic ones together."""
    names = node.inputs
    for i, formal in enumerate(schema.inputs):
        given = (
            names[i:]
            if formal.option is defs.OpSchema.FormalParameterOption.Variadic
            else names[i : i + 1]
        )
        if any(given):
            name = formal.name.lower()
            yield RENAMED.get(name, name), given


def _value(known: Known, formal: str, name: str, annotation: Any) -> object:
    """The tensor's name or its Python value, as the annotation asks."""
    kinds = get_args(annotation) if not _is_tuple(annotation) else ()
    trainable = name in known.trained
    constant = name in known.values and not trainable
    if annotation is Tensor or Tensor in kinds:
        number = constant and float in kinds and np.ndim(known.values[name]) == 0
        return known.values[name].item() if number else Read(name)
    if not constant:
        why = "is trained" if trainable else "is computed at run time"
        raise OperatorError(f"input {formal!r} must be a constant, but {name!r} {why}")
    value = np.asarray(known.values[name])
    if any(map(_is_tuple, (annotation, *kinds))):
        return tuple(value.reshape(-1).tolist())
    if value.size != 1:
        raise OperatorError(f"input {formal!r} must be one number, but {name!r} has {value.size}")
    return value.item()


def _is_tuple(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple
