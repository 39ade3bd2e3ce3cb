"""Clusters as rows of plain text and as the machine's JSON: what ships, what one consists of, how
wide its links are, and what bounds its collectives.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from planner.clusters import read_topology
from planner.files import shipped
from planner.report import Table


@dataclass(frozen=True, slots=True)
class Preset:
    """A topology that ships.

    Attributes:
        name: as `--topology` takes it.
        num_devices: of which one per core stands for `count: auto`.
        num_hosts: the machines.
        device_types: how many devices there are of each type, by name.
        description: the first sentence of the file.
    """

    name: str
    num_devices: int
    num_hosts: int
    device_types: dict[str, int]
    description: str


def presets() -> tuple[Preset, ...]:
    """The topologies that ship with the planner, by name.

    Raises:
        FileError: if one is malformed.
    """
    found = []
    for path in sorted(shipped("topologies").glob("*.yaml")):
        if path.stem == "devices":
            continue
        topology = read_topology(path)
        kinds = Counter(device.type for device in topology.devices)
        found.append(
            Preset(
                path.stem,
                len(topology.devices),
                len(topology.hosts),
                dict(sorted(kinds.items())),
                first_sentence(path.read_text()),
            )
        )
    return tuple(found)


def first_sentence(text: str) -> str:
    """What a file's leading comment begins with; empty where it has none.

    >>> first_sentence("# Two cards of\\n# unequal size. Made up.\\nformat: x")
    'Two cards of unequal size.'
    """
    lines: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        lines.append(words)
    sentence = re.split(r"(?<=\.)\s", " ".join(lines), maxsplit=1)[0]
    return sentence


def presets_table(found: tuple[Preset, ...]) -> Table:
    """The presets for people."""
    return Table(
        "Topologies that ship with the planner",
        ("name", ">devices", ">hosts", "types", "description"),
        tuple(
            (
                one.name,
                str(one.num_devices),
                str(one.num_hosts),
                ", ".join(f"{n} x {kind}" for kind, n in one.device_types.items()),
                one.description,
            )
            for one in found
        ),
        optional=("types",),
    )
