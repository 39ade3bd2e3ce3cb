"""Trainings under `--schedule pipedream` on several ranks, beside a replay of PipeDream's rule on
the original PyTorch module.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from planner.artefacts.losses import losses
from planner.artefacts.strategy import ScheduleName
from planner.model.load import ReadOptions, load
from planner.operators import randomness, synthetic
from tests.support import mode_runs
from tests.support.mode_runs import BATCH, SEED, net, profile_of, run_all, write_strategy
from tests.support.pipedream_replay import Replay, net_stages

STEPS, RATE, SAME = 5, 0.1, 1e-12
OPTIMIZERS = {
    "sgd": partial(SGD, lr=RATE),
    "momentum": partial(SGD, lr=RATE, momentum=0.9),
    "adam": partial(Adam, lr=RATE),
}
# Replicas, forwards ahead, M, and how a strategy differs.
CASES = {
    "two stages": ((1, 1), (2, 1), 4, {}),
    "three stages": ((1, 1, 1), (3, 2, 1), 4, {"optimizer": "momentum"}),
    "three stages, adam": ((1, 1, 1), (3, 2, 1), 2, {"optimizer": "adam"}),
    "recompute": ((1, 1, 1), (3, 2, 1), 4, {"optimizer": "momentum", "recompute": True}),
    "replicas in front": ((2, 1), (2, 1), 4, {"optimizer": "momentum"}),
    "replicas behind": ((1, 2), (3, 1), 4, {"optimizer": "adam"}),
    "replicas alone": ((3,), (1,), 6, {"optimizer": "momentum"}),
    "vertical sync": ((1, 1, 1), (3, 2, 1), 4, {"optimizer": "momentum", "vertical_sync": True}),
    "vertical sync, recompute": (
        (1, 1), (2, 1), 4, {"optimizer": "adam", "vertical_sync": True, "recompute": True}
    ),
    "vertical sync, replicas in front": ((2, 1), (2, 1), 4, {"vertical_sync": True}),
    "vertical sync, replicas behind": ((1, 2), (3, 1), 4, {"vertical_sync": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Losses and parameters of each case by rank, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("pipedream")
    net(folder / "net.onnx")
    profile = profile_of(folder / "net.onnx")
    for name, (widths, _, num_microbatches, options) in CASES.items():
        write_strategy(
            folder / f"{name}.strategy.json", profile, widths, schedule=ScheduleName.PIPEDREAM,
            num_microbatches=num_microbatches, **options,
        )  # fmt: skip
    run_all(folder, 3, STEPS)
    return folder, {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(sum(CASES[name][0]))]
        for name in CASES
    }


def replayed(folder, name, tmp_path):
    """The same training by the replay: the module, and losses of all minibatches."""
    widths, ahead, num_microbatches, options = CASES[name]
    module, model = net(tmp_path / "net.onnx"), load(folder / "net.onnx", ReadOptions(batch=BATCH))
    (chosen,) = losses(model.graph)

    def loss_of(run, m):
        step, microbatch = divmod(m, num_microbatches)
        x = synthetic.inputs(model, seed=SEED, microbatch=microbatch)["x"]
        target = synthetic.target(chosen, seed=SEED, microbatch=microbatch)
        with randomness.random_operators(SEED, step, microbatch):
            return cross_entropy(run(x), target)

    replay = Replay(
        module, net_stages(module, widths, ahead),
        OPTIMIZERS[options.get("optimizer", "sgd")], loss_of,
        vertical_sync=options.get("vertical_sync", False),
    )  # fmt: skip
    replay.flow(STEPS * num_microbatches)
    return module, replay


@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_replay_of_the_paper(trained, name, tmp_path, monkeypatch):
    monkeypatch.setattr(mode_runs, "RATIO", float(np.float32(mode_runs.RATIO)))
    folder, found = trained
    num_microbatches = CASES[name][2]
    module, replay = replayed(folder, name, tmp_path)
    by_step = (
        torch.tensor(replay.losses, dtype=torch.float64).view(-1, num_microbatches).mean(1).tolist()
    )
    assert found[name][0][0] == pytest.approx(by_step, rel=SAME)
    state, seen = dict(module.named_parameters()), set()
    for _, held, _ in found[name]:
        for parameter in state.keys() & held.keys():
            torch.testing.assert_close(held[parameter], state[parameter].data, rtol=SAME, atol=SAME)
            seen.add(parameter)
    assert seen == state.keys()
