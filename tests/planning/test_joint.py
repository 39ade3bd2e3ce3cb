"""Operators that share state: they are planned as one operator, and stay in one stage."""

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.artefacts.graph import Operator, Parameter, View, joint_operators
from planner.artefacts.problem import Result, Status
from planner.artefacts.profile import stash_bytes
from planner.artefacts.sharding import Sharding
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.artefacts.weight_gradients import backward_weight_share
from planner.planning.joint import joined
from planner.planning.portfolio import compare
from planner.solvers.manual import Manual
from planner.support.errors import OptionError
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

# op0 -> op1 -> op2 -> op4 -> op5, and op1 -> op3 -> op4
FEEDS = [(), (0,), (1,), (1,), (2, 3), (4,)]


SEARCHES = ("single", "data-parallel", "antichain", "even", "heft", "m-topo", "m-etf",
            "m-sct", "pesto", "netsplit")  # fmt: skip


def with_state(*users, feeds=FEEDS):
    """A graph whose operators `users` read a state."""
    graph = graph_of(feeds)
    operators = [
        replace(one, parameters=(*one.parameters, "s")) if v in users else one
        for v, one in enumerate(graph.operators)
    ]
    state = Parameter("s", (2,), "int8", False, state=True)
    return replace(graph, operators=tuple(operators), parameters=(*graph.parameters, state))


def problem(*users, **how):
    graph = with_state(*users)
    profile = profile_of(graph, [1e-3 * (v + 1) for v in range(len(graph.operators))])
    return problem_of(profile, cluster([unit_type()] * 2), **how)


@pytest.mark.parametrize(("users", "sets"), [
    ((2,), ()),  # as a normalization does
    ((1, 2), ((1, 2),)),
    ((1, 4), ((1, 2, 3, 4),)),  # with all between
    ((2, 3), ((2, 3),)),  # neither depends on the other
    ((0, 5), ((0, 1, 2, 3, 4, 5),)),
])  # fmt: skip
def test_operators_between_those_that_share_state_belong_to_them(users, sets):
    assert joint_operators(with_state(*users)) == sets


def test_sets_that_overlap_are_one():
    graph = with_state(1, 2)
    other = Parameter("r", (2,), "int8", False, state=True)
    operators = [
        replace(one, parameters=(*one.parameters, "r")) if v in (2, 5) else one
        for v, one in enumerate(graph.operators)
    ]
    graph = replace(graph, operators=tuple(operators), parameters=(*graph.parameters, other))
    assert joint_operators(graph) == ((1, 2, 3, 4, 5),)


def test_parameters_and_lone_states_put_nothing_together():
    graph = graph_of(FEEDS)
    shared = replace(graph.operators[3], parameters=("w3", "w0"))
    tied = replace(graph, operators=(*graph.operators[:3], shared, *graph.operators[4:]))
    assert joint_operators(tied) == ()


def pipeline(graph, *cuts):
    names = [one.name for one in graph.operators]
    bounds = [0, *cuts, len(names)]
    stages = [
        Stage.whole(tuple(names[a:b]), (s,), 1, False) for s, (a, b) in enumerate(pairwise(bounds))
    ]
    return Strategy(tuple(stages), ScheduleName.ONE_F_ONE_B, 4)


def test_a_strategy_that_parts_them_is_wrong_and_says_why():
    graph = with_state(1, 4)
    assert violations(pipeline(graph, 1, 5), graph, 3) == ()
    (why,) = violations(pipeline(graph, 3), graph, 3)
    assert why == (
        "forward changes s, and the operators from the first that reads it to op4 are in stages"
        " 0, 1: put them into one stage"
    )


def test_without_state_solvers_get_the_problem_itself():
    own = problem()
    assert joined(own).problem is own


def test_times_bytes_and_stash_of_a_set_are_those_of_its_operators():
    own = problem(1, 4)
    own = replace(own, profile=replace(own.profile, views=(View("t3", "t1"),)))
    profile = joined(own).problem.profile
    assert [one.name for one in profile.graph.operators] == ["op0", "op4", "op5"]
    _, one, _ = profile.operators
    whole = own.profile.operators[1:5]
    assert one.forward_s == pytest.approx(sum(each.forward_s for each in whole))
    assert one.backward_s == pytest.approx(sum(each.backward_s for each in whole))
    assert stash_bytes(profile, [1]) == stash_bytes(own.profile, [1, 2, 3, 4])
    assert profile.graph.operators[1] == Operator(
        "op4", "Test", ("t0",), ("t4",), ("w1", "s", "w2", "w3", "w4")
    )


def test_the_time_of_weights_in_a_set_is_that_of_its_operators():
    """The first one reads the input of the model, so all of its backward is for its parameter."""
    whole = problem(0, 1)
    profile = joined(whole).problem.profile
    first, *_ = whole.profile.operators
    both = profile.operators[0]
    assert (both.name, both.backward_weight_s) == ("op1", first.backward_s)
    assert backward_weight_share(profile)[0] == first.backward_s / both.backward_s


def test_operators_beside_a_set_keep_their_order():
    """op3 is not between op2 and op4, and reads what op1 makes."""
    graph = with_state(1, 2, feeds=[(), (0,), (0,), (1,), (2, 3)])
    profile = profile_of(graph, [1e-3] * 5)
    order = joined(problem_of(profile, cluster([unit_type()] * 2))).problem.profile.graph
    assert [one.name for one in order.operators] == ["op0", "op2", "op3", "op4"]


def test_a_strategy_is_parted_and_joined_again():
    one = joined(problem(1, 4))
    names = [each.name for each in one.problem.profile.graph.operators]
    sharding = Sharding((2,), {}, {}, {}, {})
    stages = (
        Stage.whole(tuple(names[:1]), (0,), 1, False),
        Stage(tuple(names[1:]), ((1, 2),), 1, False, sharding),
    )
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, 4)
    parted = one.parted(Result(Status.FEASIBLE, strategy, others=(strategy,)))
    assert parted.strategy is not None
    assert [stage.operators for stage in parted.strategy.stages] == [
        ("op0",), ("op1", "op2", "op3", "op4", "op5"),
    ]  # fmt: skip
    assert parted.others == (parted.strategy,)
    assert one.joined(parted.strategy) == strategy


@pytest.mark.parametrize("users", [(0, 1), (1, 4), (2, 3), (4, 5)])
def test_every_solver_keeps_them_in_one_stage(users):
    rows = compare(problem(*users), SEARCHES, time_limit_s=1.0, full_time=True).rows
    found = [row.plan for row in rows if row.plan is not None]
    assert len(found) == len(SEARCHES), [(row.solver, row.reason) for row in rows]
    inside = {f"op{v}" for one in joint_operators(with_state(*users)) for v in one}
    for plan in found:
        assert [1 for s in plan.strategy.stages if inside & {*s.operators}] == [1]
    assert max(len(plan.strategy.stages) for plan in found) > 1


def test_a_cut_within_them_is_refused_by_name():
    with pytest.raises(OptionError, match=r"--cuts op2: forward changes state .* up to op4"):
        joined(problem(1, 4, switches=(Manual(cuts=("op2",)),)))
    assert joined(problem(1, 4, switches=(Manual(cuts=("op4",)),))).members


def test_a_pin_of_one_of_them_is_one_of_all():
    asked = joined(problem(1, 4, pins=(("op2", "d1"), ("op0", "d0")))).problem.search.pins
    assert asked == (("op4", "d1"), ("op0", "d0"))
