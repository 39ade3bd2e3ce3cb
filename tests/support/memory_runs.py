"""Runs of many plans on ranks that are forked once: peak memory, measured and predicted."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from planner.launcher.stage import StageModule
from planner.launcher.transfers import Channel, CompletionThread
from tests.support.ranks import forked

ROOT = Path(__file__).parents[2]
UNDER, OVER = 0.98, 1.1
TRANSFER_S, FORWARD_S = 0.2, 0.4  # of slow links, and before forwards of a rank that has them

_WORKER = f"""
import json, os, sys
from functools import partial
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from planner.commands.errors import ranks_leave_at_once
from planner import launch
from planner.reports.launch import launch_json
from tests.support.memory_runs import SlowLinks, slow_down
if len(sys.argv) > 3:
    slow_down(int(os.environ["RANK"]), SlowLinks(**json.loads(sys.argv[3])))
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
start, found = dist.init_process_group, {{}}
for path in sorted(Path(sys.argv[1]).glob("*.strategy.json")):
    dist.init_process_group = partial(start, store=dist.PrefixStore(path.name, store))
    report = launch(path, steps=int(sys.argv[2]), track_memory=True)
    if report:
        found[path.name] = launch_json(report)
if found:
    print(json.dumps(found))
with ranks_leave_at_once():
    sys.exit(0)
"""


@dataclass(frozen=True)
class RankPeak:
    """Peak memory of tensors on one rank of a plan."""

    plan: str
    rank: int
    predicted_bytes: int
    live_bytes: int

    @property
    def share(self) -> float:
        """Predicted over live bytes."""
        return self.predicted_bytes / self.live_bytes

    @property
    def right(self) -> bool:
        """Whether the prediction is at most 2 % too low or 10 % too high."""
        return UNDER <= self.share <= OVER


def peaks_of(reports: Mapping[str, Mapping[str, list[int]]]) -> list[RankPeak]:
    """The peak memory of every rank.

    Args:
        reports: the launcher's JSON by plan.
    """
    return [
        RankPeak(name, rank, predicted, live)
        for name, one in sorted(reports.items())
        for rank, (predicted, live) in enumerate(
            zip(one["predicted_live_bytes"], one["live_bytes"], strict=True)
        )
    ]


@dataclass(frozen=True)
class SlowLinks:
    """A rank whose links are slow in one direction, so that its transfers wait.

    Attributes:
        rank: the rank.
        back: whether the links to the ranks before it are slow, or those to the ranks behind it.
        waits: whether its forwards start late too, so that the ranks behind it finish a microbatch
            while it sends the next one.
    """

    rank: int
    back: bool
    waits: bool


@dataclass(frozen=True)
class _LateWork:
    work: Any

    def wait(self) -> None:
        self.work.wait()
        time.sleep(TRANSFER_S)


class _LateCompletion(CompletionThread):
    """Completions at both ends of a slow link, so that they agree on when a tensor has come."""

    def watch(self, work: Any, buffer: Tensor) -> Future[float]:
        return super().watch(_LateWork(work), buffer)


def slow_down(rank: int, late: SlowLinks) -> None:
    """Slows the links of one rank in this process, at either end, and that rank's forwards."""
    connect, forward = Channel.__init__, StageModule.forward

    def connect_slowly(self: Channel, peer: int, group: object, sends: bool) -> None:
        connect(self, peer, group, sends)
        source, target = (rank, peer) if sends else (peer, rank)
        if source == late.rank and (target < source) == late.back:
            self._completion = _LateCompletion()

    def forward_late(*args: Any) -> Any:
        time.sleep(FORWARD_S)
        return forward(*args)

    Channel.__init__ = connect_slowly
    if rank == late.rank and late.waits:
        StageModule.forward = forward_late


def run(
    folder: Path, ranks: int, timeout_s: float, late: SlowLinks | None = None
) -> list[RankPeak]:
    """Runs all plans in a folder. They have the same number of ranks and names without spaces.

    Args:
        folder: the folder with strategies and models.
        ranks: number of ranks.
        timeout_s: limit for all runs together.
        late: a rank with slow links.
    """
    slowly = [] if late is None else [json.dumps(asdict(late))]
    return peaks_of(reports(folder, ranks, 1, *slowly, timeout_s=timeout_s))


def reports(
    folder: Path, ranks: int, steps: int, *slowly: str, timeout_s: float
) -> dict[str, dict[str, Any]]:
    """The launcher's JSON of all plans in a folder, by plan.

    Args:
        steps: of each.
        slowly: a rank with slow links, as JSON.
    """
    worker = folder / "worker.py"
    worker.write_text(_WORKER)
    printed = forked(worker, ranks, ".", str(steps), *slowly, folder=folder, timeout_s=timeout_s)
    found: dict[str, dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found
