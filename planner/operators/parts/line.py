"""`MeshAxisGroup`: the devices along one axis of a mesh, as an operator on one of them has them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class MeshAxisGroup(Protocol):
    """Devices in a row. All of them call the same methods in the same order, with tensors of the
    same shapes.
    """

    @property
    def rank(self) -> int:
        """This device's place in the row."""
        ...

    @property
    def size(self) -> int:
        """The number of devices."""
        ...

    def all_reduce(self, own: Tensor) -> Tensor:
        """The sum of all devices' tensors; the own one stays as it is."""
        ...

    def all_reduce_max(self, own: Tensor) -> Tensor:
        """The largest of all devices' numbers, element by element."""
        ...

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Gives a tensor to the device before and one to the device after.

        Returns:
            What the device before has given this one (in the shape of `after`), and what the device
            after has (in the shape of `before`); zeros where there is no such device.
        """
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension of an operator's first tensor that is cut over a line.

    Attributes:
        line: the devices with the parts.
        dim: the dimension.
    """

    line: MeshAxisGroup
    dim: int


def place(cuts: tuple[Cut, ...]) -> tuple[int, int]:
    """The number of this device's part among all, and their number, where several lines cut one
    dimension, the first of them outside.
    """
    rank, size = 0, 1
    for one in cuts:
        rank, size = rank * one.line.size + one.line.rank, size * one.line.size
    return rank, size
