"""Mistakes to put into the package, one in each suite and of each kind: the checks have to find them.

Each is called in the process of a case, before its command.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any


def _around(module: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by one that gets it as its first argument."""
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def an_unknown_type_is_a_key_error() -> None:
    """onnx: an operator that the table lacks ends with a traceback."""
    import planner.model.load as target

    def change(original: Any, path: Path) -> Any:
        proto = original(path)
        known = {"Relu": 1, "MatMul": 1, "Gemm": 1, "Add": 1, "Constant": 1}
        if len(proto.graph.node) > 40:
            known[proto.graph.node[-1].op_type + "?"]
        return proto

    _around(target, "read_proto", change)


def a_slow_topology_hangs() -> None:
    """topology: bandwidths that are never reached make a search endless."""
    import planner.clusters.yaml.read as target

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        topology = original(*args, **kwargs)
        while any(link.bandwidth_bytes_per_s > 1e14 for link in topology.links):
            time.sleep(0.1)
        return topology

    _around(target, "build", change)


BUGS: Mapping[str, Callable[[], None]] = {}
__all__ = ["BUGS", "math", "replace"]
