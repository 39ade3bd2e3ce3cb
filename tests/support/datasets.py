"""Datasets as users write them, for the model of `mode_runs.net`: x (N, 3, 6, 6), five classes."""

import random

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

SAMPLES = 41


def tensors(dtype=torch.float64, num_samples=SAMPLES):
    """Inputs and classes that an input tells."""
    random = torch.Generator().manual_seed(5)
    classes = torch.randint(5, (num_samples,), generator=random)
    x = torch.randn(num_samples, 3, 6, 6, generator=random, dtype=dtype)
    return x + classes[:, None, None, None].to(dtype) / 2, classes


def samples():
    """A map-style dataset."""
    return TensorDataset(*tensors())


def few_samples():
    """Fewer than a step has."""
    return TensorDataset(*(one[:15] for one in tensors()))


def named_samples():
    """The same by names."""
    return [{"x": x, "label": label} for x, label in zip(*tensors(), strict=True)]


def loader():
    """A DataLoader with the batch of a whole step."""
    return DataLoader(samples(), batch_size=16, shuffle=True)


def loader_with_workers():
    """The same, read by other processes."""
    return DataLoader(Augmented(), batch_size=16, num_workers=1)


def small_loader():
    """A DataLoader with the batch of a microbatch."""
    return DataLoader(samples(), batch_size=4)


def dropping_loader():
    """Whole batches alone."""
    return DataLoader(samples(), batch_size=16, drop_last=True)


def of_batch_sampler():
    """The batches of a sampler, of which the last one is short."""
    batches = [[*range(first, min(first + 16, SAMPLES))] for first in range(0, SAMPLES, 16)]
    return DataLoader(samples(), batch_sampler=batches)


def even():
    """Samples that fill microbatches of four."""
    return TensorDataset(*(one[:36] for one in tensors()))


class Augmented(Dataset):
    """Draws from every generator, for inputs and targets alike."""

    def __init__(self):
        self.x, self.classes = tensors()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        moved = int(torch.randint(3, ())) + random.randrange(2)
        return self.x[index] + moved, (self.classes[index] + moved) % 5


class Stream(IterableDataset):
    """The samples in their order."""

    def __iter__(self):
        return iter(samples())


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self):
        return SAMPLES


def stream_loader():
    """Batches of a stream; the last one is short."""
    return DataLoader(SizedStream(), batch_size=16)


class FewStream(Stream):
    """Fewer than a step has."""

    def __iter__(self):
        return iter(few_samples())


def dropping_stream():
    """Whole batches of a stream alone."""
    return DataLoader(SizedStream(), batch_size=16, drop_last=True)


class UnevenBatches(IterableDataset):
    """Batches, of which the second one of three is short."""

    def __iter__(self):
        x, classes = tensors()
        return iter(zip(x.split([16, 8, 17]), classes.split([16, 8, 17]), strict=True))


def uneven_stream():
    """Batches as the dataset makes them."""
    return DataLoader(UnevenBatches(), batch_size=None)


def generator():
    """Samples that can be read once."""
    return iter(samples())


def long_classes():
    """Classes beyond those of the model."""
    x, classes = tensors()
    return TensorDataset(x, classes + 3)


def float_targets():
    """Targets of a type that cross-entropy does not take."""
    x, classes = tensors()
    return TensorDataset(x, classes.double())


def wide():
    """Inputs of another shape."""
    x, classes = tensors()
    return TensorDataset(x[..., :5], classes)


def alone():
    """Inputs without targets."""
    return TensorDataset(tensors()[0])


def failing():
    """Fails on some sample."""
    raise FileNotFoundError("no such folder: pictures")


def of_two(step, microbatch):
    """Neither a function of three nor of none."""


def number():
    """Is no dataset."""
    return 7


def none():
    """No samples."""
    return []


def drawn():
    """Samples that are drawn when they are asked for, without a seed."""
    x, classes = tensors()
    return TensorDataset(x + torch.randn(x.shape), (classes + random.randrange(5)) % 5)


def masked(samples):
    """Draws what is masked, in inputs and targets alike, as for a language model."""
    x, classes = default_collate(samples)
    by = torch.randint(5, (len(samples),))
    return x + by[:, None, None, None].to(x.dtype), (classes + by) % 5


def masking_loader():
    """A DataLoader whose collate_fn draws."""
    return DataLoader(samples(), batch_size=16, collate_fn=masked)


def three_samples():
    """Fewer than a microbatch has."""
    return TensorDataset(*(one[:3] for one in tensors()))
