"""Modules, and functions as `module:function`, that the user names. A module is called as in an
import statement, and may be a .py file in the current folder; or it is the path of a .py file.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from planner.support.errors import PlannerError

FILE = ".py"


def function_named(name: str, where: str, error: type[PlannerError]) -> Callable[..., object]:
    """The function that a text names.

    Args:
        name: "module:function".
        where: the option or argument that gives it, for messages, such as "--data".
        error: the kind of mistake that is raised.

    Raises:
        PlannerError: of that kind, if there is no such module or function.
    """
    module_name, function_name = _parts(name, where, error)
    module = _module(module_name, f"{where} {name}", error)
    try:
        function: object = getattr(module, function_name)
    except AttributeError as mistake:
        raise error(f"{where} {name}: {type(mistake).__name__}: {mistake}") from mistake
    if not callable(function):
        raise error(f"{where} {name}: expected a function, got {type(function).__name__}")
    return function


def module_named(name: str, where: str, error: type[PlannerError]) -> ModuleType:
    """The module that a text names.

    Args:
        name: as in an import statement, or the path of a .py file.
        where: the option or argument that gives it, for messages.
        error: the kind of mistake that is raised.

    Raises:
        PlannerError: of that kind, if there is no such module, or it fails.
    """
    return _module(name, f"{where} {name}", error)


def check_named(name: str, where: str, error: type[PlannerError]) -> None:
    """Looks for the function that a text names, without running its module: in its text.

    Args:
        name, where, error: see `function_named`.

    Raises:
        PlannerError: of that kind, if there is no such module, or its text has no such name.
    """
    module_name, function_name = _parts(name, where, error)
    if hasattr(sys.modules.get(module_name), function_name):
        return
    spec = _spec(module_name, f"{where} {name}", error)
    if spec is None:
        raise error(f"{where} {name}: there is no module {module_name!r} here or installed")
    if spec.origin is None or not spec.origin.endswith(FILE):
        return
    try:
        names = _names(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as mistake:
        raise error(f"{where} {name}: {type(mistake).__name__}: {mistake}") from mistake
    if function_name in names or "*" in names or "__getattr__" in names:
        return
    near = get_close_matches(function_name, names, n=1)
    advice = f"; did you mean {near[0]}?" if near else ""
    raise error(f"{where} {name}: {module_name} has no {function_name!r}{advice}")


def _parts(name: str, where: str, error: type[PlannerError]) -> tuple[str, str]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise error(f"{where}: expected module:function, got {name!r}")
    return module_name, function_name


def _names(text: bytes) -> set[str]:
    """All names that a text of Python defines or imports, at any depth; "*" where it imports all
    names of another module.
    """
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _spec(name: str, where: str, error: type[PlannerError]) -> ModuleSpec | None:
    """Where a module is found; None if it is not. Packages around it are not run."""
    if name.endswith(FILE):
        return _file_spec(name, where, error)
    _put_first(Path.cwd())
    first, *rest = name.split(".")
    spec = find_spec(first)
    for count in range(1, len(rest) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        inner = ".".join((first, *rest[:count]))
        spec = PathFinder.find_spec(inner, spec.submodule_search_locations)
    return spec


def _module(name: str, where: str, error: type[PlannerError]) -> ModuleType:
    if not name.endswith(FILE):
        _put_first(Path.cwd())
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit) as mistake:
            raise error(f"{where}: {type(mistake).__name__}: {mistake}") from mistake
    spec = _file_spec(name, where, error)
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    _put_first(Path(name).resolve().parent)  # for the modules beside it
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        assert spec.loader is not None, "a .py file has a loader"
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as mistake:
        del sys.modules[spec.name]
        raise error(f"{where}: {type(mistake).__name__}: {mistake}") from mistake
    return module


def _file_spec(name: str, where: str, error: type[PlannerError]) -> ModuleSpec:
    """The module of a file. Its name is that of the file, as its neighbours import it, unless
    another module has this name already.

    Raises:
        PlannerError: of the kind, if there is no such file.
    """
    path = Path(name).resolve()
    if not path.is_file():
        raise error(f"{where}: there is no file {name}")
    known = sys.modules.get(path.stem)
    origin = getattr(known, "__file__", None)
    is_free = known is None or (origin is not None and Path(origin).resolve() == path)
    spec = spec_from_file_location(path.stem if is_free else str(path), path)
    assert spec is not None, "the ending is that of a module"
    return spec


def _put_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
