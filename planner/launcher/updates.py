"""The optimizer's step, with everything that all ranks decide together before it.

The norm of a model's gradients is known to no rank alone, nor is whether all of them are finite. So
ranks add up two numbers: the squares of the gradients that each of them owns, and its share of the
loss. A parameter that several devices hold belongs to the first of them; by then its gradients are
already summed. Without clipping, a loss scale and a rule for NaN nothing is exchanged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.artefacts.strategy import GradientSum
from planner.launcher.gradients import GradientBuffers
from planner.launcher.options import NanRule
from planner.launcher.rates import Factor
from planner.launcher.split.states import States
from planner.launcher.world import World
from planner.support.errors import LaunchError

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
class Rules:
    """How a step is done.

    Attributes:
        learning_rate: before its schedule.
        factor: of the learning rate, by step.
        clip: the largest norm of all gradients; None for any.
        nan: what is done about losses and gradients that are not finite; None goes on.
        tells: whether the loss of all ranks is wanted after each step.
    """

    learning_rate: float
    factor: Factor
    clip: float | None = None
    nan: str | None = None
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one step; the same on all ranks.

    Attributes:
        rate: the learning rate.
        loss: of all ranks; None where nobody asked for it.
        norm: of all gradients before clipping; None where nobody asked for it.
        skipped: whether the weights were left as they were.
        scale: of the loss.
    """

    rate: float
    loss: float | None = None
    norm: float | None = None
    skipped: bool = False
    scale: float = 1.0


class Updates:
    """Does the steps of one device, as `torch.optim.Optimizer.step` would.

    Attributes:
        last: what became of the last step.
        scale: of the losses.
        skipped: number of steps that left the weights as they were.

    Args:
        optimizer: of the device's parameters; None if it trains none.
        gradients: of the same.
        owned: those of its parameters that no device before it holds.
        world: the other devices, which all make a step at the same time.
        rules: how.
        scale: of the losses.
        states: shards of its parameters; None where the optimizer steps these themselves.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        gradients: GradientBuffers,
        owned: Sequence[Tensor],
        world: World,
        rules: Rules,
        scale: LossScale,
        states: States | None = None,
    ) -> None:
        self._states = states
        self._optimizer, self._gradients, self._owned = optimizer, gradients, owned
        self._world, self._rules, self.scale = world, rules, scale
        self._share: Callable[[], float] = lambda: 0.0
        self._step = 0
        self._measures = rules.clip is not None or rules.nan is not None or scale.is_dynamic
        self.last = Update(rules.learning_rate)
        self.skipped = 0

    def set_rate(self, learning_rate: float) -> None:
        """Changes the learning rate, before its schedule, from the next step on."""
        self._rules = replace(self._rules, learning_rate=learning_rate)

    @property
    def rate(self) -> float:
        """The learning rate before its schedule."""
        return self._rules.learning_rate

    def begin(self, step: int, share: Callable[[], float]) -> None:
        """Before the actions of a step.

        Args:
            step: its index.
            share: gives this rank's share of the loss, once the forward passes are done.
        """
        self._step, self._share = step, share
        rate = self._rules.learning_rate * self._rules.factor(step)
        self.last = Update(rate, scale=self.scale.value)
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        """Changes the weights, or leaves them as they are.

        Raises:
            LaunchError: if something is not finite and the rule is to stop; on all ranks.
        """
        if self._states is not None:
            self._states.cut()
        norm, loss = self._agreed()
        finite = norm is None or (math.isfinite(norm) and math.isfinite(loss or 0.0))
        if not finite:
            self._check_rule(norm, loss)
        skipped = not finite and (self._rules.nan == NanRule.SKIP or self.scale.is_dynamic)
        rate, scale = self.last.rate, self.scale.value
        self.last = Update(rate, loss, norm, skipped, scale)
        self.skipped += skipped
        if not skipped:
            self._shrink(norm)
            if self._optimizer is not None:
                self._optimizer.step()
            if self._states is not None:
                self._states.gather()
        if self.scale.is_dynamic:
            self.scale.learn(finite=finite)

    def _agreed(self) -> tuple[float | None, float | None]:
        """The norm of all gradients, and the loss of all ranks, where somebody wants them."""
        if not self._measures:
            if not self._rules.tells:
                return None, None
            return None, self._world.add_up([self._share()])[0]
        squares, loss = self._world.add_up([self._own_squares(), self._share()])
        return math.sqrt(squares) / self.scale.value if squares >= 0 else math.nan, loss

    def _own_squares(self) -> float:
        held = [one.grad for one in self._owned if one.grad is not None]
        return float(torch.nn.utils.get_total_norm(held)) ** 2 if held else 0.0

    def _check_rule(self, norm: float | None, loss: float | None) -> None:
        """With a loss scale, gradients of a sound loss are too large now and then."""
        sound = loss is not None and math.isfinite(loss)
        if self._rules.nan == NanRule.STOP and not (self.scale.is_dynamic and sound):
            raise LaunchError(
                f"step {self._step}: expected a finite loss and finite gradients, got a loss of"
                f" {loss} and gradients of norm {norm} (--nan stop); lower --lr, give --clip, look"
                " at the data of this step, or leave such steps out with --nan skip"
            )

    def _shrink(self, norm: float | None) -> None:
        """Takes the loss scale out of all gradients, and clips them."""
        factor = 1 / self.scale.value
        if self._rules.clip is not None and norm is not None:
            factor *= min(1.0, self._rules.clip / (norm + TINY))
        if factor != 1:
            for buffer in self._gradients.everything():
                buffer.mul_(factor)


def owned(
    trained: Mapping[str, Tensor], sums: Sequence[GradientSum], device: int
) -> tuple[Tensor, ...]:
    """The parameters of a device that no device before it holds.

    Args:
        trained: its trained parameters, by name.
        sums: all-reduces of the whole program: one for every parameter that several devices hold.
        device: its index in the topology.
    """
    others = {
        name
        for one in sums
        if device in one.devices and device != min(one.devices)
        for name in one.parameters
    }
    return tuple(tensor for name, tensor in trained.items() if name not in others)
