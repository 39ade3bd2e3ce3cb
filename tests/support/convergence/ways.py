"""The ways in which `planner launch` trains a task: plans for two devices, and their launches."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import planner
from tests.support.convergence import samples
from tests.support.convergence.curves import Curves, of_log
from tests.support.convergence.networks import TASKS, Task
from tests.support.convergence.samples import MICROBATCH, NUM_MICROBATCHES, STEPS_PER_EPOCH
from tests.support.ranks import ROOT, forked
from tests.support.zoo.pipeline import middle

CLI = ROOT / "cli.py"
PAIR = """
format: planner-topology/1
name: pair
device: cpu
levels:
  - {name: cpu, count: 2, bandwidth: 100 GB/s, latency: 0.1 us}
"""
"""Two devices with links so fast that a placement pays for networks as small as these."""


@dataclass(frozen=True)
class Way:
    """A kind of plan.

    Attributes:
        solver: that makes it.
        schedule: of its microbatches.
        num_ranks: devices, all of which it has to use.
    """

    solver: str
    schedule: str = "1f1b"
    num_ranks: int = 2

    @property
    def is_synchronous(self) -> bool:
        """Whether all microbatches of a step see the same weights."""
        return self.schedule != "pipedream"


WAYS: Mapping[str, Way] = {
    "data-parallel": Way("data-parallel"),
    "pipeline": Way("manual"),
    "placement": Way("netsplit"),
    "pipedream": Way("manual", "pipedream"),
}


def exported(task: str, folder: Path) -> Path:
    """The module of a task as an ONNX file for one microbatch."""
    x = next(iter(TASKS[task].batches()))[0][:MICROBATCH]
    path = folder / f"{task}.onnx"
    planner.export(TASKS[task].module(), x, path)
    return path


def planned(task: str, model: Path, ways: Mapping[str, Way] = WAYS) -> dict[str, Path]:
    """The strategies of some ways, beside the model."""
    profile = planner.profile(model, repetitions=1, budget_s=0.0, cache=False, contention=False)
    topology = model.parent / "pair.yaml"
    topology.write_text(PAIR)
    paths = {}
    for name, way in ways.items():
        cuts = {"cuts": (middle(profile.graph),)} if way.solver == "manual" else {}
        training = planner.Training(
            microbatches=NUM_MICROBATCHES, optimizer=TASKS[task].optimizer, schedule=way.schedule
        )
        plan = planner.solve(
            profile, gpus=way.num_ranks, topology=topology, training=training,
            solvers=[way.solver], search=planner.Search(switches=planner.own_options(cuts)),
        ).plan  # fmt: skip
        assert plan is not None and len(plan.ranks) == way.num_ranks, f"{task}, {name}: {plan}"
        paths[name] = model.parent / f"{name}.json"
        planner.write_strategy(plan, paths[name], model=model)
    return paths


def by_nproc(num_ranks: int, *options: str) -> None:
    """Runs `planner launch` with options, which starts its ranks itself."""
    command = [sys.executable, str(CLI), *options, "--nproc", str(num_ranks)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def by_forks(num_ranks: int, *options: str) -> None:
    """The same on ranks that are forked from a process that has torch already."""
    forked(CLI, num_ranks, *options)


def launched(
    task: Task,
    way: Way,
    strategy: Path,
    num_epochs: int,
    start: Callable[..., None] = by_nproc,
) -> Curves:
    """The curves of `planner launch`.

    Args:
        start: runs the command on a number of ranks.
    """
    log = strategy.with_suffix(".log")
    # An asynchronous training does a step for each microbatch.
    rate = task.learning_rate / (1 if way.is_synchronous else NUM_MICROBATCHES)
    start(
        way.num_ranks, "launch", str(strategy),
        "--data", f"{samples.__name__}:{task.trained}", "--epochs", str(num_epochs),
        "--eval-data", f"{samples.__name__}:{task.judged}", "--eval-every", str(STEPS_PER_EPOCH),
        "--lr", str(rate), "--lr-schedule", "cosine", "--log-file", str(log),
    )  # fmt: skip
    return of_log(log)
