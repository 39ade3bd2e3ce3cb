"""Launches whose passes take given times, whatever else the machine does: each one sleeps until its
time is over. So the rhythm of a schedule can be measured on a few cores.

    torchrun --nproc-per-node 3 tests/support/paced_runs.py FOLDER STEPS

runs every `*.strategy.json` of a folder and prints {name: report of the launch} as JSON. The times
of a plan's stages are those of its prediction.
"""

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import planner
from planner.artefacts.files import read_plan
from planner.commands.errors import ranks_leave_at_once
from planner.launcher.device_part import DevicePart
from planner.reports.launch import launch_json
from planner.training import trainer
from tests.support.ranks import under_torchrun

ROOT = Path(__file__).parents[2]


def paced(profile, bounds, times_s):
    """The profile with given times of stages.

    Args:
        bounds: where each stage begins in the order of the operators, and the end.
        times_s: forward and backward of each stage.
    """
    operators = [replace(one, forward_s=0.0, backward_s=0.0) for one in profile.operators]
    for at, (forward_s, backward_s) in zip(bounds, times_s, strict=False):
        operators[at] = replace(operators[at], forward_s=forward_s, backward_s=backward_s)
    return replace(profile, operators=tuple(operators))


def lasting(time_s, call):
    """The call, which takes some time. It sleeps first, because what a pass makes is there at its
    end only; how long, it knows from the call before.
    """
    took_s = [0.0]

    def slow(*given):
        time.sleep(max(0.0, time_s - took_s[-1]))
        begun_s = time.monotonic()
        result = call(*given)
        took_s.append(time.monotonic() - begun_s)
        return result

    return slow


def slowed(part: DevicePart, plan) -> DevicePart:
    """The stages of a device with the times that were predicted."""
    for s, stage in part.stages.items():
        times = plan.prediction.stages[s]
        stage.forward = lasting(times.forward_s, stage.forward)
        stage.backward = lasting(times.backward_s, stage.backward)
    return part


def run_all(folder, num_ranks, steps):
    """The reports of all strategies in a folder, by name, from one start of torchrun."""
    printed = under_torchrun(__file__, num_ranks, folder, steps, timeout_s=300)
    return json.loads(printed.splitlines()[-1])


def main(folder, steps):
    """Runs every strategy of a folder in the ranks that there are."""
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    start, make_part, found = dist.init_process_group, trainer.make_part, {}
    for path in sorted(folder.glob("*.strategy.json")):
        plan = read_plan(path)
        trainer.make_part = lambda *given, plan=plan: slowed(make_part(*given), plan)
        dist.init_process_group = partial(start, store=dist.PrefixStore(path.name, store))
        report = planner.launch(path, steps=steps, learning_rate=1e-3)
        if report is not None:
            found[path.name.partition(".")[0]] = launch_json(report)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), int(sys.argv[2]))
        sys.exit(0)
