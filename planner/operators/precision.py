"""Floating-point work in a shorter type than the model's, chosen operator by operator."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: str, dtype: str | None) -> AbstractContextManager[object]:
    """Products and convolutions in another type, sums and norms in float32, as torch.autocast has
    it; None changes nothing. Weights are converted anew for every operator that reads them.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: "bfloat16" or "float16".
    """
    if dtype is None:
        return nullcontext()
    kind = device.partition(":")[0]
    return torch.autocast(kind, getattr(torch, dtype), cache_enabled=False)
