"""Plans under other planners' cost models."""

from planner.artefacts.problem import Status
from planner.planning.other_cost_models import ForeignComparison, ForeignModel, ForeignRow
from planner.reports.published import published_json, published_table


def test_a_solver_without_a_plan_has_no_figures():
    row = ForeignRow("piper", Status.INFEASIBLE, (), "nothing fits", 0.5)
    found = ForeignComparison(ForeignModel.PIPER, (row,), 2, ())
    shown = published_table(found)
    assert shown.rows == (("piper", "infeasible", "", "", "", "500 ms"),)
    assert shown.marked is None
    plain = published_json(found)
    assert (plain["reason"], plain["solve_s"]) == ("nothing fits", 0.5)
    assert {plain[key] for key in ("peak_bytes", "num_stages", "stages", "reproducible")} == {None}
