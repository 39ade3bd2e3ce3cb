"""Functions of the user, which options name as module:function."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import LaunchError


def import_function(option: str, name: str) -> Callable[..., Any]:
    """The function that an option names; the module may be in the current folder.

    Args:
        option: for messages, such as "--data".
        name: "module:function".

    Raises:
        LaunchError: if there is none.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise LaunchError(f"{option}: expected module:function, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: object = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise LaunchError(f"{option} {name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise LaunchError(f"{option} {name}: expected a function, got {type(function).__name__}")
    return function
