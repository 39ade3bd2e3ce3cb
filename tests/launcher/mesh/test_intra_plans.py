"""Plans of `intra-op` on 2 and 4 ranks, and of `inter-op` on 4, train as one process does: a GPT, a
mixture of experts, and a residual network whose batch normalizations take the statistics of the
whole microbatch. So do replicas of which pairs keep parts of all levels.
"""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.profilers.rules import split_rules
from planner.solvers.registry import SOLVERS
from tests.support.checkpoint_runs import tensors_of
from tests.support.doubles import doubled
from tests.support.experts import Experts, mixed_by_experts
from tests.support.models import Flow
from tests.support.ranks import ROOT, forked
from tests.support.split_launches import launched
from tests.support.split_models import Net, gpt, loaded
from tests.support.split_plans import plan_of
from tests.support.split_profiles import problem, profiled

OPTIONS = {"steps": 3, "learning_rate": 0.05, "every": 3}
# Microbatches by the number of ranks: one cannot go to replicas.
MICROBATCHES = {2: 1, 4: 2}
PAIRS = 4  # ranks, and microbatches, of replicas that keep parts in pairs
BATCH, SEQUENCE, CLASSES = 8, 16, 12


def mixture(path):
    """Tokens, a layer of four experts in groups of 16 tokens, and scores of classes."""
    flow = Flow("mixture", seed=2)
    sizes = Experts(count=4, group=16, width=8, inner=32)
    hidden = flow.add("MatMul", "x", flow.weight("first", 8, 8))
    mixed = flow.add("Add", hidden, mixed_by_experts(flow, hidden, sizes, SEQUENCE))
    result = flow.add("MatMul", mixed, flow.weight("last", 8, CLASSES))
    ends = (("x", 8), (result, CLASSES))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (BATCH, SEQUENCE, width))
             for name, width in ends]  # fmt: skip
    onnx.save(flow.model(*infos), path)
    return doubled(path, path)


def resnet(path):
    """Two residual blocks in training mode."""
    net = Net(seed=4)

    def conv(h, name, wide, channels, size):
        made = net.add("Conv", h, net.weight(f"{name}k", channels, wide, size, size),
                       pads=[size // 2] * 4)  # fmt: skip
        held = [net.weight(f"{name}{one}", channels) for one in ("g", "b")]
        held += [
            net.constant(f"{name}m", np.zeros(channels)),
            net.constant(f"{name}v", np.ones(channels)),
        ]
        return net.add("BatchNormalization", made, *held, outputs=3, training_mode=1)[0]

    h, wide = "x", 4
    for i, channels in enumerate((8, 16)):
        inner = net.add("Relu", conv(h, f"{i}a", wide, channels, 3))
        both = net.add(
            "Add", conv(inner, f"{i}b", channels, channels, 3), conv(h, f"{i}s", wide, channels, 1)
        )
        h, wide = net.add("Relu", both), channels
    h = net.add("Flatten", net.add("GlobalAveragePool", h))
    h = net.add("Gemm", h, net.weight("w", wide, CLASSES), net.weight("c", CLASSES))
    return net.save(path, ((BATCH, 4, 6, 6), TensorProto.DOUBLE), (h, (BATCH, CLASSES)))


NETWORKS = {"gpt": gpt, "mixture": mixture, "resnet": resnet}


def strategies(model):
    """By name, those of one process, and of `intra-op` and `inter-op` over slow links, of each
    number of ranks.
    """
    names = tuple(one.name for one in model.graph.operators)
    profile = profiled(model, split_rules(model))
    for count, microbatches in MICROBATCHES.items():
        alone = Stage(names, ((0,),), 1, False)
        yield f"alone-{count}", Strategy((alone,), ScheduleName.ONE_F_ONE_B, microbatches)
        given = problem(profile, count, microbatches, bandwidth=1e8)
        found = SOLVERS["intra-op"](given, 5.0).strategy
        (stage,) = found.stages
        assert len(stage.devices) == count and stage.sharding.rules
        yield f"split-{count}", found
        if count == 4:
            found = SOLVERS["inter-op"](given, 5.0).strategy
            assert [len(stage.devices) for stage in found.stages] == [2, 2]
            assert any(stage.sharding or stage.zero_of for stage in found.stages)
            yield f"piped-{count}", found
    alone = Stage(names, ((0,),), 1, False)
    yield "alone-pairs", Strategy((alone,), ScheduleName.ONE_F_ONE_B, PAIRS)
    levels = {one.name: i % 4 for i, one in enumerate(model.graph.parameters)}
    pairs = replace(alone, groups=tuple((r,) for r in range(PAIRS)), over=2, zero_of=levels)
    yield "pairs", Strategy((pairs,), ScheduleName.ONE_F_ONE_B, PAIRS)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Losses of all launches by the names of their strategies, and the folder of checkpoints."""
    folder, losses = tmp_path_factory.mktemp("intra"), {}
    launches = {count: {} for count in MICROBATCHES}
    for network, make in NETWORKS.items():
        model = loaded(make(folder / f"{network}.onnx"))
        for kind, strategy in strategies(model):
            name = f"{network}-{kind}"
            plan = plan_of(model, strategy, optimizer="momentum")
            write_plan(plan, folder / f"{name}.json")
            if len(plan.ranks) == 1:
                losses[name] = launched(folder, f"{name}.json", name, **OPTIONS)["loss"]
            else:
                launches[len(plan.ranks)][name] = {
                    "strategy": f"{name}.json", "keep": name, **OPTIONS
                }  # fmt: skip
    for count, some in launches.items():
        (folder / "launches.json").write_text(json.dumps(some))
        forked(ROOT / "tests/support/split_launches.py", count, folder)
        found = json.loads((folder / "told.json").read_text())
        losses |= {name: one["loss"] for name, one in found.items()}
    return folder, losses


@pytest.mark.parametrize(("kind", "count"), [*product(["split"], MICROBATCHES), ("piped", 4)])
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_and_checkpoints_are_those_of_one_process(told, network, kind, count):
    assert_same(told, f"{network}-alone-{count}", f"{network}-{kind}-{count}")


@pytest.mark.parametrize("network", ["gpt", "mixture"])
def test_pairs_of_replicas_that_keep_parts_train_as_one_process(told, network):
    """HSDP, with a level of each parameter's own."""
    assert_same(told, f"{network}-alone-pairs", f"{network}-pairs")


def assert_same(told, alone, split):
    folder, losses = told
    assert losses[split] == pytest.approx(losses[alone], rel=1e-9)
    expected, after = tensors_of(folder / alone), tensors_of(folder / split)
    assert expected.keys() == after.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-8, atol=1e-11)
