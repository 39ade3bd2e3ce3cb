"""What the losses of a training step cost. They are no operators of the model, but the stage that
makes an output with a loss computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.artefacts.graph import Graph
from planner.artefacts.losses import Loss, losses
from planner.artefacts.profile import LossCost
from planner.operators import synthetic
from planner.operators.losses import Criterion, criterion
from planner.profilers.kernels import listed
from planner.profilers.roofline.times import PassKernels
from planner.profilers.timing import Stopwatch, quiet, timed_loss_s
from planner.support.errors import LaunchError
from planner.support.repeat import repeat

LEAST_RUNS, ENOUGH_S = 5, 0.2
"""A loss is timed so often at least, and until this time is spent."""


@dataclass(frozen=True, slots=True)
class RunnableLoss:
    """A loss with a target.

    Attributes:
        output: the output that it is computed from.
        run: computes it from that output.
        missing: why something else stands for it, as a sentence; "" where it is the loss itself.
    """

    output: str
    run: Callable[[Tensor], Tensor]
    missing: str


def runnable_losses(graph: Graph, *, device: str, seed: int) -> tuple[RunnableLoss, ...]:
    """The graph's losses. A sum stands for a user's function that is not there, or fails.

    Args:
        graph: with the types that its tensors have while it runs.
        device: "cpu", "cuda" or "cuda:N".
        seed: of targets.
    """
    return tuple(_runnable(loss, device, seed) for loss in losses(graph))


def _runnable(loss: Loss, device: str, seed: int) -> RunnableLoss:
    target = None
    if loss.has_target:
        target = synthetic.target(loss, seed=seed, microbatch=0, device=device)
    try:
        compute = criterion(loss)
        if loss.is_users:
            compute(_made(loss, device), target)
    except LaunchError as error:
        return RunnableLoss(loss.output.name, torch.sum, _left_out(loss, error))
    return RunnableLoss(loss.output.name, lambda output: compute(output, target).value, "")


def _left_out(loss: Loss, error: LaunchError) -> str:
    return f"the time of the loss of {loss.output.name!r} is left out: {error}"


def _made(loss: Loss, device: str) -> Tensor:
    """An output of random numbers."""
    dtype = getattr(torch, loss.output.dtype)
    made = torch.randn(loss.output.shape, dtype=torch.float32, device=device).to(dtype)
    return made.requires_grad_()


def measured_losses(
    graph: Graph, *, device: str, threads: int | None, seed: int
) -> tuple[tuple[LossCost, ...], tuple[str, ...]]:
    """The times of the graph's losses alone: median of several runs, each on an output that was
    just made and with the caches cleared before, as operators are timed.

    Args:
        graph: with the types that its tensors have while it runs.
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads; None leaves it as it is.
        seed: of targets.

    Returns:
        The costs, one per loss; and why some are left out, as sentences.
    """
    known = runnable_losses(graph, device=device, seed=seed)
    watch = Stopwatch(device)
    with quiet(threads):
        costs = tuple(
            _timed(loss, one.run, watch)
            for loss, one in zip(losses(graph), known, strict=True)
            if not one.missing
        )
    return costs, tuple(one.missing for one in known if one.missing)


def _timed(loss: Loss, compute: Callable[[Tensor], Tensor], watch: Stopwatch) -> LossCost:
    made = _made(loss, watch.device)

    def once() -> tuple[float, ...]:
        output = made.detach().requires_grad_()
        watch.clear_caches([output])
        return timed_loss_s(lambda: compute(output), output, watch)[0]

    times_s = repeat(once, least=LEAST_RUNS, budget_s=ENOUGH_S, warm_ups=1)
    each_s = (round(median(side), 9) for side in zip(*times_s, strict=True))
    return LossCost(loss.output.name, *each_s)


def computed_losses(graph: Graph) -> tuple[dict[str, PassKernels], tuple[str, ...]]:
    """The kernels that the graph's losses start.

    Args:
        graph: with the types that its tensors have while it runs.

    Returns:
        The kernels by output, and why some losses are left out, as sentences.
    """
    known, unknown = {}, []
    for loss in losses(graph):
        try:
            known[loss.output.name] = _kernels(loss, criterion(loss))
        except LaunchError as error:  # the user's own function is not there, or fails
            unknown.append(_left_out(loss, error))
    return known, tuple(unknown)


def _kernels(loss: Loss, compute: Criterion) -> PassKernels:
    with FakeTensorMode():
        output = torch.empty(loss.output.shape, dtype=getattr(torch, loss.output.dtype))
        output.requires_grad_()
        target = None
        if loss.has_target:
            target = torch.empty(loss.target_shape, dtype=getattr(torch, loss.target_dtype))
        values: list[Tensor] = []
        forward = listed(lambda: values.append(compute(output, target).value))
        return PassKernels(forward, listed(values[0].backward))
