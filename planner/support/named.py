"""Modules, and functions as `module:function`, that the user names."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from planner.support.errors import PlannerError


def function_named(name: str, where: str, error: type[PlannerError]) -> Callable[..., object]:
    """The function that a text names; its module may be a .py file in the current folder.

    Args:
        name: "module:function".
        where: the option or argument that gives it, for messages, such as "--data".
        error: the kind of mistake that is raised.

    Raises:
        PlannerError: of that kind, if there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise error(f"{where}: expected module:function, got {name!r}")
    module = _module(module_name, f"{where} {name}", error)
    try:
        function: object = getattr(module, function_name)
    except AttributeError as mistake:
        raise error(f"{where} {name}: {type(mistake).__name__}: {mistake}") from mistake
    if not callable(function):
        raise error(f"{where} {name}: expected a function, got {type(function).__name__}")
    return function


def module_named(name: str, where: str, error: type[PlannerError]) -> ModuleType:
    """The module that a text names; it may be a .py file in the current folder.

    Args:
        name: as in an import statement.
        where: the option or argument that gives it, for messages.
        error: the kind of mistake that is raised.

    Raises:
        PlannerError: of that kind, if there is no such module, or it fails.
    """
    return _module(name, f"{where} {name}", error)


def _module(name: str, where: str, error: type[PlannerError]) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as mistake:
        raise error(f"{where}: {type(mistake).__name__}: {mistake}") from mistake
