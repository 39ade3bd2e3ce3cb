"""A probe as tables, lines of text and JSON."""

import pytest

from planner.artefacts.topology import CollectiveKind
from planner.clusters.probing.collectives import CollectiveTimes
from planner.clusters.probing.infer import Inferred
from planner.clusters.probing.link_fit import LinkClass, PairFit, PairTimes
from planner.launcher.probe import Probed
from planner.reports.topology import (
    class_table,
    measured_table,
    probe_comments,
    probe_json,
    probe_lines,
)
from tests.support.builders import cluster, unit_type

PAIRS = ((0, 1), (1, 0))


@pytest.fixture
def probed():
    """Two devices, 1 GB/s and 10 us apart."""
    topology = cluster([unit_type()] * 2, bandwidth=1e9)
    alike = LinkClass("over the host", PAIRS, 1e-5, 1e9, 0.011, 0.022)
    sizes, times_s = (1024, 2048, 4096), (1e-5, 2e-5, 4e-5)
    return Probed(
        Inferred(topology, (alike,), 0.013),
        tuple(PairTimes(*pair, sizes, times_s, (0.0,) * 3) for pair in PAIRS),
        tuple(PairFit(*pair, 1e-5, 1e9, 0.011, 0.022) for pair in PAIRS),
        tuple(
            CollectiveTimes(((0, 1),), sizes, times_s, kind)
            for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
        ),
        "gloo",
        "2.9",
    )


def test_classes_of_pairs_are_shown_and_written(probed):
    shown = class_table(probed)
    assert shown.heads == (
        *("connection", "bandwidth", "latency", "fit error", "spread", "pairs", "examples"),
    )
    assert shown.rows == (("over the host", "1 GB/s", "10 us", "1.1 %", "2.2 %", "2", "d0 - d1"),)
    comments = probe_comments(probed, "2026-01-01")
    assert comments[0].startswith("Measured on 2026-01-01 by planner topology probe, gloo")
    assert comments[-1] == (
        "  over the host: 1 GB/s, 10 us, fit within 1.1 %, spread 2.2 %: d0 - d1"
    )
    (row,) = probe_json(probed, "x.yaml")["classes"]
    assert [*row] == ["kind", "latency_s", "bandwidth_bytes_per_s", "error", "spread", "pairs"]
    assert row["pairs"] == [["d0", "d1"], ["d1", "d0"]]


def test_the_largest_collectives_stand_beside_what_the_links_give(probed):
    shown = measured_table(probed)
    assert [row[:5] for row in shown.rows] == [
        ("all-reduce", "2", "1", "2 KiB", "20 us"),
        ("all-reduce", "2", "1", "4 KiB", "40 us"),
        ("all-gather", "2", "1", "2 KiB", "20 us"),
        ("all-gather", "2", "1", "4 KiB", "40 us"),
    ]
    assert all(row[5] for row in shown.rows)
    plain = probe_json(probed, "x.yaml")
    assert [one["groups"] for one in plain["allreduces"]] == [[[0, 1]]]
    assert [one["times_s"] for one in plain["allreduces"]] == [[1e-5, 2e-5, 4e-5]]
    assert [one["kind"] for one in plain["collectives"]] == ["all-gather"]


def test_parts_of_the_topology_are_counted(probed):
    assert probe_lines(probed) == (
        "2 devices, 1 host, 0 switches, 4 links; the bandwidth of each path is within 1.3 % of the"
        " measured one",
    )
