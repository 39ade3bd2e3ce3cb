"""Loops of a user by `planner.trainer`, as scripts that torchrun starts.

    torchrun --nproc-per-node 2 tests/support/own_loops.py FOLDER

All loops of `LOOPS` run in one start, one after the other. Rank r writes FOLDER/LOOP.r.pt.
"""

import os
import sys
from pathlib import Path

import torch

import planner
from tests.support import datasets
from tests.support.ranks import under_torchrun

ROOT = Path(__file__).parents[2]
SAMPLES, STEPS, HALF = 16, 6, 3
RATES = (0.1, 0.05, 0.05, 0.2, 0.1, 0.1)
"""Learning rates of the steps, by the user's own schedule."""


def batches(steps=STEPS):
    """Batches of whole steps, other ones in each step."""
    x, classes = datasets.tensors(num_samples=SAMPLES * steps)
    return list(zip(x.split(SAMPLES), classes.split(SAMPLES), strict=True))


def trained(strategy, begin=0, end=STEPS, **how):
    """Losses, state and figures of some steps, each with its own learning rate."""
    given = batches()
    losses = []
    with planner.trainer(strategy, learning_rate=1.0, threads=1, **how) as trainer:
        assert trainer.steps_done == begin
        for step in range(begin, end):
            trainer.set_lr(RATES[step])
            losses.append(trainer.step(given[step]))
        figures = trainer.evaluate(batches(3)[1:])
        state = trainer.state_dict()
        if "checkpoint" in how:
            trainer.save()
    return losses, state, figures


def of_pipeline(folder):
    """Two stages."""
    return trained(folder / "pipeline.json", optimizer="momentum", weight_decay=0.05, clip=1.0)


def of_replicas(folder):
    """A stage on two devices, from the plan and not its file."""
    plan = planner.read_strategy(folder / "replicas.json")
    return trained(plan, model=folder / "net.onnx", optimizer="momentum", weight_decay=0.05,
                   clip=1.0)  # fmt: skip


def resumed(folder):
    """The same on two stages, half of it after a start from a checkpoint, named batches."""
    how = {"optimizer": "momentum", "weight_decay": 0.05, "clip": 1.0}
    first, _, _ = trained(folder / "pipeline.json", 0, HALF, checkpoint=folder / "kept", **how)
    losses, state, figures = trained(
        folder / "replicas.json", HALF, model=folder / "net.onnx", resume=folder / "kept", **how
    )
    return first + losses, state, figures


def refused(folder):
    """What ranks with different batches, rates, or none of what they need are told."""
    said = []
    own = batches()[int(os.environ["RANK"])]
    for tell in (
        lambda one: one.step(own),
        lambda one: (one.set_lr(0.1 * (1 + int(os.environ["RANK"]))), one.step(batches()[0])),
    ):
        trainer = planner.trainer(folder / "pipeline.json", threads=1)
        try:
            tell(trainer)
        except planner.PlannerError as error:
            said.append(str(error))
        trainer.close()
    return said


LOOPS = {"pipeline": of_pipeline, "replicas": of_replicas, "resumed": resumed, "refused": refused}


def run_all(folder):
    """Runs all loops; gives what each of the two ranks has written."""
    under_torchrun(__file__, 2, folder)
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1)]
        for name in LOOPS
    }


if __name__ == "__main__":
    for name, loop in LOOPS.items():
        made = loop(Path(sys.argv[1]))
        torch.save(made, Path(sys.argv[1]) / f"{name}.{os.environ['RANK']}.pt")
