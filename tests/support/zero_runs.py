"""A ZeRO-3 plan that is trained, saved, and gone on from, on four ranks.

    torchrun --nproc-per-node 4 tests/support/zero_runs.py FOLDER

Rank r writes FOLDER/r.pt: the memory of tensors at the peak of going on, in bytes; and what
`state_dict` gives before and after.
"""

import os
import sys
from pathlib import Path

import torch

import planner
from planner.launcher.device_part import staying
from planner.profilers.storages import watching
from planner.training.trainer import Trainer
from tests.support.split_models import _FLOAT, Net

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, WIDTH, LAYERS, RANKS = 4, 2, 64, 8, 4
"""Of a model whose parameters take more memory than all else."""


def wide(path):
    """Products one after the other."""
    net, h = Net(), "x"
    for i in range(LAYERS):
        h = net.add("MatMul", h, net.weight(f"w{i}", WIDTH, WIDTH))
    return net.save(path, ((BATCH, LENGTH, WIDTH), _FLOAT), (h, (BATCH, LENGTH, WIDTH)))


def batch():
    """Of a whole step."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(2 * BATCH, LENGTH, WIDTH, generator=chance, dtype=torch.float64)
    return x, torch.randint(WIDTH, (2 * BATCH, LENGTH), generator=chance)


def main(folder):
    """Trains for a step, saves, and goes on; memory is watched while the checkpoint is read."""
    usual, peaks = Trainer.resume, []

    def resume(trainer, start):
        with watching("cpu", staying(trainer.part, trainer.buckets, trainer.optimizer)) as watch:
            usual(trainer, start)
        peaks.append(watch.peak_bytes())

    Trainer.resume = resume
    how = {"model": folder / "net.onnx", "threads": 1}
    with planner.trainer(folder / "zero.json", checkpoint=folder / "kept", **how) as trainer:
        trainer.step(batch())
        before = trainer.state_dict()
        trainer.save()
    with planner.trainer(folder / "zero.json", resume=folder / "kept", **how) as trainer:
        after = trainer.state_dict()
        trainer.step(batch())
    (peak,) = peaks
    torch.save((peak, before, after), folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
