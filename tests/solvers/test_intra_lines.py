"""Rules of all operators by policies: the best point of the part of the space that these leave."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest

from planner.artefacts.graph import Parameter
from planner.artefacts.profile import PartTime, SplitRule
from planner.artefacts.strategy import Stage
from planner.costs.stage_pass import stage_pass
from planner.solvers.intra.lines import FAST, Axis, lines_of
from planner.solvers.intra.policy import Policy
from planner.solvers.intra.space import View, allowed, comes, lies_of, strategies
from planner.solvers.sharded.complete import shardings
from planner.solvers.sharded.rules import rule_beside, share_work
from tests.costs.test_split_bounds import with_rules
from tests.support.builders import cluster, islands, unit_type
from tests.support.split import mlp
from tests.support.split_models import MODELS, loaded
from tests.support.split_profiles import FAST as FAST_DEVICE
from tests.support.split_profiles import problem, profiled

FREE = Policy(further=False)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return profiled(loaded(MODELS["gpt"](tmp_path_factory.mktemp("gpt") / "gpt.onnx")))


def chosen(given, policy=FREE, size=2, rounds=1.0, sure=False):
    (rules,) = lines_of(given, [tuple(range(size))], [Axis(size, policy, sure)], rounds)
    return rules


def test_a_part_counts_at_its_measured_time_on_the_type_that_was_measured():
    """As halves, products by columns and by samples take as long. By samples, whole weights have
    gradients to be added up, and that is not worth it.
    """
    known = with_rules(mlp())
    parts = (PartTime((2,), ("S0,R->S0",), 0.1, 0.1),)
    operators = tuple(
        replace(one, parts=parts) if one.name == "up" else one for one in known.operators
    )
    rules = {}
    for name, operators_of in (("plain", known.operators), ("measured", operators)):
        for kind in (known.device_type, "another"):
            profile = replace(known, operators=operators_of)
            given = problem(profile, bandwidth=1e15)
            devices = replace(given.topology, **cluster_of(kind))
            rules[name, kind] = chosen(replace(given, topology=devices), rounds=1e-3)[1].line
    assert rules.pop(("measured", known.device_type)) == "S0,R->S0"
    assert set(rules.values()) == {"R,S1->S1"}


def cluster_of(kind):
    """Fields of a topology of two devices of a type."""
    made = cluster([unit_type(kind, bandwidth=1e12)] * 2, 1e15, 1e-12)
    return {"device_types": made.device_types, "devices": made.devices}


def test_where_no_conversion_is_allowed_that_is_needed_all_are():
    """The first operator has to be cut though the second one has to be whole."""
    given = problem(with_rules(mlp()), bandwidth=1e15)
    mine = Policy(
        rule=lambda v, _: v == 0, conversion=lambda *_: False, must=lambda v: v == 0, further=False
    )
    assert [one.rule.cuts for one in chosen(given, mine)] == [True, False, False, False]


def test_a_conversion_that_is_not_allowed_is_not_made():
    """By columns the first product is fast, but what follows it reads samples, or all."""
    known, columns = with_rules(mlp()), "R,S1->S1"
    profile = replace(known, operators=tuple(
        replace(one, parts=(PartTime((2,), (columns,), 0.01, 0.01),)) if one.name == "up" else one
        for one in known.operators
    ))  # fmt: skip
    given = problem(profile, bandwidth=1e12)
    given = replace(given, topology=replace(given.topology, **cluster_of(known.device_type)))
    samples = replace(FREE, rule=lambda v, rule: v == 1 or rule.inputs[0] == "S0")
    assert chosen(given, samples)[1].line == columns
    strict = replace(samples, conversion=lambda name, old, new: (name, old) != ("h", "S1"))
    lines = [one.line for one in chosen(given, strict)]
    assert lines[1] in ("S0,R->S0", "R,R->R")
    for name in ("h", "a"):  # only the first of these may not be converted
        other = replace(samples, conversion=lambda tensor, *_, name=name: tensor != name)
        assert (chosen(given, other)[1].line == columns) is (name == "a")


def test_only_rules_that_are_allowed_are_taken_and_whole_ones_always(gpt):
    given = problem(gpt, 2, bandwidth=1e12)
    samples = replace(FREE, rule=lambda _, rule: rule.inputs[0] in ("S0", "R"))
    rules = chosen(given, samples)
    assert share_work(rules)
    assert {one.rule.inputs[0] for one in rules} <= {"S0", "R"}
    nothing = replace(FREE, rule=lambda *_: False)
    assert not share_work(chosen(given, nothing, sure=True))


def test_operators_that_must_be_split_are_if_a_rule_of_them_holds(gpt):
    given = problem(gpt, 2, bandwidth=1.0)  # nothing pays
    assert not share_work(chosen(given))
    must = replace(FREE, must=lambda _: True)
    for some, one in zip(allowed(gpt, FREE, 2), chosen(given, must), strict=True):
        assert one.rule.is_split or len(some) == 1


def test_an_axis_that_has_to_cut_something_takes_what_would_pay_over_fast_links(gpt):
    slow, fast = (problem(gpt, 2, bandwidth=rate) for rate in (1.0, 1.0 / FAST))
    assert not share_work(chosen(slow))
    assert share_work(chosen(slow, sure=True))
    assert share_work(chosen(fast))


def test_fewer_rounds_weigh_sums_of_gradients_more(gpt):
    """With whole parameters the gradients of all are added up once; that pays over many rounds."""
    whole = replace(FREE, rule=lambda v, rule: not gpt.graph.operators[v].parameters
                    or set(rule.inputs[len(gpt.graph.operators[v].inputs):]) == {"R"})  # fmt: skip
    given = problem(gpt, 2, bandwidth=1e7)
    counts = [
        sum(one.rule.shares_work for one in chosen(given, whole, rounds=rounds))
        for rounds in (1e-3, 1.0, 1e3)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_the_group_with_the_slowest_links_counts(gpt):
    given = replace(problem(gpt, 4), topology=islands([2, 2], 1e12, 1.0, FAST_DEVICE))
    inside, across = (0, 1), (0, 2)
    rules = {
        groups: lines_of(given, groups, [Axis(2, FREE)], 1.0)
        for groups in ((inside,), (across,), (inside, across))
    }
    assert rules[(inside,)] != rules[(across,)] == rules[inside, across]


def pass_s(given, mesh, lines):
    """Computations and collectives of a microbatch, by the judge."""
    graph = given.profile.graph
    (sharding,) = shardings(graph, [range(len(graph.operators))], mesh, lines)
    devices = tuple(range(prod(mesh)))
    names = tuple(one.name for one in graph.operators)
    both = stage_pass(given, Stage(names, (devices,), 1, False, sharding), 0)
    return both.compute_s.sum() + both.collective_s.sum()


@pytest.mark.parametrize("bandwidth", [1e6, 1e10])
def test_two_axes_are_chosen_together(bandwidth):
    """Of all rules along both, by the judge, where steps and sums of gradients weigh nothing."""
    profile = with_rules(mlp())
    given = problem(profile, 4, bandwidth=bandwidth)
    samples = replace(FREE, rule=lambda v, rule: v in (1, 3) and rule.inputs[0] == "S0")
    policies = samples, FREE
    lines = lines_of(given, [(0, 1, 2, 3)], [Axis(2, one) for one in policies], 1e12)
    every = product(*(product(*allowed(profile, one, 2)) for one in policies))
    best_s = min(
        pass_s(given, (2, 2), both)
        for both in every
        if all(rule_beside([a.rule, b.rule]) for a, b in zip(*both, strict=True))
    )
    assert pass_s(given, (2, 2), lines) == pytest.approx(best_s)


def test_rules_along_two_axes_go_together():
    """A rule in blocks is not beside one that cuts the same dimension along another axis."""
    profile = with_rules(mlp())
    lines = "S0,R->S0", "S0/4,S0/4->S1"
    costs = [
        replace(one, rules=tuple(map(SplitRule, lines))) if v == 1 else one
        for v, one in enumerate(profile.operators)
    ]
    profile = replace(profile, operators=tuple(costs))
    axes = [allowed(profile, FREE, 2)[1]] * 2
    view = View((2, 2), 1, (0, 1, 2, 3), (FREE, FREE))
    pairs = {rule.lines for rule in strategies(profile, 1, view, axes)}
    assert ("R,R->R", "S0,R->S0") in pairs
    assert (lines[0], lines[1]) not in pairs and (lines[1], lines[0]) not in pairs


def test_inputs_and_parameters_lie_as_a_policy_says(gpt):
    view = View((2,), 1, (0, 1), (replace(FREE, lies={"x": "S1", "w": "S0"}),))
    wanted = [("R",), ("S0",), ("P",)]
    assert comes("x", wanted, view) == (("S1",),)
    assert comes("y", wanted, view) == (("R",), ("S0",))
    lies = {name: lies_of(Parameter(name, (4, 4), "float32", True), wanted, view) for name in "wv"}
    assert [[one.spec for one in lies[name]] for name in "wv"] == [[("S0",)], [("R",), ("S0",)]]


def test_what_lies_in_further_parts_needs_a_policy_that_lets_it():
    one, wanted = Parameter("w", (4, 4), "float32", True), [("R",)]
    for policy, levels in ((FREE, {0}), (Policy(), {0, 1, 2, 3})):
        alone = lies_of(one, wanted, View((2,), 1, (0, 1), (policy,)))
        replicas = lies_of(one, wanted, View((2,), 2, (0, 1, 2, 3), (policy,)))
        assert {lie.mesh_level for lie in alone} == levels
        assert {lie.level for lie in replicas} == levels
