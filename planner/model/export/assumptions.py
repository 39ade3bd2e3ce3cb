"""Decisions of a module about values of tensors that training may take for granted."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FINITE = "all values are finite: branches on torch.isfinite(...).all() are taken so"


class Assumptions(TorchFunctionMode):
    """While a module is traced under it, `torch.isfinite(x).all()` is True.

    Some models of transformers clamp what overflows. A graph cannot branch on that.

    Attributes:
        made: what was assumed, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, None] = {}
        self._known: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors, so that ids are unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        first = args[0] if args else None
        state = self._known[id(first)][0] if id(first) in self._known else ""
        if state == "all" and func is Tensor.__bool__:
            self.made[FINITE] = None
            return True
        made = func(*args, **(kwargs or {}))
        if func in (torch.isfinite, Tensor.isfinite):
            self._known[id(made)] = ("elements", made)
        elif state == "elements" and func in (torch.all, Tensor.all) and made.ndim == 0:
            self._known[id(made)] = ("all", made)
        return made
