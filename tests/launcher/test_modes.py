"""BatchNormalization in training, Dropout and drawn numbers in a launch, against PyTorch's loop."""

import shutil
from pathlib import Path

import pytest
import torch

from planner import launch
from planner.artefacts.files import read_plan
from planner.artefacts.profile import BatchNorm
from planner.reports.launch import launch_json
from tests.support.memory_runs import peaks_of
from tests.support.mode_runs import (
    launched,
    loop,
    net,
    profile_of,
    run_all,
    write_along_samples,
    write_strategy,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
RUNNING = {"bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, and its profile."""
    folder = tmp_path_factory.mktemp("modes")
    net(folder / "net.onnx")
    return folder, profile_of(folder / "net.onnx")


@pytest.fixture(scope="module")
def by_hand(made, tmp_path_factory):
    """Losses and final state of PyTorch's loop over the original module."""
    module = net(tmp_path_factory.mktemp("module") / "net.onnx")
    losses = loop(module, made[0] / "net.onnx", STEPS)
    return losses, module.state_dict()


def assert_state(held, state, rel=1e-7):
    for name, value in held.items():
        torch.testing.assert_close(value, state[name], rtol=rel, atol=rel)


ALONE = {
    "one stage": {"widths": (1,)},
    "one stage, recomputed": {"widths": (1,), "recompute": True},
    "two stages on one device": {"widths": (1, 1), "devices": (0, 0)},
    "three stages on one device, recomputed": {
        "widths": (1, 1, 1), "devices": (0, 0, 0), "recompute": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_one_process_trains_as_pytorch_does(made, by_hand, name):
    folder, profile = made
    path = write_strategy(folder / "alone.json", profile, **ALONE[name])
    report, held, running = launched(path, STEPS)
    losses, state = by_hand
    assert report.loss == pytest.approx(losses, rel=1e-7)
    assert {*running} == RUNNING <= held.keys()
    assert_state(held, state)


@pytest.fixture(scope="module")
def together(made):
    """Losses, and state by rank, of several strategies in one start of torchrun on two ranks."""
    folder, profile = made
    cases = {
        "pipeline": ((1, 1), {}), "again": ((1, 1), {"recompute": True}), "replicas": ((2,), {}),
        "shared": ((2,), {"zero": 3}),
    }  # fmt: skip
    for name, (widths, options) in cases.items():
        write_strategy(folder / f"{name}.strategy.json", profile, widths, **options)
    run_all(folder, 2, STEPS)
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in (0, 1)] for name in cases}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def along_samples(made, request, tmp_path_factory):
    """Losses, and state by rank, where two or four ranks cut the samples of each microbatch; with
    collectives in line with computations, and beside them.
    """
    folder, size = tmp_path_factory.mktemp("samples"), request.param
    shutil.copy(made[0] / "net.onnx", folder)
    for name, prefetch in (("line", None), ("beside", 2**20)):
        write_along_samples(folder / f"{name}.strategy.json", made[1], size, prefetch)
    run_all(folder, size, STEPS)
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(size)]
        for name in ("line", "beside")
    }


@pytest.mark.parametrize("name", ["line", "beside"])
def test_samples_of_a_microbatch_are_normalized_together(along_samples, by_hand, name):
    losses, state = by_hand
    assert along_samples[name][0][0] == pytest.approx(losses, rel=1e-7)
    for _, held, running in along_samples[name]:
        assert {*running} == RUNNING
        assert_state(held, state)


@pytest.mark.parametrize("name", ["pipeline", "again"])
def test_a_pipeline_trains_as_pytorch_does(together, by_hand, name):
    losses, state = by_hand
    ranks = together[name]
    assert ranks[0][0] == pytest.approx(losses, rel=1e-7)
    assert {key for _, _, running in ranks for key in running} == RUNNING
    assert all(running for _, _, running in ranks), "each stage should have a normalization"
    for _, held, _ in ranks:
        assert_state(held, state)


def test_replicas_draw_as_one_and_keep_statistics_of_their_own(together, by_hand, made):
    losses, state = by_hand
    ranks = together["replicas"]
    assert ranks[0][0] == pytest.approx(losses, rel=1e-7)
    trained = {name for name in ranks[0][1] if name not in RUNNING}
    for rank, (_, held, _) in enumerate(ranks):
        assert_state({name: held[name] for name in trained}, state)
        # At a learning rate of 0, statistics are those of the microbatches that a replica gets.
        assert not torch.equal(held["bn1.running_var"], state["bn1.running_var"]), rank
    assert not torch.equal(ranks[0][1]["bn1.running_mean"], ranks[1][1]["bn1.running_mean"])


def test_replicas_that_keep_parts_have_statistics_of_their_own(together, by_hand):
    assert together["shared"][0][0] == pytest.approx(by_hand[0], rel=1e-7)
    for shared, whole in zip(together["shared"], together["replicas"], strict=True):
        assert_state({name: shared[1][name] for name in RUNNING}, whole[1])
        assert {len(one) for one in shared[1].values()} & {2, 3, 4}, "parts of what has 3 to 8 rows"


def test_frozen_strategies_and_old_ones_keep_running_statistics(made):
    folder, _ = made
    profile = profile_of(folder / "net.onnx", batch_norm=BatchNorm.FROZEN)
    path = write_strategy(folder / "frozen.json", profile, (1,))
    assert "batch_norm" not in path.read_text()
    module = net(folder / "same.onnx")
    module.bn1.eval(), module.bn2.eval()
    report, held, running = launched(path, 3)
    assert report.loss == pytest.approx(loop(module, folder / "net.onnx", 3), rel=1e-7)
    assert_state(held, module.state_dict())
    assert not running
    assert report.notes[0] == (
        "2 BatchNormalizations use running statistics: --batch-norm is frozen, the file says"
        " training"
    )


def test_an_evaluation_graph_says_what_it_leaves_out(tmp_path):
    net(tmp_path / "net.onnx", training=False)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    assert launch(path, steps=1).notes[0] == (
        "2 BatchNormalizations use running statistics and 1 Dropout drops nothing: the file was"
        " exported in evaluation mode; export with module.train()"
    )


def test_an_evaluation_graph_can_be_trained(tmp_path):
    net(tmp_path / "net.onnx", training=False)
    profile = profile_of(tmp_path / "net.onnx", batch_norm=BatchNorm.TRAINING)
    path = write_strategy(tmp_path / "s.json", profile, (1,))
    assert read_plan(path).batch_norm is BatchNorm.TRAINING
    _, _, running = launched(path, 1)
    assert {*running} == RUNNING


def test_another_seed_and_another_step_draw_other_numbers(made):
    folder, profile = made
    path = write_strategy(folder / "seeds.json", profile, (1,))
    first = launch(path, steps=2, learning_rate=0.0, data="tests.launcher.test_modes:same")
    other = launch(path, steps=2, learning_rate=0.0, data="tests.launcher.test_modes:same", seed=9)
    again = launch(path, steps=2, learning_rate=0.0, data="tests.launcher.test_modes:same")
    assert first.loss == again.loss
    assert len({*first.loss, *other.loss}) == 4


def same(step, microbatch, inputs):
    """User's data: the same in each step."""
    (shape, dtype) = inputs["x"]
    random = torch.Generator().manual_seed(microbatch)
    x = torch.randn(shape, generator=random, dtype=dtype)
    return {"x": x}, torch.randint(5, shape[:1], generator=random)


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_batch_statistics_is_predicted(tmp_path, recompute):
    net(tmp_path / "net.onnx", dtype="float32")
    profile = profile_of(tmp_path / "net.onnx")
    path = write_strategy(tmp_path / "s.json", profile, (1,), recompute=recompute)
    found = launch_json(launch(path, steps=1, track_memory=True))
    (one,) = peaks_of({"s": found})
    assert one.right, one
