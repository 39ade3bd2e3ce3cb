"""`njit`: numba, with compiled kernels kept in the user's cache folder, a folder for each state of
the sources.

Numba checks only the file of a compiled function, not the files of the functions that it calls. So
the name of the folder has a hash of all code that kernels are made of (`sources`).
"""

import hashlib
import pickle
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy
from numba.core import caching, event
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from planner.support.brake import COMPILING
from planner.support.caches import LOGGER, CacheFolder, cache_root, private_folder

F = TypeVar("F", bound=Callable[..., Any])

_PLANNER = Path(__file__).resolve().parents[1]
_COMPILES = re.compile(
    r"^from planner\.support\.jit import .*\b(?:njit|inner|inlined)\b", re.MULTILINE
)
_SUFFIX = ".kernel"
_IMPORTS = re.compile(r"^ *from (planner[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def sources() -> list[Path]:
    """The files that compiled code is made of.

    These are the files that compile functions, and all files of the package that they import, at
    any distance: their constants and functions are compiled in. Only imports of the form
    `from planner.x import y` are seen; one of another form would leave stale kernels in use.
    """
    text = {path: path.read_text() for path in sorted(_PLANNER.rglob("*.py"))}
    reached = [path for path in text if _COMPILES.search(text[path])]
    for path in reached:  # the list grows while it is walked
        for module, names in _IMPORTS.findall(text[path]):
            folder = _PLANNER.joinpath(*module.split(".")[1:])
            candidates = (folder.with_suffix(".py"), folder / "__init__.py")
            members = (folder / f"{name}.py" for name in re.findall(r"\w+", names))
            reached += {p for p in (*candidates, *members) if p in text and p not in reached}
    return sorted(reached)


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(_PLANNER).as_posix().encode())
        digest.update(path.read_bytes())
    # The parts whose own formats a compiled kernel has in it.
    parts = (numba.__version__, llvmlite.__version__, numpy.__version__)
    name = "-".join(["kernels", sys.implementation.cache_tag or "", *parts])
    root = Path(numba.config.CACHE_DIR or cache_root())  # type: ignore[attr-defined]
    return root / f"{name}-{digest.hexdigest()[:16]}"


FOLDER = _cache_folder()
"""Where compiled kernels are kept."""


@cache
def _shelf(folder: Path) -> CacheFolder:
    """The compiled kernels in a folder. Kernels are pickled, so whoever can write to the folder can
    run programs as this user: a folder that others can write to is not used, which is said.
    """
    if reason := private_folder(folder):
        LOGGER.warning(
            "%s; compiled kernels are not kept, so every run compiles them; NUMBA_CACHE_DIR names"
            " another folder",
            reason,
        )
        return CacheFolder(None)
    return CacheFolder(folder, "free some space, or set NUMBA_CACHE_DIR to another folder")


class _KernelCache(caching._Cache):
    """The compiled forms of a function: a file for each signature.

    Numba's own cache unpickles whatever is in its files, writes an index and its entries one after
    the other, and looks in the folder of the sources where it cannot write to another one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        code = function.__code__
        place = Path(code.co_filename).resolve()
        within = place.relative_to(_PLANNER) if place.is_relative_to(_PLANNER) else place
        self._function = (
            f"{within.as_posix()}:{code.co_firstlineno} {function.__qualname__}"
            f" {hashlib.sha256(code.co_code).hexdigest()}"
        )
        self._enabled = True

    @property
    def cache_path(self) -> str:
        """The folder, as numba shows it."""
        return str(_shelf(FOLDER).folder)

    def enable(self) -> None:
        """Uses the cache from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Leaves the cache alone from now on."""
        self._enabled = False

    def flush(self) -> None:
        """Nothing: another state of the sources has another folder."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The function compiled for a signature; None if there is none."""
        target_context.refresh()
        shelf, name = _shelf(FOLDER), self._name(sig, target_context.codegen())
        if not self._enabled or (content := shelf.get(name)) is None:
            _say_once()
            return None
        rebuild = CompileResult._rebuild
        return rebuild(target_context, *pickle.loads(content))  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps the function compiled for a signature."""
        shelf = _shelf(FOLDER)
        if not self._enabled or shelf.problem or data.lifted or data.library.has_dynamic_globals:
            return
        content = dumps(data._reduce())  # type: ignore[no-untyped-call]
        shelf.put(self._name(sig, data.codegen), content)
        if shelf.problem:
            LOGGER.warning("%s; the next run compiles this again", shelf.problem)

    def _name(self, sig: Any, codegen: Any) -> str:
        """The file of a signature on this kind of processor."""
        key = repr((self._function, sig, codegen.magic_tuple()))
        return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"


def compiled_before() -> bool:
    """Whether this version's kernels were compiled on this machine already."""
    folder = _shelf(FOLDER).folder
    return folder is not None and any(folder.glob(f"*{_SUFFIX}"))


@cache
def _say_once() -> None:
    """Says why the first plan of a version takes longer, before the first kernel is compiled."""
    LOGGER.info("compiling the searches and the simulator, once per version: up to a minute")


def _kept(compiled: Any) -> Any:
    """A compiled function, with our cache; as it is where numba is told not to compile, and where
    it has values from around it, which are not in its name.
    """
    if isinstance(compiled, Dispatcher) and compiled.py_func.__closure__ is None:
        compiled._cache = _KernelCache(compiled.py_func)  # type: ignore[attr-defined]
    return compiled


class _Timer(event.TimingListener):
    """Counts the time that compiling takes; loading what was compiled before is no compiling."""

    def on_end(self, one: Any) -> None:
        """The end of a function, of which others may be a part."""
        super().on_end(one)  # type: ignore[no-untyped-call]
        COMPILING.total_s = self.duration if self.done else 0.0


event.register("numba:compile", _Timer())  # type: ignore[no-untyped-call]


def njit(function: F) -> F:
    """Compiles a function for the machine, at its first call, and keeps the result."""
    return cast(F, _kept(numba.njit(error_model="numpy")(function)))


def inner(function: F) -> F:
    """Compiles a function that only compiled functions call: this takes less time, and Python
    cannot call it.
    """
    # These two options are missing in numba's own type stubs.
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, _kept(numba.njit(error_model="numpy", **options)(function)))


def inlined(function: F) -> F:
    """The same for a function whose machine code goes into that of its callers, and which counts no
    references to arrays. To hand some arrays to another compiled function takes next to nothing
    then; else numba counts up and down for each, which can take longer than the function itself.
    Such a function may neither make an array nor return one.
    """
    options: dict[str, Any] = {
        "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True, "_nrt": False,
    }  # fmt: skip
    return cast(F, numba.njit(error_model="numpy", **options)(function))
