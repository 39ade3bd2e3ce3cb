"""The types of arrays that the package works with; docstrings give the shapes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int8]
"""Kinds and flags, a byte each."""
Masks = npt.NDArray[np.uint64]
"""Sets of small numbers as bits, 64 to a word."""


class Csr(NamedTuple):
    """Rows of different lengths: row i is values[start[i]:start[i + 1]].

    Attributes:
        start: (number of rows + 1,) int64.
        values: (sum of the lengths,) int64.
    """

    start: Ints
    values: Ints


def csr(rows: Iterable[Iterable[int]]) -> Csr:
    """Rows as arrays."""
    listed = [list(row) for row in rows]
    start = np.cumsum([0, *map(len, listed)], dtype=np.int64)
    values = (x for row in listed for x in row)
    return Csr(start, np.fromiter(values, dtype=np.int64, count=int(start[-1])))


def transposed(rows: Iterable[Iterable[int]], num_values: int) -> list[list[int]]:
    """Per value, the rows that have it, ascending."""
    of_value: list[list[int]] = [[] for _ in range(num_values)]
    for i, row in enumerate(rows):
        for x in row:
            of_value[x].append(i)
    return of_value
