"""What goes over the edge between two meshes: boxes of a tensor from device to device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.artefacts.sharding import Box, Spec, tile


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that one device gives another, or keeps for itself.

    Attributes:
        source: the device that has it.
        target: the device that needs it.
        box: first and one behind the last index in each dimension of the whole tensor.
    """

    source: int
    target: int
    box: Box


def pieces(
    shape: tuple[int, ...],
    source: tuple[Sequence[int], tuple[int, ...], Spec],
    target: tuple[Sequence[int], tuple[int, ...], Spec],
) -> tuple[Piece, ...]:
    """How every device of a mesh gets its box of a tensor, each element once: from itself where it
    has it, else from a device that has it. Those who could give the same are asked in turn.

    Args:
        shape: of the whole tensor.
        source: devices in the mesh's order, its sizes, and the tensor's spec there, without P.
        target: the same of the mesh that needs it.

    Raises:
        ValueError: if a spec has a summand, or does not divide the shape.

    >>> pieces((4,), ((0, 1), (2,), ("S0",)), ((1, 2), (2,), ("S0",)))
    (Piece(source=0, target=1, box=((0, 2),)), Piece(source=1, target=2, box=((2, 4),)))
    """
    for spec in (source[2], target[2]):
        if "P" in spec:
            raise ValueError(f"{','.join(spec)}: a summand cannot cross to another mesh")
    holders: dict[Box, list[int]] = {}
    for index, device in enumerate(source[0]):
        holders.setdefault(tile(shape, source[2], source[1], index), []).append(device)
    return tuple(
        piece
        for index, device in enumerate(target[0])
        for piece in _for_one(holders, device, index, tile(shape, target[2], target[1], index))
    )


def _for_one(
    holders: dict[Box, list[int]], device: int, index: int, box: Box
) -> Iterator[Piece]:  # fmt: skip
    """The pieces of one device. The boxes of the holders part the tensor: tiles of one spec are
    the same or have nothing in common.
    """
    for tile_of, devices in sorted(holders.items()):
        common = overlap(tile_of, box)
        if common is not None:
            giver = device if device in devices else devices[index % len(devices)]
            yield Piece(giver, device, common)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing.

    >>> overlap(((0, 4), (2, 6)), ((2, 8), (0, 3)))
    ((2, 4), (2, 3))
    """
    common = tuple(
        (max(first, start), min(last, end))
        for (first, last), (start, end) in zip(a, b, strict=True)
    )
    return common if all(first < last for first, last in common) else None
