"""`Network`: an entry of the zoo, and the pieces that several families share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

WORDS, LENGTH, BATCH = 48, 8, 2


@dataclass(frozen=True)
class Network:
    """A network of the zoo.

    Attributes:
        make: gives the module and a tuple of example inputs, one microbatch.
        loss: of the first output: "cross-entropy" over `class_dim`, or "mse".
        class_dim: the dimension of the classes; None for mse.
        draws: whether it draws numbers in training.
        training: whether the module is in training mode.
    """

    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    loss: str = "mse"
    class_dim: int | None = None
    draws: bool = False
    training: bool = True


def tokens(make, **options):
    """A network that gives a score for every word at every position."""
    return Network(make, "cross-entropy", 2, **options)


def classifier(make, **options):
    """A network that gives a score for every class, one set per sample."""
    return Network(make, "cross-entropy", 1, **options)


def words(*shape):
    """Random word numbers; two samples of `LENGTH` words if no shape is given."""
    return torch.randint(WORDS, shape or (BATCH, LENGTH))


def images(size=16, channels=3, batch=BATCH):
    """Random images."""
    return torch.randn(batch, channels, size, size)


class Called(nn.Module):
    """A module whose inputs have names that are not the first ones of its `forward`.

    Args:
        module: the module.
        names: of the inputs.
    """

    def __init__(self, module, *names):
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *inputs):
        return self.module(**dict(zip(self.names, inputs, strict=True)))
