"""Planners that split operators: Megatron-LM's and ZeRO's plans of small models."""

import math
from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from onnx import TensorProto

from planner.api.topologies import type_of
from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import LossChoice, tensors_by_name
from planner.artefacts.options import Optimizer, Recompute
from planner.artefacts.problem import Problem, Status
from planner.artefacts.profile import SplitRule
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.artefacts.topology import take
from planner.artefacts.weight_gradients import without_parameter_work
from planner.clusters.yaml.read import find_topology, read_topology
from planner.costs.evaluate import closed_form_s, evaluate
from planner.costs.local_stage import local_stage
from planner.costs.stage_memory import memory_of
from planner.costs.stage_pass import stage_pass
from planner.costs.transfers import allreduce_s, conversion_s
from planner.model.load import load
from planner.planning.portfolio import compare
from planner.reports.plans import parameter_table, stage_table
from planner.resharding import reshardings
from planner.simulator.collectives import collectives as collectives_of
from planner.simulator.events import run
from planner.simulator.timeline import timeline_of
from planner.simulator.traces.write import chrome_trace
from planner.solvers.registry import SOLVERS, portfolio
from planner.solvers.sharded import best as sharded_best
from planner.solvers.sharded import megatron
from planner.solvers.sharded.best import OTHERS, UNSURE, LayoutSearch
from planner.solvers.sharded.complete import may_leave, shardings
from planner.solvers.sharded.layout import host_by_host
from planner.solvers.sharded.options import Megatron, Zero
from planner.solvers.sharded.promise import Promise, promises
from planner.solvers.sharded.rules import rules_of
from planner.support.errors import OptionError
from tests.costs.test_split_bounds import with_rules
from tests.support.builders import asked, islands
from tests.support.split import MEGATRON, mlp
from tests.support.split_models import BATCH, WIDTH, WORDS, Net, cnn, gpt
from tests.support.split_profiles import FAST, problem, profiled


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    """A block of GPT with queries, keys and values apart."""
    return profiled(load(gpt(tmp_path_factory.mktemp("gpt") / "gpt.onnx", tied=False)))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Convolutions, a pool, and a product."""
    return profiled(load(cnn(tmp_path_factory.mktemp("cnn") / "cnn.onnx")))


PLAIN = Megatron(tensor_degree=2, sequence_parallel=False)


def only_stage(strategy):
    (stage,) = strategy.stages
    return stage


def lines_of(stage):
    """The lines of its rules, by operator."""
    return {name: list(rule.lines) for name, rule in stage.sharding.rules.items()}


def collectives(strategy, graph):
    """How often each collective runs in a forward, and in a backward: for the block alone, and not
    for the head behind it.
    """
    head = {graph.operators[-1].name}
    forward, backward = Counter(), Counter()
    for copy in reshardings(only_stage(strategy), graph):
        if not copy.leaves and set(copy.readers) != head and copy.tensor != "gather0":
            forward.update(step.kind.value for step in copy.forward)
            backward.update(step.kind.value for step in copy.backward)
    local = ("slice", "first", "scatter")
    return tuple({k: n for k, n in both.items() if k not in local} for both in (forward, backward))


def test_megatron_finds_the_columns_and_rows_of_an_mlp():
    given = problem(with_rules(mlp()), switches=(Megatron(tensor_degree=2),))
    strategy = SOLVERS["megatron"](given, 1.0).strategy
    stage = only_stage(strategy)
    assert lines_of(stage) == MEGATRON
    assert stage.sharding.parameters == {"w1": ("S1",), "w2": ("S0",)}
    assert stage.groups == ((0, 1),)


def test_megatron_has_a_plan_without_work_and_the_best_with_enough(block, monkeypatch):
    """In whichever order the points of its grid are tried."""
    given = problem(block, 4)
    first, best = SOLVERS["megatron"](given, 0.0), SOLVERS["megatron"](given, math.inf)
    assert first.strategy is not None
    assert first.work_s < best.work_s
    assert "as far as the time limit has work for it" in first.space
    assert "time limit" not in best.space
    assert closed_form_s(given, best.strategy) <= closed_form_s(given, first.strategy)
    monkeypatch.setattr(
        megatron,
        "promises",
        lambda *given: [Promise(False, -one.iteration_s) for one in promises(*given)],
    )
    assert SOLVERS["megatron"](given, math.inf).strategy == best.strategy


def test_megatron_has_a_plan_however_much_work_prices_take(block, monkeypatch):
    monkeypatch.setattr(sharded_best, "estimate_work_s", lambda strategy: 1e6)
    assert SOLVERS["megatron"](problem(block, 4), 0.0).strategy is not None


def test_points_without_room_promise_recomputation_or_come_last(block):
    """Two stages keep two microbatches on the first device, each half of what a forward leaves."""
    trained = sum(one.bytes for one in block.graph.parameters if one.trainable)
    kept = memory_of(block, range(len(block.operators))).kept_bytes
    stages = (1, 1, 2)

    def promised(memory, **options):
        given = problem(block, 2, 4, device_memory=memory, reserve=0, **options)
        return promises(given, (0, 1), [stages])[0]

    roomy = promised(2 * trained + kept)  # of Adam's weights, gradients and moments half each
    tight, little = 2 * trained + kept * 3 // 4, 2 * trained + kept // 4
    recomputed = promised(tight)
    assert [roomy.too_large, recomputed.too_large] == [False, False]
    assert roomy.iteration_s < recomputed.iteration_s
    assert recomputed == promised(2 * trained + kept, recompute=Recompute.FULL)
    assert promised(tight, recompute=Recompute.NONE).too_large
    # Of layers that are run again hardly anything is kept.
    assert not promised(little).too_large
    assert promised(2 * trained - 1).too_large
    assert roomy < recomputed < promised(2 * trained - 1)


def test_a_block_has_two_all_reduces_each_way(block):
    """Shoeybi et al. 2019, figure 4."""
    given = problem(block, switches=(PLAIN,))
    strategy = SOLVERS["megatron"](given, 1.0).strategy
    weights = only_stage(strategy).sharding.parameters
    assert {name: weights[name] for name in ("0q", "0k", "0v", "0o", "0u", "0d")} == {
        "0q": ("S1",), "0k": ("S1",), "0v": ("S1",), "0o": ("S0",), "0u": ("S1",), "0d": ("S0",)
    }  # fmt: skip
    assert collectives(strategy, block.graph) == ({"all-reduce": 2}, {"all-reduce": 2})


def test_sequence_parallelism_is_tried_where_nothing_is_said(block):
    """It moves as many bytes, and norms take half the time: the closed form is smaller."""
    found = {}
    for sequence in (None, False, True):
        degrees = Megatron(tensor_degree=2, sequence_parallel=sequence)
        given = problem(block, switches=(degrees,))
        result = SOLVERS["megatron"](given, 1.0)
        found[sequence] = closed_form_s(given, result.strategy), {result.strategy, *result.others}
    assert found[True][0] < found[False][0]
    assert found[None][0] == found[True][0]
    assert found[None][1] == found[True][1] | found[False][1]


def test_the_head_is_cut_by_columns_and_its_logits_are_not_gathered(block):
    """Megatron-LM's cross-entropy over a cut vocabulary (Shoeybi et al. 2019, section 3)."""
    given = problem(block, switches=(Megatron(tensor_degree=2),))
    stage = only_stage(SOLVERS["megatron"](given, 1.0).strategy)
    head, logits = block.graph.operators[-1], block.graph.outputs[0]
    assert lines_of(stage)[head.name] == ["R,S1->S2"]
    assert stage.sharding.parameters["head"] == ("S1",)
    assert stage.sharding.outputs == {logits: ("S2",)}
    assert not [one for one in reshardings(stage, block.graph) if one.tensor == logits]
    rows = prod(tensors_by_name(block.graph)[logits].shape) // WORDS
    # Of float64: the largest score of each row, and then two sums.
    agreed_s = sum(allreduce_s(given.topology, (0, 1), 8 * rows * n) for n in (1, 2))
    whole = replace(stage, sharding=replace(stage.sharding, outputs={}))
    gathered = [one for one in reshardings(whole, block.graph) if one.tensor == logits]
    cut_s, whole_s = (stage_pass(given, one, 0).collective_s[0].sum() for one in (stage, whole))
    gathered_s = conversion_s(given.topology, (0, 1), (2,), gathered[0].forward)
    assert whole_s - cut_s == pytest.approx(gathered_s - agreed_s)


def test_a_large_language_model_has_its_vocabulary_cut():
    """The embedding by rows, the head by columns, as Megatron-LM has it."""
    (profile,) = read_any_profiles(shipped("profiles") / "llama7b-a100.json")
    topology = take(read_topology(find_topology("p4d")), 4)
    degrees = Megatron(tensor_degree=2, data_degree=1, pipeline_degree=2)
    switches = {"optimizer": Optimizer.SGD, "switches": (degrees,)}
    measured_on = type_of(profile, topology)
    given = Problem(
        profile, topology, **asked(num_microbatches=2, **switches), measured_on=measured_on
    )
    first, last = SOLVERS["megatron"](given, 1.0).strategy.stages
    assert first.sharding.parameters["embedding"] == ("S0",)
    assert last.sharding.parameters["head"] == ("S1",)
    (logits,) = profile.graph.outputs
    assert last.sharding.outputs == {logits: ("S2",)}
    assert logits not in {one.tensor for one in reshardings(last, profile.graph)}


def test_a_table_is_cut_and_left_whole_where_that_takes_as_long():
    """With many microbatches a step weighs little, and no sums of gradients count here. A plan that
    fits may be the one with less memory, so that both are asked.
    """
    (profile,) = read_any_profiles(shipped("profiles") / "llama7b-a100.json")
    profile = without_parameter_work(profile)
    topology = take(read_topology(find_topology("p4d")), 2)
    degrees = Megatron(tensor_degree=2, data_degree=1, pipeline_degree=1, sequence_parallel=True)
    options = asked(64, optimizer=Optimizer.ADAM, switches=(degrees,), device_memory=10**12)
    given = Problem(profile, topology, **options, measured_on=type_of(profile, topology))
    result = SOLVERS["megatron"](given, 1.0)
    found = {}
    for one in (result.strategy, *result.others):
        table = only_stage(one).sharding.parameters.get("embedding")
        used = max(device.total_bytes for device in evaluate(given, one).memory.values())
        found[table] = closed_form_s(given, one), used
    assert set(found) == {None, ("S0",)}
    assert found["S0",][0] == pytest.approx(found[None][0], rel=1e-3)
    assert found["S0",][1] < found[None][1] - 10**9


@pytest.mark.parametrize(
    ("choice", "cut"),
    [("auto", True), ("cross-entropy", True), ("nll", False), ("mse", True), ("a:loss", False)],
)
def test_classes_are_cut_only_where_the_loss_can_be_computed_from_parts(block, choice, cut):
    (logits,) = block.graph.outputs
    graph = replace(block.graph, losses=(LossChoice(logits, choice),))
    assert may_leave(graph, logits, "S2") is cut
    assert may_leave(graph, logits, "S0") is (choice != "a:loss")
    assert not may_leave(graph, logits, "P")
    assert may_leave(graph, logits, "R")


def test_classes_behind_a_softmax_or_in_blocks_stay_whole(block):
    (logits,) = block.graph.outputs
    assert not may_leave(block.graph, logits, "S2/3")
    last = replace(block.graph.operators[-1], type="Softmax")
    graph = replace(block.graph, operators=(*block.graph.operators[:-1], last))
    assert not may_leave(graph, logits, "S2")


def test_two_axes_do_not_both_cut_the_classes(block):
    size = len(block.graph.operators)
    columns = SplitRule("R,S1->S2")
    whole = [one[0] for one in rules_of(block)]
    (made,) = shardings(block.graph, [range(size)], (2, 2), [[*whole[:-1], columns]] * 2)
    assert made.outputs == {block.graph.outputs[0]: ("S2", "R")}


def test_a_tensor_in_blocks_crosses_stages_whole(tmp_path):
    """A fused product whose stage ends before the Split of its result."""
    net = Net()
    fused = net.add("MatMul", "x", net.weight("w", WIDTH, 3 * WIDTH))
    given = [net.constant("sizes", np.array([WIDTH] * 3))]
    q, k, v = net.add("Split", fused, *given, outputs=3, axis=1)
    made = net.add("Mul", net.add("Add", q, k), v)
    shape = (BATCH, WIDTH)
    graph = load(net.save(tmp_path / "net.onnx", (shape, TensorProto.DOUBLE), (made, shape))).graph
    texts = ("R,S1/3->S1/3", "S1/3->S1,S1,S1 split", "S1,S1->S1", "S1,S1->S1")
    lines = list(map(SplitRule, texts))
    stages = [(0,), (1, 2, 3)]
    first, last = shardings(graph, stages, (2,), [lines])
    assert (first.outputs, last.inputs) == ({}, {})
    names = [tuple(graph.operators[v].name for v in inside) for inside in stages]
    cut = tuple(
        Stage(own, ((2 * s, 2 * s + 1),), 1, False, lies)
        for s, (own, lies) in enumerate(zip(names, (first, last), strict=True))
    )
    strategy = Strategy(cut, ScheduleName.GPIPE, 1)
    assert violations(strategy, graph, 4) == ()


def test_with_sequence_parallelism_sums_are_scattered(block):
    """Korthikanti et al. 2022, figure 5: two of each way, and norms on parts of the sequence."""
    given = problem(block, switches=(Megatron(tensor_degree=2, sequence_parallel=True),))
    strategy = SOLVERS["megatron"](given, 1.0).strategy
    norms = [o.name for o in block.graph.operators if o.type == "LayerNormalization"]
    found = lines_of(only_stage(strategy))
    assert [found.get(name) for name in norms] == [["S1,R,R->S1"]] * 2
    both = {"all-gather": 2, "reduce-scatter": 2}
    assert collectives(strategy, block.graph) == (both, both)


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({"tensor_degree": 2, "data_degree": 2, "pipeline_degree": 1}, [((2,), 2)]),
        ({"tensor_degree": 2, "data_degree": 1, "pipeline_degree": 2}, [((2,), 1)] * 2),
        ({"tensor_degree": 1, "data_degree": 2, "pipeline_degree": 2}, [(None, 2)] * 2),
    ],
)
def test_degrees_that_are_given(block, degrees, shape):
    given = problem(block, 4, switches=(Megatron(**degrees),))
    strategy = SOLVERS["megatron"](given, 1.0).strategy
    assert [
        (stage.sharding and stage.sharding.mesh, stage.num_replicas) for stage in strategy.stages
    ] == shape
    assert violations(strategy, block.graph, 4) == ()


def test_a_tensor_degree_cuts_weights_though_links_are_slow(block):
    """Where other degrees are left, none is chosen by which nothing would be cut."""

    def stages(switches, **slow):
        one = replace(switches, sequence_parallel=False)
        return SOLVERS["megatron"](problem(block, switches=(one,), **slow), 1.0).strategy.stages

    slow = {"bandwidth": 1e3}
    (fast,) = stages(Megatron(tensor_degree=2))
    for switches in (Megatron(tensor_degree=2), Megatron(data_degree=1, pipeline_degree=1)):
        (stage,) = stages(switches, **slow)
        assert stage.sharding.parameters == fast.sharding.parameters != {}
    assert all(stage.sharding is None for stage in stages(Megatron(), **slow))


def test_with_one_microbatch_samples_are_split_along_an_axis(block):
    degrees = Megatron(tensor_degree=2, data_degree=2, pipeline_degree=1)
    given = problem(block, 4, num_microbatches=1, switches=(degrees,))
    stage = only_stage(SOLVERS["megatron"](given, 1.0).strategy)
    assert stage.sharding.mesh == (2, 2) and stage.num_replicas == 1
    assert stage.sharding.inputs == {"x": ("S0", "R")}
    assert stage.sharding.parameters["0u"] == ("R", "S1")


def test_with_fewer_microbatches_than_copies_some_copies_are_replicas(block):
    """As many as have a microbatch; the rest of the degree splits samples."""
    degrees = Megatron(tensor_degree=2, data_degree=4, pipeline_degree=1)
    for num_microbatches, shape in ((4, ((2,), 4)), (3, ((2, 2), 2)), (2, ((2, 2), 2))):
        given = problem(block, 8, num_microbatches, switches=(degrees,))
        stage = only_stage(SOLVERS["megatron"](given, 1.0).strategy)
        assert (stage.sharding.mesh, stage.num_replicas) == shape


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor_degree": 3},
         "--tensor-degree 3: expected a divisor of the 4 devices of a host, 1, 2 or 4"),
        ({"pipeline_degree": 99}, "--pipeline-degree 99: expected at most"),
        ({"data_degree": 3},
         "--data-degree 3: expected degrees that make up the 4 devices, with a tensor degree that"
         " divides the 4 devices of a host and at most"),
        ({"tensor_degree": 4, "data_degree": 2, "pipeline_degree": 1},
         "--tensor-degree 4 --data-degree 2 --pipeline-degree 1: expected degrees that make up"),
    ],
)  # fmt: skip
def test_degrees_that_make_up_no_cluster(block, degrees, message):
    given = problem(block, 4, switches=(Megatron(**degrees),))
    with pytest.raises(OptionError) as error:
        SOLVERS["megatron"](given, 1.0)
    assert str(error.value).startswith(message)


def test_a_tensor_degree_may_be_of_whole_hosts(block):
    given = problem(block, 4, switches=(Megatron(tensor_degree=4),))
    hosts = replace(given, topology=islands([2, 2], 1e9, 1e8))
    stage = only_stage(SOLVERS["megatron"](hosts, 1.0).strategy)
    assert (stage.sharding.mesh, stage.groups) == ((4,), ((0, 1, 2, 3),))
    uneven = replace(given, topology=islands([1, 3], 1e9, 1e8))
    with pytest.raises(OptionError, match="--tensor-degree 4: expected a divisor of the 1 device"):
        SOLVERS["megatron"](uneven, 1.0)
    three = replace(hosts, search=replace(hosts.search, switches=(Megatron(tensor_degree=3),)))
    with pytest.raises(OptionError, match=r"1 or 2; or of whole hosts, 4$"):
        SOLVERS["megatron"](three, 1.0)


def test_options_out_of_range():
    with pytest.raises(OptionError, match="--tensor-degree: expected a whole number of at least 1"):
        Megatron(tensor_degree=0)
    with pytest.raises(OptionError, match="--zero-stage: expected a whole number from 0 to 3"):
        Zero(zero_stage=4)


def test_three_degrees_may_leave_devices_over(block):
    degrees = Megatron(tensor_degree=2, data_degree=1, pipeline_degree=1)
    strategy = SOLVERS["megatron"](problem(block, 4, switches=(degrees,)), 1.0).strategy
    assert only_stage(strategy).groups == ((0, 1),)


def test_zero_keeps_a_part_of_everything(block):
    held = {}
    for stage in (1, 2, 3):
        given = problem(block, 2, num_microbatches=1, switches=(Zero(zero_stage=stage),))
        strategy = SOLVERS["zero"](given, 1.0).strategy
        assert violations(strategy, block.graph, 2) == ()
        assert only_stage(strategy).sharding.inputs == {"x": ("S0",)}
        memory = evaluate(given, strategy).memory[0]
        held[stage] = memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes
    trained = sum(p.bytes for p in block.graph.parameters if p.trainable)
    others = sum(p.bytes for p in block.graph.parameters if not p.trainable)
    assert held == {
        1: (trained + others, trained + trained // 2, trained),
        2: (trained + others, trained // 2, trained),
        3: (trained // 2 + others, trained // 2, trained),
    }


def test_zero_at_stage_0_splits_samples_of_whole_copies(block):
    given = problem(block, 2, num_microbatches=4, switches=(Zero(zero_stage=0),))
    result = SOLVERS["zero"](given, 1.0)
    for strategy in (result.strategy, *result.others):
        stage = only_stage(strategy)
        assert (stage.over, stage.zero, stage.groups) == (1, 0, ((0, 1),))
        assert stage.sharding.inputs == {"x": ("S0",)}
        assert not (stage.sharding.states or stage.sharding.gradients)
    memory = evaluate(given, result.strategy).memory[0]
    trained = sum(p.bytes for p in block.graph.parameters if p.trainable)
    others = sum(p.bytes for p in block.graph.parameters if not p.trainable)
    held = memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes
    assert held == (trained + others, trained, 2 * trained)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_keeps_parts_over_replicas_with_microbatches_of_their_own(block, level):
    """It holds as much as where the samples of one microbatch as large as all are split."""
    given = problem(block, 2, num_microbatches=2, switches=(Zero(zero_stage=level),))
    strategy = SOLVERS["zero"](given, 1.0).strategy
    assert strategy.stages[0].groups == ((0,), (1,))
    assert (strategy.stages[0].over, strategy.stages[0].zero) == (2, level)
    assert violations(strategy, block.graph, 2) == ()
    memory = evaluate(given, strategy).memory[0]
    trained = sum(p.bytes for p in block.graph.parameters if p.trainable)
    # Chunks of odd rows are a little more than halves.
    few = sum(p.bytes // p.shape[0] for p in block.graph.parameters if p.trainable and p.shape)
    assert trained // 2 <= memory.optimizer_bytes // 2 <= trained // 2 + few
    plain = evaluate(
        given, replace(strategy, stages=(replace(strategy.stages[0], over=1, zero=0),))
    ).memory[0]
    assert (memory.parameter_bytes < plain.parameter_bytes) == (level == 3)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAM, Optimizer.SGD])
def test_megatron_keeps_optimizer_state_over_replicas_where_it_does_not_fit_otherwise(
    block, optimizer
):
    degrees = Megatron(tensor_degree=1, data_degree=2, pipeline_degree=1)
    how = {"num_microbatches": 2, "switches": (degrees,), "optimizer": optimizer}
    whole = SOLVERS["megatron"](problem(block, 2, **how), 1.0).strategy
    assert only_stage(whole).over == 1
    need = evaluate(problem(block, 2, **how), whole).memory[0].total_bytes
    given = problem(block, 2, device_memory=need - 1, recompute=Recompute.NONE, **how)
    found = SOLVERS["megatron"](given, 1.0).strategy
    if optimizer is Optimizer.SGD:  # it has no state
        assert found is None
    else:
        assert (only_stage(found).over, only_stage(found).zero) == (2, 1)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_megatron_keeps_over_replicas_what_it_is_told(block, level):
    """Beside a tensor degree and stages, also where whole copies fit, and in the judge's plan."""
    degrees = Megatron(tensor_degree=2, data_degree=2, pipeline_degree=2, over_replicas=level)
    given = problem(block, 8, num_microbatches=4, switches=(degrees,))
    result = SOLVERS["megatron"](given, 1.0)
    over = 2 if level else 1
    for one in (result.strategy, *result.others):
        assert {(stage.over, stage.zero) for stage in one.stages} == {(over, level)}
        assert violations(one, block.graph, 8) == ()
    (row,) = compare(given, ["megatron"]).rows
    assert {(stage.over, stage.zero) for stage in row.plan.strategy.stages} == {(over, level)}


def test_megatron_that_is_told_to_keep_whole_copies_keeps_them_where_they_do_not_fit(block):
    how = {"num_microbatches": 2, "recompute": Recompute.NONE, "optimizer": Optimizer.ADAM}
    degrees = {"tensor_degree": 1, "data_degree": 2, "pipeline_degree": 1}
    kept = [problem(block, 2, switches=(Megatron(**degrees, over_replicas=level),), **how)
            for level in (0, 1)]  # fmt: skip
    needs = [evaluate(one, SOLVERS["megatron"](one, 1.0).strategy).memory[0] for one in kept]
    assert needs[1].optimizer_bytes < needs[0].optimizer_bytes
    short = replace(kept[0].training, device_memory=needs[1].total_bytes)
    found = [SOLVERS["megatron"](replace(one, training=short), 1.0).strategy for one in kept]
    assert [one is None for one in found] == [True, False]


def test_zero_keeps_parts_over_all_devices_or_over_those_of_a_host(block):
    hosts = islands((2, 2), 1e9, 1e8, FAST, 1e-7)
    given = replace(problem(block, 4, num_microbatches=6), topology=hosts)
    result = SOLVERS["zero"](given, 1.0)
    found = {one.stages[0].over for one in (result.strategy, *result.others)
             if one.stages[0].sharding is None}  # fmt: skip
    assert found == {3}  # of six microbatches, three devices get equally many
    given = replace(given, num_microbatches=8)
    result = SOLVERS["zero"](given, 1.0)
    found = {one.stages[0].over for one in (result.strategy, *result.others)
             if one.stages[0].sharding is None}  # fmt: skip
    assert found == {2, 4}


def test_zero_tries_all_numbers_of_devices_that_divide_the_samples(block):
    """4 samples on 8 devices: 4 split them, with 2 replicas, or 2, with 4; the fastest first."""
    given = problem(block, 8, num_microbatches=4)
    result = SOLVERS["zero"](given, 1.0)
    found = [result.strategy, *result.others]
    split = [one.stages[0] for one in found if one.stages[0].sharding is not None]
    assert {(one.sharding.mesh, one.num_replicas) for one in split} == {((4,), 2), ((2,), 4)}
    times = [closed_form_s(given, one) for one in found]
    assert times == sorted(times)


def slow_pair(block, **how):
    """Two devices between which nothing pays."""
    return problem(block, 2, bandwidth=1e3, **how)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_splits_samples_though_links_are_slow(block, stage):
    """Copies that all run the same samples would be no data parallelism."""
    both = [
        only_stage(SOLVERS["zero"](given, 1.0).strategy).sharding
        for how in [{"switches": (Zero(zero_stage=stage),)}]
        for given in (
            problem(block, 2, num_microbatches=1, **how),
            slow_pair(block, num_microbatches=1, **how),
        )
    ]
    assert both[1].inputs == {"x": ("S0",)}
    assert both[0] == both[1]


def test_zero_splits_samples_where_sums_of_gradients_hide_behind_a_backward():
    """A sum of 8.4 s against 6 s saved by a cut: products run whole, if their sums are waited for.
    They run beside the backward of `scale`, 20 s.
    """
    model = with_rules(mlp((20.0, 4.0, 2.0, 4.0), (4, 1024, 1024)))
    given = problem(model, 2, 1, bandwidth=5e5, switches=(Zero(zero_stage=0),))
    result = SOLVERS["zero"](given, 1.0)
    split = {frozenset(only_stage(one).sharding.rules) for one in (result.strategy, *result.others)}
    assert split == {frozenset({"scale"}), frozenset({"scale", "up", "gelu", "down"})}
    best = compare(given, ("zero",), 20.0).best.plan
    assert len(only_stage(best.strategy).sharding.rules) == 4
    # Half of 20 + 4 + 2 + 4 s, and twice as much backwards.
    assert best.prediction.iteration_s == pytest.approx(48.0, rel=0.01)


def test_copies_on_a_mesh_split_samples_though_links_are_slow(block):
    degrees = Megatron(tensor_degree=1, data_degree=2)
    given = slow_pair(block, num_microbatches=1, switches=(degrees,))
    stage = only_stage(SOLVERS["megatron"](given, 1.0).strategy)
    assert stage.sharding.inputs == {"x": ("S0",)}


def test_a_tensor_degree_moves_no_more_where_links_are_slow(tmp_path):
    """Over links of no cost it would not matter where a table lies that is read both ways."""
    tied = profiled(load(gpt(tmp_path / "gpt.onnx")))
    how = {"switches": (Megatron(tensor_degree=2, sequence_parallel=False),)}
    both = [
        only_stage(SOLVERS["megatron"](given, 1.0).strategy).sharding
        for given in (problem(tied, 2, **how), slow_pair(tied, **how))
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("solver", ["zero", "megatron", "expert", "heuristic"])
def test_there_is_no_plan_where_nothing_can_be_split(block, solver):
    """Seven devices divide nothing."""
    degrees = Megatron(tensor_degree=7)
    given = problem(block, 7, num_microbatches=1, switches=(degrees,))
    result = SOLVERS[solver](given, 1.0)
    assert (result.strategy, result.reason) == (None, "no operator can be split over the devices")


@pytest.mark.parametrize("solver", ["zero", "expert", "heuristic", "intra-op"])
def test_one_device_is_said_to_be_one(block, solver):
    result = SOLVERS[solver](problem(block, 1), 1.0)
    reason = "there is one device, and operators are split over several"
    assert (result.strategy, result.reason) == (None, reason)


def test_without_rules_they_are_not_asked():
    assert "megatron" not in portfolio(rules=False)
    assert "zero" in portfolio(rules=False)  # over replicas it needs none
    given = problem(mlp())
    assert "megatron" not in [row.solver for row in compare(given, None, 5.0).rows]
    result = SOLVERS["megatron"](given, 1.0)
    assert result.status is Status.UNKNOWN and "no rules" in result.reason


def test_with_rules_no_plan_is_worse_than_data_parallelism(block):
    """With one microbatch, splitting operators is all that helps."""
    given = problem(block, 4, num_microbatches=1)
    comparison = compare(given, ("data-parallel", "megatron", "zero"), 20.0)
    plans = {row.solver: row.plan for row in comparison.rows}
    best = comparison.best.plan.prediction.iteration_s
    assert best < plans["data-parallel"].prediction.iteration_s / 2
    assert best >= comparison.lower_bound_s


def test_the_expert_splits_samples_of_convolutions_and_weights_of_products(images):
    """Krizhevsky 2014, section 3."""
    strategy = SOLVERS["expert"](problem(images), 1.0).strategy
    found = lines_of(only_stage(strategy))
    types = {operator.name: operator.type for operator in images.graph.operators}
    convolutions = [found[name] for name, kind in types.items() if kind == "Conv"]
    assert convolutions == [["S0,R,R->S0"]] * 2 + [["S0,R->S0"]]
    (product,) = (found[name] for name, kind in types.items() if kind == "Gemm")
    assert product in (["R,S1,S0->S1"], ["S1,S0,P->P"])
    assert violations(strategy, images.graph, 2) == ()


def test_the_expert_deals_the_layers_of_recurrent_models_to_the_devices_of_a_host():
    """Wu et al. 2016: one copy per host, here one."""
    profile = mlp()
    recurrent = tuple(replace(one, type="LSTM") for one in profile.graph.operators)
    profile = replace(profile, graph=replace(profile.graph, operators=recurrent))
    strategy = SOLVERS["expert"](problem(profile), 1.0).strategy
    assert [(stage.operators, stage.groups) for stage in strategy.stages] == [
        (("scale", "up"), ((0,),)), (("gelu", "down"), ((1,),))
    ]  # fmt: skip


def on_hosts(profile, counts, num_microbatches, slow=None, **options):
    """A problem on hosts with some devices each; device `slow` has a slow link."""
    given = problem(profile, sum(counts), num_microbatches, **options)
    topology = islands(counts, 1e9, 1e8, FAST, 1e-7)
    links = tuple(
        replace(one, bandwidth_bytes_per_s=1e7) if f"d{slow}" in (one.source, one.target) else one
        for one in topology.links
    )
    return replace(given, topology=replace(topology, links=links))


def test_the_expert_keeps_each_copy_of_a_recurrent_model_within_a_host():
    profile = mlp()
    recurrent = tuple(replace(one, type="LSTM") for one in profile.graph.operators)
    profile = replace(profile, graph=replace(profile.graph, operators=recurrent))
    strategy = SOLVERS["expert"](on_hosts(profile, (3, 2), 4), 1.0).strategy
    assert [stage.groups for stage in strategy.stages] == [((0,), (3,)), ((1,), (4,))]


@pytest.mark.parametrize(
    ("counts", "size", "order"),
    [
        ((2, 3, 3), 2, (0, 1, 2, 3, 5, 6, 4, 7)),
        ((3, 2), 1, (0, 1, 2, 3, 4)),
        ((4, 4), 4, (0, 1, 2, 3, 4, 5, 6, 7)),
        ((2, 5), 2, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_groups_lie_inside_hosts_of_unequal_size_as_far_as_they_can(block, counts, size, order):
    assert host_by_host(on_hosts(block, counts, 4), size) == order


def test_a_tensor_degree_groups_devices_of_one_host(block):
    degrees = Megatron(tensor_degree=2, data_degree=3, pipeline_degree=1)
    given = on_hosts(block, (2, 3, 3), 3, switches=(degrees,))
    assert only_stage(SOLVERS["megatron"](given, 1.0).strategy).groups == ((0, 1), (2, 3), (5, 6))


def test_the_heuristic_cuts_the_longest_dimension_of_every_input(block):
    strategy = SOLVERS["heuristic"](problem(block), 1.0).strategy
    split = only_stage(strategy).sharding
    assert split.inputs == {"x": ("S1",)}  # 4 samples of 8 tokens
    for parameter in block.graph.parameters:
        longest = max(parameter.shape, default=1)
        if longest % 2 == 0:
            dim = parameter.shape.index(longest)
            assert split.parameters[parameter.name] == (f"S{dim}",)
    assert violations(strategy, block.graph, 2) == ()
    comparison = compare(problem(block), ("megatron", "heuristic"), 20.0, full_time=True)
    plans = {row.solver: row.plan.prediction.iteration_s for row in comparison.rows}
    assert plans["megatron"] < plans["heuristic"]


def test_tables_show_meshes_and_how_parameters_lie(block):
    given = problem(block, 4, switches=(Megatron(tensor_degree=2),))
    plan = compare(given, ("megatron",), 20.0).best.plan
    table = stage_table(plan)
    assert table.rows[0][table.heads.index("mesh")] == "2, 2 replicas"
    rows = {row[0]: row[1:] for row in parameter_table(plan).rows}
    assert rows["0u"] == ("1", "0", "S1") and rows["0d"] == ("1", "0", "S0")
    given = problem(block, num_microbatches=1, switches=(Zero(1),))
    zero = compare(given, ("zero",), 20.0).best.plan
    rows = {row[0]: row[1:] for row in parameter_table(zero).rows}
    assert rows["0u"] == ("1", "0", "R", "R", "S0")
    given = problem(block, num_microbatches=4, switches=(Zero(1),))
    table = stage_table(compare(given, ("zero",), 20.0).best.plan)
    assert table.rows[0][table.heads.index("in parts")] == "ZeRO-1 over 2"


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_trace_shows_the_collectives_of_a_stage(block, recompute):
    given = problem(block, num_microbatches=1, switches=(PLAIN,), recompute=recompute)
    strategy = SOLVERS["megatron"](given, 1.0).strategy
    known = evaluate(given, strategy)
    timeline = run(known.program, known.costs, given.topology)
    timeline = timeline_of(timeline)
    inside = collectives_of(given, strategy, timeline)
    record = chrome_trace(timeline, {0: "a", 1: "b"}, inside=inside)["traceEvents"]
    own = [one for one in record if one.get("cat") == "collectives" and one["pid"] == 1]
    named = Counter(one["name"].partition(" of ")[0] for one in own)
    again = 2 * recompute.is_everywhere
    # Two of the block each way, and again in its layers; those of the loss of cut logits are one;
    # the head's input has one for its gradient.
    assert named == {"all-reduce": 3 + 3 + again}
    taken = sum(one.end_s - one.start_s for one in inside if one.device == 0)
    forward, backward = stage_pass(given, strategy.stages[0], 0).collective_s
    segments = local_stage(given.profile, strategy.stages[0]).segments
    rows = [row for some in segments for row in some.operators]
    assert taken == pytest.approx(forward.sum() + forward[rows].sum() + backward.sum())


def test_all_that_may_be_the_fastest_go_to_the_judge():
    """Ten in any case, and more whose estimates differ by less than they may be off."""
    search = LayoutSearch(problem(mlp()))
    few = OTHERS + 1
    search.fitting = [(1.0 + 0.1 * k, f"plan {k}") for k in range(few + 5)]
    assert search.best == tuple(f"plan {k}" for k in range(few))
    search.fitting = [(1.0 + 0.9 * (UNSURE - 1) * (k > 0), f"plan {k}") for k in range(few + 5)]
    search.fitting.append((1.01 * UNSURE, "slower"))
    assert search.best == tuple(f"plan {k}" for k in range(few + 5))
