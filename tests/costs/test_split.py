"""Prices and memory of split stages, against numbers worked out by hand."""

from dataclasses import replace
from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Optimizer
from planner.artefacts.profile import ROOFLINE, Contention, Source
from planner.artefacts.sharding import local_shape, rule_of
from planner.artefacts.strategy import Stage, violations
from planner.artefacts.topology import CollectiveKind, CollectiveTable
from planner.clusters.yaml.read import shipped_device_type
from planner.costs.casts import kept_casts
from planner.costs.evaluate import evaluate
from planner.costs.local_stage import local_stage, work_share
from planner.costs.stage_memory import StaticBytes, stage_memory
from planner.costs.stage_pass import stage_pass
from planner.costs.transfers import (
    allgather_s,
    allreduce_s,
    alltoall_s,
    collective_s,
    conversion_s,
    gradient_sum_s,
    lines,
    reducescatter_s,
)
from planner.profilers.interpolate import interpolated
from planner.resharding import conversion
from planner.resharding.sums import gradient_sums
from planner.schedules.actions import Receive, Send
from planner.simulator.steady import iterate
from planner.solvers.antichain.blocks import sets_of
from planner.solvers.graphs.coarsen import coarsen
from planner.solvers.placement.problem import placement_problem_of
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import (
    HIDDEN,
    ROWS,
    WIDTH,
    megatron,
    mlp,
    one_stage,
    sharding,
    two_stages,
    with_stage,
    zero,
)

LATENCY, RATE = 1e-5, 1e9
FAST = unit_type(bandwidth=1e9)
WEIGHTS = 4 * WIDTH + 2 * 4 * WIDTH * HIDDEN  # bytes of w0, w1 and w2
OF_Y, OF_H = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN


def problem(count=4, profile=None, num_microbatches=2, **options):
    topology = cluster([FAST] * count, RATE, LATENCY)
    return problem_of(profile or mlp(), topology, num_microbatches, measured_on=FAST, **options)


def ring_s(size, n):
    """Half of a ring all-reduce."""
    return (n - 1) * (LATENCY + size / n / RATE)


# ------------------------------------------------------------------------------ collectives


def test_an_all_gather_is_half_an_all_reduce():
    topology = cluster([FAST] * 4, RATE, LATENCY)
    for n in (1, 2, 3, 4):
        group = tuple(range(n))
        assert allgather_s(topology, group, 600) == pytest.approx(ring_s(600, n))
        assert allreduce_s(topology, group, 600) == pytest.approx(2 * ring_s(600, n))


def test_an_einsum_keeps_permuted_copies_of_what_it_reads():
    """With data over the rows it keeps the whole weight; another operator half of what it made."""
    profile = mlp()
    v = next(v for v, one in enumerate(profile.graph.operators) if "w1" in one.parameters)
    costs, private = list(profile.operators), 4 * WIDTH * HIDDEN
    costs[v] = replace(costs[v], stash_private_bytes=private, stash_tensors=())
    for kind, expected in (("MatMul", private // 2), ("Einsum", private)):
        operators = list(profile.graph.operators)
        operators[v] = replace(operators[v], type=kind)
        graph = replace(profile.graph, operators=tuple(operators))
        changed = replace(profile, graph=graph, operators=tuple(costs))
        (stage,) = one_stage(changed, zero(2, 0), ((0, 1),)).stages
        local = local_stage(changed, stage)
        assert local.profile.operators[local.graph_index.index(v)].stash_private_bytes == expected


def test_what_was_measured_takes_precedence():
    """Each kind by its own table; a reduce-scatter that was not measured is half an all-reduce."""
    kinds = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL
    bare = cluster([FAST] * 3, RATE, LATENCY)
    names, pair = tuple(device.name for device in bare.devices[:2]), (0, 1)
    topology = replace(
        bare,
        tables=tuple(
            CollectiveTable(names, 2, ((0, 1.0 + k), (1000, 2.0 + k)), kind)
            for k, kind in enumerate(kinds)
        ),
    )
    assert allreduce_s(topology, pair, 500) == 1.5
    assert allgather_s(topology, pair, 500) == 2.5
    assert alltoall_s(topology, pair, 500) == 3.5
    assert reducescatter_s(topology, pair, 500) == 0.75
    assert alltoall_s(topology, pair, 2000) == 5.0
    # The sum of a gradient of which each keeps half is a reduce-scatter.
    assert gradient_sum_s(topology, pair, 500, ((0,), (1,))) == 0.75
    # Other groups were not measured.
    for kind in CollectiveKind:
        assert collective_s(topology, (0, 2), kind, 500) == collective_s(bare, (0, 2), kind, 500)


def test_before_the_smallest_size_stand_the_latencies_of_a_ring():
    """n - 1 messages of an all-gather, twice as many of an all-reduce."""
    bare, everyone, times = cluster([FAST] * 3, RATE, LATENCY), (0, 1, 2), ((1000, 1.0),)
    names = tuple(device.name for device in bare.devices)
    tables = tuple(CollectiveTable(names, 3, times, kind) for kind in CollectiveKind)
    topology = replace(bare, tables=tables)
    assert allreduce_s(topology, everyone, 0) == pytest.approx(4 * LATENCY)
    for time_s in (allgather_s, reducescatter_s, alltoall_s):
        assert time_s(topology, everyone, 0) == pytest.approx(2 * LATENCY)


def test_an_all_to_all_takes_the_slowest_pair():
    links = [(0, 1, 1e9), (0, 2, 1e9), (1, 2, 1e6)]
    topology = cluster([FAST] * 3, 1.0, 0.0, links=links)
    assert alltoall_s(topology, (0, 1, 2), 3_000_000) == pytest.approx(2 * 1_000_000 / 1e6)
    assert alltoall_s(topology, (1,), 3_000_000) == 0.0


def test_a_step_is_as_slow_as_on_the_slowest_line_of_its_axis():
    topology = cluster([FAST] * 4, 1e6, 0.0, links=[(0, 1, 1e9), (2, 3, 1e8)])
    assert lines((0, 1, 2, 3), (2, 2), 1) == ((0, 1), (2, 3))
    steps = conversion((100,), 1.0, (2, 2), ("R", "S0"), ("R", "R"))
    assert conversion_s(topology, (0, 1, 2, 3), (2, 2), steps) == pytest.approx(50 / 1e8)
    # With the devices laid out in another way, the same lines run over the host's links.
    assert conversion_s(topology, (0, 2, 3, 1), (2, 2), steps) == pytest.approx(50 / 1e6)


# ------------------------------------------------------------------------------ times


@pytest.mark.parametrize("size", [2, 4])
def test_megatrons_mlp_by_hand(size):
    """4 s each of two products, cut; 2 s of gelu, cut; 0.5 s of a scale that all do. An all-reduce
    of y forward, and one of the gradient of s backward.
    """
    given_problem = problem(4)
    strategy = one_stage(mlp(), megatron(size), [range(size)], 2)
    evaluation = evaluate(given_problem, strategy)
    reduced_s = 2 * ring_s(OF_Y, size)
    stage = evaluation.stages[0]
    assert stage.forward_s == pytest.approx(0.5 + 10.0 / size + reduced_s)
    assert stage.backward_s == pytest.approx(1.0 + 20.0 / size + reduced_s)
    step_s = 4 * (4 * WIDTH + (WEIGHTS - 4 * WIDTH) / size) / 1e9
    assert stage.tail_s == pytest.approx(step_s)
    simulated = iterate(given_problem, strategy, evaluation).iteration_s
    assert simulated == pytest.approx(2 * (stage.forward_s + stage.backward_s) + step_s)


def test_recomputation_repeats_the_collectives_of_the_forward():
    strategy = one_stage(mlp(), megatron(2), [[0, 1]], 2)
    plain = evaluate(problem(2), strategy).stages[0]
    again = evaluate(problem(2), with_stage(strategy, recompute=True)).stages[0]
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s)


def test_contention_slows_collectives_as_it_slows_computation():
    """By the rule of cores and where it was measured, a factor of 2 doubles the whole pass, and
    what is left of a backward is a part of it.
    """
    strategy = one_stage(mlp(), megatron(4), [range(4)], 2)
    measured = replace(mlp(), contention=Contention(2, {4: 2.0}), device_type=FAST.name)
    passes_s = []
    for profile, cores in ((mlp(), None), (mlp(), 2), (measured, 2)):
        topology = cluster([FAST] * 4, 1e3, LATENCY, cores=cores)
        given_problem = replace(problem(4), profile=profile, topology=topology)
        (stage,) = evaluate(given_problem, strategy).stages
        passes_s.append(np.array([stage.forward_s, stage.backward_s]))
    alone_s, by_cores_s, measured_s = passes_s
    assert alone_s[0] > 1.1 * (0.5 + 1.0 + 0.5 + 1.0)
    assert by_cores_s == pytest.approx(2 * alone_s)
    assert measured_s == pytest.approx(2 * alone_s)


def test_what_is_left_of_a_backward_is_that_of_the_devices_own_replica():
    # The links between devices 2 and 3 are slow, so that their collectives take longer.
    topology = cluster([FAST] * 4, RATE, LATENCY, links=[(0, 1, 100 * RATE)])
    given_problem = replace(problem(4), topology=topology)
    strategy = one_stage(mlp(), megatron(2), [(0, 1), (2, 3)], 2)
    with mock.patch("planner.artefacts.strategy.FIRST_BUCKET_BYTES", 1.0):
        costs = evaluate(given_problem, strategy).costs
    fast_s, slow_s = (
        max(left_s for (_, d), left_s in costs.backward_left_s.items() if d == device)
        for device in (0, 2)
    )
    assert fast_s < slow_s < costs.backward_s[0, 2]


def test_a_part_is_no_faster_than_the_fastest_operator():
    profile = mlp(forward_s=(0.5, 4.0, 0.6, 4.0))
    stage = one_stage(profile, megatron(4), [range(4)], 2).stages[0]
    compute_s = stage_pass(problem(4, profile), stage, 0).compute_s[0]
    assert compute_s.sum() == pytest.approx(0.5 + 1.0 + 0.5 + 1.0)


@pytest.mark.parametrize(
    ("fastest_s", "floor_s"),
    [
        (2e-6, 2e-6),
        (5e-6, 5e-6),
        (5e-4, 5e-6),  # of a model without small operators an empty kernel is the floor
    ],
)
@pytest.mark.parametrize("source", [Source.ANALYTIC, Source.INTERPOLATED, Source.RESCALED])
def test_parts_of_computed_times_follow_the_roofline_and_are_launched_each(
    fastest_s, floor_s, source
):
    # By the roofline all is bound by FLOPs, so that shares are exact.
    profile = mlp(forward_s=(fastest_s, 4e-3, 2e-3, 4e-3))
    profile = replace(profile, source=source, engine=ROOFLINE)
    stage = one_stage(profile, megatron(4), [range(4)], 2).stages[0]
    topology = cluster([unit_type()] * 4)
    forward_s, _ = stage_pass(problem_of(profile, topology), stage, 0).compute_s
    parts_s = [floor_s + (whole_s - floor_s) / 4 for whole_s in (4e-3, 2e-3, 4e-3)]
    assert forward_s.sum() == pytest.approx(fastest_s + sum(parts_s))


def test_a_host_starts_a_part_in_the_time_of_the_whole():
    profile = mlp(forward_s=(0.5, 4.0, 0.6, 4.0))
    stage = one_stage(profile, megatron(4), [range(4)], 2).stages[0]

    def started_in(host_s):
        operators = tuple(replace(one, host_forward_s=host_s) for one in profile.operators)
        return stage_pass(problem(4, replace(profile, operators=operators)), stage, 0)

    free = started_in(0.0)
    assert free.forward_s >= 0.5 + 1.0 + 0.5 + 1.0
    assert started_in(0.2).forward_s == free.forward_s  # beside the parts
    slow = started_in(2.0)
    last_s = free.forward_s - max(free.times[0].end)  # what is sent behind all operators
    assert slow.forward_s == pytest.approx(4 * 2.0 + last_s)
    assert (slow.backward_s, slow.compute_s.tolist()) == (free.backward_s, free.compute_s.tolist())


def test_a_host_that_waits_for_kernels_takes_its_whole_time_beside_parts():
    profile = mlp(forward_s=(0.5, 4.0, 0.6, 4.0))
    operators = tuple(replace(one, host_forward_s=0.2) for one in profile.operators)
    stage = one_stage(profile, megatron(4), [range(4)], 2).stages[0]

    def forward(**how):
        return stage_pass(problem(4, replace(profile, operators=operators, **how)), stage, 0)

    free, awaited = forward(), forward(launch_blocking=True)
    assert awaited.forward_s == pytest.approx(free.forward_s + 4 * 0.2)
    assert awaited.compute_s.sum() == pytest.approx(free.compute_s.sum() + 4 * 0.2)
    whole = Stage.whole([one.name for one in operators], [0], 1, False)
    alone = stage_pass(problem(1, replace(profile, operators=operators, launch_blocking=True)),
                       whole, 0)  # fmt: skip
    assert alone.forward_s == pytest.approx(0.5 + 4.0 + 0.6 + 4.0 + 4 * 0.2)


def test_rules_of_summands_alone_do_all_the_work():
    assert work_share(rule_of(["P,R->P", "R,S1->S1"]), (2, 8)) == 1 / 8
    assert work_share(rule_of(["S0,R->P @rows"]), (4,)) == 1.0


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_megatrons_mlp_by_hand(size):
    given_problem = problem(4, optimizer=Optimizer.ADAM)
    strategy = one_stage(mlp(), megatron(size), [range(size)], 2)
    memory = evaluate(given_problem, strategy).memory[0]
    held = 4 * WIDTH + 2 * 4 * WIDTH * HIDDEN // size
    assert memory.parameter_bytes == memory.gradient_bytes == held
    assert memory.optimizer_bytes == 2 * held
    # x, s, a part of h and one of a, y, and what the loss keeps.
    assert memory.stash_bytes == 4 * OF_Y + 2 * OF_H // size


def test_a_local_slice_keeps_all_that_it_is_cut_from():
    # gelu stashes its part of h, a view of the whole; down stashes a, gathered.
    strategy = one_stage(mlp(), sharding((2,), {"gelu": ["S0->S0"]}), [[0, 1]], 2)
    assert evaluate(problem(2), strategy).memory[0].stash_bytes == 4 * OF_Y + 2 * OF_H
    # Parts of weights lie in these.
    whole = replace(megatron(2), parameters={})
    stash = [
        evaluate(problem(2), one_stage(mlp(), split, [[0, 1]], 2)).memory[0].stash_bytes
        for split in (whole, megatron(2))
    ]
    assert stash[0] == stash[1] == 4 * OF_Y + 2 * OF_H // 2


def test_memory_of_zero_by_hand():
    """Rajbhandari et al. 2020, figure 1: their 2 + 2 + 12 bytes are 4 + 4 + 8 in float32, with two
    moments of Adam.
    """
    given_problem = problem(2, optimizer=Optimizer.ADAM)
    parts, uses = {}, {}
    for stage in range(4):
        memory = evaluate(
            given_problem, one_stage(mlp(), zero(2, stage), [[0, 1]], 2)
        ).memory[0]  # fmt: skip
        parts[stage] = memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes
        uses[stage] = memory.stash_bytes, memory.buffer_bytes
    half = WEIGHTS // 2
    # Half the rows of x, s, h, a, y and of what the loss keeps. ZeRO-3 gathers weights again.
    of_rows = 4 * OF_Y // 2 + 2 * OF_H // 2
    # ZeRO-1 takes the most after its passes, while it scatters sums: gradients to send, gradients
    # that come, the sum of a half.
    scattering = 0, 2 * WEIGHTS + half
    assert uses == {0: (of_rows, 0), 1: scattering, 2: (of_rows, 0), 3: (of_rows, 0)}
    assert parts == {
        0: (WEIGHTS, WEIGHTS, 2 * WEIGHTS),
        1: (WEIGHTS, WEIGHTS + half, 2 * half),  # the sum of a part is not in the whole gradient
        2: (WEIGHTS, half, 2 * half),
        3: (half, half, 2 * half),
    }


def test_a_gathered_copy_is_there_only_while_a_pass_reads_it():
    stage = one_stage(mlp(), zero(2, 3), [[0, 1]], 2).stages[0]
    local = local_stage(mlp(), stage)
    assert [local.profile.graph.operators[i].name for i in local.regathered] == ["up", "down"]
    # The most is there when `down` has run: the gradient of its weight, that of the other device
    # and the sum of a half, and the gradient of a. What the loss has kept, as large as y, and a
    # itself are gone.
    weight = 4 * WIDTH * HIDDEN
    need = stage_memory(mlp(), stage)
    gone = OF_Y // 2 + OF_H // 2
    assert need.backward_workspace_bytes == weight + weight + weight // 2 + OF_H // 2 - gone


def test_times_of_zero_by_hand():
    """ZeRO-1 scatters sums, and gathers parameters after the step, each at once; ZeRO-2 scatters
    in every backward, ZeRO-3 gathers in every forward too, one parameter after the other, and again
    in the backward of those whose input has a gradient.
    """
    stages = [
        evaluate(problem(2), one_stage(mlp(), zero(2, stage), [[0, 1]], 2)).stages[0]
        for stage in range(4)
    ]
    weights = (4 * WIDTH, 4 * WIDTH * HIDDEN, 4 * WIDTH * HIDDEN)
    each_s = sum(ring_s(size, 2) for size in weights)
    step_s = 4 * WEIGHTS / 1e9
    assert [one.forward_s for one in stages] == pytest.approx([5.5, 5.5, 5.5, 5.5 + each_s])
    again_s = sum(ring_s(size, 2) for size in weights[1:])
    backward = [11.0, 11.0, 11.0 + each_s, 11.0 + each_s + again_s]
    assert [one.backward_s for one in stages] == pytest.approx(backward)
    once_s = ring_s(WEIGHTS, 2)
    tails = [2 * once_s + step_s, 2 * once_s + step_s / 2, once_s + step_s / 2, step_s / 2]
    assert [one.tail_s for one in stages] == pytest.approx(tails)


@given(st.sampled_from(["R", "S0", "S1"]), st.sampled_from(["R", "S0"]), st.booleans())
def test_a_mesh_of_one_device_is_an_unsplit_stage(up, gelu, recompute):
    split = sharding((1,), {"up": [f"{'S0' if up == 'S0' else 'R'},{'S1' if up == 'S1' else 'R'}"
                                   f"->{up}"], "gelu": [f"{gelu}->{gelu}"]})  # fmt: skip
    with_mesh = one_stage(mlp(), split, [[0], [1]], 2, recompute)
    without = with_stage(with_mesh, sharding=None)
    first, second = (evaluate(problem(2), one) for one in (with_mesh, without))
    assert first.stages == second.stages
    assert first.program.sums == second.program.sums
    assert first.program.code.kind.tolist() == second.program.code.kind.tolist()
    assert first.costs.step_s == second.costs.step_s
    one, other = first.memory[0], second.memory[0]
    assert one.parameter_bytes == other.parameter_bytes
    # A copy is a tensor of its own: never less than without a mesh.
    assert one.total_bytes >= other.total_bytes


# ------------------------------------------------------------------------------ sums


def test_sums_run_over_lines_and_replicas():
    mesh = sharding(
        (2, 2),
        {"scale": ["S0,R->S0", "R,R->R"], "up": ["S0,R->S0", "R,S1->S1"],
         "gelu": ["S0->S0", "S1->S1"], "down": ["S0,R->S0", "S1,S0->P"]},
        parameters={"w1": ("R", "S1"), "w2": ("R", "S0")},
        inputs={"x": ("S0", "R")}, outputs={"y": ("S0", "R")},
    )  # fmt: skip
    strategy = one_stage(mlp(), mesh, [[0, 1, 2, 3], [4, 5, 6, 7]], 2)
    sums = {
        (one.devices, one.parameters, one.bytes) for one in gradient_sums(strategy, mlp().graph)
    }
    local = 4 * WIDTH + 2 * 4 * WIDTH * HIDDEN // 2
    assert sums == {
        ((0, 2, 4, 6), ("w2", "w1", "w0"), local), ((1, 3, 5, 7), ("w2", "w1", "w0"), local)
    }  # fmt: skip
    assert iterate(problem(8), strategy, evaluate(problem(8), strategy)).iteration_s > 0


# ------------------------------------------------------------------------------ boundaries

ENDS = [
    (None, [[0]], None, [[1]]),
    (sharding((2,), {"scale": ["S0,R->S0"], "up": ["S0,R->S0"]}, inputs={"x": ("S0",)},
              outputs={"h": ("S0",)}), [[0, 1]], None, [[2], [3]]),
    (sharding((2,), {"up": ["R,S1->S1"]}, parameters={"w1": ("S1",)}, outputs={"h": ("S1",)}),
     [[0, 1]],
     sharding((2,), {"gelu": ["S0->S0"], "down": ["S0,R->S0"]}, inputs={"h": ("S0",)},
              outputs={"y": ("S0",)}), [[2, 3]]),
    (sharding((2,), {"up": ["R,S1->S1"]}, parameters={"w1": ("S1",)}, outputs={"h": ("S1",)}),
     [[0, 1], [2, 3]],
     sharding((4,), {"gelu": ["S1->S1"], "down": ["S1,S0->P"]}, parameters={"w2": ("S0",)},
              inputs={"h": ("S1",)}), [[4, 5, 6, 7]]),
]  # fmt: skip


@pytest.mark.parametrize(("first", "here", "second", "there"), ENDS)
def test_boxes_between_stages(first, here, second, there):
    """Every device of the second stage receives its part of h once per microbatch; every one of the
    first receives its part of the gradient.
    """
    strategy = two_stages(mlp(), 2, (first, here), (second, there))
    assert violations(strategy, mlp().graph, 8) == ()
    evaluation = evaluate(problem(8), strategy)
    received = dict.fromkeys([d for stage in strategy.stages for d in stage.devices], 0)
    for device, actions in evaluation.program.lists.items():
        for one in actions:
            if isinstance(one, Receive):
                box = one.box or ((0, ROWS), (0, HIDDEN))
                received[device] += prod(stop - start for start, stop in box)
    for s, kind in ((0, "outputs"), (1, "inputs")):
        stage = strategy.stages[s]
        split = stage.sharding
        shape = (ROWS, HIDDEN)
        if split is not None:
            spec = getattr(split, kind).get("h", ("R",) * len(split.mesh))
            shape = local_shape(shape, spec, split.mesh)
        for group in stage.groups:
            for device in group:
                assert received[device] == prod(shape) * 2 / len(stage.groups)
    sends = [a for some in evaluation.program.lists.values() for a in some if isinstance(a, Send)]
    assert iterate(problem(8), strategy, evaluation).iteration_s > 0
    assert len(sends) == sum(
        isinstance(a, Receive) for some in evaluation.program.lists.values() for a in some
    )


def test_a_tensor_without_elements_crosses_stages_in_no_time():
    profile = mlp(shape=(ROWS, WIDTH, 0))
    strategy = two_stages(profile, 2, *zip(*[iter(ENDS[2])] * 2, strict=True))
    first, _ = evaluate(problem(4, profile), strategy).stages
    assert (first.send_s, first.return_s) == pytest.approx((LATENCY, LATENCY))


def test_the_closed_form_counts_the_busiest_device():
    """Columns of h become rows: each of two devices sends two quarters."""
    strategy = two_stages(mlp(), 2, *zip(*[iter(ENDS[2])] * 2, strict=True))
    stages = evaluate(problem(4), strategy).stages
    assert stages[0].send_s == pytest.approx(LATENCY + OF_H / 2 / RATE)
    assert stages[0].return_s == pytest.approx(LATENCY + OF_H / 2 / RATE)


def test_a_split_stage_shares_no_device():
    strategy = two_stages(mlp(), 2, (megatron(2), [[0, 1]]), (None, [[1]]))
    wrong = violations(strategy, mlp().graph, 4)
    assert any("device 1 runs a replica of stage 0 and another one" in line for line in wrong)


def test_the_local_graph_has_local_shapes():
    local = local_stage(mlp(), one_stage(mlp(), megatron(4), [range(4)]).stages[0])
    shapes = {one.name: one.shape for one in local.profile.graph.tensors}
    assert shapes["h"] == shapes["a"] == (ROWS, HIDDEN // 4)
    assert shapes["y"] == (ROWS, WIDTH)
    parameters = {one.name: one.shape for one in local.profile.graph.parameters}
    assert parameters == {"w0": (WIDTH,), "w1": (WIDTH, 16), "w2": (16, WIDTH)}
    need = stage_memory(mlp(), one_stage(mlp(), megatron(4), [range(4)]).stages[0])
    assert need.static.trainable == need.static.gradient == need.static.state


@pytest.mark.parametrize("split", [None, megatron(2), zero(2, 1), zero(2, 2), zero(2, 3)])
def test_parameters_that_are_not_trained_have_no_gradient_and_no_state(split):
    trained = mlp()
    parameters = tuple(replace(one, trainable=False) for one in trained.graph.parameters)
    frozen = replace(trained, graph=replace(trained.graph, parameters=parameters))
    group = range(2 if split else 1)
    with_gradients, without = (
        stage_memory(one, one_stage(one, split, [group]).stages[0]).static
        for one in (trained, frozen)
    )
    held = with_gradients.trainable  # without a second copy of a part that is stepped
    assert without == StaticBytes(held, 0, 0, 0, scatter=0, gather=0)
    assert with_gradients.gradient > 0 and with_gradients.state > 0


def test_a_lookup_moves_what_it_makes_and_not_its_table():
    """The weight is whole on each of two devices; half of the rows are made there."""
    some = mlp()
    for moved, due in ((100, 50), (10**6, 10**6 * (OF_Y + 4 * WIDTH) / (2 * OF_Y + 4 * WIDTH))):
        first = replace(some.operators[0], bytes_moved=moved)
        profile = replace(some, operators=(first, *some.operators[1:]))
        split = sharding((2,), {"scale": ["S0,R->S0"]})
        local = local_stage(profile, one_stage(profile, split, [(0, 1)]).stages[0])
        (own,) = (one for one in local.profile.operators if one.name == "scale")
        assert own.bytes_moved == round(due)


def test_a_copy_for_an_operator_without_a_backward_has_no_gradient():
    def copied(profile):
        split = sharding((2,), {"scale": ["S0,R->S0"]})
        local = local_stage(profile, one_stage(profile, split, [(0, 1)]).stages[0])
        (made,) = (one for one in local.profile.graph.tensors if one.name.startswith("s as"))
        return made.gradient

    some = mlp()
    tensors = (replace(t, gradient=t.gradient and t.name != "h") for t in some.graph.tensors)
    assert copied(some)
    assert not copied(replace(some, graph=replace(some.graph, tensors=tuple(tensors))))


def cast_mlp():
    """The MLP under autocast: products make bfloat16, and keep copies of what they read."""
    profile = mlp()
    short = ("h", "a", "y")
    tensors = tuple(
        replace(one, dtype="bfloat16") if one.name in short else one
        for one in profile.graph.tensors
    )
    copies = {"up": (ROWS * WIDTH + WIDTH * HIDDEN) * 2, "down": HIDDEN * WIDTH * 2}
    operators = tuple(
        replace(one, stash_tensors={"up": (), "gelu": ("h",)}.get(one.name, one.stash_tensors),
                stash_private_bytes=copies.get(one.name, 0) + 64 * (one.name == "gelu"))
        for one in profile.operators
    )  # fmt: skip
    return replace(profile, graph=replace(profile.graph, tensors=tensors), operators=operators)


def kept_of(split, name):
    """Private bytes of an operator on each device, and the tensors that it stashes."""
    local = local_stage(cast_mlp(), one_stage(cast_mlp(), split, ((0, 1),)).stages[0])
    (cost,) = [one for one in local.profile.operators if one.name == name]
    return cost.stash_private_bytes, cost.stash_tensors


def test_copies_under_autocast_are_as_large_as_what_is_read():
    """Columns: the input is whole on both devices, the weight is halved. What is no copy follows
    the outputs.
    """
    assert kept_of(megatron(2), "up") == ((ROWS * WIDTH + WIDTH * HIDDEN // 2) * 2, ())
    assert kept_of(megatron(2), "down")[0] == HIDDEN // 2 * WIDTH * 2
    assert kept_of(megatron(2), "gelu") == (32, ("h",))


def test_zero_keeps_whole_weights_as_copies_unless_it_gathers_them_again():
    """Samples are halved, weights are cast, and nothing longer is kept; in the backward of ZeRO-3
    the gathered weight is there with its copy.
    """
    of_input = ROWS // 2 * WIDTH * 2
    assert kept_of(zero(2, 1), "up") == (of_input + WIDTH * HIDDEN * 2, ())
    assert kept_of(zero(2, 3), "up") == (of_input, ())
    local = local_stage(cast_mlp(), one_stage(cast_mlp(), zero(2, 3), ((0, 1),)).stages[0])
    (cost,) = [one for one in local.profile.operators if one.name == "up"]
    assert cost.workspace_bytes == WIDTH * HIDDEN * (2 + 1)


def cast_once_mlp():
    """The same, as profiles are now: copies of weights are not in what products keep."""
    profile = cast_mlp()
    kept = {"up": ROWS * WIDTH * 2, "down": 0}
    operators = tuple(
        replace(one, stash_private_bytes=kept.get(one.name, one.stash_private_bytes))
        for one in profile.operators
    )
    return replace(profile, operators=operators, dtype="bfloat16", casts_once=True)


def test_a_part_of_the_samples_takes_what_as_many_samples_take():
    """Of eight samples of Llama's a device has one. The kernels that cast whole gradients are as
    long as for one sample, and so are sums of those that lie whole.
    """
    (single,) = read_any_profiles(shipped("profiles") / "llama7b-a100.json")
    eight = interpolated([single], 8)
    topology = cluster([shipped_device_type("A100-SXM4-80GB")] * 8, 1e11, 1e-6)
    v = next(i for i, one in enumerate(single.graph.operators) if one.type == "MatMul")
    operator, cost = single.graph.operators[v], single.operators[v]
    cut = {operator.inputs[0]: ("S0",)}
    for home, held in (("R", 1.0), ("S0", 1 / 8)):
        split = sharding(
            (8,), {operator.name: ["S0,R->S0"]}, inputs=cut, outputs={operator.outputs[0]: ("S0",)},
            parameters={operator.parameters[0]: (home,)},
        )  # fmt: skip
        stage = Stage((operator.name,), (tuple(range(8)),), 1, False, split)
        one = stage_pass(problem_of(eight, topology, 1), stage, 0)
        (row,) = np.flatnonzero(one.operators >= 0)
        saved_s = (1 - held) * cost.sums_s
        assert one.compute_s[1, row] == pytest.approx(cost.backward_s - saved_s, rel=0.01)
        assert saved_s == 0 or saved_s > 0.1 * cost.backward_s


def test_one_copy_of_a_weight_stays_on_a_device_that_has_it_as_it_is_read():
    """Columns: halves of both weights, whatever is in flight."""
    profile = cast_once_mlp()
    names = tuple(one.name for one in profile.graph.operators)
    whole = Stage.whole(names, (0,), 1, False)
    halves, rows = (
        one_stage(profile, split, ((0, 1),)).stages[0] for split in (megatron(2), zero(2, 1))
    )
    both = WIDTH * HIDDEN * 2
    assert kept_casts(whole, profile) == {"w1": both, "w2": both}
    assert kept_casts(halves, profile) == {"w1": both // 2, "w2": both // 2}
    assert kept_casts(rows, profile) == {"w1": both, "w2": both}
    (up,) = (one for one in local_stage(profile, halves).profile.operators if one.name == "up")
    assert up.stash_private_bytes == ROWS * WIDTH * 2


def test_gathered_weights_are_converted_in_each_pass():
    """ZeRO-3 keeps nothing of them, and each device reads 4 and writes 2 bytes of each number of
    its half, forward and backward.
    """
    profile = cast_once_mlp()
    stage = one_stage(profile, zero(2, 3), ((0, 1),)).stages[0]
    assert kept_casts(stage, profile) == {}
    local = local_stage(profile, stage)
    found = {
        one.name: (both, cost.stash_private_bytes)
        for one, both, cost in zip(
            local.profile.graph.operators, local.cast_bytes, local.profile.operators, strict=True
        )
    }
    moved = WIDTH * HIDDEN // 2 * 6
    assert found["up"] == ((moved, moved), ROWS // 2 * WIDTH * 2)
    assert found["down"] == ((moved, moved), 0)


def test_searches_count_the_copies_of_weights():
    profile = cast_once_mlp()
    whole = Stage.whole(tuple(one.name for one in profile.graph.operators), (0,), 1, False)
    static = stage_memory(profile, whole).static
    given = problem(1, profile)
    sets = sets_of(given, coarsen(profile.graph, [1.0] * 4, None), cautious=False)
    assert sets.parameter_size.sum() == static.parameter
    assert (sets.parameter_size * sets.parameter_trained).sum() == static.trainable
    placed = placement_problem_of(given)
    assert placed.parameter_bytes.sum() == static.parameter
    assert placed.trainable_bytes.sum() == static.trainable
