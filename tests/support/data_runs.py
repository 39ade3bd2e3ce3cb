"""Launches whose ranks may read different data, in one start of two ranks.

FOLDER/launches.json has plans, data and options of each launch by name. Rank r writes the losses or
the message of each into FOLDER/r.json.
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
from planner.support.errors import PlannerError
from tests.support.ranks import ROOT, forked

HERE = "tests.support.copied"


def run_all(folder, launches):
    """What each of two ranks has told: losses (None on rank 1) or a message, by name."""
    (folder / "launches.json").write_text(json.dumps(launches))
    forked(ROOT / "tests/support/data_runs.py", 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def launched(folder, plan, data, **options):
    """Losses of a launch; None on rank 1; the message if it is refused."""
    try:
        report = planner.launch(folder / f"{plan}.json", model=folder / "net.onnx",
                                data=f"{HERE}:{data}", **options)  # fmt: skip
    except PlannerError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return str(error)
    return None if report is None else report.loss


def main(folder):
    """Runs every launch, one after the other."""
    torch.set_num_threads(1)
    rank, told = os.environ["RANK"], {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    start = dist.init_process_group
    torch.manual_seed(int(rank))  # as if each rank had drawn before
    for name, options in json.loads((folder / "launches.json").read_text()).items():
        dist.init_process_group = partial(start, store=dist.PrefixStore(name, store))
        told[name] = launched(folder, **options)
        store.set(f"{name} is over on {rank}", b"")
        store.wait([f"{name} is over on {one}" for one in (0, 1)])
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
