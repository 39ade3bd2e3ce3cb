"""Tensors in parts, by the words of a spec (`artefacts/sharding.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.artefacts.sharding import CHUNKS, Spec, blocks_of, dim_of


def parts(tensor: Tensor, n: int, cut: str) -> Tensor:
    """(n, *shape) the equal parts of a tensor, contiguous; chunks with zeros behind the shorter.

    Args:
        cut: along which dimension, and in how many blocks, such as "S1/3".

    >>> import torch
    >>> parts(torch.arange(6), 2, "S0/3").tolist()
    [[0, 2, 4], [1, 3, 5]]
    >>> parts(torch.arange(1, 6), 4, "C").tolist()
    [[1, 2], [3, 4], [5, 0], [0, 0]]
    """
    if cut == CHUNKS:
        rows = chunk_rows(tensor.shape[0], n)
        return padded(tensor.contiguous(), n * rows).view(n, rows, *tensor.shape[1:])
    dim = _dim_of(cut)
    return views_of_parts(tensor, n, cut).flatten(dim + 1, dim + 2).contiguous()


def views_of_parts(tensor: Tensor, n: int, cut: str) -> Tensor:
    """The same where they lie in the tensor, so that they can be written to, with the dimension
    that is cut as two: blocks, and what a part has of each.

    >>> import torch
    >>> views_of_parts(torch.arange(6), 2, "S0/3").tolist()
    [[[0], [2], [4]], [[1], [3], [5]]]
    """
    dim, blocks = _dim_of(cut), blocks_of(cut)
    width = tensor.shape[dim] // (blocks * n)
    return _apart(tensor, dim, (blocks, n, width)).movedim(dim + 1, 0)


def joined(some: Tensor, cut: str, rows: int = 0) -> Tensor:
    """The tensor with these parts.

    Args:
        some: (n, *shape) as `parts` gives them.
        cut: as of `parts`.
        rows: of the tensor, where these are chunks.

    >>> import torch
    >>> joined(torch.tensor([[0, 2, 4], [1, 3, 5]]), "S0/3").tolist()
    [0, 1, 2, 3, 4, 5]
    >>> joined(torch.tensor([[1, 2], [3, 4], [5, 0], [0, 0]]), "C", 5).tolist()
    [1, 2, 3, 4, 5]
    """
    if cut == CHUNKS:
        return some.flatten(0, 1)[:rows]
    dim, blocks = _dim_of(cut), blocks_of(cut)
    if blocks == 1:
        return some.movedim(0, dim).flatten(dim, dim + 1)
    apart = _apart(some, dim + 1, (blocks, some.shape[dim + 1] // blocks))
    return apart.movedim(0, dim + 1).flatten(dim, dim + 2)


def chunk_rows(rows: int, n: int) -> int:
    """Rows of the largest of n chunks."""
    return -(-rows // n)


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with zeros behind its rows, up to so many; itself where it has them."""
    short = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((short, *tensor.shape[1:]))]) if short else tensor


def _dim_of(cut: str) -> int:
    dim = dim_of(cut)
    assert dim is not None, "a part of a spec that cuts"
    return dim


def _apart(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """A view with several dimensions in the place of one."""
    return tensor.reshape((*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]))


def part_of(tensor: Tensor, n: int, cut: str, k: int) -> Tensor:
    """The k-th of the parts of a tensor, equal but for chunks; where there are no blocks, a view.

    Raises:
        ValueError: if there are no equal parts.

    >>> import torch
    >>> [part_of(torch.arange(5), 4, "C", k).tolist() for k in range(4)]
    [[0, 1], [2, 3], [4], []]
    """
    dim, blocks = _dim_of(cut), blocks_of(cut)
    if cut == CHUNKS:
        rows, most = tensor.shape[0], chunk_rows(tensor.shape[0], n)
        return tensor[min(k * most, rows) : min((k + 1) * most, rows)]
    width, rest = divmod(tensor.shape[dim], n * blocks)
    if rest:
        raise ValueError(f"{cut}: {tensor.shape[dim]} cannot be cut into {n} equal parts")
    if blocks == 1:
        return tensor.narrow(dim, k * width, width)
    return _apart(tensor, dim, (blocks, n, width)).select(dim + 1, k).flatten(dim, dim + 1)


def local_part(whole: Tensor, spec: Spec, mesh: Sequence[int], at: Sequence[int]) -> Tensor:
    """The part of a whole tensor that one device of a mesh has; of a summand, all.

    The first axis is the outer one, so cuts are put on from the first.

    Args:
        mesh: size of each axis.
        at: coordinate of the device on each axis.

    >>> import torch
    >>> local_part(torch.arange(12).reshape(2, 6), ("S1/3", "S0"), (2, 2), (1, 0)).tolist()
    [[1, 3, 5]]
    """
    for part, size, coordinate in zip(spec, mesh, at, strict=True):
        if dim_of(part) is not None:
            whole = part_of(whole, size, part, coordinate)
    return whole
