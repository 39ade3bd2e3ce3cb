"""The result of a probe as rows of plain text, as JSON, and as comments of the file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.artefacts.topology import CollectiveKind
from planner.clusters.probing.link_fit import Pair
from planner.clusters.routes import routes
from planner.costs.collectives import collective_s
from planner.reports.tables import Table
from planner.support.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.clusters.probing.infer import CollectiveTimes
    from planner.launcher.probe import Probed

# Lines of a table of groups.
MAX_ROWS = 24


def class_table(probed: "Probed") -> Table:
    """The classes of pairs."""
    names = [device.name for device in probed.inferred.topology.devices]
    return Table(
        "Pairs that agree",
        ("joined by", ">bandwidth", ">latency", ">fit within", ">spread", ">pairs", "which"),
        tuple(
            (
                one.kind,
                format_rate(one.bandwidth_bytes_per_s),
                format_seconds(one.latency_s),
                f"{one.error:.1%}",
                f"{one.spread:.1%}",
                str(len(one.pairs)),
                pairs_text(one.pairs, names),
            )
            for one in probed.inferred.classes
        ),
        optional=(">pairs",),
    )


def pairs_text(pairs: Sequence[Pair], names: Sequence[str], most: int = 4) -> str:
    """The first pairs, in words; two directions of one pair are one.

    >>> pairs_text([(0, 1), (1, 0), (1, 2)], ["a", "b", "c"])
    'a - b, b -> c'
    """
    both, shown = set(pairs), []
    for p, q in pairs:
        if (q, p) not in both:
            shown.append(f"{names[p]} -> {names[q]}")
        elif p < q:
            shown.append(f"{names[p]} - {names[q]}")
    more = len(shown) - most
    return ", ".join([*shown[:most], *([f"{more} more"] if more > 0 else [])])


def measured_table(probed: "Probed") -> Table:
    """Measured collectives beside those computed from the links alone."""
    links = replace(probed.inferred.topology, tables=())
    rows = []
    for one in probed.collectives:
        group = tuple(range(one.num_ranks))
        for size_bytes, time_s in list(zip(one.sizes_bytes, one.times_s, strict=True))[-2:]:
            rows.append(
                (
                    one.kind.value,
                    str(one.num_ranks),
                    format_bytes(size_bytes),
                    format_seconds(time_s),
                    format_seconds(collective_s(links, group, one.kind, size_bytes)),
                )
            )
    return Table(
        "Collectives over the first ranks, largest sizes",
        ("collective", ">ranks", ">size", ">measured", ">over the links"),
        tuple(rows[:MAX_ROWS]),
    )


def probe_lines(probed: "Probed") -> tuple[str, ...]:
    """The parts of the topology, and its distance from the measurements."""
    topology = probed.inferred.topology
    return (
        f"{len(topology.devices)} devices, {len(topology.hosts)} hosts, {len(topology.switches)}"
        f" switches, {len(topology.links)} links; the paths' bandwidths are within"
        f" {probed.inferred.off:.1%} of the pairs'",
        *(f"note: {note}" for note in topology.notes),
    )


def probe_comments(probed: "Probed", when: str) -> tuple[str, ...]:
    """Lines for the head of the file: date, method and result.

    Args:
        probed: the result.
        when: a date.
    """
    names = [device.name for device in probed.inferred.topology.devices]
    lines = [
        f"Measured on {when} by planner topology probe, {probed.backend} of torch {probed.torch}.",
        "One-way times: a message one way and one byte back, less half of a round trip of a byte;",
        "medians; latency and bandwidth by least squares of the relative error. Pairs that agree:",
    ]
    lines += [
        f"  {one.kind}: {format_rate(one.bandwidth_bytes_per_s)}, {format_seconds(one.latency_s)},"
        f" fit within {one.error:.1%}, spread {one.spread:.1%}: {pairs_text(one.pairs, names)}"
        for one in probed.inferred.classes
    ]
    return tuple(lines)


def probe_json(probed: "Probed", written: str) -> dict[str, Any]:
    """The object that `topology probe --json` prints."""
    topology = probed.inferred.topology
    names = [device.name for device in topology.devices]
    width = routes(topology).bandwidth_bytes_per_s
    return {
        "written": written,
        "backend": probed.backend,
        "devices": [
            {"name": device.name, "type": device.type, "host": device.host}
            for device in topology.devices
        ],
        "pairs": [
            {
                "source": names[one.source],
                "target": names[one.target],
                "latency_s": one.latency_s,
                "bandwidth_bytes_per_s": one.bandwidth_bytes_per_s,
                "routed_bytes_per_s": float(width[one.source, one.target]),
                "error": one.error,
                "spread": one.spread,
                "sizes_bytes": list(times.sizes_bytes),
                "times_s": list(times.times_s),
            }
            for times, one in zip(probed.times, probed.fits, strict=True)
        ],
        "classes": [
            {
                "kind": one.kind,
                "latency_s": one.latency_s,
                "bandwidth_bytes_per_s": one.bandwidth_bytes_per_s,
                "error": one.error,
                "spread": one.spread,
                "pairs": [[names[p], names[q]] for p, q in one.pairs],
            }
            for one in probed.inferred.classes
        ],
        "allreduces": [
            _times_json(one) for one in probed.collectives if one.kind is CollectiveKind.ALL_REDUCE
        ],
        "collectives": [
            {"kind": one.kind.value, **_times_json(one)}
            for one in probed.collectives
            if one.kind is not CollectiveKind.ALL_REDUCE
        ],
        "off": probed.inferred.off,
        "notes": list(topology.notes),
    }


def _times_json(one: "CollectiveTimes") -> dict[str, Any]:
    return {
        "num_ranks": one.num_ranks,
        "sizes_bytes": list(one.sizes_bytes),
        "times_s": list(one.times_s),
    }
