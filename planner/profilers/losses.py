"""What the losses of a training step cost. They are no operators of the model, but the stage that
makes an output with a loss computes it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.errors import LaunchError
from planner.graph import Graph
from planner.model.losses import Loss, losses
from planner.operators import synthetic
from planner.operators.criteria import Criterion, criterion
from planner.profilers.efficiencies import Kernel
from planner.profilers.kernels import listed
from planner.profilers.timing import CACHES_BYTES, Stopwatch, quiet
from planner.profiles import LossCost
from planner.support.arrays import Floats

LEAST_RUNS, ENOUGH_S = 5, 0.2
"""A loss is timed so often at least, and until this time is spent."""


def measured_losses(
    graph: Graph, *, device: str, threads: int | None, seed: int
) -> tuple[tuple[LossCost, ...], tuple[str, ...]]:
    """The times of the graph's losses: median of several runs, each on an output that was just made
    and with the caches cleared before, as operators are timed.

    Args:
        graph: with the types that its tensors have while it runs.
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads; None leaves it as it is.
        seed: of outputs and targets.

    Returns:
        The costs, one per loss; and why some are left out, as sentences.
    """
    scratch = torch.zeros(CACHES_BYTES[device.partition(":")[0]] // 4, device=device)
    with quiet(threads):
        return _each(losses(graph), partial(_timed, seed=seed, device=device, scratch=scratch))


def computed_losses(
    graph: Graph, seconds: Callable[[Sequence[Sequence[Kernel]]], Floats]
) -> tuple[tuple[LossCost, ...], tuple[str, ...]]:
    """The same by the kernels that the losses start.

    Args:
        graph: with the types that its tensors have while it runs.
        seconds: the time of each of some passes, given as kernels.
    """
    return _each(losses(graph), partial(_computed, seconds=seconds))


def _each(
    all_losses: Sequence[Loss], cost: Callable[[Loss, Criterion], LossCost]
) -> tuple[tuple[LossCost, ...], tuple[str, ...]]:
    known, unknown = [], []
    for loss in all_losses:
        try:
            known.append(cost(loss, criterion(loss)))
        except LaunchError as error:  # the user's own function is not there, or fails
            unknown.append(f"the time of the loss of {loss.output.name!r} is left out: {error}")
    return tuple(known), tuple(unknown)


def _timed(loss: Loss, compute: Criterion, *, seed: int, device: str, scratch: Tensor) -> LossCost:
    target = None
    if loss.has_target:
        target = synthetic.target(loss, seed=seed, microbatch=0, device=device)
    watch = Stopwatch(device)
    dtype = getattr(torch, loss.output.dtype)
    made = torch.randn(loss.output.shape, dtype=torch.float32, device=device).to(dtype)

    def once() -> tuple[float, float]:
        output = made.detach().requires_grad_()
        scratch.add_(1)
        made.sum()
        forward_s, value = watch.seconds(lambda: compute(output, target))
        backward_s, _ = watch.seconds(value.backward)
        return forward_s, backward_s

    once()
    begin = perf_counter()
    times_s: list[tuple[float, float]] = []
    while len(times_s) < LEAST_RUNS or perf_counter() - begin < ENOUGH_S:
        times_s.append(once())
    forward_s, backward_s = (round(median(side), 9) for side in zip(*times_s, strict=True))
    return LossCost(loss.output.name, forward_s, backward_s)


def _computed(
    loss: Loss,
    compute: Criterion,
    *,
    seconds: Callable[[Sequence[Sequence[Kernel]]], Floats],
) -> LossCost:
    with FakeTensorMode():
        output = torch.empty(loss.output.shape, dtype=getattr(torch, loss.output.dtype))
        output.requires_grad_()
        target = None
        if loss.has_target:
            target = torch.empty(loss.target_shape, dtype=getattr(torch, loss.target_dtype))
        values: list[Tensor] = []
        forward = listed(lambda: values.append(compute(output, target)))
        backward = listed(values[0].backward)
    forward_s, backward_s = (round(float(one), 9) for one in seconds((forward, backward)))
    return LossCost(loss.output.name, forward_s, backward_s)
