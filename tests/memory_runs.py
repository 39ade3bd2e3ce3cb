"""Runs of many plans in one start of torchrun, and what their tensors take beside what the plans
say.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNDER, OVER = 0.98, 1.1

_WORKER = f"""
import json, os, sys
from functools import partial
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from planner.commands.ends import ranks_leave_at_once
from planner.launch.run import launch
from planner.reports.launch import launch_json
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
start, found = dist.init_process_group, {{}}
for path in sorted(Path(sys.argv[1]).glob("*.strategy.json")):
    dist.init_process_group = partial(start, store=dist.PrefixStore(path.name, store))
    report = launch(path, steps=1, track_memory=True)
    if report:
        found[path.name] = launch_json(report)
if found:
    print(json.dumps(found))
with ranks_leave_at_once():
    sys.exit(0)
"""


@dataclass(frozen=True)
class Taken:
    """Bytes of tensors on one rank of a plan."""

    plan: str
    rank: int
    predicted_bytes: int
    live_bytes: int

    @property
    def share(self) -> float:
        """Predicted over live."""
        return self.predicted_bytes / self.live_bytes

    @property
    def right(self) -> bool:
        """Never under by more than 2 %, over by at most 10 %."""
        return UNDER <= self.share <= OVER


def taken(found: Mapping[str, Mapping[str, list[int]]]) -> list[Taken]:
    """What every rank takes.

    Args:
        found: the launcher's JSON by plan.
    """
    return [
        Taken(name, rank, predicted, live)
        for name, one in sorted(found.items())
        for rank, (predicted, live) in enumerate(
            zip(one["predicted_live_bytes"], one["live_bytes"], strict=True)
        )
    ]


def run(folder: Path, ranks: int, timeout_s: float) -> list[Taken]:
    """Runs all plans in a folder, which have equally many ranks and names without spaces."""
    worker = folder / "worker.py"
    worker.write_text(_WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(ranks), worker.name, "."], cwd=folder, capture_output=True, text=True,
        timeout=timeout_s, check=False, env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return taken(json.loads(done.stdout.splitlines()[-1]))
