"""Mistakes to put into the package, one for each suite and each of another kind: the checks have to
find them. Each is called in the process of a case, before its command.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Bug:
    """A mistake.

    Attributes:
        suite: that has to find it.
        found: part of the problem that the checks have to report.
        put_in: puts it into the package, in this process.
    """

    suite: str
    found: str
    put_in: Callable[[], None]


def _wrap(where: str, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function of a module by one that gets it as its first argument."""
    module = import_module(where)
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def _unknown_tensors_are_key_errors() -> None:
    """As of a reader that looks names up without asking whether they are there."""

    def around(read: Any, path: Path) -> Any:
        proto = read(path)
        graph = proto.graph
        made = [name for node in graph.node for name in node.output]
        held = [value.name for value in (*graph.input, *graph.initializer)]
        index = {name: i for i, name in enumerate([*made, *held, ""])}
        _ = [index[name] for node in graph.node for name in node.input]
        return proto

    _wrap("planner.model.load", "read_proto", around)


def _many_devices_never_end() -> None:
    """As of a search whose time grows exponentially with the number of devices."""

    def around(read: Any, *args: Any, **kwargs: Any) -> Any:
        topology = read(*args, **kwargs)
        while len(topology.devices) > 8:
            time.sleep(0.1)
        return topology

    _wrap("planner.api", "read_topology", around)


def _nothing_over_nothing_is_written() -> None:
    """As of a share of 0 s in 0 s, in any file."""

    def around(write: Any, path: Path, content: bytes) -> None:
        write(path, content.replace(b": 0.0", b": NaN"))

    _wrap("planner.artefacts.files", "write_atomically", around)


def _targets_are_opened_first() -> None:
    """As of a writer that opens its file before it has anything to write."""

    def around(convert: Any, source: Path, written: Path, **options: Any) -> Any:
        written.touch()
        return convert(source, written, **options)

    _wrap("planner.api", "convert", around)


def _large_figures_take_memory() -> None:
    """As of a table with a row for every nanosecond, and of buffers for what is sent."""

    def around(read: Any, path: Path) -> Any:
        trace = read(path)
        sent = [transfer.bytes for transfer in trace.timeline.transfers]
        bytearray(min(max([round(trace.timeline.iteration_s * 1e9), *sent]), 10**11))
        return trace

    _wrap("planner.api", "read_trace", around)


BUGS: Mapping[str, Bug] = {
    "key-error": Bug("onnx", "traceback: KeyError", _unknown_tensors_are_key_errors),
    "endless": Bug("topology", "hangs", _many_devices_never_end),
    "not-a-number": Bug("json", "NaN is no JSON", _nothing_over_nothing_is_written),
    "left-over": Bug("text", "left ", _targets_are_opened_first),
    "memory": Bug("trace", "no memory", _large_figures_take_memory),
}
