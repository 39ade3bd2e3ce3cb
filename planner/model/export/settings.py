"""What is set while a module is exported, and restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def settings_for_export(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Turns off what makes outputs that a graph cannot have, for as long as it is entered.

    Models of transformers return the keys and values of their attention for later tokens
    (`use_cache`). Training has no use for them.

    Yields:
        what was set, such as "use_cache=False".
    """
    changed = [one for one in _configurations(module) if getattr(one, "use_cache", False) is True]
    for one in changed:
        one.use_cache = False  # type: ignore[attr-defined]
    try:
        yield ("use_cache=False",) if changed else ()
    finally:
        for one in changed:
            one.use_cache = True  # type: ignore[attr-defined]


def _configurations(module: nn.Module) -> list[object]:
    """The `config` of each submodule, and the configurations in these."""
    waiting = [one.config for one in module.modules() if hasattr(one, "config")]
    seen: dict[int, object] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and hasattr(one, "__dict__"):
            seen[id(one)] = one
            waiting += [part for part in vars(one).values() if hasattr(part, "use_cache")]
    return list(seen.values())
