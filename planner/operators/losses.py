"""Losses: of an output and its target, and those that a model computes itself.

In the latter, classes lie on dimension 1.
"""

import math
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from planner.artefacts.losses import Loss, LossName
from planner.operators.running import total_of
from planner.support.errors import LaunchError, OperatorError
from planner.support.named import function_named

IGNORED_CLASS = -100
"""The class index that losses ignore, torch's default."""


class LossValue(NamedTuple):
    """The loss of one microbatch, before it is divided by its total.

    Attributes:
        value: a scalar. A loss over classes is the sum over its counted targets (`num_counted`), so
            that its total is their number; any other one is a mean, with a total of 1. In a step
            of several microbatches totals add up.
        counted: the total, where only the user's function knows it; else None.
    """

    value: Tensor
    counted: float | None = None


Criterion = Callable[[Tensor, Tensor | None], LossValue]
"""(output, target) -> loss. An output that is the loss itself has no target."""

_OF_VALUES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    LossName.MSE: functional.mse_loss,
    LossName.L1: functional.l1_loss,
    LossName.SMOOTH_L1: functional.smooth_l1_loss,
    LossName.HUBER: functional.huber_loss,
}


def criterion(loss: Loss) -> Criterion:
    """The function that computes a loss; in float32 if the output has a shorter type.

    Raises:
        LaunchError: if the user's function is not there; later, if it fails, or does not give a
            scalar that depends differentiably on the output, or such a sum and a count.
    """
    if loss.function == LossName.OWN:
        return lambda output, target: LossValue(_long(output).reshape(()))
    if loss.is_users:
        return _users(loss)
    compute = _known(loss)

    def compared(output: Tensor, target: Tensor | None) -> LossValue:
        assert target is not None, "only an output that is the loss itself has no target"
        return LossValue(compute(_long(output), target))

    return compared


def num_counted(classes: Tensor) -> Tensor:
    """The number of class indices that are not to be ignored, as a scalar."""
    return torch.count_nonzero(classes != IGNORED_CLASS)


def _long(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _known(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    if loss.class_dim is not None:
        return lambda output, target: _of_classes(loss, loss.class_dim or 0, output, target)
    if loss.function == LossName.BCE:
        return lambda output, target: _binary(loss, output, target.to(output.dtype))
    function = _OF_VALUES[loss.function]
    return lambda output, target: function(output, target.to(output.dtype))


def _of_classes(loss: Loss, class_dim: int, output: Tensor, target: Tensor) -> Tensor:
    scores, classes = output.movedim(class_dim, -1).flatten(0, -2), target.flatten()
    if loss.function == LossName.NLL or loss.operator == "LogSoftmax":
        return functional.nll_loss(scores, classes, reduction="sum")
    if loss.operator == "Softmax":
        smallest = torch.finfo(scores.dtype).tiny
        return functional.nll_loss(scores.clamp_min(smallest).log(), classes, reduction="sum")
    return functional.cross_entropy(scores, classes, reduction="sum")


def _binary(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    if loss.operator == "Sigmoid":
        return functional.binary_cross_entropy(output, target)
    return functional.binary_cross_entropy_with_logits(output, target)


def _users(loss: Loss) -> Criterion:
    """The user's function, its results checked. A sum and a count are divided by the number of rows
    of classes in the output, which leaves their quotient as it is. So gradients of the sum are of
    the size of a mean's, which a loss scale is made for.
    """
    name, rows = loss.function, prod(loss.output.shape[:-1])
    function = function_named(name, "--loss", LaunchError)

    def checked(output: Tensor, target: Tensor | None) -> LossValue:
        output = _long(output)
        try:
            value: object = function(output, target)
        except Exception as error:
            raise LaunchError(f"--loss {name}: {type(error).__name__}: {error}") from error
        if not isinstance(value, tuple | list):
            return LossValue(_checked(name, value, output))
        if len(value) != 2:
            raise LaunchError(
                f"--loss {name}: expected a scalar or (sum, count), got {len(value)} values"
            )
        return LossValue(_checked(name, value[0], output) / rows, _count(name, value[1]) / rows)

    return checked


def _checked(name: str, value: object, output: Tensor) -> Tensor:
    """A scalar that the user's function has returned."""
    if not isinstance(value, Tensor) or value.shape or not value.is_floating_point():
        raise LaunchError(
            f"--loss {name}: expected a scalar float tensor, got {_described(value)};"
            " reduce it, for example by .mean()"
        )
    if output.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
        raise LaunchError(
            f"--loss {name}: expected a loss that depends differentiably on the output, got"
            " one without a gradient; compute it by torch functions, without .detach(),"
            " .item() or argmax"
        )
    return value


def _count(name: str, count: object) -> float:
    """A count that the user's function has returned beside a sum."""
    if isinstance(count, Tensor) and not count.shape:
        if count.requires_grad:
            raise LaunchError(
                f"--loss {name}: expected a count without a gradient; divide the sum by what"
                " depends on the output, or return count.detach()"
            )
        # A profile of kernels computes without values.
        count = 1.0 if isinstance(count, FakeTensor) else count.item()
    if not isinstance(count, int | float) or not 0 <= count < math.inf:
        shown = _described(count) if isinstance(count, Tensor) else repr(count)
        raise LaunchError(
            f"--loss {name}: expected (sum, count) with a finite count of at least 0, got {shown}"
        )
    return float(count)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)} and {value.dtype}"
    return type(value).__name__


# ---- operators


def negative_log_likelihood_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Minus the target's input, weighted by class; the mean is divided by the sum of weights."""
    if reduction not in ("none", "mean", "sum"):
        raise OperatorError(f"reduction: expected none, mean or sum, got {reduction!r}")
    ignored = IGNORED_CLASS if ignore_index is None else ignore_index
    return functional.nll_loss(
        input, target.long(), weight, ignore_index=ignored, reduction=reduction
    )


def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """The negative log likelihood of the softmax, and then the logarithm of the softmax."""
    log_prob = torch.log_softmax(scores, 1)
    loss = negative_log_likelihood_loss(log_prob, labels, weights, ignore_index, reduction)
    return (loss, log_prob) if num_outputs > 1 else loss


class StepDivision(nn.Module):
    """An operator that divides by a denominator of the step, and by its own where there is none.

    Args:
        function: of the operator.
        name: of the denominator.
        is_loss: whether it is a loss operator, which counts its labels; if not, the operator's last
            input is the denominator.
        num_parts: the number of devices whose means a loss operator makes a mean of. By the step's
            denominator it divides sums, of which it makes a sum.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, *, is_loss: bool, num_parts: int = 1
    ) -> None:
        super().__init__()
        self.function, self._name = function, name
        self._is_loss, self._num_parts = is_loss, num_parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's outputs."""
        total = total_of(self._name)
        if self._is_loss:
            return self._mean(total, kwargs)
        if total is None:
            return self.function(*args, **kwargs)
        if not kwargs:
            return self.function(*args[:-1], torch.full_like(args[-1], total))
        last = [*kwargs][-1]
        return self.function(**{**kwargs, last: torch.full_like(kwargs[last], total)})

    def _mean(self, total: float | None, kwargs: Mapping[str, Any]) -> Any:
        """The outputs of a loss operator."""
        how = {} if total is None else {"reduction": "none"}
        made = self.function(**{**kwargs, **how})
        loss, *others = made if isinstance(made, tuple) else (made,)
        # Divided before it is summed: the sum of a long microbatch is beyond float16.
        loss = loss / self._num_parts if total is None else (loss / total).sum()
        return (loss, *others) if others else loss
