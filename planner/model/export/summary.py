"""The parameters of an exported module, counted."""

from dataclasses import dataclass
from math import prod

from planner.artefacts.graph import ITEM_BYTES
from planner.model.record import ModuleRecord, TensorRecord


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a module, each tensor once.

    Attributes:
        num_tensors: all of them.
        num_elements: of all of them.
        num_bytes: of all of them.
        trained: names of those that the file holds and the module trains.
        frozen: names of those that the file holds and the module does not train.
        unused: names of those that no output depends on, which the file does not hold.
        ties: the names of each tensor that has several.
    """

    num_tensors: int
    num_elements: int
    num_bytes: int
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    unused: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]


def parameters_of(record: ModuleRecord) -> Parameters:
    """The parameters in a record, counted."""
    held = [one for one in record.parameters if one.initializer is not None]
    return Parameters(
        num_tensors=len(record.parameters),
        num_elements=sum(prod(one.shape) for one in record.parameters),
        num_bytes=sum(_num_bytes(one) for one in record.parameters),
        trained=tuple(one.name for one in held if one.requires_grad),
        frozen=tuple(one.name for one in held if not one.requires_grad),
        unused=tuple(one.name for one in record.parameters if one.initializer is None),
        ties=tuple((one.name, *one.aliases) for one in record.parameters if one.aliases),
    )


def _num_bytes(one: TensorRecord) -> int:
    return int(prod(one.shape) * ITEM_BYTES[one.dtype])
