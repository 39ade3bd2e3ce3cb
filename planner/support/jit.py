"""`njit`: numba, with its cache in a folder of its own for each state of the sources, in the user's
cache folder.

Numba checks only the file of a compiled function, not the files of the functions that it calls. So
the name of the folder has a hash of all code that kernels are made of (`sources`).
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from platformdirs import user_cache_path

F = TypeVar("F", bound=Callable[..., Any])

_PLANNER = Path(__file__).resolve().parents[1]
_COMPILES = re.compile(
    r"^from planner\.support\.jit import .*\b(?:njit|inner|inlined)\b", re.MULTILINE
)
_IMPORTS = re.compile(r"^ *from (planner[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def sources() -> list[Path]:
    """The files that compiled code is made of.

    These are the files that compile functions, and all files of the package that they import, at
    any distance: their constants and functions are compiled in.
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
    name = f"numba-{numba.__version__}-{digest.hexdigest()[:16]}"
    return user_cache_path("planner", appauthor=False) / name


# Read by numba when it compiles; its environment variable goes first.
if not numba.config.CACHE_DIR:  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined]


def compiled_before() -> bool:
    """Whether this version's kernels were compiled on this machine already."""
    folder = Path(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    return any(folder.rglob("*.nbi"))


@contextmanager
def compile_clock() -> Iterator[Callable[[], float]]:
    """A context with a function that returns the time spent on compiling since, in s, so that it
    need not count against a time limit.
    """
    from numba.core import event

    timer = event.TimingListener()  # type: ignore[no-untyped-call]
    with event.install_listener("numba:compile", timer):
        yield lambda: float(timer.duration) if timer.done else 0.0


def njit(function: F) -> F:
    """Compiles a function for the machine, at its first call, and keeps the result."""
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))


def inner(function: F) -> F:
    """Compiles a function that only compiled functions call: this takes less time, and Python
    cannot call it.
    """
    # These two options are missing in numba's own type stubs.
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(cache=True, error_model="numpy", **options)(function))


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
