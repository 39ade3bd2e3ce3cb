"""Placements of operators cut into stages, and devices that run several of them."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.graph import predecessors
from planner.artefacts.options import Objective, Optimizer, Recompute
from planner.artefacts.plan import StagePrediction
from planner.artefacts.problem import Result, Status
from planner.artefacts.strategy import (
    ScheduleName,
    Stage,
    Strategy,
    crossings,
    deliveries,
    gradient_sums,
    stages_by_device,
    violations,
)
from planner.costs.closed_form import bottleneck_s, iteration_s, latency_s
from planner.costs.evaluate import closed_form_s, evaluate
from planner.planning.judge import judge
from planner.schedules import shared as schedules_shared
from planner.schedules.actions import Compute, Direction, Receive, Send, text
from planner.schedules.dry_run import dry_run
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from planner.simulator.events import simulate
from planner.solvers.fit import pipeline
from planner.solvers.placement.stages import pieces, segments, strategies_of, strategy_of
from tests.support import slow_simulator
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.often import often
from tests.support.programs import SYNCHRONOUS, as_graph, chain, split, split_graphs
from tests.support.strategies import dags

FREE = 1e30


def cut(feeds, device_of, how=segments, **options):
    """The parts of a placement in text: a device and its operators each."""
    parts = how(graph_of(feeds), device_of, **options)
    return " ".join(f"{device}:{','.join(map(str, inside))}" for device, inside in parts)


def placed(device_of, feeds, forward_s, bandwidth=FREE, num_microbatches=1, **options):
    """A problem whose devices are those of the placement, and its strategies."""
    graph = graph_of(feeds, [8] * len(feeds))
    topology = cluster([unit_type()] * (max(device_of) + 1), bandwidth)
    problem = problem_of(profile_of(graph, forward_s), topology, num_microbatches, **options)
    return problem, strategies_of(problem, device_of)


def run(problem, strategy):
    evaluation = evaluate(problem, strategy)
    return simulate(evaluation.program, evaluation.costs, problem.topology)


# ------------------------------------------------------------------------------ segments


def test_a_chain_that_comes_back_has_three_segments():
    assert cut([[], [0], [1]], [0, 1, 0]) == "0:0 1:1 0:2"


def test_two_chains_of_which_one_ends_elsewhere_have_two_segments():
    # A -> B and C -> D, with B on device 1.
    assert cut([[], [0], [], [2]], [0, 1, 0, 0]) == "0:0,2,3 1:1"


def test_a_branch_on_another_device_makes_three_segments():
    #   0 -> 1 -> 3
    #     -> 2 ->      with 1 on device 1
    assert cut([[], [0], [0], [1, 2]], [0, 1, 0, 0]) == "0:0,2 1:1 0:3"


def test_the_better_device_begins():
    # 0 (on 1) -> 2 (on 0); 1 (on 0): with device 0 first, it would have to go on once more.
    assert cut([[], [], [0]], [1, 0, 0]) == "1:0 0:1,2"


def fewest(graph, device_of):
    """The fewest segments, over all chains of downsets."""
    size, feeds = len(device_of), predecessors(graph)
    closed = [
        done
        for done in range(1 << size)
        if all(done >> u & 1 for v in range(size) if done >> v & 1 for u in feeds[v])
    ]
    best = {0: 0}
    for after in closed[1:]:
        best[after] = min(
            best[done] + 1
            for done in closed
            if done != after
            and done & ~after == 0
            and len({device_of[v] for v in range(size) if (after & ~done) >> v & 1}) == 1
        )
    return best[(1 << size) - 1]


@st.composite
def placements(draw, max_nodes=7, max_devices=3):
    """Predecessor lists and a device for each operator."""
    feeds = draw(dags(max_nodes=max_nodes))
    devices = st.integers(0, draw(st.integers(0, max_devices - 1)))
    return feeds, draw(st.lists(devices, min_size=len(feeds), max_size=len(feeds)))


@given(placements())
def test_no_cut_has_fewer_segments(case):
    feeds, device_of = case
    graph = graph_of(feeds)
    assert len(segments(graph, device_of)) == fewest(graph, device_of)


def check_parts(parts, feeds, device_of):
    """All operators once, on their devices, and parts in a topological order of their graph."""
    assert sorted(v for _, inside in parts for v in inside) == list(range(len(feeds)))
    part_of = {v: i for i, (_, inside) in enumerate(parts) for v in inside}
    assert all(device_of[v] == device for device, inside in parts for v in inside)
    assert all(part_of[u] <= part_of[v] for v, before in enumerate(feeds) for u in before)


@given(placements(max_nodes=8))
def test_segments_and_pieces_have_no_cycles(case):
    feeds, device_of = case
    check_parts(segments(graph_of(feeds), device_of), feeds, device_of)
    check_parts(pieces(graph_of(feeds), device_of, range(len(feeds))), feeds, device_of)


def test_a_search_over_too_many_downsets_takes_the_longest_runs(monkeypatch):
    feeds = [[v - 1] if v % 4 else [] for v in range(24)]
    device_of = [(v * 7 + v // 5) % 3 for v in range(24)]
    exact = segments(graph_of(feeds), device_of)
    monkeypatch.setattr("planner.solvers.placement.stages.MAX_DOWNSETS", 2)
    greedy = segments(graph_of(feeds), device_of)
    check_parts(greedy, feeds, device_of)
    assert len(exact) <= len(greedy) < 24


def test_a_placement_needs_a_device_for_each_operator():
    with pytest.raises(ValueError, match="a device for each of 2 operators, got 1"):
        segments(graph_of([[], [0]]), [0])


# ------------------------------------------------------------------------------ pieces


def test_a_piece_ends_behind_what_others_wait_for_and_begins_with_what_waits():
    #   0 -> 1 -> 3      with 1 on device 1: 2 runs beside it
    #     -> 2 ->
    assert cut([[], [0], [0], [1, 2]], [0, 1, 0, 0], pieces, order=range(4)) == "0:0 1:1 0:2 0:3"


def test_what_has_been_waited_for_needs_no_new_piece():
    # 2 and 3 on device 1 both read 0 of device 0; 2 waits for both.
    assert cut([[], [0], [0]], [0, 1, 1], pieces, order=range(3)) == "0:0 1:1,2"


def test_branches_on_different_devices_run_side_by_side():
    #   0 (1 s) -> 1 (4 s, device 1) -> 3 (1 s)
    #           -> 2 (4 s, device 0) ->
    problem, (first, other) = placed(
        [0, 1, 0, 0], [[], [0], [0], [1, 2]], [1.0, 4.0, 4.0, 1.0], objective=Objective.LATENCY
    )
    assert [len(one.stages) for one in (first, other)] == [4, 3]
    # 6 s forward and 12 s backward; with few stages 1 waits until 2 has run, there and back.
    assert run(problem, first).iteration_s == pytest.approx(18.0)
    assert run(problem, other).iteration_s == pytest.approx(30.0)
    assert closed_form_s(problem, first) == pytest.approx(18.0)
    assert closed_form_s(problem, other) == pytest.approx(30.0)
    assert strategy_of(problem, [0, 1, 0, 0]) == first


def test_the_order_of_a_solver_is_kept():
    feeds, device_of = [[], [], [0], [1]], [0, 0, 1, 1]
    problem, _ = placed(device_of, feeds, [1.0] * 4)
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        (strategy,) = [s for s in strategies_of(problem, device_of, order) if len(s.stages) == 4]
        assert [stage.operators for stage in strategy.stages] == [(f"op{v}",) for v in order]


def test_a_third_way_follows_the_order_of_backwards():
    # 0 -> 2 -> 4 and 1 -> 3 -> 4, with 0 and 1 on device 0.
    graph = graph_of([[], [], [0], [1], [2, 3]], [8] * 5)
    profile = profile_of(graph, [4.0, 1, 1, 2, 1], [1.0, 9, 9, 1, 1])
    problem = problem_of(profile, cluster([unit_type()] * 2, FREE), 1)
    strategies = strategies_of(problem, [0, 0, 1, 1, 1])
    stages = [[",".join(stage.operators) for stage in strategy.stages] for strategy in strategies]
    assert stages[:2] == [["op0", "op1", "op2", "op3,op4"], ["op1", "op0", "op3", "op2,op4"]]
    # There 8 s; back 4 and 3 take 2 s, then 2 and 1 run at once for 9 s, and 0 for 1 s.
    assert run(problem, strategies[0]).iteration_s == pytest.approx(20.0)
    # Forwards alone would start 1 before 0, which takes 7 s: but then 2 and 1 do not run at once.
    assert run(problem, strategies[1]).iteration_s == pytest.approx(27.0)


def test_the_cut_that_fits_is_taken():
    #   0 -> 1 (device 1, next to no time) -> 3, 0 -> 2 -> 3: few stages are as fast.
    problem, (few, more) = placed([0, 1, 0, 0], [[], [0], [0], [1, 2]], [1.0, 1e-3, 4.0, 1.0])
    assert (len(few.stages), len(more.stages)) == (3, 4)
    assert strategy_of(problem, [0, 1, 0, 0]) == few
    # Stages that are longer have more in their largest pass.
    assert [evaluate(problem, s).memory[0].total_bytes for s in (few, more)] == [8064, 8056]
    small = replace(problem, options=replace(problem.options, device_memory_bytes=8060))
    assert strategy_of(small, [0, 1, 0, 0]) == more
    smaller = replace(problem, options=replace(problem.options, device_memory_bytes=8000))
    assert strategy_of(smaller, [0, 1, 0, 0]) == few


def test_recomputation_where_it_is_asked_for():
    _, strategies = placed([0, 1, 0], [[], [0], [1]], [1.0] * 3, recompute=Recompute.FULL)
    assert all(stage.recompute for strategy in strategies for stage in strategy.stages)


# ------------------------------------------------------------------------------ action lists


def picture(lists, keep=Compute):
    return "\n".join(
        " ".join(text(action) for action in actions if isinstance(action, keep))
        for actions in lists.lists.values()
    )


def shared(graph, cuts, devices, num_microbatches, schedule="1f1b"):
    """Stages of consecutive operators with one replica each, on given devices."""
    strategy = split(graph, cuts, [1] * len(devices), num_microbatches, schedule)
    depths = default_warmups(
        [1] * len(devices), num_microbatches, schedule=ScheduleName(schedule),
        devices=[(d,) for d in devices],
    )  # fmt: skip
    stages = [
        replace(stage, groups=((device,),), warmup=depth)
        for stage, device, depth in zip(strategy.stages, devices, depths, strict=True)
    ]
    return replace(strategy, stages=tuple(stages))


def test_three_stages_on_two_devices_with_3_microbatches():
    # A device takes a backward that is ready, else the forward of the oldest microbatch.
    lists = program(shared(chain(3), [1, 2], [0, 1, 0], 3), chain(3))
    assert picture(lists) == (
        "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0F2 2F2 2B2 0B1 0B2\n1F0 1F1 1B0 1F2 1B1 1B2"
    )


def test_gpipe_runs_all_forwards_of_all_stages_first():
    lists = program(shared(chain(3), [1, 2], [0, 1, 0], 2, "gpipe"), chain(3))
    assert picture(lists) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 1B0 1B1"


def test_stages_of_one_device_send_nothing_to_each_other():
    # t0 is made in stage 0 and read in 1 on the other device, and in 2 and 3 on the same one.
    graph = as_graph([[], [0], [0, 1], [0, 2]])
    lists = program(shared(graph, [1, 2, 3], [0, 1, 0, 0], 1), graph)
    assert picture(lists, (Compute, Send, Receive)) == (
        "2<1:0:t1 0F0 0>1:0:t0 2F0 3F0 3B0 0<1:0:d/t0 2B0 2>1:0:d/t1 0B0\n"
        "1<0:0:t0 1<0:0:d/t1 1F0 1>0:0:t1 1B0 1>0:0:d/t0"
    )


def test_a_tensor_is_received_once_for_all_stages_of_a_device():
    # t0 goes to stages 1 and 2 on device 1: received for 1, and its gradient leaves after 1B.
    graph = as_graph([[], [0], [0, 1]])
    lists = program(shared(graph, [1, 2], [0, 1, 1], 1), graph)
    assert picture(lists, (Compute, Send, Receive)) == (
        "0<1:0:d/t0 0F0 0>1:0:t0 0B0\n1<0:0:t0 1F0 2F0 2B0 1B0 1>0:0:d/t0"
    )


def test_a_stage_with_several_replicas_has_its_devices_to_itself():
    graph = chain(2)
    strategy = split(graph, [1], [2, 1], 4)
    first, last = strategy.stages
    wrong = replace(strategy, stages=(first, replace(last, groups=((1,),))))
    (said,) = violations(wrong, graph, 3)
    assert said == (
        "device 1 runs a replica of stage 0 and another one; only stages with one"
        " replica that is not split share a device"
    )
    twice = replace(strategy, stages=(replace(first, groups=((0,), (0,))), last))
    assert violations(twice, graph, 3)


@st.composite
def shared_splits(draw):
    """A graph with skips and tied parameters, some of whose tensors have no gradient, and a
    strategy in which stages with one replica share devices, beside others with several.
    """
    graph, strategy = draw(split_graphs(schedules=SYNCHRONOUS))
    flags = draw(st.lists(st.booleans(), min_size=20, max_size=20))
    graph = replace(
        graph,
        tensors=tuple(
            replace(t, gradient=t.gradient and flag)
            for t, flag in zip(graph.tensors, flags, strict=False)
        ),
    )
    devices = [stage.devices for stage in strategy.stages]
    alone = [s for s, one in enumerate(devices) if len(one) == 1]
    pool = [devices[s] for s in alone]
    for s in alone:
        devices[s] = draw(st.sampled_from(pool))
    depths = default_warmups(
        [len(one) for one in devices], strategy.num_microbatches, draw(st.integers(0, 1)),
        strategy.schedule, devices,
    )  # fmt: skip
    stages = [
        replace(stage, groups=tuple((d,) for d in where), warmup=depth)
        for stage, where, depth in zip(strategy.stages, devices, depths, strict=True)
    ]
    return graph, replace(strategy, stages=tuple(stages))


def ragged(graph, strategy, times=()):
    return schedules_shared.lists(
        strategy, crossings(strategy, graph), gradient_sums(strategy, graph), times
    )


@often(60, 200, shared_splits(), st.data())
def test_default_warmups_never_block_where_stages_share_devices(case, data):
    graph, strategy = case
    assert violations(strategy, graph, 99) == ()
    some = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    times = [StagePrediction(data.draw(some), data.draw(some)) for _ in strategy.stages]
    assert dry_run(program(strategy, graph)) is None
    assert dry_run(program(strategy, graph, times)) is None


@often(60, 200, shared_splits())
def test_stages_of_a_device_keep_to_their_order_and_depths(case):
    graph, strategy = case
    lists, mine = ragged(graph, strategy), stages_by_device(strategy)
    for device, actions in lists.items():
        done = [a for a in actions if isinstance(a, Compute)]
        assert len(set(done)) == len(done)
        at = {action: i for i, action in enumerate(done)}
        for m in {a.microbatch for a in done}:
            turns = [at[Compute(Direction.FORWARD, s, m)] for s in mine[device]]
            turns += [at[Compute(Direction.BACKWARD, s, m)] for s in reversed(mine[device])]
            assert all(a < b for a, b in pairwise(turns))
        if strategy.schedule is ScheduleName.GPIPE:
            kinds = [a.direction for a in done]
            assert kinds == sorted(kinds, key=list(Direction).index)
            continue
        running = Counter()
        for action in done:
            running[action.stage] += 1 if action.direction is Direction.FORWARD else -1
            assert running[action.stage] <= strategy.stages[action.stage].warmup


@often(60, 200, shared_splits())
def test_every_tensor_goes_once_to_each_device_that_reads_it_and_its_gradient_back(case):
    graph, strategy = case
    sent, received = Counter(), Counter()
    for device, actions in ragged(graph, strategy).items():
        for a in actions:
            if isinstance(a, Send):
                sent[a.direction, a.tensor, a.microbatch, device, a.device] += 1
            if isinstance(a, Receive):
                received[a.direction, a.tensor, a.microbatch, a.device, device] += 1
    assert sent == received
    due = set()
    for one in crossings(strategy, graph):
        for m in range(strategy.num_microbatches):
            home = schedules_shared.device_of(strategy, one.source, m)
            for t in one.targets:
                there = schedules_shared.device_of(strategy, t, m)
                if there != home:
                    due.add((Direction.FORWARD, one.tensor, m, home, there))
                    if one.gradient:
                        due.add((Direction.BACKWARD, one.tensor, m, there, home))
    assert sent == Counter(due)


@given(split_graphs(max_warmup=3))
def test_where_no_device_is_shared_the_devices_compute_as_in_any_pipeline(case):
    graph, strategy = case
    plain, lists = program(strategy, graph), ragged(graph, strategy)
    assert all(deliveries(strategy, c) == c.targets for c in crossings(strategy, graph))
    if dry_run(plain) is None:
        kept = [[a for a in actions if isinstance(a, Compute)] for actions in lists.values()]
        assert kept == [
            [a for a in actions if isinstance(a, Compute)] for actions in plain.lists.values()
        ]


def test_depths_that_block_are_found_by_the_dry_run():
    graph = chain(3)
    strategy = shared(graph, [1, 2], [0, 1, 0], 4)
    stages = [replace(s, warmup=w) for s, w in zip(strategy.stages, (1, 3, 1), strict=True)]
    lists = program(replace(strategy, stages=tuple(stages)), graph)
    assert "device 1 waits at 1F1" in dry_run(lists)


# ------------------------------------------------------------------------------ time


@st.composite
def placed_problems(draw):
    """Small problems with a placement each, on devices of two speeds."""
    feeds, device_of = draw(placements(max_nodes=6))
    size = len(feeds)
    times = st.lists(st.integers(1, 9).map(float), min_size=size, max_size=size)
    graph = graph_of(feeds, draw(st.lists(st.integers(1, 99), min_size=size, max_size=size)))
    profile = profile_of(graph, draw(times), draw(times))
    kinds = [unit_type(bandwidth=1e3), unit_type("slow", flops=0.5e12), unit_type(bandwidth=1e3)]
    problem = problem_of(
        profile, cluster(kinds, draw(st.sampled_from([3.0, 100.0, FREE])), 0.1),
        draw(st.integers(1, 6)), schedule=draw(st.sampled_from(SYNCHRONOUS)),
    )  # fmt: skip
    return problem, device_of


def longest_s(problem, strategy, costs):
    """The longest way through the stages, there and back, without transfers."""
    there, back = {}, {}
    stages, crossing = range(len(strategy.stages)), crossings(strategy, problem.profile.graph)
    for s in stages:
        device = strategy.stages[s].devices[0]
        begin = max((there[c.source] for c in crossing if s in c.targets), default=0.0)
        there[s] = begin + costs.forward_s[s, device]
    for s in reversed(stages):
        device = strategy.stages[s].devices[0]
        ends = [back[t] for c in crossing if s == c.source for t in c.targets]
        back[s] = max([there[s], *ends]) + costs.backward_s[s, device]
    return max(back.values())


@often(60, 200, placed_problems())
def test_every_placement_becomes_sound_strategies_that_the_simulator_runs(case):
    problem, device_of = case
    graph, names = problem.profile.graph, [o.name for o in problem.profile.graph.operators]
    for strategy in strategies_of(problem, device_of):
        assert violations(strategy, graph, 3) == ()
        for stage in strategy.stages:
            assert {device_of[names.index(name)] for name in stage.operators} == {*stage.devices}
        evaluation = evaluate(problem, strategy)
        assert dry_run(evaluation.program) is None
        costs, num_microbatches = evaluation.costs, strategy.num_microbatches
        simulated = simulate(evaluation.program, costs, problem.topology)
        assert simulated == slow_simulator.simulate(evaluation.program, costs, problem.topology)
        for device, mine in stages_by_device(strategy).items():
            work = sum(costs.forward_s[s, device] + costs.backward_s[s, device] for s in mine)
            assert simulated.iteration_s >= num_microbatches * work * (1 - 1e-9)
        least = longest_s(problem, strategy, costs)
        assert simulated.iteration_s >= least * (1 - 1e-9)
        assert latency_s(evaluation.stages) >= least * (1 - 1e-9)
        closed = iteration_s(evaluation.stages, num_microbatches, strategy.schedule)
        assert closed >= latency_s(evaluation.stages) * (1 - 1e-9)


@given(placements(), st.integers(1, 6), st.sampled_from(SYNCHRONOUS))
def test_one_stage_per_device_is_the_same_as_a_pipeline(case, num_microbatches, schedule):
    feeds, device_of = case
    problem, strategies = placed(device_of, feeds, [1.0] * len(feeds), 1e3, num_microbatches,
                            schedule=schedule)  # fmt: skip
    for strategy in strategies:
        if len(strategy.stages) == len({*device_of}):
            names = [o.name for o in problem.profile.graph.operators]
            inside = [[names.index(n) for n in stage.operators] for stage in strategy.stages]
            where = [list(stage.devices) for stage in strategy.stages]
            assert strategy == pipeline(problem, inside, where, recompute=False)


def test_a_closed_form_of_branches_by_hand():
    #   0 -> 1 -> 3      1 and 2 take 2 s forward, 4 s backward, 0 and 3 half of that; 8 bytes
    #     -> 2 ->        take 1 s, and 1 is on device 1
    problem, (strategy, _) = placed(
        [0, 1, 0, 0], [[], [0], [0], [1, 2]], [1.0, 2.0, 2.0, 1.0], 8.0, 4
    )
    stages = evaluate(problem, strategy).stages
    assert len(stages) == 4
    # 1 + 1 (to device 1) + 2 + 1 (and back) + 1 forward; 2 + 1 + 4 + 1 + 2 backward.
    assert latency_s(stages) == pytest.approx(6.0 + 10.0)
    # Device 0 computes (1 + 2 + 1) x 3 s per microbatch.
    assert bottleneck_s(stages) == pytest.approx(12.0)
    # Two microbatches in flight of stage 0, with a round trip of 16 s.
    assert iteration_s(stages, 4, ScheduleName.ONE_F_ONE_B) == pytest.approx(16.0 + 3 * 12.0)


def test_the_judge_prices_branches_as_the_simulator_runs_them():
    problem, (strategy, other) = placed(
        [0, 1, 0, 0], [[], [0], [0], [1, 2]], [1.0, 4.0, 4.0, 1.0], objective=Objective.LATENCY
    )
    result = Result(Status.FEASIBLE, other, others=(strategy,))
    plan, _ = judge(problem, "test", result)
    assert plan.strategy.stages == strategy.stages
    assert plan.prediction.latency_s == pytest.approx(18.0)
    assert plan.prediction.iteration_s == pytest.approx(18.0)


# ------------------------------------------------------------------------------ memory


def test_memory_of_two_stages_of_a_device_by_hand():
    problem, (strategy,) = placed([0, 1, 0], [[], [0], [1]], [1.0] * 3, num_microbatches=1,
                                  optimizer=Optimizer.ADAM)  # fmt: skip
    evaluation = evaluate(problem, strategy)
    parts = evaluation.memory[0]
    # w0 and w2, 1000 bytes each, with two moments; the step passes over both, 8 times.
    assert evaluation.costs.step_s[0] == pytest.approx(8 * 2000 / 1e18, abs=0)
    assert (parts.parameter_bytes, parts.gradient_bytes) == (2000, 2000)
    assert parts.optimizer_bytes == 4000
    # Stage 0 keeps x and t0; stage 2 keeps t1 and t2, and the loss keeps as much again.
    assert parts.stash_bytes == (1000 + 8) + (8 + 8 + 8)
    # The gradient of t0 has its buffer when the backward of stage 2 runs.
    assert parts.buffer_bytes == 8
    # Backward of 2: the gradients of t2, t1 and w2; what the loss kept is gone.
    assert parts.workspace_bytes == 8 + 8 + 1000 - 8


def test_what_stages_of_a_device_share_is_held_once():
    #   0 -> 1 -> 2      2 reads t0 of 0 on its own device, and both have the parameter w0.
    #     ------>
    graph = graph_of([[], [0], [0, 1]], [8, 8, 8])
    operators = list(graph.operators)
    operators[2] = replace(operators[2], parameters=("w0",))
    graph = replace(graph, operators=tuple(operators), parameters=graph.parameters[:2])
    problem = problem_of(profile_of(graph, [1.0] * 3), cluster([unit_type()] * 2, FREE), 1)
    strategy = Strategy(
        tuple(Stage.whole((f"op{v}",), (d,), 1, False) for v, d in enumerate((0, 1, 0))),
        ScheduleName.ONE_F_ONE_B, 1,
    )  # fmt: skip
    assert gradient_sums(strategy, graph) == ()
    evaluation = evaluate(problem, strategy)
    parts = evaluation.memory[0]
    assert (parts.parameter_bytes, parts.gradient_bytes) == (1000, 1000)
    # t0 is stage 0's; stage 2 adds t1, t2 and what the loss keeps.
    assert parts.stash_bytes == (1000 + 8) + (8 + 8 + 8)
    # The step passes over w0 once: 4 passes at 1e18 bytes/s.
    assert evaluation.costs.step_s[0] == pytest.approx(4 * 1000 / 1e18, abs=0)
    # While 2B runs, the buffer for the gradient of t0 from device 1 is there. Its own waits for 0B.
    lists = evaluation.program.lists[0]
    assert [text(a) for a in lists if not isinstance(a, Send)][-5:] == [
        "2F0", "0<1:0:d/t0", "2B0", "0B0", "O",
    ]  # fmt: skip
    assert parts.buffer_bytes == 8


def test_a_gradient_waits_for_the_earlier_stage_that_it_is_for():
    # Stage 2's gradient of t0 (900 bytes) waits while 1B runs elsewhere and 0B here.
    graph = graph_of([[], [0], [0, 1]], [900, 8, 8], [1, 1, 1])
    problem = problem_of(profile_of(graph, [1.0] * 3), cluster([unit_type()] * 2, FREE), 1)
    strategy = strategies_of(problem, [0, 1, 0])[0]
    parts = evaluate(problem, strategy).memory[0]
    # 2B: the stash of both stages with what the loss keeps, the buffer for the gradient from device
    # 1, and in its workspace the gradients of t0, t1, t2 and w2; what the loss kept is gone.
    assert parts.stash_bytes == (1000 + 900) + (8 + 8 + 8)
    assert parts.buffer_bytes == 900
    assert parts.workspace_bytes == 900 + 8 + 8 + 1 - 8
    # 0B: its own stash, the gradient from device 1, the waiting one, what went back last (t1's),
    # and the gradient of w0.
    last = 1000 + 900 + 900 + 900 + 8 + 1
    assert last < parts.stash_bytes + parts.buffer_bytes + parts.workspace_bytes


def test_stages_that_do_not_fit_together_are_named():
    problem, (strategy,) = placed([0, 1, 0], [[], [0], [1]], [1.0] * 3)
    small = replace(problem, options=replace(problem.options, device_memory_bytes=4500))
    said = evaluate(small, strategy).shortage
    assert said.startswith("stages 0, 2 together need 5")
