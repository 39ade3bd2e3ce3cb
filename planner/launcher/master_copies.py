"""`MasterCopies`: float32 copies of bfloat16 parameters, which the optimizer steps instead of these
(Micikevicius et al., ICLR 2018, section 3.1).

They are of what a device steps: of its parameters, or of its parts of them. Gradients become
float32 some parameters at a time, so that the most that a step takes is known
(`costs/update.py`): torch steps only parameters that have a gradient.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from planner.artefacts import graph as graphs
from planner.artefacts.strategy import buckets


class MasterCopies:
    """The copies of one device.

    Attributes:
        copies: by the names of the parameters; what the optimizer steps.

    Args:
        stepped: the parameters or parts, by name, with gradients.
        copies: of them, from the model's file; of those that have none, the optimizer steps
            themselves.
    """

    def __init__(self, stepped: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        self._stepped, self.copies = stepped, copies
        described = (_described(name, stepped[name]) for name in sorted(copies))
        self._buckets = [[one.name for one in bucket] for bucket in buckets([*described])]

    @torch.no_grad()
    def step(self, change: Callable[[], object], factor: float) -> None:
        """Steps the copies, and gives the parameters their values.

        Args:
            change: a step of the optimizer.
            factor: of the gradients.
        """
        for names in self._buckets:
            for name in names:
                gradient = self._stepped[name].grad
                assert gradient is not None, "gradients are in buffers"
                made = torch.empty_like(self.copies[name], requires_grad=False)
                self.copies[name].grad = made.copy_(gradient)
                if factor != 1:
                    made.mul_(factor)
            del made
            change()
            for name in names:
                self._stepped[name].copy_(self.copies[name])
                self.copies[name].grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Gives the parameters the values of the copies, which have changed."""
        for name, copy in self.copies.items():
            self._stepped[name].copy_(copy)

    def __bool__(self) -> bool:
        return bool(self.copies)

    def tensors(self) -> Iterator[Tensor]:
        """The copies."""
        return iter(self.copies.values())


def _described(name: str, stepped: Tensor) -> graphs.Parameter:
    dtype = str(stepped.dtype).removeprefix("torch.")
    return graphs.Parameter(name, tuple(stepped.shape), dtype, trainable=True)
