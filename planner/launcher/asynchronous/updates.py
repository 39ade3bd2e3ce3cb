"""The optimizer's steps of one stage, each after one minibatch of every replica.

No rank waits for another one here but for the sums of a stage's own gradients. So nothing is
decided together: gradients are not clipped, and `--nan stop` is decided by each stage for itself.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.launcher.asynchronous.versions import Versions
from planner.launcher.gradients import GradientBuffers
from planner.launcher.options import NanRule
from planner.launcher.updates import LossScale, Rules, Update
from planner.support.errors import LaunchError


class StageUpdates:
    """Makes the versions of one stage's parameters.

    Attributes:
        last: what became of the last step of the training.
        scale: of the losses, which is always 1.
        skipped: number of steps that left the weights as they were: none.

    Args:
        optimizer: of the stage's parameters; None if it trains none.
        gradients: of the same.
        versions: of the same.
        num_replicas: R, whose gradients of one minibatch each have been summed before a step.
        rules: how; neither `clip` nor `NanRule.SKIP`.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        gradients: GradientBuffers,
        versions: Versions,
        num_replicas: int,
        rules: Rules,
    ) -> None:
        self._optimizer, self._gradients, self._versions = optimizer, gradients, versions
        self._num_replicas, self._rules = num_replicas, rules
        self._stops = rules.nan == NanRule.STOP
        self._step, self._loss = -1, 0.0
        self.last = Update(rules.learning_rate)
        self.scale, self.skipped = LossScale(), 0

    def begin(self, step: int) -> None:
        """The updates that follow are of a step of the training.

        Args:
            step: its index.
        """
        if step == self._step:
            return
        self._step = step
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            group["lr"] = self.rate_at(step)

    @property
    def rate(self) -> float:
        """The learning rate before its schedule."""
        return self._rules.learning_rate

    def set_rate(self, learning_rate: float) -> None:
        """Changes the learning rate, before its schedule, from the next step on."""
        self._rules = replace(self._rules, learning_rate=learning_rate)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step of the training."""
        return self._rules.learning_rate * self._rules.factor(step)

    def lost(self, loss: float) -> None:
        """A minibatch has given a loss."""
        self._loss = loss

    def step(self) -> None:
        """Makes the next version.

        Raises:
            LaunchError: if something is not finite and the rule is to stop; on this rank.
        """
        if self._num_replicas > 1:
            for buffer in self._gradients.everything():
                buffer.div_(self._num_replicas)
        if self._stops:
            self._check()
        if self._optimizer is not None:
            self._versions.step(self._optimizer.step)

    def _check(self) -> None:
        held: list[Tensor] = [*self._gradients.everything()]
        norm = float(torch.nn.utils.get_total_norm(held)) if held else 0.0
        if not (math.isfinite(norm) and math.isfinite(self._loss)):
            raise LaunchError(
                f"step {self._step}: expected a finite loss and finite gradients, got a loss of"
                f" {self._loss} and gradients of norm {norm} (--nan stop); lower --lr, or look at"
                " the data of this step"
            )
