"""Steps of the launcher beside those of PyTorch's own loops, in turn, in the same processes.

    python tests/support/launch_rivals.py alone FOLDER ROUNDS STEPS
    torchrun --nproc-per-node 2 tests/support/launch_rivals.py pipeline FOLDER ROUNDS STEPS

`prepare` writes models and plans into the folder. Rank 0 prints {contender: seconds per step of
each round} as JSON. All contenders begin with the same weights, read the same data and must come to
the same weights. Where gradients are summed, the launcher runs a second time, with the sums behind
the backward.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import planner
from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.options import LossOptions
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.launcher import groups
from planner.launcher.job import prepare as job_of
from planner.launcher.options import Loop
from planner.launcher.rendezvous import ProcessRank
from planner.model.load import load
from planner.profilers.measured import measure
from planner.schedules.orders import default_warmups
from planner.training.trainer import Trainer
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type

ALIKE = 1e-3
LAUNCH, TORCH, BEHIND = "launch", "torch", "launch, sums behind the backward"
RATE, WIDTH, BLOCKS, BATCH, CLASSES = 1e-3, 768, 12, 48, 100
ODD = 1023
"""A width that two devices cannot have halves of."""


class Block(nn.Module):
    """Two linear layers beside a skip."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def residual() -> nn.Sequential:
    """A chain with 57 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def odd() -> nn.Sequential:
    """The same of a width that does not divide."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(ODD) for _ in range(BLOCKS)), nn.Linear(ODD, CLASSES))


def convolutional() -> nn.Sequential:
    """Convolutions with batch normalizations in training."""
    torch.manual_seed(0)
    sizes = (3, 32, 64, 64, 128)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(sizes)
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], CLASSES)
    )


MODELS: Mapping[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "residual": (residual, (BATCH, WIDTH)),
    "odd": (odd, (BATCH, ODD)),
    "convolutional": (convolutional, (8, 3, 32, 32)),
}


@dataclass(frozen=True)
class Duel:
    """A plan and the loop beside it.

    Attributes:
        model: one of `MODELS`.
        cuts: the children of the model at which stages begin.
        widths: replicas of the stages.
        num_microbatches: M.
        zero: level of what lies in parts over all replicas.
    """

    model: str
    cuts: tuple[int, ...]
    widths: tuple[int, ...]
    num_microbatches: int
    zero: int = 0

    @property
    def num_ranks(self) -> int:
        """The number of devices."""
        return sum(self.widths)


DUELS: Mapping[str, Duel] = {
    "alone": Duel("residual", (), (1,), 2),
    "alone, convolutional": Duel("convolutional", (), (1,), 2),
    "pipeline": Duel("residual", (BLOCKS // 2,), (1, 1), 8),
    "replicas": Duel("residual", (), (2,), 2),
    "parameters in parts": Duel("odd", (), (2,), 2, zero=3),
}


def prepare(folder: Path) -> None:
    """Writes models and plans."""
    profiles = {}
    for name, (make, shape) in MODELS.items():
        planner.export(make().train(), torch.randn(shape), folder / f"{name}.onnx", check=False)
        model = load(folder / f"{name}.onnx")
        found = measure(model, model_path=f"{name}.onnx", repetitions=1, budget_s=0.0, cached=False)
        profiles[name] = replace(found, warnings=())
    for name, duel in DUELS.items():
        profile = profiles[duel.model]
        children = [int(path.partition(".")[0]) for path in profile.modules]
        bounds = [0, *(children.index(cut) for cut in duel.cuts), len(children)]
        names = [operator.name for operator in profile.graph.operators]
        warmups = default_warmups(duel.widths, duel.num_microbatches)
        stages, first = [], 0
        for s, width in enumerate(duel.widths):
            inside = tuple(names[bounds[s] : bounds[s + 1]])
            devices = tuple(range(first, first + width))
            one = Stage.whole(inside, devices, warmups[s], False)
            stages.append(replace(one, over=width if duel.zero else 1, zero=duel.zero))
            first += width
        strategy = Strategy(tuple(stages), ScheduleName.ONE_F_ONE_B, duel.num_microbatches)
        topology = cluster([unit_type("cpu")] * first, bandwidth=1e9)
        problem = Problem(profile, topology, **asked(duel.num_microbatches))
        write_plan(planned(problem, strategy), folder / f"{name}.json")


Step = Callable[[], None]


def ours(duel: Duel, path: Path, rank: int) -> Trainer:
    """The launcher's part of a rank."""
    seat = ProcessRank(rank, duel.num_ranks, rank, duel.num_ranks)
    job = job_of(read_plan(path), path, None, seat, (LossOptions(), "cpu"))
    return Trainer(job, Loop(learning_rate=RATE, threads=1), rank)


def rival(duel: Duel, trainer: Trainer, rank: int) -> tuple[nn.Module, Step]:
    """PyTorch's loop on the same data; the module that it trains, and a step."""
    module = MODELS[duel.model][0]().train()
    batches = trainer.batches().by_microbatch
    inputs = [x for batch in batches.values() for x in batch.inputs.values()]
    targets = [y for batch in batches.values() for y in batch.targets.values()]
    if len(duel.widths) > 1:
        return pipelined(duel, module, rank, inputs, targets)
    trained: nn.Module = module
    if duel.zero:
        for block in module:
            fully_shard(block)
        fully_shard(module)
    elif duel.num_ranks > 1:
        trained = DistributedDataParallel(module)
    optimizer = SGD(module.parameters(), lr=RATE)

    def step() -> None:
        for x, y in zip(inputs, targets, strict=True):
            (cross_entropy(trained(x), y) / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, step


def pipelined(
    duel: Duel, module: nn.Sequential, rank: int, inputs: list[Tensor], targets: list[Tensor]
) -> tuple[nn.Module, Step]:
    """torch.distributed.pipelining's schedule on the same chain and cuts."""
    bounds = [0, *duel.cuts, len(module)]
    own = module[bounds[rank] : bounds[rank + 1]]
    stage = PipelineStage(own, rank, duel.num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, duel.num_microbatches, loss_fn=cross_entropy)
    optimizer = SGD(own.parameters(), lr=RATE)
    x = (torch.cat(inputs),) if rank == 0 else ()
    y = {"target": torch.cat(targets)} if rank == duel.num_ranks - 1 else {}

    def step() -> None:
        schedule.step(*x, **y)
        optimizer.step()
        optimizer.zero_grad()

    return module, step


def timed_s(step: Step, count: int, num_ranks: int) -> float:
    """Time per step from when all ranks begin to when all have ended."""
    if num_ranks > 1:
        dist.barrier()
    begun_s = time.perf_counter()
    for _ in range(count):
        step()
    if num_ranks > 1:
        dist.barrier()
    return (time.perf_counter() - begun_s) / count


def difference(trainer: Trainer, module: nn.Module) -> float:
    """The largest difference of a weight, relative to the largest weight of its parameter."""
    weights = {name: whole(one.detach()) for name, one in module.named_parameters()}
    own: Mapping[str, Tensor] = {n: one.detach() for n, one in trainer.part.trained.items()}
    if any(isinstance(one, DTensor) for one in module.parameters()):
        own = trainer.content.state_dict()
    pairs = [(one, weights[name]) for name, one in own.items()]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def whole(parameter: Tensor) -> Tensor:
    """A parameter of which every rank may have a part; all ranks call it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def run(name: str, folder: Path, rounds: int, steps: int, rank: int) -> dict[str, list[float]]:
    """Seconds per step of each round, by contender."""
    duel = DUELS[name]
    trainer = ours(duel, folder / f"{name}.json", rank)
    module, step = rival(duel, trainer, rank)
    contenders: dict[str, Step] = {LAUNCH: lambda: void(trainer.step()), TORCH: step}
    if max(duel.widths) > 1 and not duel.zero:
        late = ours(duel, folder / f"{name}.json", rank)
        late.buckets.follow([])
        contenders[BEHIND] = lambda: void(late.step())
    times_s: dict[str, list[float]] = {who: [] for who in contenders}
    for turn in range(rounds + 1):
        order = list(contenders) if turn % 2 else list(reversed(contenders))
        for who in order:
            took_s = timed_s(contenders[who], steps, duel.num_ranks)
            if turn:  # the first round warms up
                times_s[who].append(took_s)
    apart = difference(trainer, module)
    assert apart < ALIKE, f"the weights of both loops are {apart:.1e} apart"
    return times_s


def void(_: object) -> None:
    """Drops a result."""


def main() -> None:
    """One duel."""
    name, folder, rounds, steps = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    rank = int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    if DUELS[name].num_ranks > 1:
        groups.join_group(rank, DUELS[name].num_ranks)
        groups.join_group = lambda *already: None
    times_s = run(name, folder, rounds, steps, rank)
    if rank == 0:
        print(json.dumps(times_s))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main()
        sys.exit(0)
