"""Launches of split stages, one after the other in one start of torchrun.

    torchrun --nproc-per-node 2 tests/support/split_launches.py FOLDER

FOLDER/launches.json has the options of each launch by name; strategies and folders are from FOLDER.
Losses and evaluations of each come into FOLDER/told.json.
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

EVALS = """
import torch
from torch.utils.data import TensorDataset

SAMPLES = 10


def data():
    chance = torch.Generator().manual_seed(5)
    targets = torch.randint(24, (SAMPLES, 8), generator=chance)
    targets[3, 2:] = -100
    return TensorDataset(torch.randint(24, (SAMPLES, 8), generator=chance), targets)
"""


def launched(folder, strategy, keep, resume=None, **options):
    """Losses and evaluations on rank 0; None elsewhere."""
    resume = None if resume is None else folder / resume
    every = options.pop("every", None)
    kept = {"checkpoint": folder / keep, "checkpoint_every": every, "resume": resume}
    report = planner.launch(folder / strategy, **kept, **options)
    if report is None:
        return None
    return {
        "loss": report.loss,
        "evaluations": [[one.step, dict(one.figures)] for one in report.evaluations],
        "notes": report.notes,
    }


def main(folder, launched=launched):
    """Runs every launch in the ranks that there are; all wait for the last one's files."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    start = dist.init_process_group
    told = {}
    for name, options in json.loads((folder / "launches.json").read_text()).items():
        dist.init_process_group = partial(start, store=dist.PrefixStore(name, store))
        told[name] = launched(folder, **options)
        store.set(f"{name} is over on {os.environ['RANK']}", b"")
        store.wait([f"{name} is over on {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
