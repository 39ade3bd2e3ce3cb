"""The networks, in float64, and how each is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.support.convergence import samples
from tests.support.convergence.samples import ALPHABET, LENGTH

CHANNELS, WIDTH, HEADS, BLOCKS = 8, 32, 2, 2


def normalized(channels: int, more: int, size: int) -> nn.Sequential:
    """A convolution with batch normalization."""
    convolution = nn.Conv2d(channels, more, size, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(more), nn.ReLU())


class Convolutions(nn.Module):
    """Two branches of convolutions with batch normalization, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normalized(1, CHANNELS, 3)
        self.fine = nn.Sequential(
            normalized(CHANNELS, CHANNELS, 3), normalized(CHANNELS, CHANNELS, 3)
        )
        self.coarse = normalized(CHANNELS, CHANNELS, 5)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(2 * CHANNELS * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, 10) of pictures (N, 1, 8, 8)."""
        x = self.stem(x)
        x = functional.max_pool2d(torch.cat((self.fine(x), self.coarse(x)), 1), 2)
        return self.head(self.dropout(x.flatten(1)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention and two linear layers, each beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape (N, length, WIDTH)."""
        y = self.before(x)
        q, k, v = (
            one(y).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, length, letters) of texts (N, length)."""
        x = self.letters(x) + self.places.weight
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """A network and its training.

    Attributes:
        make: the module's class.
        trained: name of the function in the module of samples that gives the training samples.
        judged: the same for the evaluation.
        optimizer: as `planner launch` calls it.
        by_torch: the same optimizer of PyTorch.
        learning_rate: of steps of `BATCH` samples, before half a cosine takes it down to 0.
        draws: whether the module draws numbers, for Dropout.
    """

    make: Callable[[], nn.Module]
    trained: str
    judged: str
    optimizer: str
    by_torch: Callable[..., Optimizer]
    learning_rate: float
    draws: bool = False

    def module(self) -> nn.Module:
        """In float64, with the same weights each time."""
        torch.manual_seed(0)
        return self.make().double()

    def batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """The training samples."""
        return getattr(samples, self.trained)()  # type: ignore[no-any-return]

    def judge(self) -> TensorDataset:
        """The samples of the evaluation."""
        return getattr(samples, self.judged)()  # type: ignore[no-any-return]


def momentum(parameters: object, lr: float) -> Optimizer:
    """SGD with the usual momentum."""
    return SGD(parameters, lr=lr, momentum=0.9)  # type: ignore[arg-type]


TASKS: Mapping[str, Task] = {
    "digits": Task(
        Convolutions, "trained_digits", "judged_digits", "momentum", momentum, 0.05, draws=True
    ),
    "text": Task(Transformer, "trained_texts", "judged_texts", "adamw", AdamW, 3e-3),
}
