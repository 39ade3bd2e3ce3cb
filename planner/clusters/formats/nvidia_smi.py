"""`nvidia-smi topo -m`: which GPUs of one machine are linked how -> `Topology`.

The matrix says, for every pair of GPUs, the slowest thing on the way:

    NV#    # NVLinks together
    PIX    at most one PCIe switch
    PXB    several PCIe switches, but no host bridge
    PHB    a PCIe host bridge (the CPU)
    NODE   several host bridges of one NUMA node
    SYS    the link between NUMA nodes (sockets)

It has no figures: those come from the type of device, see `NVLINK` and `PCIE`. The nodes of the
PCIe tree follow from the pairs, so GPUs behind one switch share its uplink. For a pair with NV#,
the place in the PCIe tree is that of its NUMA nodes. Network cards are left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from planner.artefacts.topology import Device, DeviceType, Host, Link, Topology
from planner.clusters.links import both_ways, components
from planner.support.errors import FileError

FORM = "the output of nvidia-smi topo -m"
# By the first letters of a device type: links per GPU, and bandwidth of one of them per direction.
# Source: NVIDIA's data sheets (TITAN RTX: 100 GB/s over a bridge of two, both ways); B200: from
# memory.
NVLINK: Mapping[str, tuple[int, float]] = {
    "P100": (4, 20e9),
    "V100": (6, 25e9),
    "TITAN-RTX": (2, 25e9),
    "A100": (12, 25e9),
    "H100": (18, 25e9),
    "H200": (18, 25e9),
    "B200": (18, 50e9),
}
# Of 16 lanes, per direction, as seen by copies: about three quarters of the generation's rate, from
# memory.
PCIE: Mapping[str, float] = {
    "K80": 12e9, "P100": 12e9, "V100": 12e9, "TITAN-RTX": 12e9, "T4": 12e9,
    "L4": 24e9, "A10G": 24e9, "A100": 24e9,
    "H100": 48e9, "H200": 48e9, "B200": 48e9,
}  # fmt: skip
# Between sockets, as a share of PCIe: 10.1 and 12.6 GB/s were measured on P100 hosts, in FlexFlow's
# example of a machine file.
BETWEEN_SOCKETS = 10.1 / 12.6
# As in the presets: NVLink's own, as TACCL measured it; PCIe from memory, each way.
NVLINK_LATENCY_S, PCIE_LATENCY_S = 0.3e-6, 5e-6
# From near to far: the words of the matrix, and the names of the nodes in the tree.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
STANDS_FOR = ("pcie", "bridge", "root", "numa")
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|PSB|SOC")
# Of one machine. To join the pairs takes about the cube of the number.
MAX_GPUS = 128
# Older names.
_OLD = {"SOC": "SYS", "PSB": "PIX"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """The part of the output that is about GPUs.

    Attributes:
        names: of the GPUs, as printed.
        cells: per pair of them, the words; "X" on the diagonal.
        numa: per GPU, its NUMA node, or "" where the output has none.
    """

    names: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    numa: tuple[str, ...]


def looks_like(text: str) -> bool:
    """Whether a text has a head of GPUs and a row of the first one."""
    head = re.search(r"^[ \t]*GPU\d+([ \t]+\S.*)?$", text, re.MULTILINE)
    row = re.search(r"^[ \t]*GPU\d+[ \t]+(X|NV\d+)\b", text, re.MULTILINE)
    return head is not None and row is not None


def _rows(
    lines: Sequence[str], start: int, columns: Sequence[str], path: Path
) -> dict[str, tuple[int, list[str]]]:
    """The number of its line and the words of each GPU.

    Args:
        start: index of the line of the columns.

    Raises:
        FileError: if they do not fit the columns.
    """
    rows: dict[str, tuple[int, list[str]]] = {}
    for i in range(start + 1, len(lines)):
        words = lines[i].split()
        if words and re.fullmatch(r"GPU\d+", words[0]):
            rows[words[0]] = (i + 1, words[1:])
    wrong = [f"{path}: line {start + 1}: {name} has no row" for name in columns if name not in rows]
    wrong += [
        f"{path}: line {rows[name][0]}: {name} is not among the columns of line {start + 1}"
        for name in rows
        if name not in columns
    ]
    wrong = wrong or [w for name in columns for w in _wrong_cells(name, columns, *rows[name], path)]
    if wrong:
        raise FileError("\n".join(wrong))
    return rows


def parse(text: str, path: Path) -> Matrix:
    """The matrix of GPUs.

    Raises:
        FileError: with the line, if rows and columns do not fit or a word is unknown.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*GPU\d+\s", f"{line} ")]
    start = next((i for i in heads if "X" not in lines[i].split()), None)
    if start is None:
        raise FileError(f"{path}: expected {FORM}: a line with GPU0 GPU1 .., found none")
    columns = [word for word in lines[start].split() if re.fullmatch(r"GPU\d+", word)]
    if len(columns) > MAX_GPUS:
        raise FileError(
            f"{path}: line {start + 1}: expected at most {MAX_GPUS} GPUs of one machine, got"
            f" {len(columns)}"
        )
    # After the GPUs come network cards, then the affinities, whose heads have several words.
    cards = [w for w in lines[start].split() if re.fullmatch(r"NIC\d+|mlx\w+|bnxt\w+|hfi\w+", w)]
    rows = _rows(lines, start, columns, path)
    cells = [[_OLD.get(word, word) for word in rows[n][1][: len(columns)]] for n in columns]
    return Matrix(
        tuple(columns),
        tuple(map(tuple, cells)),
        tuple(_numa(rows[name][1][len(columns) + len(cards) :]) for name in columns),
    )


def _wrong_cells(
    name: str, columns: Sequence[str], line: int, words: Sequence[str], path: Path
) -> Iterator[str]:
    here = f"{path}: line {line}: {name}"
    if len(words) < len(columns):
        yield f"{here}: expected {len(columns)} cells, one for each GPU, got {len(words)}"
    for column, word in zip(columns, words, strict=False):
        expected = "X" if column == name else "NV#, PIX, PXB, PHB, NODE or SYS"
        if not _CELL.fullmatch(word) or (word == "X") != (column == name):
            yield f"{here}, {column}: expected {expected}, got {word!r}"


def _numa(words: Sequence[str]) -> str:
    """The NUMA node behind the CPUs: "0-23,48-71 0 N/A" -> "0". The CPUs if they stand alone."""
    known = [word for word in words if word != "N/A"]
    return (known[1] if len(known) > 1 else known[0]) if known else ""


def to_topology(matrix: Matrix, name: str, types: Sequence[DeviceType], path: Path) -> Topology:
    """The machine: one host, `host0`, with its GPUs in the order of the matrix.

    Args:
        types: of each GPU.

    Raises:
        FileError: if pairs contradict each other, or the figures of a type are not known.
    """
    wrong = list(_contradictions(matrix, path))
    if wrong:
        raise FileError("\n".join(wrong))
    tree, switches = _pcie_tree(matrix, types, path)
    fast, more = _nvlinks(matrix, types, path)
    names = [one.lower() for one in matrix.names]
    return Topology(
        name=name,
        device_types=tuple(
            {kind.name: kind for kind in types}[n] for n in sorted({k.name for k in types})
        ),
        hosts=(Host("host0"),),
        devices=tuple(
            Device(own, kind.name, "host0") for own, kind in zip(names, types, strict=True)
        ),
        switches=(*switches, *more),
        links=(*fast, *tree),
        notes=(
            "links as nvidia-smi topo -m has them; it says no figures",
            "NVLink: bandwidth by the data sheet of the device type, latency 0.3 us",
            "PCIe: from memory, by the type of device; 5 us each way; NODE counts like PHB",
        ),
    )


def _contradictions(matrix: Matrix, path: Path) -> Iterator[str]:
    for i, row in enumerate(matrix.cells):
        for j in range(i):
            if row[j] != matrix.cells[j][i]:
                a, b = matrix.names[j], matrix.names[i]
                yield f"{path}: {a} to {b} is {matrix.cells[j][i]}, but {b} to {a} is {row[j]}"


Figure = TypeVar("Figure")


def _figure_of(table: Mapping[str, Figure], kind: DeviceType, what: str, path: Path) -> Figure:
    """The entry of a table for a device type, by the first letters of its name.

    Raises:
        FileError: if there is none; with the types that have one.
    """
    for family, figure in table.items():
        if re.match(rf"{re.escape(family)}(\W|$)", kind.name):
            return figure
    raise FileError(
        f"{path}: no {what} is known for device type {kind.name!r}, only for {', '.join(table)};"
        " give one of these, and change the file that is written"
    )


def _nvlinks(
    matrix: Matrix, types: Sequence[DeviceType], path: Path
) -> tuple[list[Link], list[str]]:
    """Links of NVLink, from GPU to GPU; where a GPU has more of them in the matrix than the chip
    has, all its pairs share them, and there is an NVSwitch.
    """
    counts = {
        (i, j): int(cell.removeprefix("NV"))
        for i, row in enumerate(matrix.cells)
        for j, cell in enumerate(row)
        if cell.startswith("NV")
    }
    links: list[Link] = []
    switches: list[str] = []
    for group in components(counts):
        own = {pair: n for pair, n in counts.items() if pair[0] in group}
        chips = {i: _figure_of(NVLINK, types[i], "NVLink", path) for i in group}
        total = Counter[int]()
        for (i, _), n in own.items():
            total[i] += n
        if all(total[i] <= chips[i][0] for i in group):
            for (i, j), n in own.items():
                rate = n * min(chips[i][1], chips[j][1])
                ends = matrix.names[i].lower(), matrix.names[j].lower()
                links.append(Link(*ends, rate, NVLINK_LATENCY_S, f"nvlink{n}"))
            continue
        switch = f"nvswitch{len(switches)}"
        switches.append(switch)
        for i in group:
            rate = max(n for (a, _), n in own.items() if a == i) * chips[i][1]
            links += both_ways(matrix.names[i].lower(), switch, rate, NVLINK_LATENCY_S, "nvlink")
    return links, switches


def _pcie_tree(
    matrix: Matrix, types: Sequence[DeviceType], path: Path
) -> tuple[list[Link], list[str]]:
    """The links and the inner nodes of the PCIe tree. Groups of GPUs hang on a node each, from near
    groups to far ones, up to the host; a group of one level holds whole groups of the level before.
    """
    count = len(matrix.names)
    rates = [_figure_of(PCIE, kind, "PCIe", path) for kind in types]
    # The node of each group: first the GPUs themselves.
    nodes = {frozenset([i]): name.lower() for i, name in enumerate(matrix.names)}
    gpus = set(nodes.values())
    links: list[Link] = []
    switches: list[str] = []

    def join(members: Sequence[frozenset[int]], above: str, share: float, kind: str) -> None:
        for member in members:
            rate = share * max(rates[i] for i in member)
            latency_s = PCIE_LATENCY_S if nodes[member] in gpus else 0.0
            links.extend(both_ways(nodes[member], above, rate, latency_s, kind))

    for depth, stands_for in enumerate(STANDS_FOR):
        number = 0
        for group in _groups(matrix, depth, path):
            inside = [member for member in nodes if member <= group]
            if len(inside) > 1:
                above = f"{stands_for}{number}"
                number += 1
                switches.append(above)
                join(inside, above, 1.0, "pcie")
                for member in inside:
                    del nodes[member]
                nodes[group] = above
    if len(nodes) > 1 and count > len(nodes):
        join(list(nodes), "host0", BETWEEN_SOCKETS, "socket")
    else:
        join(list(nodes), "host0", 1.0, "pcie")
    return links, switches


def _groups(matrix: Matrix, depth: int, path: Path) -> list[frozenset[int]]:
    """Groups of GPUs that reach each other over nothing farther than a level.

    Raises:
        FileError: if two of them pass something farther.
    """
    count = len(matrix.names)
    near = set(LEVELS[: depth + 1])
    pairs = [(i, j) for i in range(count) for j in range(count) if _passes(matrix, i, j) in near]
    groups = [frozenset(group) for group in components(pairs)]
    for group in groups:
        for i, j in combinations(sorted(group), 2):
            cell = matrix.cells[i][j]
            if cell in LEVELS[depth + 1 :]:
                raise FileError(
                    f"{path}: {matrix.names[i]} to {matrix.names[j]} is {cell}, but other GPUs are"
                    f" {LEVELS[depth]} or nearer to both; write the topology by hand"
                )
    return groups


def _passes(matrix: Matrix, i: int, j: int) -> str:
    """What the PCIe path of two GPUs passes; for those with NVLink, what their NUMA nodes say."""
    cell = matrix.cells[i][j]
    if not cell.startswith("NV"):
        return cell
    same = matrix.numa[i] == matrix.numa[j] and matrix.numa[i]
    return "NODE" if same else "SYS"
