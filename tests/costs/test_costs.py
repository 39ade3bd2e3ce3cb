"""The cost model on cases that can be worked out by hand, and against the simulator."""

from dataclasses import replace
from itertools import compress

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from planner.artefacts.graph import Graph, LossChoice, Operator, Parameter, Tensor, View
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Result, Status
from planner.artefacts.profile import Contention, OperatorCost, stash_bytes
from planner.artefacts.roofline import rescaled_times
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import Link, take
from planner.costs.actions import action_costs
from planner.costs.bounds import fractional_s, longest_path_s, lower_bound_s, memory_shortage
from planner.costs.closed_form import bottleneck_s, iteration_s
from planner.costs.evaluate import evaluate
from planner.costs.operators import slowdowns
from planner.costs.peak_memory import (
    MemoryReason,
    bytes_by_reason,
    dynamic_bytes,
    gradients_waiting,
    outputs_waiting,
)
from planner.costs.stage_memory import limit_bytes, memory_of, stage_memory
from planner.costs.stage_pass import stage_pass
from planner.costs.transfers import allreduce_s, ring_allreduce_s, transfer_s
from planner.costs.update import step_s
from planner.planning.judge import judge
from planner.schedules.actions import ActionKind, Compute, Direction, Receive, Send, text, waits
from planner.schedules.dry_run import dry_run
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from planner.simulator.events import simulate
from planner.simulator.steady import iterate
from planner.solvers.fit import pipeline
from planner.support.errors import OptionError
from tests.support.builders import KB, changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.programs import SYNCHRONOUS


def chain_problem(num_stages, num_microbatches, bandwidth=1e15, forward_s=1.0, **options):
    """One operator per stage and device."""
    graph = graph_of([[v - 1] if v else [] for v in range(num_stages)], [8] * num_stages)
    profile = profile_of(graph, [forward_s] * num_stages)
    topology = cluster([unit_type()] * num_stages, bandwidth)
    return problem_of(profile, topology, num_microbatches, **options)


def straight(problem, **options):
    """One operator a stage, one device each."""
    each = [[v] for v in range(len(problem.profile.operators))]
    return pipeline(problem, each, each, recompute=False, **options)


# ------------------------------------------------------------------------------ transfers


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    topology = cluster([unit_type()] * 2, bandwidth=1000.0, latency=0.5)
    # Two links of 0.25 s and 1000 bytes/s each, in cut-through.
    assert transfer_s(topology, (0,), (1,), 2000) == pytest.approx(0.5 + 2.0)
    assert transfer_s(topology, (1,), (1,), 2000) == 0.0


def test_a_path_never_runs_through_another_device():
    # 0 - 1 - 2 are chained by fast links; from 0 to 2 only the slow host is allowed.
    topology = cluster([unit_type()] * 3, bandwidth=10.0, links=[(0, 1, 1e6), (1, 2, 1e6)])
    assert transfer_s(topology, (0,), (2,), 1000) == pytest.approx(100.0)
    assert transfer_s(topology, (0,), (1,), 1000) == pytest.approx(0.001)


def test_a_ring_avoids_the_slow_pair():
    # A square of fast links with slow diagonals: the ring goes round the square.
    links = [(0, 2, 100.0), (2, 1, 100.0), (1, 3, 100.0), (3, 0, 100.0)]
    topology = cluster([unit_type()] * 4, bandwidth=1.0, links=links)
    assert allreduce_s(topology, (0, 1, 2, 3), 400) == ring_allreduce_s(400, 4, 0.0, 100.0)
    assert allreduce_s(topology, (0, 1), 400) == ring_allreduce_s(400, 2, 0.0, 1.0)
    assert allreduce_s(topology, (2,), 400) == 0.0


def test_directions_of_a_link_may_differ():
    topology = cluster([unit_type()] * 2, bandwidth=1.0)
    topology = replace(topology, links=(*topology.links, Link("d0", "d1", 50.0, 0.0)))
    assert transfer_s(topology, (0,), (1,), 100) == pytest.approx(2.0)
    assert transfer_s(topology, (1,), (0,), 100) == pytest.approx(100.0)


# ------------------------------------------------------------------------------ computation


def test_times_are_rescaled_by_the_ratio_of_rooflines():
    # 1e9 FLOP and 1e6 bytes per operator: bound by FLOPs on both types.
    profile = profile_of(graph_of([[]]), [1.0])
    slow = unit_type("slow", flops=0.25e12)
    assert rescaled_times(profile, slow, unit_type()).forward_s[0] == pytest.approx(4.0)
    assert rescaled_times(profile, unit_type(), None).forward_s[0] == 1.0


def test_rescaling_by_memory_bandwidth_where_that_binds():
    profile = profile_of(graph_of([[]]), [1.0])  # 1e6 bytes, 1e9 FLOP
    narrow = unit_type("narrow", flops=1e15, bandwidth=1e8)  # 10 ms for the bytes, 1 us else
    assert rescaled_times(profile, narrow, unit_type()).forward_s[0] == pytest.approx(10.0)


def test_an_unknown_source_device_cannot_be_rescaled():
    profile = profile_of(graph_of([[]]), [1.0])
    with pytest.raises(OptionError, match="made on 'unit', whose speed is not known"):
        rescaled_times(profile, unit_type("other"), None)


def test_processes_on_shared_cores_slow_each_other_down():
    topology = cluster([unit_type()] * 4, cores=2)
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), topology)
    assert [slowdowns(problem, range(n))[0] for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]


def test_a_measured_contention_replaces_the_rule_on_hosts_with_as_many_cores():
    known = Contention(2, {2: 1.25, 3: 2.0})
    profile = replace(profile_of(graph_of([[]]), [1.0]), contention=known)

    def slow(kinds, cores):
        problem = problem_of(profile, cluster(kinds, cores=cores))
        return [slowdowns(problem, range(n))[0] for n in (1, 2, 3, 4)]

    assert slow([unit_type()] * 4, 2) == [1.0, 1.25, 2.0, pytest.approx(8 / 3)]
    assert slow([unit_type()] * 4, 4) == [1.0, 1.0, 1.0, 1.0]
    assert slow([unit_type()] * 4, None) == [1.0, 1.0, 1.0, 1.0]
    assert slow([unit_type()] * 3 + [unit_type("other")], 2) == [1.0, 1.0, 1.5, 2.0]


def test_a_device_is_as_slow_as_those_that_compute_at_the_time_make_it():
    # Two stages of 3 s per microbatch. One computes while the other waits, but where the second
    # microbatch's forward, 1 s, runs beside the first one's: each takes 1.5 s.
    profile = replace(
        profile_of(graph_of([[], [0]]), [1.0, 1.0]), contention=Contention(2, {2: 1.5})
    )
    problem = problem_of(profile, cluster([unit_type()] * 2, 1e18, cores=2), 2)
    problem = changed(problem, schedule=ScheduleName.GPIPE)
    strategy = straight(problem)
    evaluation = evaluate(problem, strategy)
    assert [one.forward_s for one in evaluation.stages] == [1.5, 1.5]
    # 0F0, then 0F1 beside 1F0, then 1F1; 1B, then 0B beside 1B, then 0B.
    time_s = simulate(evaluation.program, evaluation.costs, problem.topology).iteration_s
    assert time_s == pytest.approx((1 + 1.5 + 1) + (2 + 3 + 2))
    alone = replace(problem, profile=replace(profile, contention=None))
    evaluation = evaluate(alone, strategy)
    time_s = simulate(evaluation.program, evaluation.costs, problem.topology).iteration_s
    assert time_s == pytest.approx(3 + 6)


def test_a_step_passes_over_parameters_gradients_and_moments():
    kind, problem = unit_type(bandwidth=100.0), chain_problem(1, 1)
    seconds = [
        step_s(changed(problem, optimizer=one), 1000, kind)
        for one in (Optimizer.SGD, Optimizer.MOMENTUM, Optimizer.ADAMW)
    ]
    assert seconds == [40.0, 60.0, 80.0]


# ------------------------------------------------------------------------------ iteration


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from(SYNCHRONOUS))
def test_closed_form_and_simulator_agree_on_equal_stages_with_free_links(stages, m, schedule):
    problem = chain_problem(stages, m, schedule=schedule)
    evaluation = evaluate(problem, straight(problem))
    timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
    expected = (m + stages - 1) * 3.0
    assert timeline.iteration_s == pytest.approx(expected, rel=1e-9)
    assert iteration_s(evaluation.stages, m, schedule) == pytest.approx(expected, rel=1e-9)


# Without a flush an iteration of equal stages has no bubble, however few microbatches it has.
@given(st.integers(1, 5), st.integers(1, 9))
def test_closed_form_and_simulator_agree_on_a_flow_through_equal_stages(stages, m):
    problem = chain_problem(stages, m, schedule=ScheduleName.PIPEDREAM)
    strategy = straight(problem)
    evaluation = evaluate(problem, strategy)
    assert iterate(problem, strategy, evaluation).iteration_s == pytest.approx(m * 3.0, rel=1e-9)
    closed = iteration_s(evaluation.stages, m, ScheduleName.PIPEDREAM)
    assert closed == pytest.approx(m * 3.0, rel=1e-9)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
       st.integers(1, 9))  # fmt: skip
def test_closed_form_and_simulator_agree_on_gpipe_with_unequal_stages(times, m):
    feeds = [[v - 1] if v else [] for v in range(len(times))]
    profile = profile_of(
        graph_of(feeds), [float(f) for f, _ in times], [float(b) for _, b in times]
    )
    topology = cluster([unit_type()] * len(times), 1e15)
    problem = problem_of(profile, topology, m, schedule=ScheduleName.GPIPE)
    evaluation = evaluate(problem, straight(problem))
    timeline = simulate(evaluation.program, evaluation.costs, topology)
    closed = iteration_s(evaluation.stages, m, ScheduleName.GPIPE)
    # Exact but for backwards that start before the last forward has come through.
    assert closed == pytest.approx(timeline.iteration_s, rel=1e-6)


@pytest.mark.parametrize("extra", [0, 1])
def test_transfers_that_the_warmup_cannot_hide_slow_the_closed_form_as_the_simulator(extra):
    # A transfer takes a quarter of a stage's time: 8 bytes at 32 / 3 bytes/s.
    problem = chain_problem(3, 60, bandwidth=8 / 0.75)
    evaluation = evaluate(problem, straight(problem, extra=extra))
    timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
    closed = iteration_s(evaluation.stages, 60, ScheduleName.ONE_F_ONE_B)
    assert closed == pytest.approx(timeline.iteration_s, rel=0.03)
    stalls = timeline.iteration_s > 1.05 * 60 * 3.0
    assert stalls == (extra == 0)


@pytest.mark.parametrize("widths", [(4, 1), (1, 4), (3, 2), (2, 2)])
def test_transfers_take_as_long_as_on_the_side_with_fewer_replicas(widths):
    # 8 bytes take 4 s there and 4 s back, two stages of 0.3 s each: the links are the bottleneck.
    problem = problem_of(
        profile_of(graph_of([[], [0]], [8, 8], [8, 8]), [0.1, 0.1]),
        cluster([unit_type()] * sum(widths), bandwidth=2.0),
        num_microbatches=24,
    )
    devices = list(range(sum(widths)))
    where = [devices[: widths[0]], devices[widths[0] :]]
    strategy = pipeline(problem, [[0], [1]], where, recompute=False, extra=3)
    evaluation = evaluate(problem, strategy)
    timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
    closed = iteration_s(evaluation.stages, 24, ScheduleName.ONE_F_ONE_B)
    assert closed == pytest.approx(timeline.iteration_s, rel=0.25)
    assert bottleneck_s(evaluation.stages) == pytest.approx(4.0 / min(widths))


def test_a_late_stage_hides_its_sums_behind_the_cooldown_of_earlier_ones():
    problem = problem_of(
        profile_of(graph_of([[], [0]], [8, 8], [10, 3000]), [2.0, 1.0]),
        cluster([unit_type()] * 3, bandwidth=1000.0),
    )
    strategy = pipeline(problem, [[0], [1]], [[0], [1, 2]], recompute=False)
    evaluation = evaluate(problem, strategy)
    # The sum of 3000 B over two takes 3 s; stage 0's last backward takes 4 s.
    assert evaluation.costs.sum_s == (3.0,)
    with_sum = simulate(evaluation.program, evaluation.costs, problem.topology)
    free = replace(evaluation.costs, sum_s=(0.0,))
    without = simulate(evaluation.program, free, problem.topology)
    assert with_sum.iteration_s == without.iteration_s


def test_recomputation_pays_the_forward_twice():
    problem = chain_problem(1, 4)
    again = pipeline(problem, [[0]], [[0]], recompute=True)
    assert evaluate(problem, again).stages[0].backward_s == 3.0
    assert evaluate(problem, straight(problem)).stages[0].backward_s == 2.0


# ------------------------------------------------------------------------------ memory

#   x -> a -> b (a view of a's output) -> c, which keeps its input
VIEWS = Graph(
    operators=(
        Operator("a", "Test", ("x",), ("ta",), ("w",)),
        Operator("b", "Reshape", ("ta",), ("tb",), ()),
        Operator("c", "Test", ("tb",), ("tc",), ("w",)),
    ),
    tensors=(
        Tensor("x", (10,), "int8", False),
        Tensor("ta", (100,), "int8", True),
        Tensor("tb", (60,), "int8", True),
        Tensor("tc", (7,), "int8", True),
    ),
    parameters=(Parameter("w", (1000,), "int8", True),),
    inputs=("x",),
    outputs=("tc",),
)


def views_profile():
    costs = (
        OperatorCost("a", 1.0, 2.0, 100, 1000, 1, 1, ("x", "ta"), 0),
        OperatorCost("b", 0.0, 0.0, 60, 0, 1, 1, (), 0),
        OperatorCost("c", 1.0, 2.0, 7, 1000, 1, 1, ("tb",), 5),
    )
    base = profile_of(VIEWS, [1.0, 0.0, 1.0])
    return replace(base, operators=costs, views=(View("tb", "ta"),))


def test_a_stashed_view_counts_as_its_base_where_both_are_on_one_device():
    profile = views_profile()
    assert stash_bytes(profile, [0, 1, 2]) == 10 + 100 + 5  # x, ta (tb is a view), private
    assert stash_bytes(profile, [0]) == 10 + 100
    assert stash_bytes(profile, [1, 2]) == 100 + 5  # b's input is kept alive by its view
    assert stash_bytes(profile, [2]) == 60 + 5  # a received copy of tb alone


def test_a_stage_keeps_inputs_outputs_stash_and_what_the_loss_keeps():
    need = memory_of(views_profile(), [0, 1, 2])
    assert need.static.parameter == need.static.trainable == 1000  # tied: held once
    assert need.kept_bytes == 10 + 100 + 5 + 7 + 7
    assert need.boundary_bytes == 10 + 7
    assert need.returned_bytes == 0
    # Backward of a: gradients of its parameters and of its output, and that of the tied one, which
    # waits since c's; what the loss and c kept is gone. A forward only adds to what is kept.
    assert need.backward_workspace_bytes == 1000 + 1000 + 100 - 7 - 5
    assert need.forward_workspace_bytes == 0


def test_a_fused_loss_keeps_nothing_and_makes_the_gradient_of_its_output_alone():
    eager = replace(views_profile(), graph=replace(VIEWS, tensors=tuple(
        replace(one, dtype="bfloat16", shape=(50_000,)) if one.name == "tc" else one
        for one in VIEWS.tensors
    )))  # fmt: skip
    costs = (*eager.operators[:2], replace(eager.operators[2], output_bytes=100_000))
    eager = replace(eager, operators=costs)
    before = memory_of(eager, [0, 1, 2])
    after = memory_of(replace(eager, fused_loss=True), [0, 1, 2])
    # Log-probabilities in float32, and no copy of the output while they are made.
    assert before.kept_bytes - after.kept_bytes == 200_000
    assert (before.forward_workspace_bytes, after.forward_workspace_bytes) == (200_000, 0)
    # Beside what is kept: both float32 gradients, or the output's in its own type with those that
    # c makes, of tb and of w.
    assert before.backward_workspace_bytes == 2 * 200_000
    assert after.backward_workspace_bytes == 100_000 + 60 + 1000


def test_a_fused_loss_of_values_has_the_data_s_targets():
    graph = replace(
        VIEWS,
        tensors=tuple(
            replace(one, dtype="float32", shape=(25_000,)) if one.name == "tc" else one
            for one in VIEWS.tensors
        ),
        losses=(LossChoice("tc", "mse"),),
    )
    costs = (*views_profile().operators[:2], replace(views_profile().operators[2],
                                                     output_bytes=100_000))  # fmt: skip
    profile = replace(
        views_profile(), graph=graph, operators=costs, model_hash="0" * 64, fused_loss=True
    )
    need = memory_of(profile, [0, 1, 2])
    assert need.kept_bytes == 10 + 100 + 5 + 100_000 + 100_000  # tc, and what it is compared with
    # The gradients of tc, and of tb and w, which c makes.
    assert need.backward_workspace_bytes == 100_000 + 60 + 1000


def test_a_part_of_something_larger_is_copied_to_be_sent():
    profile = views_profile()
    assert memory_of(profile, [0]).copied_bytes == 0  # ta lies alone
    assert memory_of(profile, [0, 1]).copied_bytes == 60  # tb is a part of ta
    assert memory_of(profile, [1]).copied_bytes == 60  # also of what has come
    assert memory_of(profile, [2]).copied_bytes == 0
    whole = replace(profile.graph.tensors[2], shape=(100,))
    graph = replace(profile.graph, tensors=tuple(
        whole if one.name == "tb" else one for one in profile.graph.tensors
    ))  # fmt: skip
    assert memory_of(replace(profile, graph=graph), [0, 1]).copied_bytes == 0


@pytest.mark.parametrize(
    ("base", "size", "output", "copied"),
    [
        ("ta", 100, 100, 0),
        ("ta", 60, 60, 60),
        ("w", 1000, 0, 0),
        ("w", 60, 60, 60),
        ("x", 10, 0, 0),
    ],
)
def test_only_what_is_not_there_anyway_waits_to_be_sent(base, size, output, copied):
    """tb is the whole or a part of what a made, of a parameter or of what has come."""
    a, _, c = VIEWS.operators
    graph = replace(
        VIEWS,
        operators=(a, Operator("b", "Test", ("ta", "x"), ("tb",), ("w",)), c),
        tensors=tuple(
            replace(one, shape=(size,)) if one.name == "tb" else one for one in VIEWS.tensors
        ),
    )
    need = memory_of(replace(views_profile(), graph=graph, views=(View("tb", base),)), [0, 1])
    assert need.output_bytes == output
    assert need.boundary_bytes == 10 + output
    assert need.copied_bytes == copied


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_sent_waits_as_long_as_its_reader_may_be_behind(recompute):
    problem = problem_of(views_profile(), cluster([unit_type()] * 2), 6)
    strategy = Strategy(
        (Stage.whole(("a", "b"), (0,), 4, recompute), Stage.whole(("c",), (1,), 1, False)),
        ScheduleName.ONE_F_ONE_B, 6,
    )  # fmt: skip
    code = evaluate(problem, strategy).program.code
    needs = {0: memory_of(problem.profile, [0, 1])}

    def use(waits):
        """Bytes besides workspace of the first device, in its computations in order."""
        kept, buffers, _ = dynamic_bytes(problem, strategy, code, 0, needs, waits)
        return (kept + buffers)[code.kind[: len(kept)] == ActionKind.COMPUTE].tolist()

    may, at_once = use(True), use(False)
    backward = code.backward[: code.start[1]][code.kind[: code.start[1]] == ActionKind.COMPUTE]
    assert backward.tolist() == [False] * 4 + [True, False] * 2 + [True] * 4
    # Of 60 B each: all of the forwards before the first backward. From then on its reader may not
    # have begun more microbatches than have come back.
    waiting = [0, 60, 120, 180, 180, 180, 180, 180, 180, 120, 60, 0]
    assert [m - n for m, n in zip(may, at_once, strict=True)] == waiting


@pytest.mark.parametrize(
    ("recompute", "held"),
    [
        # x and ta, of which tb is a part; of tb a copy is made and waits.
        (False, {
            MemoryReason.STASH: [110, 110, 110, 220, 220, 220, 220, 110],
            MemoryReason.COPIES: [0, 60, 60, 60, 120, 120, 60, 0],
            MemoryReason.WORKSPACE: [60, 0, 0, 60, 0, 0, 1100, 1100],
        }),
        # x stays, and tb until it has been sent; ta is made again, and tb in it.
        (True, {
            MemoryReason.STASH: [70, 10, 10, 80, 20, 20, 20, 10],
            MemoryReason.OUTPUTS: [0, 60, 60, 60, 120, 120, 60, 0],
            MemoryReason.RERUN: [0, 0, 0, 0, 0, 0, 100, 100],
            MemoryReason.WORKSPACE: [0, 0, 0, 0, 0, 0, 1100, 1100],
        }),
    ],
)  # fmt: skip
def test_what_is_held_for_which_reason(recompute, held):
    problem = problem_of(views_profile(), cluster([unit_type()] * 2), 2)
    strategy = Strategy(
        (Stage.whole(("a", "b"), (0,), 2, recompute), Stage.whole(("c",), (1,), 1, False)),
        ScheduleName.ONE_F_ONE_B, 2,
    )  # fmt: skip
    evaluation = evaluate(problem, strategy)
    code, needs = evaluation.program.code, {0: evaluation.needs[0]}
    assert [text(one) for one in evaluation.program.lists[0]] == [
        "0F0", "0>1:0:tb", "0<1:0:d/tb", "0F1", "0>1:1:tb", "0<1:1:d/tb", "0B0", "0B1", "A0", "O",
    ]  # fmt: skip
    due = dict.fromkeys(MemoryReason, [0] * 8) | held
    due[MemoryReason.RECEIVED] = [0, 0, 60, 60, 60, 120, 120, 60]
    found = bytes_by_reason(problem, strategy, code, 0, needs)
    assert {kind: row.tolist() for kind, row in found.items()} == {
        kind: [*row, 0, 0] for kind, row in due.items()
    }


def test_a_stage_needs_its_operators_and_what_earlier_stages_of_the_device_have_not():
    profile, first, last = views_profile(), *(
        Stage.whole(names, (0,), 1, False) for names in (("a", "b"), ("c",))
    )  # fmt: skip
    assert stage_memory(profile, first) == memory_of(profile, [0, 1])
    assert stage_memory(profile, last, [first]) == memory_of(profile, [2], [0, 1])
    assert stage_memory(profile, last, [first]).static.parameter == 0
    assert stage_memory(profile, last).static.parameter == 1000


def test_the_price_of_a_stage_has_its_operators_and_the_step_of_all_that_it_trains():
    problem = problem_of(views_profile(), cluster([unit_type(bandwidth=4000.0)] * 2))
    stage = Stage.whole(("b", "c"), (0, 1), 1, False)
    own = stage_pass(problem, stage, 1)
    assert (own.forward_s, own.backward_s) == (1.0, 2.0)
    both = Stage.whole(("a",), (0,), 1, False), replace(stage, groups=((1,),))
    strategy = Strategy(both, ScheduleName.GPIPE, 1)
    assert action_costs(problem, strategy, (), [0, 1000]).step_s == {0: 0.0, 1: 1.0}
    with pytest.raises(ValueError, match="a stage has no mesh, and its replicas have 2 devices"):
        stage_pass(problem, replace(stage, groups=((0, 1),)), 0)


def chain_in_stages(widths, count, warmups):
    """A graph, its strategy with one operator a stage, and the lists."""
    last = np.cumsum(widths).tolist()
    stages = tuple(
        Stage.whole((f"op{s}",), tuple(range(last[s] - width, last[s])), warmups[s], recompute=True)
        for s, width in enumerate(widths)
    )
    graph = graph_of([[s - 1] if s else [] for s in range(len(stages))])
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, count)
    return graph, strategy, program(strategy, graph)


@st.composite
def pipelines(draw):
    """Up to four stages in 1F1B, on up to three devices each, whose lists end."""
    widths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    count = draw(st.integers(1, 12))
    warmups = default_warmups(widths, count, draw(st.integers(0, 2)))
    if draw(st.booleans()):
        most = [min(4, -(-count // width)) for width in widths]
        warmups = tuple(draw(st.integers(1, one)) for one in most)
    found = chain_in_stages(widths, count, warmups)
    assume(dry_run(found[-1]) is None)
    return found


# Of the replicas that a device sends to in turn, some have begun fewer microbatches than others.
IN_TURN = chain_in_stages((2, 3), 12, (3, 2))


@example(IN_TURN)
@given(pipelines())
def test_outputs_wait_unless_they_must_have_come(drawn):
    graph, strategy, ended = drawn
    stages, lists = strategy.stages, ended.lists
    known = surely_run(lists)
    for s, stage in enumerate(stages[:-1]):
        for device in stage.devices:
            mine = [one for one in lists[device] if isinstance(one, Compute)]
            back = np.array([one.direction is Direction.BACKWARD for one in mine], dtype=bool)
            found = outputs_waiting(strategy, graph, s, ~back, back).tolist()
            for k, one in enumerate(mine):
                flying = {m.microbatch for m in compress(mine[:k], ~back)} - {one.microbatch}
                flying -= {m.microbatch for m in compress(mine[:k], back)}
                its = [Compute(Direction.FORWARD, s + 1, m) for m in flying]
                waiting = sum(m not in known[one] for m in its)
                assert found[k] >= waiting
                if {one.num_replicas for one in stages} == {1}:
                    assert found[k] == waiting


@example(IN_TURN)
@given(pipelines())
def test_gradients_wait_unless_they_must_have_come(drawn):
    graph, strategy, ended = drawn
    stages, lists = strategy.stages, ended.lists
    known = surely_run(lists)
    for s, stage in list(enumerate(stages))[1:]:
        for device in stage.devices:
            mine = [one for one in lists[device] if isinstance(one, Compute)]
            back = np.array([one.direction is Direction.BACKWARD for one in mine], dtype=bool)
            found = gradients_waiting(strategy, graph, s, ~back, back).tolist()
            for k, one in enumerate(mine):
                sent = [replace(done, stage=s - 1) for done in compress(mine[:k], back)]
                # All but those of the latest ones, as the device has waited for them.
                waiting = [its not in known[one] for its in sent[-1 if back[k] else -2 :]]
                assert found[k] >= KB * sum(waiting)
                if {one.num_replicas for one in stages} == {1}:
                    assert found[k] == KB * sum(waiting)


def surely_run(lists):
    """By computation, those that have ended when it starts, whatever takes how long: all before it
    on its device, and what was done where the tensors were made that it waits for.
    """
    sent, known = {}, {}
    done = {device: frozenset() for device in lists}
    left = {device: list(actions) for device, actions in lists.items()}
    while any(left.values()):
        for device, actions in left.items():
            while actions:
                action = actions[0]
                if isinstance(action, Compute):
                    due = [
                        (device, one.device, one.direction, one.microbatch, one.tensor)
                        for one in lists[device]
                        if isinstance(one, Receive) and waits(action, one)
                    ]
                    if not sent.keys() >= set(due):
                        break
                    known[action] = done[device].union(*(sent[one] for one in due))
                    done[device] = known[action] | {action}
                if isinstance(action, Send):
                    key = action.device, device, action.direction, action.microbatch, action.tensor
                    sent[key] = done[device]
                del actions[0]
    return known


@pytest.mark.parametrize("recompute", [False, True])
def test_with_gpipe_the_outputs_of_one_forward_wait_while_the_next_runs(recompute):
    problem = problem_of(views_profile(), cluster([unit_type()] * 2), 4)
    stages = Stage.whole(("a", "b"), (0,), 4, recompute), Stage.whole(("c",), (1,), 4, False)
    strategy = Strategy(stages, ScheduleName.GPIPE, 4)
    code = evaluate(problem, strategy).program.code
    needs = {0: memory_of(problem.profile, [0, 1])}
    may, at_once = (
        dynamic_bytes(problem, strategy, code, 0, needs, waits) for waits in (True, False)
    )
    computes = code.kind[: code.start[1]] == ActionKind.COMPUTE
    waiting = (may[0] + may[1] - at_once[0] - at_once[1])[computes].tolist()
    assert waiting == [0, 60, 60, 60, 0, 0, 0, 0]
    # A copy is made when the forward is through; run again, the copy is what is kept of it.
    assert may[2][computes].tolist()[:4] == ([0] * 4 if recompute else [60] * 4)


def test_a_gradient_may_wait_until_the_next_backward_is_through():
    problem = problem_of(views_profile(), cluster([unit_type()] * 2), 3)
    strategy = pipeline(problem, [[0, 1], [2]], [[0], [1]], recompute=False)
    code = evaluate(problem, strategy).program.code
    mine = slice(code.start[1], code.start[2])
    needs = {1: memory_of(problem.profile, [2])}
    assert needs[1].returned_bytes == 60
    with_it, without = (
        dynamic_bytes(problem, strategy, code, 1, needs, waits)[1] for waits in (True, False)
    )
    computes = code.kind[mine] == ActionKind.COMPUTE
    assert (with_it - without)[computes].tolist() == [0, 0, 60, 60, 60, 60]


def test_the_peak_of_1f1b_holds_warmup_many_microbatches():
    problem = chain_problem(2, 8, optimizer=Optimizer.ADAM)
    evaluation = evaluate(problem, straight(problem))
    parts = evaluation.memory[0]
    assert parts.parameter_bytes == 1000
    assert parts.gradient_bytes == 1000
    assert parts.optimizer_bytes == 2000
    # Two in flight, each with the model's input (1000 B) and the stage's output (8 B).
    assert parts.stash_bytes == 2 * (1000 + 8)
    # The gradient in use and the one that is on its way.
    assert parts.buffer_bytes == 2 * 8


def test_gpipe_holds_all_microbatches():
    problem = chain_problem(2, 8, schedule=ScheduleName.GPIPE)
    assert evaluate(problem, straight(problem)).memory[0].stash_bytes == 8 * (1000 + 8)


def test_shared_host_memory_is_divided_among_the_devices_in_use():
    problem = problem_of(
        profile_of(graph_of([[]]), [1.0]), cluster([unit_type()] * 4, cores=4, memory=1000)
    )
    assert limit_bytes(problem, (0, 1), 0) == 500
    assert limit_bytes(problem, (0, 1, 2, 3), 0) == 250


def test_a_strategy_that_does_not_fit_is_refused_with_the_parts():
    problem = problem_of(
        profile_of(graph_of([[]]), [1.0]),
        cluster([unit_type(memory=2500)]),
        optimizer=Optimizer.ADAM,
    )
    result = Result(Status.FEASIBLE, pipeline(problem, [[0]], [[0]], recompute=False))
    plan, reason = judge(problem, "test", result)
    assert plan is None
    assert "the limit is 2.44 KiB (parameters 1000 B, gradients 1000 B, optimizer 1.95" in reason


def test_a_shortage_names_stage_and_device_and_tells_need_and_limit_apart():
    profile = profile_of(graph_of([[], [0]], parameter_bytes=[10**6, 2 * 10**6]), [1.0, 1.0])
    problem = problem_of(profile, cluster([unit_type()] * 2))
    strategy = pipeline(problem, [[0], [1]], [[0], [1]], recompute=False)
    need = evaluate(problem, strategy).memory[1].total_bytes
    tight = evaluate(changed(problem, device_memory=need - 1), strategy).shortage
    name, size = problem.topology.devices[1].name, need / 2**20
    assert f"{need:.3g}" == f"{need - 1:.3g}"
    assert tight.startswith(f"stage 1 needs {size:.7g} MiB on {name}, the limit is ")
    assert f"limit is {(need - 1) / 2**20:.7g} MiB (" in tight


# ------------------------------------------------------------------------------ bounds


def test_the_longest_path_goes_there_and_back():
    # A diamond with a heavy and a light side: 1 + 5 + 1 forwards, twice that backwards.
    profile = profile_of(graph_of([[], [0], [0], [1, 2]]), [1.0, 5.0, 2.0, 1.0])
    problem = problem_of(profile, cluster([unit_type()] * 2))
    assert longest_path_s(problem) == pytest.approx(21.0)


def test_the_heaviest_operator_runs_all_microbatches_of_a_device():
    problem = problem_of(
        profile_of(graph_of([[], [0]]), [10.0, 0.001]), cluster([unit_type()] * 3), 4
    )
    # Four microbatches on three devices: one device runs it twice.
    assert lower_bound_s(problem) == pytest.approx(60.0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 3))
def test_the_fractional_assignment_is_no_more_than_any_share_of_a_mixed_cluster(times, a, b):
    kinds = [unit_type()] * a + [unit_type("slow", flops=0.25e12)] * b
    feeds = [[v - 1] if v else [] for v in range(len(times))]
    problem = problem_of(profile_of(graph_of(feeds), [float(t) for t in times]), cluster(kinds))
    # All operators have the same ratio of speeds, so the rates add up: a + b / 4.
    assert fractional_s(problem) == pytest.approx(3 * sum(times) / (a + b / 4))


def test_parameters_alone_may_prove_that_nothing_fits():
    problem = problem_of(profile_of(graph_of([[], [0]]), [1.0, 1.0]),
                         cluster([unit_type(memory=1500)] * 2))  # fmt: skip
    assert "alone take 3.91 KiB" in memory_shortage(problem)
    roomy = problem_of(problem.profile, cluster([unit_type(memory=2500)] * 2))
    assert memory_shortage(roomy) is None


def test_taking_devices_drops_their_links():
    smaller = take(cluster([unit_type()] * 4), 2)
    assert [d.name for d in smaller.devices] == ["d0", "d1"]
    assert {link.source for link in smaller.links} == {"d0", "d1", "host"}
