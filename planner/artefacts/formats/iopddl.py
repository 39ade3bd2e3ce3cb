"""The JSON of the contest on intra-operator parallelism (ASPLOS and EuroSys 2025), plain or .gz.

A problem has nodes, of each of which one strategy is to be chosen, edges with a cost for each
combination of their nodes' strategies (row-major), and usages of memory: a node holds its
strategy's usage over its interval [from, to). All numbers are integers of 64 bits.

Source: https://github.com/google/iopddl
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.support.arrays import Ints
from planner.support.errors import FileError, shown
from planner.support.reading import read_bytes

FORM = "a problem of the iopddl contest (JSON, or JSON in .gz)"
MAX_BYTES = 2**30
"""Of a file, and of what is packed in it: the contest's largest has 150 MB."""
MOST_INT = 2**63 - 1
MOST_MESSAGES = 10


@dataclass(frozen=True, slots=True)
class ContestProblem:
    """A problem of the contest.

    Attributes:
        name: of the instance.
        intervals: per node (from, to); nothing is held where to <= from.
        costs, usages: per node, (k,) by strategy; usages >= 0.
        edges: per edge, its nodes: usually two, different ones.
        edge_costs: per edge, flat and row-major over the strategies of its nodes.
        usage_limit: at every time; None for no limit.
    """

    name: str
    intervals: tuple[tuple[int, int], ...]
    costs: tuple[Ints, ...]
    usages: tuple[Ints, ...]
    edges: tuple[tuple[int, ...], ...]
    edge_costs: tuple[Ints, ...]
    usage_limit: int | None


def read_contest(path: Path) -> ContestProblem:
    """The problem in a file.

    Raises:
        FileError: if it is missing, no such file, or malformed; with its problems, the first ten.
    """
    from pydantic_core import from_json  # takes long to load

    try:
        plain = from_json(_content(path), allow_inf_nan=False, cache_strings="none")
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected {FORM}, this is no JSON: {error}") from None
    problems: list[str] = []
    lists = _fields(plain, problems)
    if not problems:
        problems += _problems(lists)
    if problems:
        more = len(problems) - MOST_MESSAGES
        problems = [*problems[:MOST_MESSAGES], *([f"and {more} more"] if more > 0 else [])]
        raise FileError("\n".join(f"{path}: {problem}" for problem in problems))
    limit = lists.limit
    return ContestProblem(
        name=str(plain["problem"].get("name", "")),
        intervals=tuple((one[0], one[1]) if one else (0, 0) for one in lists.intervals),
        costs=_arrays(lists.costs),
        usages=_arrays(lists.usages),
        edges=tuple(map(tuple, lists.edges)),
        edge_costs=_arrays(lists.edge_costs),
        usage_limit=limit,
    )


class _Lists(NamedTuple):
    intervals: list[Any]
    costs: list[Any]
    usages: list[Any]
    edges: list[Any]
    edge_costs: list[Any]
    limit: Any


def _content(path: Path) -> bytes:
    """The text of a file, unpacked if it is packed."""
    try:
        content = read_bytes(path, MAX_BYTES)
        if content[:2] != b"\x1f\x8b":
            return content
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        content = unpacker.decompress(content, MAX_BYTES)
        if unpacker.unconsumed_tail:
            raise FileError(f"{path}: expected at most {MAX_BYTES} bytes when unpacked")
        if not unpacker.eof:
            raise FileError(f"{path}: expected {FORM}, the packed file ends too early")
        return content
    except (FileNotFoundError, ValueError):
        raise FileError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise FileError(f"{path}: expected {FORM}, this is a folder") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"{path}: expected {FORM}, it cannot be unpacked: {error}") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _fields(plain: Any, problems: list[str]) -> _Lists:
    """The lists of a file; what is missing or no list goes to the problems."""
    problem = plain.get("problem") if isinstance(plain, dict) else None
    if not isinstance(problem, dict):
        problems.append(f"problem: expected {FORM}, got {shown(plain)}")
        problem = {}

    def field(of: Any, group: str, name: str) -> list[Any]:
        found = of.get(name) if isinstance(of, dict) else None
        if isinstance(found, list) and all(isinstance(one, list) for one in found):
            return found
        if problem:
            problems.append(f"{group}.{name}: expected a list of lists, got {shown(found)}")
        return []

    nodes, edges = problem.get("nodes"), problem.get("edges")
    return _Lists(
        intervals=field(nodes, "nodes", "intervals"),
        costs=field(nodes, "nodes", "costs"),
        usages=field(nodes, "nodes", "usages"),
        edges=field(edges, "edges", "nodes"),
        edge_costs=field(edges, "edges", "costs"),
        limit=problem.get("usage_limit"),
    )


def _problems(lists: _Lists) -> Iterator[str]:
    """What is wrong with the numbers, else with the lengths."""
    found = [
        *_wrong_numbers("nodes.intervals", lists.intervals),
        *_wrong_numbers("nodes.costs", lists.costs),
        *_wrong_numbers("nodes.usages", lists.usages),
        *_wrong_numbers("edges.nodes", lists.edges),
        *_wrong_numbers("edges.costs", lists.edge_costs),
        *_wrong_numbers("usage_limit", [] if lists.limit is None else [[lists.limit]]),
    ]
    if found:
        yield from found
        return
    if lists.limit is not None and lists.limit < 0:
        yield f"usage_limit: expected at least 0, got {lists.limit}"
    yield from _wrong_nodes(lists)
    yield from _wrong_edges(lists)


def _wrong_numbers(field: str, rows: Sequence[Any]) -> Iterator[str]:
    """Rows with something that is no integer of 64 bits."""
    if set(map(type, chain.from_iterable(rows))) <= {int}:
        try:
            np.fromiter(chain.from_iterable(rows), dtype=np.int64)
            return
        except OverflowError:
            pass
    for i, row in enumerate(rows):
        for value in row:
            if type(value) is not int or not -MOST_INT - 1 <= value <= MOST_INT:
                yield f"{field}[{i}]: expected integers of 64 bits, got {shown(value)}"


def _wrong_nodes(lists: _Lists) -> Iterator[str]:
    n = len(lists.costs)
    if not n:
        yield "nodes.costs: expected at least one node"
    for name, rows in (("intervals", lists.intervals), ("usages", lists.usages)):
        if len(rows) != n:
            yield f"nodes.{name}: expected {n} rows as in nodes.costs, got {len(rows)}"
            return
    for i, (interval, costs, usages) in enumerate(
        zip(lists.intervals, lists.costs, lists.usages, strict=True)
    ):
        if interval and (len(interval) != 2 or interval[0] < 0):
            yield f"nodes.intervals[{i}]: expected [from, to] with 0 <= from, got {interval}"
        if not costs:
            yield f"nodes.costs[{i}]: expected at least one strategy"
        if len(usages) != len(costs):
            yield f"nodes.usages[{i}]: expected {len(costs)} usages as costs, got {len(usages)}"
        elif min(usages, default=0) < 0:
            yield f"nodes.usages[{i}]: expected no negative usage, got {min(usages)}"


def _wrong_edges(lists: _Lists) -> Iterator[str]:
    n = len(lists.costs)
    if len(lists.edges) != len(lists.edge_costs):
        yield f"edges.costs: expected {len(lists.edges)} rows, got {len(lists.edge_costs)}"
        return
    for e, (nodes, costs) in enumerate(zip(lists.edges, lists.edge_costs, strict=True)):
        if not nodes or len(set(nodes)) < len(nodes):
            yield f"edges.nodes[{e}]: expected different nodes, got {nodes}"
        elif min(nodes) < 0 or max(nodes) >= n:
            yield f"edges.nodes[{e}]: expected nodes 0 to {n - 1}, got {nodes}"
        elif len(costs) != (due := prod(len(lists.costs[i]) for i in nodes)):
            yield f"edges.costs[{e}]: expected {due} costs, got {len(costs)}"


def _arrays(rows: Iterable[list[int]]) -> tuple[Ints, ...]:
    """Views of one array, a row each."""
    listed = list(rows)
    ends = np.cumsum([len(row) for row in listed], dtype=np.int64).tolist()
    count = ends[-1] if ends else 0
    flat = np.fromiter(chain.from_iterable(listed), dtype=np.int64, count=count)
    begins = [0, *ends]
    return tuple(flat[first:end] for first, end in zip(begins, ends, strict=False))
