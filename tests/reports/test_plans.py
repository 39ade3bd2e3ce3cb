"""Plans beside each other: bars, CSV and the winner."""

import csv
from dataclasses import replace

import pytest

from planner.artefacts.problem import Result, Status
from planner.planning.judge import objective_s
from planner.planning.portfolio import compare
from planner.reports.plans import bars, compare_bars, compare_csv, comparison_table, winner_line
from planner.solvers.registry import automatic
from tests.commands.test_compare import two_branches


def test_branches_beside_each_other_beat_data_parallelism_for_one_microbatch():
    found = compare(two_branches(), ("data-parallel", "netsplit"), 2.0, full_time=True)
    assert found.best.solver == "netsplit"
    # 5 of 8 operators one after the other, beside little communication.
    assert objective_s(found.best.plan) == pytest.approx(5 * 0.03, rel=0.01)
    said = winner_line(found)
    assert said == "the best plan is netsplit's, 60.0 % faster than plain data parallelism"


def test_where_nothing_fits_there_are_rows_with_reasons_and_no_bars():
    found = compare(two_branches(memory=10), automatic(), 2.0, full_time=True)
    assert found.best is None
    assert all(row.reason for row in found.rows)
    assert compare_bars(found, 40) == ()
    assert winner_line(found) == ""
    rows = list(csv.DictReader(compare_csv(found).splitlines()))
    assert [row["iteration_s"] for row in rows] == [""] * len(automatic())
    assert all(row["reason"] for row in rows)


@pytest.mark.parametrize(
    ("status", "short", "note"),
    [
        (Status.INFEASIBLE, True, "does not fit"),
        (Status.INFEASIBLE, False, "no plan"),
        (Status.UNKNOWN, True, "no plan"),
    ],
)
def test_only_what_surely_lacks_memory_is_said_not_to_fit(status, short, note):
    found = compare(two_branches(memory=10), ("single",), 2.0)
    result = Result(status, None, reason="why", short_of_memory=short)
    (row,) = found.rows
    row = replace(row, answer=replace(row.answer, result=result))
    assert row.shortage == ("why" if short else None)
    assert comparison_table(replace(found, rows=(row,))).rows[0][-1] == note


def test_bars_are_sorted_and_as_long_as_what_they_say():
    found = compare(two_branches(), ("single", "netsplit"), 2.0, full_time=True)
    head, *lines = compare_bars(found, 60)
    assert head.startswith("latency; the mark is the lower bound, ")
    assert [line.split()[0] for line in lines] == ["netsplit", "single"]
    assert max(map(len, lines)) == 60
    assert max(len(line) for line in compare_bars(found, 500)[1:]) < 80
    filled = [line.count("█") for line in lines]
    assert filled[1] >= 39
    assert filled[0] / filled[1] == pytest.approx(5 / 8, abs=0.05)


def test_a_bar_of_nothing_is_empty_and_one_of_little_is_seen():
    assert bars([("a", 0.0, "0 s"), ("b", 1e-9, "1 ns"), ("c", 1.0, "1 s")], 3) == (
        "a       0 s",
        "b  ▏    1 ns",
        "c  ███  1 s",
    )
