"""`Held`: a tensor of a checkpoint as far as one device has it, for saving and for going on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from planner.artefacts.sharding import Box


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a checkpoint as far as one device has it.

    Attributes:
        values: what the device has, a tensor of the boxes in their order.
        shape: of the whole tensor.
        boxes: their places in the whole tensor; they differ along one dimension. Several where
            the dimension is cut in blocks.
        writes: whether this device saves them for all devices that have the same.
    """

    values: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writes: bool = True

    def parts(self) -> dict[tuple[int, ...], Tensor]:
        """Views of the values, by the start of their box.

        >>> import torch
        >>> Held(torch.arange(4), (8,), (((0, 2),), ((4, 6),))).parts()
        {(0,): tensor([0, 1]), (4,): tensor([2, 3])}
        """
        starts = [tuple(start for start, _ in box) for box in self.boxes]
        if len(starts) == 1:
            return {starts[0]: self.values}
        (dim,) = (d for d, firsts in enumerate(zip(*starts, strict=True)) if len({*firsts}) > 1)
        sizes = [box[dim][1] - box[dim][0] for box in self.boxes]
        return dict(zip(starts, torch.split(self.values, sizes, dim), strict=True))


def whole(values: Tensor, *, writes: bool = True) -> Held:
    """A tensor that the device has whole."""
    shape = tuple(values.shape)
    return Held(values, shape, (tuple((0, size) for size in shape),), writes)
