"""Functions of the library check their arguments: by the declared option where a parameter is one,
else by the type in the signature. So a wrong value is an `OptionError` with the parameter's name,
the expected and the given value.
"""

import builtins
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from planner.support.errors import OptionError, UnitError, shown
from planner.support.options import Option, checked

Function = TypeVar("Function", bound=Callable[..., Any])


def checks_arguments(function: Function, options: Mapping[str, Option]) -> Function:
    """The function, which checks its arguments first. Keywords without a parameter of their own are
    left to the function.

    Args:
        options: by the names of parameters.
    """

    @wraps(function)
    def checking(*positional: Any, **keywords: Any) -> Any:
        given = signature(function).bind(*positional, **keywords)
        for name, parameter in given.signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD or name not in given.arguments:
                continue
            value = given.arguments[name]
            if value is not parameter.default:
                hint = _type_of(function, name)
                given.arguments[name] = _checked(name, value, hint, options.get(name))
        return function(*given.args, **given.kwargs)

    return checking  # type: ignore[return-value]  # its signature is the function's


def _checked(name: str, value: Any, hint: Any, one: Option | None) -> Any:
    """A value, as the function computes with it.

    Raises:
        OptionError: if it is wrong.
    """
    if one is not None:
        try:
            return checked(one, value)
        except (ValueError, UnitError) as error:
            raise OptionError(f"{name}: {error}") from None
    if not _fits(value, hint):
        raise OptionError(f"{name}: expected {_in_words(hint)}, got {shown(value)}")
    return value


class _Unloaded(type):
    """A class that is known by its name only: its module may take long to load, and a value of it
    cannot exist before that.
    """

    def __instancecheck__(cls, value: object) -> bool:
        return cls.__name__ in (kind.__name__ for kind in type(value).__mro__)

    def __getattr__(cls, name: str) -> "_Unloaded":
        """A class of a module that is not loaded."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unloaded(name, (), {})


class _Names(dict[str, Any]):
    """The names of a module, with those that are imported for type checkers only."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or _Unloaded(name, (), {})


@cache
def _type_of(function: Callable[..., Any], name: str) -> Any:
    """The type of a parameter."""
    hint = signature(function).parameters[name].annotation
    return eval(hint, {}, _Names(function.__globals__)) if isinstance(hint, str) else hint


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, one) for one in arguments)
    if hint in (int, float):
        number = isinstance(value, int | float) and math.isfinite(value)
        return number and not isinstance(value, bool) and (hint is float or isinstance(value, int))
    if hint is Any or origin is Callable:
        return hint is Any or callable(value)
    if origin is Sequence:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return all(_fits(one, arguments[0]) for one in value)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return False
        key, one = arguments
        return all(_fits(name, key) and _fits(item, one) for name, item in value.items())
    return isinstance(value, origin or hint)


def _in_words(hint: Any) -> str:
    """A type as messages say it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        is_path = any(get_origin(one) is os.PathLike for one in arguments)
        kinds = [one for one in arguments if one is not NoneType and not (is_path and one is str)]
        return " or ".join(map(_in_words, kinds))
    if origin is Sequence:
        return f"a list (each item: {_in_words(arguments[0])})"
    if origin is Mapping:
        return f"a mapping from {_in_words(arguments[0])} to {_in_words(arguments[1])}"
    if (origin or hint) in WORDS:
        return WORDS[origin or hint]
    name = hint.__name__
    return name if name.endswith("s") else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    os.PathLike: "a path",
    Callable: "a function",
    Any: "a value",
}
