"""A number that tells batches apart, so that ranks can compare theirs before a step.

Ranks that get different batches would train the inputs of the one with the targets of the other.
Nothing else would show that, so a few elements of each tensor are compared, not only its shape.
"""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from planner.training.data.samples import Named

ELEMENTS = 256
"""Elements of each tensor that are looked at: some 50 us for a batch."""
_STRIDE = 2_654_435_761
"""Knuth's multiplier: its multiples lie evenly, and not in the columns of a picture."""


def fingerprint(named: Named) -> int:
    """A number below 2 ** 32 of names, shapes, types and some elements."""
    found = 0
    for words, values in (("input", named.inputs), ("target", named.targets)):
        found = _of(words, values, found)
    return found


def _of(words: str, values: Mapping[str, object], before: int) -> int:
    found = before
    for name, value in sorted(values.items()):
        found = crc32(f"{words} {name} {type(value).__name__}".encode(), found)
        if isinstance(value, Tensor):
            found = crc32(f"{tuple(value.shape)} {value.dtype}".encode(), found)
            found = crc32(_some(value), found)
    return found


def _some(tensor: Tensor) -> bytes:
    """Bytes of some elements."""
    size = tensor.numel()
    if size == 0:
        return b""
    places = torch.arange(min(size, ELEMENTS), device=tensor.device)
    if size > ELEMENTS:
        places = places * _STRIDE % size
    picked = tensor.detach().take(places).cpu()
    return picked.view(torch.uint8).numpy().tobytes()
