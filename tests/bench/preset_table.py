"""docs/topologies.md: what ships in topologies/, as a table.
`python -m tests.bench.preset_table` writes it; a test says when it is out of date.
"""

from collections import Counter
from pathlib import Path

from planner.clusters.yaml.read import find_topology, preset_names, read_topology
from planner.costs.collectives import allreduce_s, ring_links
from planner.topology import table_of
from planner.units import format_seconds

FILE = Path(__file__).parents[2] / "docs" / "topologies.md"
# Size of the all-reduce, and the processes of presets that have as many as are asked for.
SIZE_BYTES, ASKED = 100_000_000, 2

HEAD = f"""\
# Topologies that ship with the planner

Made by `make docs`. All-reduce: the time of 100 MB over all devices, by measured times where the
file has some for all of them, else by a ring, whose slowest link is named beside it. Links: how
many there are of each kind, both directions counted as one, and their bandwidth per direction.
[topologies/README.md](../topologies/README.md) says how to write such files; each says where its
figures come from. `local` is shown for --gpus {ASKED}.

| topology | hosts | devices | links | all-reduce of 100 MB | by |
|---|---|---|---|---|---|
"""


def rate(bytes_per_s):
    """A bandwidth in words."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def links(topology):
    """The kinds of links, each once."""
    found = Counter()
    ends = {(link.source, link.target) for link in topology.links}
    for link in topology.links:
        if (link.target, link.source) in ends and link.source > link.target:
            continue
        found[link.name or "link", link.bandwidth_bytes_per_s] += 1
    return ", ".join(f"{count} {name} {rate(width)}" for (name, width), count in found.items())


def row(name):
    """One line of the table."""
    topology = read_topology(find_topology(name), ASKED)
    kinds = Counter(device.type for device in topology.devices)
    everything = tuple(range(len(topology.devices)))
    time_s, by = "-", "-"
    if len(everything) > 1:
        time_s = format_seconds(allreduce_s(topology, everything, SIZE_BYTES))
        measured = table_of(topology, everything) is not None
        by = "table" if measured else f"ring, {rate(ring_links(topology, everything)[1])}"
    cells = (
        f"`{name}`",
        str(len(topology.hosts)),
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        links(topology),
        time_s,
        by,
    )
    return f"| {' | '.join(cells)} |\n"


def text():
    """The whole file."""
    return HEAD + "".join(row(name) for name in preset_names())


if __name__ == "__main__":
    FILE.write_text(text())
