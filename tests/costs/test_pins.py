"""Operators that have to be on a device."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.options import Objective
from planner.costs.operators import pinned
from planner.planning.pins import violated_pin
from planner.planning.portfolio import compare
from planner.solvers.registry import automatic
from planner.support.errors import OptionError
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.commands import run


def chain(pins, size=6, devices=3, num_microbatches=8, **options):
    """A chain of equal operators with large parameters on equal devices."""
    feeds = [[v - 1] if v else [] for v in range(size)]
    graph = graph_of(feeds, [1000] * size, [10**8] * size)
    named = tuple((graph.operators[v].name, f"d{d}") for v, d in pins)
    topology = cluster([unit_type()] * devices)
    return problem_of(
        profile_of(graph, [0.01] * size), topology, num_microbatches, pins=named, **options
    )


def test_the_plan_has_the_operators_where_they_are_pinned():
    found = compare(chain([(0, 2), (5, 0)]), ("data-parallel", "antichain", "even"), 5.0)
    stages = found.best.plan.strategy.stages
    assert stages[0].devices == (2,)
    assert stages[-1].devices == (0,)


def test_a_row_that_breaks_a_pin_says_which():
    found = compare(chain([(0, 2)]), ("data-parallel",), 5.0)
    assert found.rows[0].plan is None
    assert "is pinned to d2, and would be on d0, d1, d2" in found.rows[0].reason


def test_pins_cost_nothing_where_the_best_plan_keeps_them():
    free = compare(chain([]), ("antichain",), 5.0).best.plan
    (where,) = free.strategy.stages[0].devices
    again = compare(chain([(0, where)]), ("antichain",), 5.0).best.plan
    assert again.prediction.iteration_s == pytest.approx(free.prediction.iteration_s)


def test_placements_keep_pins_too():
    # Two branches, pinned the wrong way round.
    graph = graph_of([[], [0], [0], [1, 2]], [10] * 4)
    names = [o.name for o in graph.operators]
    problem = problem_of(
        profile_of(graph, [0.01] * 4),
        cluster([unit_type()] * 2),
        1,
        objective=Objective.LATENCY,
        pins=((names[1], "d1"), (names[2], "d0")),
    )
    found = compare(problem, ("heft", "netsplit"), 5.0, full_time=True)
    for row in found.rows:
        assert row.plan is not None, row.reason
        assert violated_pin(problem, row.plan.strategy) is None
        # Three operators one after the other.
        assert row.plan.prediction.latency_s == pytest.approx(0.09, rel=0.01)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ((("nothing", "d0"),), "there is no operator nothing"),
        ((("op0", "d9"),), "there is no device d9; there are d0, d1, d2"),
        ((("op0", "d0"), ("op0", "d1")), "pinned to two devices"),
    ],
)
def test_a_wrong_pin_is_said(pins, said):
    problem = chain([])
    first = problem.profile.graph.operators[0].name
    named = tuple((first if name == "op0" else name, device) for name, device in pins)
    wrong = changed(problem, pins=named)
    with pytest.raises(OptionError, match=said):
        pinned(wrong)


@pytest.mark.parametrize("given", [("--pin", "a=gpu0"), ("--cuts", "a"), ("--replicas", "2")])
@pytest.mark.parametrize("model", ["pipedream", "dnn-partitioning", "piper"])
def test_other_cost_models_refuse_what_they_would_not_heed(given, model):
    said = run("solve", "--cost-model", model, *given, code=1).output
    assert f"{given[0]} is for --cost-model planner, not for {model}" in said


@settings(max_examples=15)
@given(st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=3))
def test_no_row_breaks_a_pin(pins):
    problem = chain(sorted(pins.items()), num_microbatches=2)
    names = [name for name in automatic(rules=False) if name not in ("netsplit", "pesto")]
    for row in compare(problem, names, 5.0, full_time=True).rows:
        if row.plan is None:
            assert row.reason
        else:
            assert violated_pin(problem, row.plan.strategy) is None
