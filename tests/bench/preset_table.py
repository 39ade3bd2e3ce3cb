"""The table of docs/topologies.md: the topologies that ship with the planner.
`make docs` writes it, and a test fails when it is out of date.
"""

from collections import Counter
from pathlib import Path

from planner.artefacts.topology import table_of
from planner.clusters.yaml.read import find_topology, preset_names, read_topology
from planner.costs.transfers import allreduce_s, host_rows, ring_links
from planner.support.units import format_seconds
from tests.bench.solvers import put

FILE = Path(__file__).parents[2] / "docs" / "topologies.md"
# Size of the all-reduce, and the processes of presets that have as many as are asked for.
SIZE_BYTES, ASKED = 100_000_000, 2

HEAD = """\
| topology | hosts | devices | links | all-reduce of 100 MB | by |
|---|---|---|---|---|---|
"""


def rate(bytes_per_s):
    """A bandwidth in words."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def links(topology):
    """The kinds of links, each once."""
    kinds = Counter()
    ends = {(link.source, link.target) for link in topology.links}
    for link in topology.links:
        if (link.target, link.source) in ends and link.source > link.target:
            continue
        kinds[link.name or "link", link.bandwidth_bytes_per_s] += 1
    return ", ".join(f"{count} {name} {rate(width)}" for (name, width), count in kinds.items())


def row(name):
    """One line of the table."""
    topology = read_topology(find_topology(name), ASKED)
    kinds = Counter(device.type for device in topology.devices)
    everything = tuple(range(len(topology.devices)))
    time_s, by = "-", "-"
    if len(everything) > 1:
        time_s = format_seconds(allreduce_s(topology, everything, SIZE_BYTES))
        measured = table_of(topology, everything) is not None
        way = "over hosts" if host_rows(topology, everything) else "ring"
        by = "table" if measured else f"{way}, {rate(ring_links(topology, everything)[1])}"
    cells = (
        f"`{name}`",
        str(len(topology.hosts)),
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        links(topology),
        time_s,
        by,
    )
    return f"| {' | '.join(cells)} |"


def text():
    """The table."""
    return HEAD + "\n".join(row(name) for name in preset_names())


if __name__ == "__main__":
    put(FILE, "presets", text())
