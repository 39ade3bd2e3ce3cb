"""Batches of the user -> the samples in them, as a map-style dataset."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from planner.support.errors import LaunchError


class Rows(Dataset[Any]):
    """The samples of batches: row i of each tensor in one of them.

    Args:
        batches: in any form that `samples.Reader` takes; each has as many rows as it likes.
        where: they are from, for messages.

    Raises:
        LaunchError: if the tensors of a batch have different numbers of rows.
    """

    def __init__(self, batches: Iterable[object], where: str) -> None:
        self._batches = list(batches)
        self._places = [
            (b, row)
            for b, batch in enumerate(self._batches)
            for row in range(_num_rows(batch, f"{where}: batch {b}"))
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        batch, row = self._places[index]
        return _row(self._batches[batch], row)


def samples_of(data: object, where: str) -> object:
    """A dataset to evaluate on: itself, or that of batches."""
    if isinstance(data, Dataset | DataLoader) or not isinstance(data, Iterable):
        return data
    return Rows(data, where)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return []
    inside = value.values() if isinstance(value, Mapping) else value
    return [tensor for one in inside for tensor in _tensors(one)]


def _num_rows(batch: object, where: str) -> int:
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in _tensors(batch)}
    if len(counts) != 1 or None in counts:
        found = " and ".join(sorted(map(str, counts))) or "no"
        raise LaunchError(f"{where}: expected tensors with a row for each sample, got {found} rows")
    (count,) = counts
    assert count is not None
    return count


def _row(value: Any, row: int) -> Any:
    """The same form with a row of each tensor."""
    if isinstance(value, Tensor):
        return value[row]
    if isinstance(value, Mapping):
        return {name: _row(one, row) for name, one in value.items()}
    return [_row(one, row) for one in value]
