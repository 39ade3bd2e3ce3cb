"""Numbers that tell batches apart, so that ranks can compare theirs.

Ranks that get different batches would train the inputs of the one with the targets of the other.
Nothing else would show that. A `fingerprint` is cheap enough for each step. `prints` look at every
element, some 4 GB/s, and say which tensor and which row differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from planner.training.data.samples import Named

GLANCE_BYTES, ELEMENTS = 2**16, 256
"""A fingerprint looks at all elements of tensors up to this size, 16 us, and at 256 of larger ones,
up to 300 us where these are not in a cache."""
_STRIDE = 2_654_435_761
"""Knuth's multiplier: its multiples lie evenly, and not in the columns of a picture."""


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """Numbers that tell a tensor from another one of the same name.

    Attributes:
        name: for messages, such as "input 'x'".
        form: shape and type of its elements; the type of a value that is no tensor.
        rows: a number below 2 ** 32 for each row; of a scalar, one.
    """

    name: str
    form: str
    rows: tuple[int, ...]


Prints = tuple[TensorPrint, ...]
"""Of the inputs and targets of a batch."""


def prints(named: Named) -> Prints:
    """Those of a batch: names, shapes, types and values."""
    return tuple(TensorPrint(name, _form(one), _rows(one)) for name, one in _each(named))


def number(found: Prints) -> int:
    """A number below 2 ** 32 that other prints hardly have."""
    return crc32(repr(found).encode())


def fingerprint(named: Named) -> int:
    """A number below 2 ** 32 of names, shapes, types and values; of large tensors, of some."""
    found = 0
    for name, value in _each(named):
        found = crc32(f"{name} {_form(value)}".encode(), found)
        if isinstance(value, Tensor):
            found = crc32(_some(value), found)
    return found


def _each(named: Named) -> Iterator[tuple[str, object]]:
    for name, value in sorted(named.inputs.items()):
        yield f"input {name!r}", value
    for name, value in sorted(named.targets.items()):
        yield f"target of {name!r}", value


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {value.dtype}"


def _rows(value: object) -> tuple[int, ...]:
    if not isinstance(value, Tensor) or not value.numel():
        return ()
    rows = value.detach().reshape(value.shape[0] if value.dim() else 1, -1)
    return tuple(map(crc32, _bytes(rows)))


def _some(tensor: Tensor) -> bytes:
    """Bytes of a small tensor, and of some elements of a large one."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > ELEMENTS and flat.numel() * flat.element_size() > GLANCE_BYTES:
        flat = flat[torch.arange(ELEMENTS, device=flat.device) * _STRIDE % flat.numel()]
    return b"".join(_bytes(flat[None])) if flat.numel() else b""


def _bytes(rows: Tensor) -> Iterator[bytes]:
    """The bytes of each row of a matrix."""
    yield from rows.cpu().contiguous().view(torch.uint8).numpy()
