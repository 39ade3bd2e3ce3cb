"""Plans that ran: the measured order beside the predicted one, and the table as CSV."""

import csv
from dataclasses import replace

from planner.planning.portfolio import compare
from planner.reports.plans import compare_csv
from planner.reports.trials import complete, order_line, order_of, trials_csv, trials_table
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.training.test_trials import trial


def test_pairs_in_the_other_order_are_counted_and_named():
    fast, middle, slow = (trial(f"s{k}", p, m) for k, p, m in [(0, 9, 1), (1, 6, 4), (2, 3, 2)])
    found = order_of([fast, middle, slow])
    assert (found.num_pairs, found.reversed) == (3, (("s2", "s1"),))
    said = order_line(found)
    assert said == "measured in the order predicted: 2 of 3 pairs of plans; s2 is faster than s1"


def test_plans_that_did_not_run_or_are_equal_make_no_pairs():
    ran = trial("single", 9.0, 1.0)
    others = [
        trial("heft", 9.0, 1.0, same_as="single"),
        trial("even", 5.0, reason="needs 3 processes"),
        trial("pesto", 9.0001, 2.0),  # predicted to be as fast
    ]
    assert order_of([ran, *others]).num_pairs == 0
    assert order_line(order_of([ran, *others])) == ""


def test_plans_that_did_not_have_their_turn_have_a_row_that_says_so():
    profile = profile_of(graph_of([[], [0]], [10, 10], [10, 10]), [0.5, 0.5])
    found = compare(
        problem_of(profile, cluster([unit_type()] * 2), 2), ("single", "data-parallel"), 1.0,
        full_time=True,
    )  # fmt: skip
    first = replace(trial("single", 9.0, 1.0), plan=found.rows[0].plan)
    trials = complete(found, [first])
    table = trials_table(trials, 1)
    assert [row[0] for row in table.rows] == ["single", "data-parallel"]
    assert table.rows[1][-1] == "not run: the command was stopped before its turn"
    assert table.marked == 0


def test_measured_figures_stand_behind_the_lines_of_compare():
    profile = profile_of(graph_of([[], [0]], [10, 10], [10, 10]), [0.5, 0.5])
    found = compare(problem_of(profile, cluster([unit_type()] * 2), 2), ("single",), 1.0)
    ran = replace(trial("single", 9.0, 1.0, 2.0, same_as="heft"), plan=found.rows[0].plan)
    (row,) = csv.DictReader(trials_csv(found, [ran]).splitlines())
    samples = ran.throughput * 3.0 / 2
    assert float(row["measured_throughput"]) == ran.throughput
    assert (float(row["least_throughput"]), float(row["most_throughput"])) == (samples / 2, samples)
    assert (row["measured_steps"], row["same_as"], row["not_measured"]) == ("2", "heft", "")
    assert float(row["throughput"]) == found.rows[0].plan.prediction.throughput
    (left,) = csv.DictReader(trials_csv(found, complete(found, [])).splitlines())
    assert left["not_measured"] == "the command was stopped before its turn"
    assert left["measured_throughput"] == left["measured_steps"] == ""
    assert trials_csv(found, [ran]).startswith(compare_csv(found).splitlines()[0])
