"""What autograd keeps of one operator, seen through its saved-tensor hooks.

A saved tensor is known by its storage: that of an input or an output has a name, that of a
parameter is on the device anyway, and every other one is private to the operator. Each input is
given a storage of its own, strides and all, because two inputs that share one here (slices of one
tensor) are two copies where another device sends them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from planner.profilers.unit import Unit
from planner.profiles import View

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stash:
    """What an operator keeps, and what of its outputs it did not have to make.

    Attributes:
        tensors: inputs and outputs that autograd keeps.
        private_bytes: of the storages that it keeps besides, parameters left out.
        views: outputs that lie in the storage of an input or of a parameter.
    """

    tensors: tuple[str, ...]
    private_bytes: int
    views: tuple[View, ...]


def observe(unit: Unit, values: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Stash]:
    """Run the operator once; its outputs and its stash.

    Args:
        values: its inputs by name, among others.
    """
    inputs = [_in_own_storage(leaf) for leaf in unit.leaves(values)]
    outputs, kept = _keeping(lambda: unit.forward(*inputs))
    named_inputs = list(zip(unit.inputs, inputs, strict=True))
    named_outputs = list(zip(unit.outputs, outputs, strict=True))
    bases = _byaddress((*named_inputs, *unit.parameters.items()))
    names = _byaddress((*named_inputs, *named_outputs))
    elsewhere = {address(value) for value in (*unit.parameters.values(), *unit.constants)}
    return outputs, Stash(
        tensors=tuple(name for address, name in names.items() if address in kept),
        private_bytes=sum(
            b for address, b in kept.items() if address not in names.keys() | elsewhere
        ),
        views=tuple(
            View(name, bases[address(output)])
            for name, output in named_outputs
            if address(output) in bases
        ),
    )


def address(tensor: Tensor) -> int:
    """Of the storage itself, not of its bytes, which a tensor without numbers does not have."""
    return int(tensor.untyped_storage()._cdata)


def _byaddress(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """The first name of each storage, in order."""
    found: dict[int, str] = {}
    for name, tensor in named:
        if tensor.untyped_storage().nbytes():
            found.setdefault(address(tensor), name)
    return found


def _in_own_storage(tensor: Tensor) -> Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def _keeping(run: Callable[[], T]) -> tuple[T, dict[int, int]]:
    """What `run` returns, and the bytes of every storage that autograd keeps for it, by address."""
    packed: list[Tensor] = []  # holds them, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, {address(t): t.untyped_storage().nbytes() for t in packed}
