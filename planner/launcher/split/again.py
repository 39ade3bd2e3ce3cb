"""Operators that keep no gathered parameter for their backward, but gather it again there (ZeRO-3;
Rajbhandari et al., SC 2020, section 5.3).

Autograd keeps what an operator's backward reads. What lies in the storage of a gathered copy is
kept as a place in it; the first of these places that is read makes the copy anew.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from planner.launcher.split.convert import Conversion, converted


class GatheredAgain(nn.Module):
    """An operator's function with the copies that its backward makes anew.

    Args:
        function: of the operator.
        conversions: that made the copies.
    """

    def __init__(self, function: Callable[..., Any], conversions: Sequence[Conversion]) -> None:
        super().__init__()
        self._function = function
        self._conversions = list(conversions)  # held elsewhere, so no submodules

    def forward(self, gathered: Sequence[tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """What the operator makes.

        Args:
            gathered: per conversion, the parameter at home and the copy.
        """
        copies = {
            copy.untyped_storage().data_ptr(): _Copy(home.detach(), how)
            for (home, copy), how in zip(gathered, self._conversions, strict=True)
        }

        def keep(tensor: Tensor) -> "Tensor | _Place":
            # All copies are alive here, so that no other storage is where one of them is.
            copy = copies.get(tensor.untyped_storage().data_ptr())
            return tensor if copy is None else copy.place_of(tensor)

        with saved_tensors_hooks(keep, _read):
            return self._function(*args, **kwargs)


class _Copy:
    """A copy that is not there until it is read.

    Args:
        home: the parameter, where it lies.
        how: makes the copy of it.
    """

    def __init__(self, home: Tensor, how: Conversion) -> None:
        self._home, self._how = home, how
        self._made: Tensor | None = None
        self._places = self._unread = 0

    def place_of(self, tensor: Tensor) -> "_Place":
        """The place of a tensor in the copy."""
        self._places += 1
        self._unread += 1
        return _Place(self, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def made(self) -> Tensor:
        """The copy: held until all of its places have been read."""
        made = self._made
        if made is None:
            made = converted(self._home, self._how.forward_steps, self._how.mesh)
        self._unread -= 1
        self._made = made if self._unread else None
        if not self._unread:
            self._unread = self._places
        return made


class _Place:
    """A tensor in a copy that is not there."""

    def __init__(
        self, copy: _Copy, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        self.copy, self.shape, self.stride, self.offset = copy, shape, stride, offset


def _read(kept: Tensor | _Place) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return torch.as_strided(kept.copy.made(), kept.shape, kept.stride, kept.offset)
