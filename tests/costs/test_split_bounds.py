"""Bounds over strategies with split operators, against all of them on small graphs."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from planner.artefacts.options import Objective
from planner.artefacts.profile import LossCost, PartTime, SplitRule
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.costs.bounds import lower_bound_s, unreplicated_s
from planner.costs.closed_form import bottleneck_s
from planner.costs.evaluate import evaluate
from planner.simulator.objective import latency_s, objective_s
from planner.simulator.steady import iterate
from tests.support.builders import changed, cluster, problem_of, unit_type
from tests.support.split import mlp

RULES = {
    "scale": ["S0,R->S0", "S1,S0->S1"],
    "up": ["S0,R->S0", "R,S1->S1", "S1,S0->P"],
    "gelu": ["S0->S0", "S1->S1"],
    "down": ["S0,R->S0", "R,S1->S1", "S1,S0->P"],
}
DOWN = ("up", "gelu", "down")


def with_rules(profile):
    """The profile, with the rules above."""
    return replace(
        profile,
        operators=tuple(
            replace(one, rules=tuple(map(SplitRule, RULES[one.name]))) for one in profile.operators
        ),
    )


def splits(names, mesh):
    """All shardings of some operators: all rules of each, or whole, on each axis."""
    whole = {"scale": "R,R->R", "up": "R,R->R", "gelu": "R->R", "down": "R,R->R"}
    lines = [[*RULES[name], whole[name]] for name in names]
    for chosen in product(*(product(some, repeat=len(mesh)) for some in lines)):
        rules = {name: rule_of(line) for name, line in zip(names, chosen, strict=True)}
        weights = {"scale": "w0", "up": "w1", "down": "w2"}
        at_rest = {w: rules[n].inputs[1] for n, w in weights.items()
                   if n in rules and "P" not in rules[n].inputs[1]}  # fmt: skip
        yield Sharding(mesh, rules, at_rest, {}, {})


def in_parts(one):
    """ZeRO-1, -2 and -3 of a sharding: what belongs to whole parameters lies in parts."""
    cut = {name: ("S0",) for name, spec in one.parameters.items() if spec == ("R",)}
    yield replace(one, states=cut)
    yield replace(one, states=cut, gradients=cut)
    yield replace(one, parameters={**one.parameters, **cut})


def strategies(num_microbatches):
    """One stage on two devices, or two stages, of which the second is split, on three; replicas,
    ZeRO, and recomputation.
    """
    everything = tuple(RULES)
    for one in splits(everything, (2,)):
        kinds = [(one, False)]
        if all(spec == ("R",) for spec in one.parameters.values()):
            kinds += [(one, True), *((zero, False) for zero in in_parts(one))]
        for (kind, again), groups in product(kinds, (((0, 1),), ((0, 1), (2, 3)))):
            yield Strategy((Stage(everything, groups, 1, again, kind),),
                           ScheduleName.ONE_F_ONE_B, num_microbatches)  # fmt: skip
    for one in splits(DOWN, (2,)):
        stages = (Stage.whole(("scale",), (0,), 2, False), Stage(DOWN, ((1, 2),), 1, False, one))
        yield Strategy(stages, ScheduleName.ONE_F_ONE_B, num_microbatches)
    for rule in splits(("down",), (2, 2)):
        one = replace(rule, rules={**rule.rules, "up": rule_of(["R,S1->S1", "S0,R->S0"])})
        yield Strategy((Stage(everything, ((0, 1, 2, 3),), 1, False, one),),
                       ScheduleName.ONE_F_ONE_B, num_microbatches)  # fmt: skip


def least_of(problem):
    """The least figure of any strategy, by objective. Each is priced once for all objectives."""
    found = {objective: [] for objective in Objective}
    for one in strategies(2):
        evaluation = evaluate(problem, one)
        iteration = iterate(problem, one, evaluation)
        found[Objective.BOTTLENECK].append(bottleneck_s(evaluation.stages, one.schedule))
        found[Objective.ITERATION].append(iteration.iteration_s)
        found[Objective.LATENCY].append(latency_s(problem, one, evaluation, iteration.times))
    return {objective: min(figures) for objective, figures in found.items()}


def bounds_of(problem):
    """The bound of each objective."""
    return {
        objective: lower_bound_s(changed(problem, objective=objective)) for objective in Objective
    }


@pytest.mark.parametrize("times", [
    (0.5, 4.0, 2.0, 4.0), (1.0, 1.0, 9.0, 1.0),
    pytest.param((0.01, 3.0, 0.01, 0.01), marks=pytest.mark.slow),
])  # fmt: skip
def test_no_split_strategy_beats_the_bound(times):
    problem = problem_of(with_rules(mlp(times)), cluster([unit_type()] * 4, 1e15, 0.0), 2)
    bounds, least = bounds_of(problem), least_of(problem)
    for objective, bound_s in bounds.items():
        assert bound_s <= least[objective] * (1 + 1e-9)
        # It is no bound that a strategy could not come near to.
        assert least[objective] < 3.5 * bound_s


def test_no_strategy_that_adds_up_parts_of_gradients_beats_the_bound():
    """A half of the backwards that have weights is sums, of which replicas may do a part each."""
    known = with_rules(mlp((0.5, 4.0, 2.0, 4.0)))
    operators = tuple(
        replace(one, sums_s=0.5 * one.backward_s * bool(operator.parameters))
        for one, operator in zip(known.operators, known.graph.operators, strict=True)
    )
    known = replace(known, operators=operators)
    problem = problem_of(known, cluster([unit_type()] * 4, 1e15, 0.0), 2)
    bounds, least = bounds_of(problem), least_of(problem)
    for objective, bound_s in bounds.items():
        assert bound_s <= least[objective] * (1 + 1e-9)
    names = tuple(RULES)
    stage = Stage(names, tuple((d,) for d in range(4)), 1, False, over=4, zero=3)
    strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 4)
    four = changed(problem, num_microbatches=4)
    assert objective_s(four, strategy) == pytest.approx(lower_bound_s(four))


def test_no_strategy_with_measured_parts_beats_the_bound():
    """Parts that take less than their share, as where they fit into a cache, and others more."""
    known = with_rules(mlp((1.0, 4.0, 9.0, 4.0)))
    numbers = Random(0)
    operators = tuple(
        replace(
            one,
            parts=tuple(
                PartTime((2,), (line,), numbers.uniform(0.1, 0.8), numbers.uniform(0.1, 0.8))
                for line in RULES[one.name]
            ),
        )
        for one in known.operators
    )
    plain = problem_of(known, cluster([unit_type()] * 4, 1e15, 0.0), 2)
    problem = replace(plain, profile=replace(known, operators=operators))
    bounds, least, without = bounds_of(problem), least_of(problem), bounds_of(plain)
    for objective, bound_s in bounds.items():
        if objective is not Objective.LATENCY:  # the bound of whole operators is none here
            assert least[objective] < without[objective]
        assert bound_s <= least[objective] * (1 + 1e-9)


def test_no_strategy_of_parts_that_all_take_a_tenth_beats_the_bound():
    """They take less than a quarter, the share of a device of four."""
    known = with_rules(mlp((1.0, 4.0, 9.0, 4.0)))
    operators = tuple(
        replace(one, parts=tuple(PartTime((2,), (line,), 0.1, 0.1) for line in RULES[one.name]))
        for one in known.operators
    )
    profile = replace(known, operators=operators)
    problem = problem_of(profile, cluster([unit_type()] * 4, 1e15, 0.0), 2)
    by_sample = Sharding((2,), {n: rule_of([lines[0]]) for n, lines in RULES.items()}, {}, {}, {})
    stage = Stage(tuple(RULES), ((0, 1),), 1, False, by_sample)
    strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 2)
    for objective, bound_s in bounds_of(problem).items():
        asked = changed(problem, objective=objective)
        assert bound_s <= objective_s(asked, strategy) * (1 + 1e-9)


def test_without_rules_the_bound_is_that_of_whole_operators():
    topology = cluster([unit_type()] * 4, 1e15, 0.0)
    some = mlp((1.0, 1.0, 9.0, 1.0))
    without, known = (problem_of(one, topology, 1) for one in (some, with_rules(some)))
    assert lower_bound_s(without) == pytest.approx(3 * 12.0)  # the longest path
    assert lower_bound_s(known) == pytest.approx(3 * (1 + 1 + 9 / 4 + 1))
    assert unreplicated_s(known) == unreplicated_s(without)


def test_the_loss_of_a_part_of_its_output_is_counted_in_part():
    """The operator that makes it has no rule; half the loss is on each device."""
    some = replace(mlp((1.0, 1.0, 1.0, 1.0)), loss_costs=(LossCost("y", 6.0, 6.0),))
    problem = problem_of(some, cluster([unit_type()] * 2, 1e15, 0.0), 1)
    split = Sharding((2,), {}, {}, {}, {"y": ("S0",)})
    strategy = Strategy((Stage(tuple(RULES), ((0, 1),), 1, False, split),),
                        ScheduleName.ONE_F_ONE_B, 1)  # fmt: skip
    assert evaluate(problem, strategy).stages[0].forward_s == pytest.approx(4.0 + 3.0)
