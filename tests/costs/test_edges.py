"""Tensors that are cut where they cross slow links, against times worked out by hand."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from planner.artefacts.problem import Result, Status
from planner.costs.evaluate import evaluate
from planner.planning.judge import judge
from planner.resharding import Piece
from planner.resharding.checks import all_violations
from planner.schedules.dry_run import dry_run, meetings_of
from planner.simulator.account import account
from planner.simulator.collectives import collectives
from planner.simulator.steady import iterate
from planner.solvers.sharded.edges import transfers_s, with_local_all_gathers
from tests.support.builders import cluster, islands, problem_of, unit_type
from tests.support.split import MEGATRON, mlp, sharding, two_stages

SLOW, FAST = 1e3, 1e5
OF_S = 8 * 16 * 4  # bytes of the tensor that crosses
KIND = unit_type(bandwidth=1e18)


def problem_on(counts, inside=FAST, between=SLOW, latency=0.0, microbatches=1):
    topology = islands(counts, inside, between, KIND, latency)
    return problem_of(mlp(), topology, microbatches, measured_on=KIND)


def rules(size, at_rest):
    return sharding((size,), MEGATRON, parameters={"w1": ("S1",), "w2": ("S0",)}, **at_rest)


def pipeline(first, second, microbatches=1, inputs=None, outputs=None):
    """scale whole on the first devices, then Megatron-LM's MLP on the second ones."""
    into = {} if inputs is None else {"inputs": {"s": inputs}}
    out = {} if outputs is None else {"outputs": {"s": outputs}}
    ahead = sharding((len(first),), {}, **out) if len(first) > 1 else None
    return two_stages(
        mlp(), 1, (ahead, [first]), (rules(len(second), into), [second]), microbatches
    )  # fmt: skip


def iteration_s(problem, strategy):
    return iterate(problem, strategy, evaluate(problem, strategy)).times.iteration_s


def specs(strategy):
    ahead, behind = strategy.stages
    out = None if ahead.sharding is None else ahead.sharding.outputs.get("s")
    return out, behind.sharding.inputs.get("s")


def test_between_equal_meshes_each_pair_sends_a_part():
    """Before, each of two gets all over a link that both share. Now each gets half, and both gather
    inside; back, halves of a reduce-scatter instead of wholes of an all-reduce.
    """
    problem, plain = problem_on([2, 2]), pipeline((0, 1), (2, 3))
    cut = with_local_all_gathers(problem, plain)
    assert specs(cut) == (("S0",), ("S0",))
    saved_s = 2 * OF_S / SLOW - OF_S / 2 / FAST
    assert iteration_s(problem, plain) - iteration_s(problem, cut) == pytest.approx(saved_s)


def test_from_one_device_to_two():
    problem, plain = problem_on([1, 2]), pipeline((0,), (1, 2))
    cut = with_local_all_gathers(problem, plain)
    assert specs(cut) == (None, ("S0",))
    # An all-gather and a reduce-scatter are as long as the all-reduce that was.
    assert iteration_s(problem, plain) - iteration_s(problem, cut) == pytest.approx(OF_S / SLOW)


def fast_pairs(microbatches=1):
    """Two stages of two devices that run all whole, on slow links but for one from each device to
    that of the other stage with the same place.
    """
    topology = cluster([KIND] * 4, SLOW, 0.0, links=[(0, 2, 1e9), (1, 3, 1e9)])
    whole = sharding((2,), {})
    plain = two_stages(mlp(), 1, (whole, [(0, 1)]), (whole, [(2, 3)]), microbatches)
    return problem_of(mlp(), topology, microbatches, measured_on=KIND), plain


def test_over_fast_links_all_is_sent_to_each():
    problem, plain = fast_pairs()
    assert with_local_all_gathers(problem, plain) is plain


def test_stages_without_meshes_are_as_they_were():
    plain = two_stages(mlp(), 1, (None, [(0,)]), (None, [(1,)]))
    assert with_local_all_gathers(problem_on([1, 1]), plain) is plain


@pytest.mark.parametrize("level", [1, 2, 3])
def test_replicas_that_keep_parts_cut_as_whole_ones_do(level):
    """What crosses is each replica's own."""
    problem = problem_on([4, 4], microbatches=2)
    ends = (sharding((2,), {}), [(0, 1), (2, 3)]), (rules(2, {}), [(4, 5), (6, 7)])
    plain = two_stages(mlp(), 1, *ends, 2)
    stages = tuple(replace(one, over=2, zero=level) for one in plain.stages)
    cut = with_local_all_gathers(problem, replace(plain, stages=stages))
    assert specs(cut) == specs(with_local_all_gathers(problem, plain)) == (("S0",), ("S0",))
    assert all_violations(cut, problem.profile.graph, 8) == ()


def test_a_cut_needs_a_dimension_that_can_be_cut():
    problem = problem_on([3, 3])
    lies = sharding((3,), {})
    plain = two_stages(mlp(), 1, (lies, [(0, 1, 2)]), (lies, [(3, 4, 5)]), 1)
    assert with_local_all_gathers(problem, plain) is plain


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_faster(seed):
    """Against all specs of both ends, on random links, by the simulator."""
    chance = Random(seed)
    inside, between = (10 ** chance.uniform(2, 6) for _ in range(2))
    latency = chance.choice([0.0, 0.01, 0.2])
    first, second = chance.choice([((0,), (1, 2)), ((0, 1), (2, 3)), ((0, 1), (2, 3, 4, 5))])
    problem = problem_on([len(first), len(second)], inside, between, latency)
    cut = with_local_all_gathers(problem, pipeline(first, second))
    assert all_violations(cut, problem.profile.graph, 6) == ()
    ends = [("R",), ("S0",), ("S1",)]
    every = [
        iteration_s(problem, pipeline(first, second, inputs=into, outputs=out))
        for out, into in product(ends if len(first) > 1 else [None], ends)
    ]
    assert iteration_s(problem, cut) == pytest.approx(min(every))


def test_the_judge_takes_it_and_lists_run_to_their_end():
    problem, plain = problem_on([2, 2], microbatches=3), pipeline((0, 1), (2, 3), 3)
    verdict, _ = judge(problem, "some", Result(Status.FEASIBLE, plain))
    assert specs(verdict.strategy) == (("S0",), ("S0",))
    evaluation = evaluate(problem, verdict.strategy)
    assert dry_run(evaluation.program, meetings_of(verdict.strategy)) is None
    others, whole = fast_pairs(3)
    kept, _ = judge(others, "some", Result(Status.FEASIBLE, whole))
    assert kept.strategy == whole


def test_the_link_that_carries_most_counts():
    topology = islands([2, 2], FAST, SLOW, KIND)
    whole = ((0, 10),)
    same = [Piece(0, 2, whole), Piece(1, 3, whole)]
    assert transfers_s(topology, same, 4) == pytest.approx(2 * 40 / SLOW)
    assert transfers_s(topology, [Piece(0, 0, whole)], 4) == 0.0
    late = islands([1, 1], FAST, SLOW, KIND, latency=1.0)
    assert transfers_s(late, [Piece(0, 1, whole)], 4) == pytest.approx(2.0 + 40 / SLOW)


def test_traces_show_the_gather():
    problem, plain = problem_on([2, 2]), pipeline((0, 1), (2, 3))
    cut = with_local_all_gathers(problem, plain)
    described = account(problem, cut)
    names = {(one.device, one.name) for one in collectives(problem, cut, described.timeline)}
    assert {(2, "all-gather of s"), (3, "all-gather of s")} <= names
    assert {(0, "all-gather of d/s"), (2, "reduce-scatter of d/s")} <= names
    moved = described.timeline.transfers
    assert {one.bytes for one in moved} == {OF_S // 2}
    assert len(moved) == 4
