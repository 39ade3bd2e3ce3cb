"""Alpa's networks beside the sizes that its repository gives, and its ablation."""

from dataclasses import replace
from math import prod

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import planner
from planner import read_topology
from planner.artefacts.options import Recompute
from planner.artefacts.profile import BatchNorm
from planner.costs.stage_pass import gather_beside_s
from planner.model.load import ReadOptions, load
from planner.model.modes import batch_norm_form
from planner.resharding.overlap import sends
from planner.resharding.reshardings import reshardings
from planner.solvers.sharded.options import Zero
from tests.bench import ablation
from tests.support.alpa import FAMILIES, GPT, WIDE_RESNET
from tests.support.experts import Experts, mixed_by_experts
from tests.support.measured.networks import Kind, Network, model
from tests.support.models import Flow
from tests.support.thesis_models import widened_resnet

# Billions of parameters by the number of GPUs, as Alpa's benchmarks count them.
COUNTED = {
    "gpt": {1: 0.356, 2: 0.760, 4: 1.316, 8: 2.651, 16: 6.658, 32: 15.37, 64: 39.09},
    "moe": {1: 0.384, 2: 0.686, 4: 1.348, 8: 2.384, 16: 10.17, 32: 26.65, 64: 70.42},
    "wresnet": {1: 0.254, 2: 0.495, 4: 1.006, 8: 1.965, 16: 4.001, 32: 6.728, 64: 12.63},
}


def num_trained(proto):
    """The parameters of a model, without running means."""
    read = {name for node in proto.graph.node for name in node.input}
    kept = {n for node in proto.graph.node if node.op_type == "BatchNormalization"
            for n in node.input[3:]}  # fmt: skip
    return sum(
        prod(one.dims)
        for one in proto.graph.initializer
        if one.name in read - kept and one.data_type == TensorProto.FLOAT
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_networks_have_as_many_parameters_as_alpas(name):
    for gpus, network in FAMILIES[name].weak_scaling.items():
        found = num_trained(model(network)) / 1e9
        assert found == pytest.approx(COUNTED[name][gpus], rel=0.002), gpus


def test_of_a_bottleneck_only_the_output_of_the_3_x_3_convolution_is_wider():
    shapes = [
        tuple(one.dims)
        for one in widened_resnet(50, 8, 4).graph.initializer
        if one.name.startswith("stage0.1.w")
    ]
    assert shapes == [(8, 32, 1, 1), (32, 8, 3, 3), (32, 32, 1, 1)]


# A group of one microbatch, and two groups.
@pytest.mark.parametrize(("samples", "sequence"), [(1, 12), (2, 12), (4, 6)])
def test_each_token_is_mixed_from_its_two_best_experts_that_have_room(samples, sequence):
    sizes = Experts(count=4, group=12, width=6, inner=5)
    flow = Flow("experts", seed=3)
    result = mixed_by_experts(flow, "x", sizes, sequence)
    shape = [samples, sequence, sizes.width]
    ends = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", result))
    proto = flow.model(*ends)
    held = {one.name: numpy_helper.to_array(one) for one in proto.graph.initializer}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    (found,) = session.run(None, {"x": x})
    tokens = x.reshape(-1, sizes.group, sizes.width)
    expected, left_out = by_hand(tokens, held, sizes.places)
    assert left_out > 0
    np.testing.assert_allclose(found, expected.reshape(shape), rtol=1e-4, atol=1e-5)


def by_hand(groups, held, places):
    """The same token by token, and how often an expert had no room."""
    mixed, left_out = np.zeros_like(groups), 0
    for group, tokens in enumerate(groups):
        scores = np.exp(tokens @ held["gate"])
        scores /= scores.sum(1, keepdims=True)
        ranked = np.argsort(-scores, axis=1)
        room = dict.fromkeys(range(scores.shape[1]), places)
        chosen = {t: [] for t in range(len(tokens))}
        for rank in range(2):  # all first choices come before all second ones
            for t in range(len(tokens)):
                expert = int(ranked[t, rank])
                if room[expert] > 0:
                    chosen[t].append(expert)
                room[expert] -= 1
        for t, experts in chosen.items():
            left_out += 2 - len(experts)
            total = sum(scores[t, e] for e in experts)
            for e in experts:
                inner = np.maximum(tokens[t] @ held["up"][e], 0)
                mixed[group, t] += scores[t, e] / total * (inner @ held["down"][e])
    return mixed, left_out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A family with a GPT that is just large enough to be split, and a folder for its profiles."""
    network = Network(Kind.GPT, 2, 512, 4, 4, 2048, 1000, 128)
    family = replace(GPT, ablation=dict.fromkeys(ablation.GPUS, network))
    return family, tmp_path_factory.mktemp("profiles")


def made(small, gpus, **training):
    family, folder = small
    usual = ablation.training_of(family, overlap=True, recompute=None)
    return [*ablation.rows(family, gpus, replace(usual, **training), folder)]


def test_each_way_splits_one_stage_and_one_microbatch_over_all_gpus(small):
    rows = made(small, (1, 2))
    assert [one.way for one in rows] == [ablation.ONE, *ablation.WAYS]
    for one in rows:
        (stage,) = one.plan.strategy.stages
        assert one.plan.strategy.num_microbatches == stage.num_replicas == 1
        assert len(stage.devices) == one.gpus
        assert stage.recompute
        assert one.reason == ""
    data, zero_2, zero_3, *_ = (one.plan.strategy.stages[0].sharding for one in rows[1:])
    cut = [any(part.startswith("S") for part in spec) for spec in data.parameters.values()]
    assert not any(cut) and not data.gradients
    assert zero_2.gradients and not zero_3.gradients
    assert any(spec != ("R",) for spec in zero_3.parameters.values())


def test_a_plan_that_does_not_fit_is_shown_with_its_time(small):
    (fitting,) = made(small, (1,))
    (row,) = made(small, (1,), device_memory=2**20, reserve=0)
    assert row.plan.prediction.iteration_s == fitting.plan.prediction.iteration_s
    assert "all devices together have 0 B" in row.reason
    assert ablation.cells(row)[-1] == "no"


def test_batch_normalizations_of_the_ablation_train_or_are_frozen(tmp_path):
    network = Network(Kind.WIDE_RESNET, 50, 8, widening=2)
    for frozen, expected in ((False, BatchNorm.TRAINING), (True, BatchNorm.FROZEN)):
        path = tmp_path / "net.onnx"
        path.write_bytes(model(replace(network, frozen=frozen)).SerializeToString())
        assert batch_norm_form(load(path, ReadOptions(batch=2)).nodes) is expected


@pytest.fixture(scope="module")
def resnets():
    """Iteration times of the smallest wide ResNet on 8 GPUs without overlap, by way."""

    def times_s(*, frozen):
        network = replace(WIDE_RESNET.ablation[1], frozen=frozen)
        family = replace(WIDE_RESNET, ablation={8: network})
        training = ablation.training_of(family, overlap=False, recompute=None)
        assert training.recompute is Recompute.NONE
        rows = ablation.rows(family, (8,), training)
        return {one.way.name: one.plan.prediction.iteration_s for one in rows}

    return times_s(frozen=False), times_s(frozen=True)


@pytest.mark.slow
def test_statistics_of_the_whole_batch_take_little_of_data_parallelism(resnets):
    trained, frozen = (one["Data"] for one in resnets)
    assert frozen < trained < 1.1 * frozen


@pytest.mark.slow
def test_without_overlap_ways_of_a_wide_resnet_are_in_the_order_of_alpas_figure(resnets):
    trained, _ = resnets
    ways = ("Data", "ZeRO-2", "ZeRO-3", "Heuristic")
    assert sorted(ways, key=trained.get) == [*ways]


def test_statistics_of_a_forward_come_between_gathers_behind_a_step():
    """Of a plan under ZeRO-1 whose forward sends nothing else."""
    family, host = ablation.FAMILIES["wresnet"], read_topology(ablation.HOST, 8)
    profile = ablation.computed(
        family.ablation[1], family.batch, family.dtype, ablation.DEVICE
    )  # fmt: skip
    plans = planner.solve(
        profile, topology=host, training=ablation.training_of(family, overlap=True, recompute=None),
        search=planner.Search(switches=(Zero(zero_stage=1),)), solvers=["zero"],
    )  # fmt: skip
    (stage,), problem = plans.plan.strategy.stages, plans.problems[-1]

    def delay_s(one):
        return gather_beside_s(problem, one, one.groups[0], 0)

    sent = reshardings(stage, problem.profile.graph)
    assert not any(sends(one.forward) for one in sent)
    assert stage.gathered_ahead is not None
    assert delay_s(stage) < 0.9 * delay_s(replace(stage, gathered_ahead=None))
