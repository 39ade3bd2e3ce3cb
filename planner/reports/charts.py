"""Pictures of plain text: the actions of every device over time, and a cluster as a tree."""

from collections.abc import Mapping, Sequence

from planner.artefacts.topology import Topology
from planner.reports.drawing.gantt import SIGNS, Activity, gantt
from planner.reports.drawing.tree import tree
from planner.simulator.timeline import Timeline
from planner.support.printable import printable

# Narrower charts show nothing.
MIN_CELLS = 10

Piece = tuple[str, str]
"""Text, and the activity that it shows: a value of `Activity`, or "" for text beside the chart."""


def gantt_lines(
    timeline: Timeline, names: Mapping[int, str], width: int
) -> Sequence[Sequence[Piece]]:
    """A line for each device, and the legend.

    Args:
        names: of the devices.
        width: columns that there are.
    """
    names = {device: printable(name) for device, name in names.items()}
    margin = max(map(len, names.values()))
    lines = []
    for row in gantt(timeline, max(MIN_CELLS, width - margin - 3)):
        cells = ((segment.text, segment.kind.value) for segment in row.segments)
        lines.append(((names[row.device].ljust(margin) + " |", ""), *cells, ("|", "")))
    signs = ", ".join(
        f"{SIGNS[kind]} {kind.value}" for kind in Activity if kind is not Activity.IDLE
    )
    legend = f"{' ' * margin}  numbers are microbatches; {signs}"
    return (*lines, ((legend, "legend"),))


def cluster_tree(topology: Topology) -> str:
    """Hosts, switches and links, from the outermost switch inwards."""
    return tree(topology)
