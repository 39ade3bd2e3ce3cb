"""Copy tasks whose data differs between ranks, or could: inputs are words, and targets the same."""

import os
import random

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    random_split,
)

from tests.support.group_runs import BATCH, LENGTH, MICROBATCHES, WORDS

SAMPLES, STEP = 24, BATCH * MICROBATCHES
RANK = int(os.environ.get("RANK", "0"))
FEW, PIECES = 380, 10**6
"""Where pieces of the text begin that are drawn with a seed; and without one, so many that two
ranks practically never draw the same."""
TEXT = torch.randint(WORDS, (PIECES + LENGTH,), generator=torch.Generator().manual_seed(1))
IMPORTED = torch.randint(WORDS, (SAMPLES, LENGTH))


def words(at):
    """A sample of the text."""
    return TEXT[at : at + LENGTH], TEXT[at : at + LENGTH].clone()


class Crops(Dataset):
    """Random pieces of the text, drawn by a function."""

    def __init__(self, draw, samples=SAMPLES):
        self.draw, self.samples = draw, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return words(self.draw(index))


class Masked(Crops):
    """Words that are masked, and are the targets where they are."""

    def __getitem__(self, index):
        x, y = words(7 * index)
        hidden = torch.tensor([self.draw(index) % 2 == 0 for _ in range(LENGTH)])
        hidden[0] = True
        return torch.where(hidden, 0, x), torch.where(hidden, y, -100)


class Sides(Crops):
    """One tensor alone differs, in one sample and at one place of many."""

    def __getitem__(self, index):
        x, y = words(7 * index)
        y[5] = (y[5] + (RANK if index == 2 else 0)) % WORDS
        return x, y


class Stream(IterableDataset):
    """Pieces of the text in an order, each rank its own part where it is asked to."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return (words(self.draw(i)) for i in range(SAMPLES))


class Late(Crops):
    """The same on all ranks until some samples were read."""

    def __init__(self):
        super().__init__(lambda index: 7 * index)
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        return words(7 * index + (RANK if self.read > 2 * STEP else 0))


class Orders(Sampler):
    """Orders of a generator of its own, from some epoch on without a seed."""

    def __init__(self, unseeded_from):
        self.unseeded_from, self.epoch = unseeded_from, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        seed = None if self.epoch >= self.unseeded_from else self.epoch
        return iter(np.random.default_rng(seed).permutation(SAMPLES).tolist())


class OwnCrops(Crops):
    """Random pieces of the text, drawn by a generator that the dataset holds."""

    def __init__(self, seed):
        self.chance = np.random.default_rng(seed)
        pieces = PIECES if seed is None else FEW
        super().__init__(lambda index: int(self.chance.integers(pieces)))


def crop_unseeded():
    return OwnCrops(None)


def crop_seeded():
    return OwnCrops(3)


def crop_hidden():
    chance = np.random.default_rng(3)
    return Crops(lambda index: int(chance.integers(FEW)))


def crop_global():
    return Crops(lambda index: int(np.random.randint(FEW)))


def crop_workers():
    return DataLoader(crop_unseeded(), STEP, num_workers=2)


def masks_unseeded():
    chance = random.Random()
    return Masked(lambda index: chance.randrange(2))


def masks_collated():
    chance = np.random.default_rng()

    def collate(samples):
        x, y = (torch.stack(one) for one in zip(*samples, strict=True))
        hidden = torch.from_numpy(chance.random(x.shape) < 0.5)
        hidden[:, 0] = True
        return torch.where(hidden, 0, x), torch.where(hidden, y, -100)

    return DataLoader(Crops(lambda index: 7 * index), STEP, collate_fn=collate)


def built_unseeded():
    starts = np.random.default_rng().integers(PIECES, size=SAMPLES).tolist()
    return Crops(starts.__getitem__)


def drawn():
    x = torch.randint(WORDS, (SAMPLES, LENGTH))
    return TensorDataset(x, x)


def imported():
    return TensorDataset(IMPORTED, IMPORTED)


def split():
    return random_split(Crops(lambda index: 3 * index, 2 * SAMPLES), [SAMPLES, SAMPLES])[0]


def set_order():
    names = list({f"doc{i}" for i in range(SAMPLES)})
    return Crops(lambda index: 7 * int(names[index][3:]))


def shard():
    return Crops(lambda index: 7 * (2 * index + RANK))


def one_target():
    return Sides(lambda index: 0)


def longer():
    return Crops(lambda index: 7 * index, SAMPLES + 2 * RANK)


def late():
    return Late()


def late_workers():
    return DataLoader(Late(), STEP, num_workers=1)


def sampler_unseeded():
    return DataLoader(Crops(lambda index: 7 * index), STEP, sampler=Orders(0))


def sampler_later():
    return DataLoader(Crops(lambda index: 7 * index), STEP, sampler=Orders(1))


def sampler_by_rank():
    data = Crops(lambda index: 7 * index, 2 * SAMPLES)
    return DataLoader(data, STEP, sampler=DistributedSampler(data, 2, RANK, shuffle=False))


def stream():
    return Stream(lambda index: 7 * index)


def stream_by_rank():
    return Stream(lambda index: 7 * (2 * index + RANK))


def stream_loader_unseeded():
    chance = np.random.default_rng()
    return DataLoader(Stream(lambda index: int(chance.integers(PIECES))), STEP)


def function_global(step, microbatch, inputs):
    some = [words(int(at))[0] for at in torch.randint(FEW, (BATCH,))]
    return {"x": torch.stack(some)}, torch.stack(some)


def function_unseeded(step, microbatch, inputs):
    some = [words(int(at))[0] for at in np.random.default_rng().integers(PIECES, size=BATCH)]
    return {"x": torch.stack(some)}, torch.stack(some)
