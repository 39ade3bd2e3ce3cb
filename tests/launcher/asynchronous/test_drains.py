"""Where the pipeline is emptied in the middle of a training: evaluations and checkpoints."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from planner.artefacts.losses import losses as model_losses
from planner.artefacts.strategy import ScheduleName
from planner.launcher.asynchronous import flow_end
from planner.model.load import ReadOptions, load
from planner.operators import randomness, synthetic
from tests.support import datasets, mode_runs
from tests.support.checkpoint_runs import tensors_of
from tests.support.mode_runs import net, profile_of, run_all, write_strategy
from tests.support.pipedream_replay import Replay, net_stages
from tests.support.ranks import forked
from tests.training.test_checkpoints import assert_same

ROOT = Path(__file__).resolve().parents[3]
STEPS, COUNT, SAME = 5, 4, 1e-12
DATA = "tests.support.datasets:samples"
# Decay by torch's own rule; the rate rises to all of it in 2 steps, and falls to 0 at step 6.
HOW = {
    "data": DATA, "shuffle": False, "eval_data": DATA, "eval_every": 2, "weight_decay": 0.05,
    "lr_schedule": "linear:2:6",
}  # fmt: skip
RATES = (0.05, 0.1, 0.1, 0.075, 0.05)


def test_flows_end_at_multiples_whatever_they_began_with():
    assert [flow_end(step, 20, 4, [6, None, 4]) for step in (0, 4, 5, 6, 17)] == [4, 6, 6, 8, 18]
    assert flow_end(18, 20, 4, [6, None, 4]) == 20
    assert flow_end(1000, 5000, 4, []) == flow_end(1023, 5000, 4, []) == 1024
    assert flow_end(3, 10, 10_000, [None]) == 4, "a flow has a step at least"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, which draws no noise, and its profile."""
    folder = tmp_path_factory.mktemp("drains")
    net(folder / "net.onnx", noise=False)
    return folder, profile_of(folder / "net.onnx")


def strategy(made, name, widths=(1, 1, 1), schedule=ScheduleName.PIPEDREAM):
    folder, profile = made
    return write_strategy(
        folder / name, profile, widths, schedule=schedule, optimizer="momentum",
        num_microbatches=COUNT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(made):
    """State by rank, and the lines of the log, of a training with evaluations."""
    folder, _ = made
    strategy(made, "evaluated.strategy.json")
    how = json.dumps(HOW | {"log": str(folder / "log.jsonl")})
    (folder / "evaluated.settings.json").write_text(how)
    run_all(folder, 3, STEPS)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [torch.load(folder / f"evaluated.{rank}.pt") for rank in range(3)], lines[1:]


@pytest.fixture
def quiet(monkeypatch):
    """The module as the file has it: no noise, a ratio of dropout in float32."""
    zeros = lambda node, shape, dtype, **_: torch.zeros(shape, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(randomness, "standard_normal", zeros)
    ratio = torch.tensor(mode_runs.RATIO, dtype=torch.float32).item()
    monkeypatch.setattr(mode_runs, "RATIO", ratio)


def replay_of(made):
    module = net(made[0] / "same.onnx")
    x, classes = datasets.tensors()

    def loss_of(run, m):
        step, microbatch = divmod(m, COUNT)
        at = 4 * COUNT * (step % 2) + 4 * microbatch  # an epoch has two steps
        with randomness.random_operators(mode_runs.SEED, step, microbatch):
            return nn.functional.cross_entropy(run(x[at : at + 4]), classes[at : at + 4])

    optimizer = partial(SGD, lr=1.0, momentum=0.9, weight_decay=HOW["weight_decay"])
    stages = net_stages(module, (1, 1, 1), (3, 2, 1))
    return module, Replay(module, stages, optimizer, loss_of, rate=lambda m: RATES[m // COUNT])


def test_the_pipeline_is_empty_at_each_evaluation(made, evaluated, quiet):
    """Two flows of two steps and one of one, beside the replay."""
    ranks, lines = evaluated
    module, replay = replay_of(made)
    figures = []
    for count in (2, 2, 1):
        replay.flow(count * COUNT)
        x, classes = datasets.tensors()
        with torch.no_grad():
            logits = module.eval()(x)
        module.train()
        figures.append(nn.functional.cross_entropy(logits, classes).item())
    for _, held, _ in ranks:
        for name, value in dict(module.named_parameters()).items():
            if name in held:
                torch.testing.assert_close(held[name], value.data, rtol=SAME, atol=SAME)
    found = [line["evaluation"]["loss"] for line in lines if "evaluation" in line]
    assert found == pytest.approx(figures, rel=1e-6)
    losses = torch.tensor(replay.losses, dtype=torch.float64).view(-1, COUNT).mean(1).tolist()
    steps = [line for line in lines if "evaluation" not in line]
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=SAME)
    assert [line["lr"] for line in steps] == pytest.approx(RATES)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 5]


@pytest.fixture(scope="module")
def checkpoints(made, tmp_path_factory):
    """A folder of checkpoints, and losses, of several launches in one start of torchrun."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pipeline = str(strategy(made, "pipeline.json"))
    flush = str(strategy(made, "flush.json", (1, 1), ScheduleName.ONE_F_ONE_B))

    def case(path, to, start=None):
        return {"strategy": path, "steps": STEPS, "every": 2, "folder": to, "resume": start}

    cases = {
        "whole": case(pipeline, "whole"),
        "again": case(pipeline, "again", "whole/step-00000002"),
        "flushed": case(flush, "flushed", "whole/step-00000004"),
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    forked(ROOT / "tests/support/checkpoint_runs.py", 3, folder)
    return folder, json.loads((folder / "losses.json").read_text())


def test_a_resumed_training_is_uninterrupted_bit_by_bit(checkpoints):
    folder, losses = checkpoints
    assert losses["again"] == losses["whole"][2:]
    assert_same(folder / "again", folder / "whole")


def test_a_checkpoint_has_the_newest_version_of_all_stages(made, checkpoints, quiet):
    """Under 1F1B all minibatches of the next step meet it."""
    folder, losses = checkpoints
    module = net(made[0] / "same.onnx")
    model = load(made[0] / "net.onnx", ReadOptions(batch=mode_runs.BATCH))
    net_stages(module, (1,), (1,))
    held = tensors_of(folder / "whole" / "step-00000004")
    state = {n.split("/")[-1]: held[n] for n in held if n.startswith(("parameters", "statistics"))}
    module.load_state_dict(state, strict=False)
    (chosen,) = model_losses(model.graph)
    total = 0.0
    for m in range(COUNT):
        x = synthetic.inputs(model, seed=mode_runs.SEED, microbatch=m)["x"]
        target = synthetic.target(chosen, seed=mode_runs.SEED, microbatch=m)
        with randomness.random_operators(mode_runs.SEED, 4, m):
            total += nn.functional.cross_entropy(module(x), target).item() / COUNT
    assert losses["flushed"] == pytest.approx([total], rel=SAME)
