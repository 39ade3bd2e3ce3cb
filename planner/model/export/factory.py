"""Factories: functions of the user that make a module and example inputs."""

from inspect import Parameter, signature

from torch import nn

from planner.support.errors import ExportError
from planner.support.named import function_named


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
