"""The topologies that ship with the planner, with their sizes and descriptions."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from planner.artefacts.files import shipped
from planner.clusters.yaml.read import read_topology


@dataclass(frozen=True, slots=True)
class Preset:
    """A topology that ships.

    Attributes:
        name: as `--topology` takes it.
        num_devices: all; where the file says `count: auto`, one per core of this machine.
        num_hosts: the machines.
        device_types: number of devices by the name of their type.
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
    files = sorted(shipped("topologies").glob("*.yaml"))
    return tuple(_preset(path) for path in files if path.stem != "devices")


def _preset(path: Path) -> Preset:
    topology = read_topology(path)
    kinds = Counter(device.type for device in topology.devices)
    return Preset(
        path.stem,
        len(topology.devices),
        len(topology.hosts),
        dict(sorted(kinds.items())),
        _first_sentence(path.read_text()),
    )


def _first_sentence(text: str) -> str:
    r"""The first sentence of a file's leading comment; empty without a comment.

    >>> _first_sentence("# Two cards of\n# unequal size. Made up.\nformat: x")
    'Two cards of unequal size.'
    """
    lines: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        lines.append(words)
    return re.split(r"(?<=\.)\s", " ".join(lines), maxsplit=1)[0]
