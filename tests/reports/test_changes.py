"""The effect of changes of a cluster."""

from planner.planning.portfolio import compare
from planner.reports.changes import what_if_json, what_if_table
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type


def test_times_have_a_change_and_counts_have_none():
    profile = profile_of(graph_of([[], [0]], [10, 10], [10, 10]), [0.5, 0.5])
    before, after = (
        compare(problem_of(profile, cluster([unit_type()] * count), 2), ("data-parallel",), 1.0)
        for count in (1, 2)
    )
    shown = what_if_table(before, after, (1, 2))
    rows = {name: cells for name, *cells in shown.rows}
    assert rows["devices"] == ["1", "2", ""]
    assert rows["iteration"][2].startswith("-")
    assert rows["samples/s"][2].startswith("+")
    assert rows["stages"] == ["1", "1", ""]
    assert rows["devices in use"] == ["1", "2", ""]


def test_json_has_the_figures_before_the_changes_but_neither_files_nor_rows():
    profile = profile_of(graph_of([[], [0]], [10, 10], [10, 10]), [0.5, 0.5])
    before = compare(problem_of(profile, cluster([unit_type()]), 2), ("single",), 1.0)
    shown = what_if_json(["devices: 1 -> 2"], before, 1)
    assert shown["changes"] == ["devices: 1 -> 2"]
    assert shown["before"]["iteration_s"] == before.best.plan.prediction.iteration_s
    assert not {"strategy", "partition", "compared"} & shown["before"].keys()
