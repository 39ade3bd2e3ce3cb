"""The user's factories, example inputs of a module, and which of their dimensions are symbolic."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature

from torch import Tensor, nn

from planner.support.errors import ExportError
from planner.support.named import function_named

Constant = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a module's forward.

    Attributes:
        positional: tensors, and constants.
        named: the same by keyword.
    """

    positional: tuple[Tensor | Constant, ...]
    named: dict[str, Tensor | Constant]

    def without_cache(self) -> "Inputs":
        """The same without asking for a cache of keys and values (see `settings_for_export`)."""
        if self.named.get("use_cache") is not True:
            return self
        return Inputs(self.positional, {**self.named, "use_cache": False})

    def by_name(self, module: nn.Module) -> dict[str, Tensor | Constant]:
        """All arguments by the names that forward gives them.

        Raises:
            ExportError: if forward does not take them.
        """
        try:
            bound = signature(module.forward).bind(*self.positional, **self.named)
        except TypeError as error:
            raise ExportError(f"{_title(module)}.forward: {error}; change the inputs") from None
        arguments: dict[str, Tensor | Constant] = {}
        kinds = signature(module.forward).parameters
        for name, value in bound.arguments.items():
            if kinds[name].kind is Parameter.VAR_POSITIONAL:
                arguments |= {f"{name}_{i}": one for i, one in enumerate(value)}
            elif kinds[name].kind is Parameter.VAR_KEYWORD:
                arguments |= value
            else:
                arguments[name] = value
        return arguments


def inputs_of(given: object, where: str) -> Inputs:
    """Example inputs as the user gives them: a tensor, a tuple or list of tensors, or a mapping of
    keyword arguments. None, bool, int, float and str are constants of the exported graph.

    Args:
        where: what gives them, for messages.

    Raises:
        ExportError: if they are something else.
    """
    expected = "expected a tensor, a tuple of tensors, or a dict of tensors by argument"
    if isinstance(given, Tensor):
        given = (given,)
    if isinstance(given, Mapping):
        named = {name: _checked(value, f"{where}[{name!r}]") for name, value in given.items()}
        if not all(isinstance(name, str) for name in named):
            raise ExportError(f"{where}: {expected}, got a dict whose keys are no names")
        inputs = Inputs((), named)
    elif isinstance(given, tuple | list):
        inputs = Inputs(tuple(_checked(one, f"{where}[{i}]") for i, one in enumerate(given)), {})
    else:
        raise ExportError(f"{where}: {expected}, got {type(given).__name__}")
    inputs = _distinct(inputs)
    if not any(isinstance(one, Tensor) for one in (*inputs.positional, *inputs.named.values())):
        raise ExportError(f"{where}: {expected}, got none; a model without inputs has no data")
    return inputs


def _distinct(inputs: Inputs) -> Inputs:
    """The same with a copy of every tensor that is given twice: torch.export would make one input
    of both.
    """
    seen: set[int] = set()

    def own(value: Tensor | Constant) -> Tensor | Constant:
        if not isinstance(value, Tensor) or id(value) not in seen:
            seen.add(id(value))
            return value
        return value.detach().clone()

    return Inputs(
        tuple(own(one) for one in inputs.positional),
        {name: own(one) for name, one in inputs.named.items()},
    )


def _checked(value: object, where: str) -> Tensor | Constant:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return value
    raise ExportError(
        f"{where}: expected a tensor or a constant, got {type(value).__name__}; wrap the module in"
        " one whose forward takes tensors and builds this"
    )


def dynamic_shapes_of(
    module: nn.Module, inputs: Inputs, given: object
) -> dict[str, object] | object:
    """Dynamic shapes as torch.onnx.export takes them.

    A mapping by argument may leave arguments out, whose shapes are those of the inputs. Every other
    form is torch's own and is left to it.

    Raises:
        ExportError: if the inputs do not fit forward, a name is no argument, or a dimension is not
            there or has size 1.
    """
    arguments = inputs.by_name(module)
    if not isinstance(given, Mapping):
        return given
    for name, dims in given.items():
        value = arguments.get(name)
        if not isinstance(value, Tensor):
            known = ", ".join(k for k, v in arguments.items() if isinstance(v, Tensor))
            raise ExportError(f"dynamic shape of {name!r}: no such input; expected one of {known}")
        for dim in dims if isinstance(dims, Mapping) else ():
            if dim not in range(value.ndim):
                raise ExportError(
                    f"dynamic dimension {name}.{dim}: expected a dimension from 0 to"
                    f" {value.ndim - 1}, the example is {tuple(value.shape)}"
                )
            if value.shape[dim] == 1:
                raise ExportError(
                    f"dynamic dimension {name}.{dim}: the example has size 1, which torch takes for"
                    " fixed; give an example of at least 2"
                )
    return {name: given.get(name) for name in arguments}


def _title(module: nn.Module) -> str:
    return type(module).__name__


def call_factory(name: str) -> tuple[nn.Module, object]:
    """The module and the example inputs that a factory makes.

    Args:
        name: "module:function"; the module may be in the current folder, or a .py file's path.

    Raises:
        ExportError: if there is no such function, it needs arguments, fails, or makes something
            else.
    """
    factory = function_named(name, "factory", ExportError)
    needed = [
        one.name
        for one in signature(factory).parameters.values()
        if one.default is Parameter.empty
        and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ExportError(
            f"factory {name}: expected a function without required arguments, it needs"
            f" {', '.join(needed)}; give them defaults, or write a function that calls it"
        )
    try:
        made: object = factory()
    except Exception as error:
        raise ExportError(f"factory {name}: {type(error).__name__}: {error}") from error
    expected = f"factory {name}: expected (module, example inputs)"
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ExportError(f"{expected}, got {_described(made)}")
    module, inputs = made
    if not isinstance(module, nn.Module):
        raise ExportError(f"{expected}, the first is {_described(module)} and no torch.nn.Module")
    return module, inputs


def _described(value: object) -> str:
    """The type of a value; for a tuple also the types of its items."""
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return type(value).__name__
