"""The samples: scikit-learn's digits, and sentences made by a grammar.

Training samples come in a DataLoader whose order is that of torch's own DistributedSampler, so that
PyTorch's loops and the launcher, which gets the same loader by --data, read the same batches.
"""

import random
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_MICROBATCHES, MICROBATCH = 4, 12
BATCH = NUM_MICROBATCHES * MICROBATCH
"""Samples of a step of the optimizer."""
STEPS_PER_EPOCH = 20
NUM_TRAINED = STEPS_PER_EPOCH * BATCH
"""Samples that are trained; the digits that are left, 837 of them, are for the evaluation."""
NUM_TEXTS, LENGTH = 480, 16
"""Texts for the evaluation; characters of a text."""
ORDER_SEED = 7


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Pictures of handwritten digits (1797, 1, 8, 8) in float64 from 0 to 1, and their classes, in
    an order that mixes the writers.
    """
    pictures, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(pictures).reshape(-1, 1, 8, 8) / 16
    return x[order], torch.from_numpy(classes)[order]


ARTICLES = ("the", "a", "every", "one")
ADJECTIVES = ("old", "small", "green", "tired", "quick", "happy")
NOUNS = ("dog", "cat", "girl", "robot", "teacher", "sailor", "rabbit", "king")
VERBS = ("sees", "follows", "greets", "paints", "carries", "forgets")
PLACES = ("in the garden", "at the harbour", "on the hill", "near the old mill")


def sentence(dice: random.Random) -> str:
    """A sentence of the grammar.

    >>> sentence(random.Random(0))
    'one quick rabbit paints one teacher at the harbour. '
    """

    def thing() -> str:
        words = [dice.choice(ARTICLES), dice.choice(NOUNS)]
        if dice.random() < 0.5:
            words.insert(1, dice.choice(ADJECTIVES))
        return " ".join(words)

    parts = [thing(), dice.choice(VERBS), thing()]
    if dice.random() < 0.4:
        parts.append(dice.choice(PLACES))
    return " ".join(parts) + ". "


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Characters (N, LENGTH) as numbers, and the one that follows each of them; N is that of the
    training and of the evaluation together.
    """
    dice, size = random.Random(0), (NUM_TRAINED + NUM_TEXTS) * LENGTH + 1
    text = ""
    while len(text) < size:
        text += sentence(dice)
    numbers = torch.tensor([ALPHABET.index(letter) for letter in text[:size]])
    return numbers[:-1].view(-1, LENGTH), numbers[1:].view(-1, LENGTH)


ALPHABET = "".join(sorted({*" ".join((*ARTICLES, *ADJECTIVES, *NOUNS, *VERBS, *PLACES, "."))}))


def loader(samples: tuple[Tensor, Tensor]) -> DataLoader[tuple[Tensor, ...]]:
    """The first samples in another order in each epoch, in batches of a step."""
    data = TensorDataset(*(one[:NUM_TRAINED] for one in samples))
    order: DistributedSampler[int] = DistributedSampler(
        data, num_replicas=1, rank=0, seed=ORDER_SEED
    )
    return DataLoader(data, batch_size=BATCH, sampler=order)


def trained_digits() -> DataLoader[tuple[Tensor, ...]]:
    """For --data."""
    return loader(digits())


def judged_digits() -> TensorDataset:
    """For --eval-data."""
    return TensorDataset(*(one[NUM_TRAINED:] for one in digits()))


def trained_texts() -> DataLoader[tuple[Tensor, ...]]:
    """For --data."""
    return loader(texts())


def judged_texts() -> TensorDataset:
    """For --eval-data."""
    return TensorDataset(*(one[NUM_TRAINED:] for one in texts()))
