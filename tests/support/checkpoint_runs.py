"""Launches with checkpoints, one after the other in one start of torchrun.

    torchrun --nproc-per-node 3 tests/support/checkpoint_runs.py FOLDER

FOLDER/cases.json has the cases by name: strategy, steps, every, folder and resume, the last two
from FOLDER. The losses of each come into FOLDER/losses.json.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import planner
from planner.commands.errors import ranks_leave_at_once
from planner.training.checkpoints.files import whole_tensors
from planner.training.checkpoints.folder import find


def tensors_of(path):
    """All tensors of a checkpoint, but the generators' states, by name."""
    checkpoint = find(path)
    return whole_tensors(
        checkpoint, [name for name in checkpoint.record.tensors if "random/" not in name]
    )


def main(folder):
    """Runs every case in the ranks that there are; all wait for the last one's files."""
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    start = dist.init_process_group
    losses = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        dist.init_process_group = partial(start, store=dist.PrefixStore(name, store))
        resume = case["resume"] and folder / case["resume"]
        report = planner.launch(
            Path(case["strategy"]), steps=case["steps"], learning_rate=0.1,
            checkpoint=folder / case["folder"], checkpoint_every=case["every"], resume=resume,
        )  # fmt: skip
        if report is not None:
            losses[name] = report.loss
        store.set(f"{name} is over on {os.environ['RANK']}", b"")
        store.wait([f"{name} is over on {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
    if os.environ["RANK"] == "0":
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
