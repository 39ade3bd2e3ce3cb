"""`OptimizerStep`: the optimizer's step, and everything that is decided before it.

The norm of a model's gradients is known to no rank alone, nor is whether all of them are finite. So
ranks add up two numbers: the squares of the gradients that each of them owns, and its share of the
loss. A parameter that several devices hold belongs to the first of them; by then its gradients are
already summed. Without clipping, a loss scale and a rule for NaN nothing is exchanged, unless the
user's loss may say how much it counts: then its counts are, and gradients and loss are divided by
their sum. Under an asynchronous schedule each stage steps for itself, and decides alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from planner.artefacts.options import Optimizer as OptimizerName
from planner.launcher.gradients import GradientBuckets
from planner.launcher.master_copies import MasterCopies
from planner.launcher.mesh.shards import OptimizerShards
from planner.launcher.options import NanRule
from planner.launcher.rates import Factor
from planner.launcher.trained_groups import FACTOR
from planner.launcher.versions import Weights
from planner.support.errors import LaunchError

DEFAULT_LEARNING_RATES: Mapping[OptimizerName, float] = {
    OptimizerName.SGD: 0.01, OptimizerName.MOMENTUM: 0.01,
    OptimizerName.ADAM: 1e-3, OptimizerName.ADAMW: 1e-3,
}  # fmt: skip
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Of the loss scale, as torch.amp.GradScaler has them."""
TINY = 1e-6
"""That torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass(slots=True)
class LossScale:
    """The factor of losses that keeps gradients within the range of float16.

    Attributes:
        value: the factor in the next backward pass; 1 leaves losses as they are.
        is_dynamic: whether it grows and shrinks.
        good_steps: steps since it last changed.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    def learn(self, *, finite: bool) -> None:
        """Shrinks after gradients that are not finite, grows after many that are."""
        if not finite:
            self.value *= BACKOFF
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value *= GROWTH
            self.good_steps = 0


def loss_scale(dtype: str | None) -> LossScale:
    """The loss scale of a training that autocast computes in a type; None is the model's own."""
    return LossScale(FIRST_SCALE, is_dynamic=True) if dtype == "float16" else LossScale()


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """How a step is done.

    Attributes:
        learning_rate: before its schedule.
        factor: of the learning rate, by step.
        clip: the largest norm of all gradients; None for any.
        nan: what is done about losses and gradients that are not finite; None goes on.
        reports_loss: whether the loss of all ranks is computed after each step.
    """

    learning_rate: float
    factor: Factor
    clip: float | None = None
    nan: str | None = None
    reports_loss: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step, equal on all ranks.

    Attributes:
        rate: the learning rate.
        loss: of all ranks; None where it is not computed.
        norm: of all gradients before clipping; None where it is not computed.
        skipped: whether the weights were left as they were.
        scale: of the loss.
        counted: whether a target of any loss counts; if not, the loss is nan.
    """

    rate: float
    loss: float | None = None
    norm: float | None = None
    skipped: bool = False
    scale: float = 1.0
    counted: bool = True


class _Sums(NamedTuple):
    """Sums over all ranks: the squares of gradients as they are, the loss, and its count."""

    squares: float
    loss: float
    counted: float


class OptimizerStep:
    """Does the steps of one device, as `torch.optim.Optimizer.step` would.

    Attributes:
        last: the result of the last step.
        scale: of the losses.
        skipped: number of steps that left the weights as they were, as something was not finite.
        uncounted: number of steps that did so because no target of any loss counts.

    Args:
        optimizer: of the device's parameters; None if it trains none.
        buckets: of the gradients of the same.
        owned: those of its parameters that no device before it holds.
        shards: of its parameters.
        masters: float32 copies of what is stepped; none where the optimizer steps themselves.
        weights: changes them.
        rules: how.
        scale: of the losses; None leaves them as they are.
        together: adds up numbers over all ranks, which make a step at the same time; None where
            this device decides alone.
        is_counted: whether the loss is the user's, which may say how much it counts.
        mean_over: the number by which all gradients are divided.
    """

    def __init__(
        self, optimizer: Optimizer | None, buckets: GradientBuckets, owned: Sequence[Tensor],
        shards: OptimizerShards, weights: Weights, *, rules: UpdateRules,
        scale: LossScale | None = None, masters: MasterCopies | None = None, mean_over: int = 1,
        is_counted: bool = False,
        together: Callable[[Sequence[float]], Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._buckets, self._owned = optimizer, buckets, owned
        self._shards, self._weights, self._rules = shards, weights, rules
        self.scale = scale or LossScale()
        self._masters = masters or None
        self._together, self._mean_over, self._is_counted = together, mean_over, is_counted
        self._measures = rules.clip is not None or rules.nan is not None or self.scale.is_dynamic
        self.last = StepResult(rules.learning_rate)
        self.skipped = self.uncounted = 0

    def set_rate(self, learning_rate: float) -> None:
        """Changes the learning rate, before its schedule, from the next step on."""
        self._rules = replace(self._rules, learning_rate=learning_rate)

    @property
    def rate(self) -> float:
        """The learning rate before its schedule."""
        return self._rules.learning_rate

    def rate_at(self, index: int) -> float:
        """The learning rate of a step of the training."""
        return self._rules.learning_rate * self._rules.factor(index)

    def leave_out(self, index: int) -> float:
        """A step without counted targets: leaves the weights as they are; clears the gradients.

        Args:
            index: of the step of the training.

        Returns:
            The loss, nan.
        """
        self.last = StepResult(
            self.rate_at(index), math.nan, skipped=True, scale=self.scale.value, counted=False
        )
        self.uncounted += 1
        self._buckets.clear()
        return math.nan

    def step(self, index: int, loss: float, count: float = 1.0, expected: float = 1.0) -> float:
        """Changes the weights, or leaves them as they are; clears the gradients.

        Args:
            index: of the step of the training.
            loss: this rank's share, of gradients that were divided by `expected`.
            count: this rank's share of the number to divide by in place of it, if the loss is one
                that may say how much it counts.
            expected: the same on all ranks.

        Returns:
            This rank's share of the loss, divided by the counts of all ranks.

        Raises:
            LaunchError: if something is not finite and the rule is to stop; on all ranks that
                decide together.
        """
        if self._mean_over > 1:
            for buffer in self._buckets.everything():
                buffer.div_(self._mean_over)
        self._shards.cut()
        sums = self._sums(loss, count)
        if sums is not None and self._is_counted and not sums.counted:
            return self.leave_out(index)
        factor = expected / sums.counted if sums is not None and self._is_counted else 1.0
        total = None if sums is None else sums.loss * factor
        norm = None
        if sums is not None and self._measures:
            squares = sums.squares
            norm = math.sqrt(squares) * factor / self.scale.value if squares >= 0 else math.nan
        finite = norm is None or (math.isfinite(norm) and math.isfinite(total or 0.0))
        if not finite:
            self._check_rule(index, norm, total)
        skipped = not finite and (self._rules.nan == NanRule.SKIP or self.scale.is_dynamic)
        self.last = StepResult(self.rate_at(index), total, norm, skipped, self.scale.value)
        self.skipped += skipped
        if not skipped:
            self._change(self._clipped(factor / self.scale.value, norm))
        if self.scale.is_dynamic:
            self.scale.learn(finite=finite)
        self._buckets.clear()
        return loss * factor

    def _change(self, factor: float) -> None:
        """Steps.

        Args:
            factor: of all gradients.
        """
        self._shards.settle()
        if factor != 1 and self._masters is None:
            for buffer in self._buckets.everything():
                buffer.mul_(factor)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self.last.rate * group.get(FACTOR, 1.0)
            step: Callable[[], object] = self._optimizer.step
            if self._masters is not None:
                step = partial(self._masters.step, step, factor)
            self._weights.step(step)
        self._shards.gather()

    def _sums(self, loss: float, count: float) -> _Sums | None:
        """Over all ranks, where they are needed."""
        if not (self._measures or self._rules.reports_loss or self._is_counted):
            return None
        squares = self._own_squares() if self._measures else 0.0
        return _Sums(*(self._together or list)([squares, loss, count]))

    def _own_squares(self) -> float:
        held = [one.grad for one in self._owned if one.grad is not None]
        if self._masters is not None:  # in float32: bfloat16 has 3 digits
            full = torch.float32
            held = [torch.linalg.vector_norm(one, dtype=full) for one in held if one.numel()]
        return float(torch.nn.utils.get_total_norm(held)) ** 2 if held else 0.0

    def _check_rule(self, index: int, norm: float | None, loss: float | None) -> None:
        """With a loss scale, gradients of a sound loss are too large now and then."""
        sound = loss is not None and math.isfinite(loss)
        if self._rules.nan == NanRule.STOP and not (self.scale.is_dynamic and sound):
            advice = "lower --lr, or look at the data of this step"
            if self._together is not None:
                advice += "; --clip bounds gradients, and --nan skip leaves such steps out"
            raise LaunchError(
                f"step {index}: expected a finite loss and finite gradients, got a loss of {loss}"
                f" and gradients of norm {norm} (--nan stop); {advice}"
            )

    def _clipped(self, factor: float, norm: float | None) -> float:
        """A factor of all gradients that clips them, too.

        Args:
            norm: of the gradients with the factor.
        """
        if self._rules.clip is not None and norm is not None:
            factor *= min(1.0, self._rules.clip / (norm + TINY))
        return factor


def make_optimizer(
    name: OptimizerName,
    parameters: Sequence[Tensor] | Sequence[dict[str, Any]],
    learning_rate: float | None,
    weight_decay: float | None = None,
) -> Optimizer | None:
    """The optimizer of one device; None if it trains nothing.

    Adam's steps are fused, because these take no memory. Other steps of Adam take the memory of two
    copies of a parameter on a CPU, and of one copy of all parameters on CUDA.

    Args:
        name: name of the optimizer.
        parameters: the device's trainable parameters, or groups of them (`optimizer_groups`).
        learning_rate: None takes that of `DEFAULT_LEARNING_RATES`.
        weight_decay: of groups without their own; None takes torch's usual one.
    """
    if not parameters:
        return None
    rate = DEFAULT_LEARNING_RATES[name] if learning_rate is None else learning_rate
    usual = 0.01 if name is OptimizerName.ADAMW else 0.0
    decay = usual if weight_decay is None else weight_decay
    match name:
        case OptimizerName.SGD:
            return SGD(parameters, lr=rate, weight_decay=decay)
        case OptimizerName.MOMENTUM:
            return SGD(parameters, lr=rate, momentum=0.9, weight_decay=decay)
        case OptimizerName.ADAM:
            return Adam(parameters, lr=rate, weight_decay=decay, fused=True)
        case OptimizerName.ADAMW:
            return AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
