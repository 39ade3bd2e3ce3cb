"""PyTorch's own training of a task, over the module itself: what a launch is compared with.

    torchrun --nproc-per-node 2 -m tests.support.convergence.rivals TASK RIVAL EPOCHS FOLDER

FOLDER has the exported file, whose Dropout operators name the numbers that the launcher draws.
Rank 0 writes FOLDER/RIVAL.json.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data.distributed import DistributedSampler

import planner
from tests.support.convergence.curves import Curves, read_curves
from tests.support.convergence.networks import TASKS, Task
from tests.support.convergence.samples import NUM_MICROBATCHES, STEPS_PER_EPOCH
from tests.support.zoo import draws

ROOT = Path(__file__).parents[3]
SEED = 0
"""Of a launch, unless --seed says otherwise."""

Feeding = Callable[[int, int], AbstractContextManager[object]]
"""A context for the forward pass of (step, microbatch)."""


@dataclass(frozen=True)
class Rival:
    """A loop of PyTorch.

    Attributes:
        num_ranks: 1 for a plain loop; several train by DistributedDataParallel on gloo.
        num_parts: the batch of a step is cut into equal parts, each of which is a forward pass with
            the batch statistics of its own; part m is of rank m mod num_ranks.
        fed: whether Dropout takes the numbers that a launch draws for a microbatch.
    """

    num_ranks: int
    num_parts: int = NUM_MICROBATCHES
    fed: bool = True


RIVALS: Mapping[str, Rival] = {
    "loop": Rival(1),
    "ddp": Rival(2),
    "ddp-usual": Rival(2, num_parts=2, fed=False),
}


def train(task: Task, rival: Rival, num_epochs: int, feeding: Feeding, rank: int = 0) -> Curves:
    """A training on one of the ranks; the figures of the evaluation are those of its own module."""
    module = task.module().train()
    trained = DistributedDataParallel(module) if rival.num_ranks > 1 else module
    optimizer = task.by_torch(module.parameters(), lr=task.learning_rate)
    rate = CosineAnnealingLR(optimizer, num_epochs * STEPS_PER_EPOCH)
    loader, curves = task.batches(), Curves()
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in range(num_epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            feed = partial(feeding, len(curves.losses))
            own = range(rank, rival.num_parts, rival.num_ranks)
            parts = [(m, x.chunk(rival.num_parts)[m], y.chunk(rival.num_parts)[m]) for m in own]
            curves.losses.append(_mean(_gradients(trained, parts, feed), rival.num_ranks))
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
        curves.judge(*judged(module, task))
    return curves


def _gradients(
    trained: nn.Module,
    parts: list[tuple[int, Tensor, Tensor]],
    feed: Callable[[int], AbstractContextManager[object]],
) -> float:
    """Accumulates the gradients of the mean loss of some parts; gives that."""
    total = 0.0
    for m, x, y in parts:
        with _summing(trained, is_last=m == parts[-1][0]):
            with feed(m):
                output = trained(x)
            loss = cross_entropy(output.flatten(0, -2), y.flatten()) / len(parts)
            loss.backward()
        total += loss.item()
    return total


def _summing(trained: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """DistributedDataParallel sums gradients over ranks in the last backward pass only."""
    if isinstance(trained, DistributedDataParallel) and not is_last:
        return trained.no_sync()
    return nullcontext()


def _mean(loss: float, num_ranks: int) -> float:
    """Over all ranks."""
    if num_ranks == 1:
        return loss
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / num_ranks


def judged(module: nn.Module, task: Task) -> tuple[float, float]:
    """Loss and accuracy of a module in evaluation mode."""
    x, y = task.judge().tensors
    module.eval()
    with torch.no_grad():
        output = module(x).flatten(0, -2)
    module.train()
    right = (output.argmax(1) == y.flatten()).double().mean()
    return cross_entropy(output, y.flatten()).item(), right.item()


def feeding_of(task: Task, rival: Rival, model_path: Path) -> Feeding:
    """What the forward passes of a rival draw."""
    if not (task.draws and rival.fed):
        return lambda step, microbatch: nullcontext()
    return partial(draws.fed, planner.read_model(model_path), SEED)


def trained_by(rival: str, task: str, num_epochs: int, folder: Path) -> Curves:
    """The curves of a rival in processes of its own."""
    count = str(RIVALS[rival].num_ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count,
        "-m", __name__, task, rival, str(num_epochs), str(folder),
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return read_curves(folder / f"{rival}.json")


def main(task: str, name: str, num_epochs: int, folder: Path) -> None:
    """One rank of a rival."""
    torch.set_num_threads(1)
    rival, rank = RIVALS[name], int(os.environ["RANK"])
    if rival.num_ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1 + rank)
    feeding = feeding_of(TASKS[task], rival, folder / f"{task}.onnx")
    curves = train(TASKS[task], rival, num_epochs, feeding, rank)
    assert all(map(math.isfinite, curves.losses))
    if rank == 0:
        curves.write(folder / f"{name}.json")
    if rival.num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
