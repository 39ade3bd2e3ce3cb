"""PipeDream's rule on a PyTorch module in one process, with a list of all versions of the weights.

    Narayanan et al., PipeDream, SOSP 2019, section 3.2 (1F1B) and 3.3 (weight stashing, vertical
    sync).

Nothing here is the planner's: a stage is a set of names of parameters, a minibatch one forward and
backward pass of the whole module, each stage's parameters being in the version that it has then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

Weights = dict[str, Tensor]
Loss = Callable[[Callable[[Tensor], Tensor], int], Tensor]


@dataclass(frozen=True)
class PipeStage:
    """A stage.

    Attributes:
        names: of its parameters.
        replicas: minibatch m is on replica m mod `replicas`.
        ahead: forwards that a replica runs before its first backward.
    """

    names: tuple[str, ...]
    replicas: int
    ahead: int

    def steps_before(self, minibatch: int) -> int:
        """The steps that the stage has made when a replica begins the forward of a minibatch."""
        turn = minibatch // self.replicas
        steps, forwards = 0, self.ahead  # forwards 0 .. ahead - 1 come before any step
        while forwards <= turn:  # a backward with its step, and a forward, in turn
            steps += 1
            forwards += 1
        return steps


class Replay:
    """Trains a module minibatch after minibatch, by PipeDream's rule.

    Attributes:
        losses: of each minibatch.
        used: of each minibatch, the version of each stage.

    Args:
        module: trained in place.
        stages: front to back; together they have all parameters.
        optimizer: makes one for the parameters of a stage.
        loss_of: the loss of a minibatch, from a function that stands for the module, and the number
            of the minibatch.
        vertical_sync: whether a minibatch takes the version of the first stage along.
        rate: the learning rate of a step, by the number of the last minibatch before it; None
            leaves it to the optimizers.
    """

    def __init__(
        self, module: nn.Module, stages: Sequence[PipeStage],
        optimizer: Callable[[list[Tensor]], Optimizer], loss_of: Loss, *,
        vertical_sync: bool = False, rate: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        self._module, self._stages, self._loss_of = module, stages, loss_of
        self._held = dict(module.named_parameters())
        assert sorted(self._held) == sorted(name for one in stages for name in one.names)
        self._optimizers = [optimizer([self._held[n] for n in one.names]) for one in stages]
        self._vertical_sync, self._rate = vertical_sync, rate
        self.losses: list[float] = []
        self.used: list[list[int]] = []

    def flow(self, count: int) -> None:
        """Trains some minibatches; before and after them nothing is in flight."""
        versions: list[list[Weights]] = [[self._now(one)] for one in self._stages]
        waiting: list[list[Weights]] = [[] for _ in self._stages]  # gradients of a round
        first = len(self.losses)
        for m in range(count):
            numbers = self._numbers(m)
            chosen: Weights = {}
            for s, number in enumerate(numbers):
                chosen |= {n: w.clone().requires_grad_() for n, w in versions[s][number].items()}

            def run(x: Tensor, chosen: Weights = chosen) -> Tensor:
                out: Tensor = functional_call(self._module, chosen, x)
                return out

            loss = self._loss_of(run, first + m)
            gradients = dict(
                zip(chosen, torch.autograd.grad(loss, [*chosen.values()]), strict=True)
            )
            self.losses.append(loss.item())
            self.used.append(numbers)
            for s, stage in enumerate(self._stages):
                waiting[s].append({name: gradients[name] for name in stage.names})
                if len(waiting[s]) == stage.replicas:
                    self._step(s, waiting[s], first + m)
                    waiting[s].clear()
                    versions[s].append(self._now(stage))
        assert not any(waiting)

    def _numbers(self, m: int) -> list[int]:
        """The version that a minibatch of a flow uses in each stage."""
        newest = [one.steps_before(m) for one in self._stages]
        if not self._vertical_sync:
            return newest
        seen = newest[0] * self._stages[0].replicas  # minibatches in the version it enters with
        return [min(seen // one.replicas, n) for one, n in zip(self._stages, newest, strict=True)]

    def _step(self, s: int, rounds: list[Weights], last: int) -> None:
        """A step with the mean of the gradients of a round."""
        for name in self._stages[s].names:
            self._held[name].grad = sum(one[name] for one in rounds) / len(rounds)
        for group in self._optimizers[s].param_groups if self._rate else ():
            group["lr"] = self._rate(last)
        self._optimizers[s].step()

    def _now(self, stage: PipeStage) -> Weights:
        return {name: self._held[name].detach().clone() for name in stage.names}


# The parameters of each stage where the operators of `mode_runs.net` are cut into equally many.
NET_CUTS = {
    1: [("conv1", "bn1", "conv2", "bn2", "fc")],
    2: [("conv1", "bn1"), ("conv2", "bn2", "fc")],
    3: [("conv1", "bn1"), ("conv2", "bn2"), ("fc",)],
}


def net_stages(module: nn.Module, widths: Sequence[int], ahead: Sequence[int]) -> list[PipeStage]:
    """The stages of a module of `mode_runs.net`, whose normalizations become those of its file,
    where attributes are float32.
    """
    for norm in (module.bn1, module.bn2):
        norm.eps = float(np.float32(norm.eps))
    own = [
        tuple(name for name, _ in module.named_parameters() if name.partition(".")[0] in part)
        for part in NET_CUTS[len(widths)]
    ]
    return [PipeStage(*one) for one in zip(own, widths, ahead, strict=True)]
