"""Launches with groups of parameters, in one start of torchrun, and PyTorch's loop beside them.

    torchrun --nproc-per-node 2 tests/support/group_runs.py FOLDER

FOLDER/launches.json has the arguments of `launched` by name. Rank 0 writes the losses into
FOLDER/told.json, and each launch its checkpoint into FOLDER.
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.model.load import load
from tests.support.ranks import ROOT, forked
from tests.support.split_launches import main
from tests.support.split_plans import cut_further, plan_of, random_sharding

WORDS, WIDTH, BATCH, LENGTH, MICROBATCHES, STEPS, HALF = 24, 16, 4, 8, 2, 6, 3
RATE, DECAY, CLIP = 0.05, 0.3, 0.5
GROUPS = [
    {"names": "head.*", "lr_factor": 0.5},
    {"names": ["*.bias", "norm.*", "head.weight"], "weight_decay": 0},
    {"names": ["up.*"], "lr_factor": 2.0, "weight_decay": 0.8},
]
"""The embedding, which the head shares, is in the first one; `up.bias` is in the second."""
FACTORS = {"words.weight": (0.5, DECAY), "up.weight": (2.0, 0.8), "down.weight": (1.0, DECAY)}
"""Factor and decay of each parameter; of those that are left out (1, 0)."""
OPTIONS = {
    "learning_rate": RATE, "weight_decay": DECAY, "clip": CLIP, "lr_schedule": "linear:2:9",
    "nan": "skip",
}  # fmt: skip


class Net(nn.Module):
    """Words -> logits of the next word, by an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=2.0**-17)  # which ONNX holds exactly
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x)
        return self.head(h + self.down(self.up(self.norm(h)).relu()))


def batch(step, microbatch):
    """Words and the next ones of a microbatch."""
    chance = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randint(WORDS, (2, BATCH, LENGTH), generator=chance).unbind()


def data(step, microbatch, inputs):
    """The same for --data."""
    x, y = batch(step, microbatch)
    return dict.fromkeys(inputs, x), y


def by_torch(optimizer, *, clip=CLIP, asynchronous=False):
    """Losses, trained parameters, and states of the optimizer of a loop of PyTorch with the groups;
    the states by parameter and word.

    Args:
        asynchronous: whether each microbatch is a step.
    """
    module = Net().double()
    held = dict(module.named_parameters())
    groups = [
        {"params": [one], "lr": RATE * factor, "weight_decay": decay, "initial_lr": RATE * factor}
        for name, one in held.items()
        for factor, decay in [FACTORS.get(name, (1.0, 0.0))]
    ]
    kinds = {"adamw": torch.optim.AdamW, "momentum": partial(torch.optim.SGD, momentum=0.9)}
    stepped = kinds[optimizer](groups, lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        stepped, lambda step: (step + 1) / 2 if step < 2 else 1 - (step - 2) / 7
    )
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for m in range(MICROBATCHES):
            x, y = batch(step, m)
            loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten()) / MICROBATCHES
            losses[-1] += loss.item()
            (loss * MICROBATCHES if asynchronous else loss).backward()
            if asynchronous:
                stepped.step()
                stepped.zero_grad()
        if not asynchronous:
            nn.utils.clip_grad_norm_(module.parameters(), clip or torch.inf)
            stepped.step()
            stepped.zero_grad()
        schedule.step()
    states = {(name, word): value for name, one in held.items()
              for word, value in stepped.state[one].items()}  # fmt: skip
    return losses, {name: one.detach() for name, one in held.items()}, states


def write_model(folder):
    """The model's file."""
    planner.export(Net().double(), torch.zeros(BATCH, LENGTH, dtype=torch.long),
                   folder / "net.onnx", check=False)  # fmt: skip
    return load(folder / "net.onnx")


def write_plans(folder, model, optimizer):
    """Strategies of one and of two devices; flows are those of asynchronous schedules."""
    names = tuple(one.name for one in model.graph.operators)
    half, chance = len(names) // 2, random.Random(1)
    whole = Stage.whole(names, (0,), 1, False)
    split = random_sharding(model, (2,), chance)
    zero = {f"zero{n}": cut_further(split, model, n, chance) for n in (1, 2, 3)}
    two = [Stage.whole(names[:half], (0,), 2, False), Stage.whole(names[half:], (1,), 1, False)]
    both = Stage.whole(names, (0, 1), 1, False)
    stages = {
        "alone": [whole], "pipeline": two, "replicas": [both], "flow": [whole],
        "flow of two": [both],
        **{name: [Stage(names, ((0, 1),), 1, False, lies)]
           for name, lies in {"split": split, **zero}.items()},
    }  # fmt: skip
    for name, some in stages.items():
        kind = ScheduleName.PIPEDREAM if "flow" in name else ScheduleName.ONE_F_ONE_B
        strategy = Strategy(tuple(some), kind, MICROBATCHES)
        write_plan(plan_of(model, strategy, optimizer=optimizer), folder / f"{name}.json")


def run_all(folder, launches):
    """Runs launches on two ranks; gives the losses by their names."""
    (folder / "launches.json").write_text(json.dumps(launches))
    forked(ROOT / "tests/support/group_runs.py", 2, folder)
    return json.loads((folder / "told.json").read_text())


def launched(folder, strategy, keep, resume=None, *, own_loop=False, **how):
    """The losses of a launch on rank 0, and of an own loop on every rank; None elsewhere.

    Args:
        strategy: its name in the folder.
        keep: name of the folder for the checkpoint.
        resume: name of the folder with the checkpoint to go on from.
    """
    asked = {
        "model": folder / "net.onnx", "checkpoint": folder / keep,
        "resume": folder / resume if resume else None, **OPTIONS, "param_groups": GROUPS, **how,
    }  # fmt: skip
    path = folder / f"{strategy}.json"
    if not own_loop:
        report = planner.launch(path, **{"steps": STEPS, "data": data, **asked})
        return None if report is None else report.loss
    with planner.trainer(path, **asked) as trainer:
        given = [[batch(step, m) for m in range(MICROBATCHES)] for step in range(STEPS)]
        whole = [[torch.cat(some) for some in zip(*parts, strict=True)] for parts in given]
        trainer.set_lr(2 * RATE)
        trainer.set_lr(RATE)
        losses = [trainer.step(tuple(one)) for one in whole]
        trainer.save()
    return losses


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), launched)
        sys.exit(0)
