"""Runs under torchrun: launches the strategies of folders, one after the other.

    torchrun --nproc-per-node 2 -m tests.support.zoo.worker FOLDER ...

Each folder has a strategy.json and the options of its launch in launch.json. Rank 0 leaves the
losses in losses.json; a rank that fails leaves the reason in error-RANK.txt. One start of torchrun
for many networks saves loading torch for each of them.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

import planner
from planner.commands.errors import ranks_leave_at_once
from planner.launcher import groups, rendezvous

LIMIT = timedelta(minutes=5)  # that a rank waits for one that has failed


def launch(folder: Path, rank: str) -> None:
    """One launch; whatever fails is written down, and the next one goes on."""
    os.chdir(folder)
    try:
        options = json.loads(Path("launch.json").read_text())
        report = planner.launch("strategy.json", **options)
        if report is not None:
            Path("losses.json").write_text(json.dumps(report.loss))
    except Exception:
        Path(f"error-{rank}.txt").write_text(traceback.format_exc())
    if dist.is_initialized():
        dist.destroy_process_group()


def main(folders: list[str]) -> None:
    rendezvous.TIMEOUT = groups.TIMEOUT = LIMIT
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # torchrun's
    start = dist.init_process_group
    for folder in folders:
        own = dist.PrefixStore(folder, store)  # or a launch would meet the addresses of the last
        dist.init_process_group = partial(start, store=own)
        launch(Path(folder), os.environ["RANK"])


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(sys.argv[1:])
