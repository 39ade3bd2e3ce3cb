"""The bound of `intra-op`: no plan of its space is faster, and it does not depend on the clock."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Status
from planner.artefacts.profile import Contention, LossCost, OperatorCost, SplitRule
from planner.artefacts.strategy import ScheduleName, Strategy
from planner.costs.bounds import lower_bound_s
from planner.costs.overlap import with_overlap
from planner.resharding.checks import all_violations
from planner.simulator.estimate import estimate_s
from planner.solvers.intra import solve as intra
from planner.solvers.intra.bound import CLOSE, Bound, queues
from planner.solvers.intra.build import built
from planner.solvers.program.problem import Choice
from planner.solvers.program.solve import solve
from tests.solvers.test_intra import counted, drawn, stage_of
from tests.support.builders import islands
from tests.support.small_splits import given, strategy_of
from tests.support.split import mlp
from tests.support.split_models import MODELS, loaded
from tests.support.split_profiles import FAST, problem, profiled

PLANS = 17
"""Random plans on a view; 1,000 in all cases together."""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bound")
    return {name: profiled(loaded(make(folder / f"{name}.onnx"))) for name, make in MODELS.items()}


def random_plans(problem, chance):
    """Their programs, seconds by what they are, and simulated seconds of an iteration."""
    for view in intra.views(problem):
        made = built(problem, view)
        for _ in range(PLANS):
            picks = drawn(made, chance)
            schedule = chance.choice([ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B])
            stage = stage_of(problem, made, picks)
            strategy = Strategy((stage,), schedule, problem.num_microbatches)
            if not all_violations(strategy, problem.profile.graph, len(view.devices)):
                simulated_s = estimate_s(problem, with_overlap(problem, strategy))
                yield made, counted(made, picks), simulated_s


MEASURED = Contention(2, {2: 1.1, 3: 1.7, 4: 2.5}, {3: 1.1, 4: 1.2})
# Microbatches, bandwidth, whether collectives run beside computations, the cores that all devices
# share, and how much slower these were measured to be.
CASES = (
    (2, 1e5, False, None, None), (2, 1e8, True, None, None), (4, 1e5, True, None, None),
    (8, 1e5, False, None, None), (8, 1e5, True, None, None),
    (4, 1e8, False, 2, None), (4, 1e5, True, 3, None), (2, 1e6, True, 2, MEASURED),
)  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_no_plan_of_the_space_is_faster_than_the_bound(profiles, name):
    """Random plans of all views, as they are simulated; the bound is of the whole space."""
    chance, compared, tightest = random.Random(5), 0, dict.fromkeys((None, 2, 3), 0.0)
    losses = tuple(LossCost(output, 1e-3, 2e-3) for output in profiles[name].graph.outputs)
    for num_microbatches, bandwidth, overlap, cores, contention in CASES:
        optimizer = chance.choice([*Optimizer])
        options = {"overlap": overlap, "optimizer": optimizer}
        profile = replace(profiles[name], loss_costs=losses, contention=contention)
        one = problem(profile, 4, num_microbatches, bandwidth, **options)
        hosts = tuple(replace(host, cores=cores) for host in one.topology.hosts)
        one = replace(one, topology=replace(one.topology, hosts=hosts))
        bound_s = intra.solve(one, 2.0).bound_s
        for made, seconds, simulated_s in random_plans(one, chance):
            compared += 1
            longest_s = max(float(seconds.weighted(queue)) for queue in queues(one, made.view))
            tightest[cores] = max(tightest[cores], longest_s / simulated_s)
            assert 0 < bound_s <= simulated_s
            assert longest_s <= 1.000001 * simulated_s
    assert compared > 1000 / 3
    assert min(tightest.values()) > 0.999


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_no_plan_is_faster_whose_parts_lie_over_replicas_of_a_host(profiles, name, overlap):
    """Their sums are exact in the program: those that are scattered in a host and added up over
    hosts are the longest queue of some plans.
    """
    chance, compared, tightest = random.Random(6), 0, 0.0
    for num_microbatches, bandwidth in ((4, 1e4), (8, 1e6)):
        one = problem(profiles[name], 4, num_microbatches, overlap=overlap)
        topology = islands((2, 2), 10 * bandwidth, bandwidth, kind=FAST, latency=1e-6)
        one = replace(one, topology=topology)
        bound_s = intra.solve(one, 2.0).bound_s
        for made, seconds, simulated_s in random_plans(one, chance):
            longest_s = max(float(seconds.weighted(queue)) for queue in queues(one, made.view))
            assert 0 < bound_s <= simulated_s
            assert longest_s <= 1.000001 * simulated_s
            if made.view.over:
                compared += 1
                tightest = max(tightest, longest_s / simulated_s)
    assert compared > 10
    assert tightest > 0.98


def with_a_constant():
    """A profile of three products with one frozen weight, and of a trained scaling behind them."""
    width, rules = 16, tuple(map(SplitRule, ("R,S1->S1", "S0,R->S0", "S1,S0->P")))
    weight = Parameter("w", (width, width), "float32", False)
    scale = Parameter("s", (width,), "float32", True)
    tensors = [Tensor(name, (8, width), "float32", name == "t3") for name in ("x", *"abc", "t3")]
    reads = zip(("x", *"ab"), "abc", strict=True)
    operators = [Operator(f"o{made}", "MatMul", (name,), (made,), ("w",)) for name, made in reads]
    operators.append(Operator("o", "Mul", ("c",), ("t3",), ("s",)))
    costs = [
        OperatorCost(one.name, 1e-6, 2e-6, 0, 0, 10**9, 10**6, one.outputs, 0,
                     rules=rules if one.type == "MatMul" else ())
        for one in operators
    ]  # fmt: skip
    graph = Graph(tuple(operators), tuple(tensors), (weight, scale), ("x",), ("t3",))
    return replace(mlp(), graph=graph, operators=tuple(costs))


def test_readers_of_a_constant_share_a_copy_of_it():
    """Where each paid for its own, the bound would be above the time of plans."""
    one, chance, above = given(with_a_constant(), 4, 1e7), random.Random(1), 0
    for view in intra.views(one):
        made, (queue, *_) = built(one, view), queues(one, view)
        for _ in range(60):
            picks = drawn(made, chance)
            strategy = strategy_of(one, made, picks)
            if not all_violations(strategy, one.profile.graph, 4):
                seconds, simulated_s = counted(made, picks), estimate_s(one, strategy)
                assert seconds.weighted(queue) <= 1.000001 * simulated_s
                above += seconds.weighted(queue) + seconds.unsure > 1.000001 * simulated_s
    assert above


@pytest.mark.parametrize("bandwidth", [1e6, 1e8])
def test_raised_bounds_are_those_of_the_best_weights(profiles, bandwidth):
    """At least what each queue alone says, and at most the longest queue of any assignment."""
    one, chance = problem(profiles["mlp"], 4, 4, bandwidth), random.Random(1)
    for view in intra.views(one):
        made, every = built(one, view), queues(one, view)
        bound = Bound(one, made, 10**12)
        asked = []

        def answer(program, asked=asked):
            asked.append(program)
            return solve(program, 2.0, lambda: 1e6)

        while not bound.done:
            bound.raised(answer)
        assert len(asked) <= 12
        for queue in every:
            weights = [part + 1e-9 for part in queue]
            alone = solve(made.program(type(queue)(*weights), 10**12, kept=False), 2.0,
                          lambda: 1e6)  # fmt: skip
            assert bound.value_s >= (1 - CLOSE - 1e-4) * alone.bound
        for _ in range(50):
            seconds = counted(made, drawn(made, chance))
            longest_s = max(float(seconds.weighted(queue)) for queue in every)
            assert bound.value_s <= longest_s * 1.000001


def test_a_search_that_ends_early_has_a_bound(profiles):
    one = problem(profiles["gpt"], 4, 4)
    early, late = intra.solve(one, 0.0), intra.solve(one, 20.0)
    assert "time limit" in early.space and "time limit" not in late.space
    assert lower_bound_s(one) <= early.bound_s <= late.bound_s
    assert late.bound_s <= min(estimate_s(one, s) for s in (late.strategy, early.strategy))


def test_a_search_that_ends_before_it_has_a_plan_says_so(profiles, monkeypatch):
    monkeypatch.setattr(intra, "FIRST_S", 0.0)
    one = problem(profiles["gpt"], 4, 4)
    ended = intra.solve(one, 0.0)
    assert ended.strategy is None and ended.reason == intra.NOT_YET
    assert ended.bound_s is None and not ended.short_of_memory


def test_programs_that_had_too_little_work_get_what_is_left(profiles, monkeypatch):
    one, given_s = problem(profiles["mlp"], 4, 4), []
    best = intra.solve(one, 20.0)

    def answer(program, work_s, *others):
        given_s.append(work_s)
        if work_s < 2 * intra.LEAST_WORK_S:
            return Choice(Status.UNKNOWN, None, np.inf, 0.0)
        return solve(program, work_s, *others)

    monkeypatch.setattr(intra, "solve_program", answer)
    found = intra.solve(one, 20.0)
    assert found.strategy == best.strategy
    assert intra.DEEPER * intra.LEAST_WORK_S in given_s


def test_the_answer_does_not_depend_on_the_clock(profiles, monkeypatch):
    one = problem(profiles["gpt"], 4, 4)
    known = intra.solve(one, 20.0)
    ticks = itertools.count(0, 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    again = intra.solve(one, 20.0)
    assert next(ticks) < 1e9
    assert again.reproducible
    assert (again.strategy, again.bound_s) == (known.strategy, known.bound_s)
    assert np.isfinite(again.bound_s)
