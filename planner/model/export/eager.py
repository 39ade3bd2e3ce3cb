"""torch.cond and torch.while_loop as Python runs them, so that modes see the operators inside.

Torch hands both to a mode whole, as operators of higher order: what a branch draws is not seen
then, and no gradient flows to the parameters that a branch reads from around it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode


def _cond(pred: Tensor | bool, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any) -> Any:
    carried = tuple(carried_inputs)
    while cond_fn(*carried, *additional_inputs):
        carried = tuple(body_fn(*carried, *additional_inputs))
    return carried


PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}
"""What an operator of higher order does, by the operator."""


class UnseenError(NotImplementedError):
    """An operator of higher order that reaches a mode whole: nothing tells what it runs."""

    def __init__(self, func: HigherOrderOperator) -> None:
        super().__init__(f"the operators that {func} runs are not seen one by one")


def called(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A call of torch that a mode handles; the mode sees the operators inside, too."""
    if func not in PLAIN:
        return func(*args, **kwargs)
    with mode:  # torch takes a mode away while it handles a call
        return PLAIN[func](*args, **kwargs)


class Eagerly(TorchFunctionMode):
    """A context in which operators of higher order run as Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        return called(self, func, args, kwargs or {})


__all__ = ["Eagerly", "UnseenError", "called"]
