"""Launches whose epochs end with a shorter step, or whose data holds a state, on two ranks.

    torchrun --nproc-per-node 2 tests/support/remainder_runs.py FOLDER

FOLDER/launches.json has the arguments of `launched` by name; rank 0 writes what they give into
FOLDER/told.json.
"""

import json
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from tests.support.group_runs import BATCH, LENGTH, WORDS, Net
from tests.support.ranks import ROOT, forked
from tests.support.split_launches import main
from tests.support.split_plans import cut_further, plan_of, random_sharding

MICROBATCHES, RATE, HERE = 4, 0.05, "tests.support.remainder_runs"
SAMPLES = BATCH * MICROBATCHES
"""Of a step: 4 microbatches of 4."""


@cache
def words(count):
    """Words and targets, of which 1 to 8 of 8 count."""
    chance = torch.Generator().manual_seed(7)
    x, y = torch.randint(WORDS, (2, count, LENGTH), generator=chance).unbind()
    y[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (count, 1), generator=chance)] = -100
    return x, y


def fifty():
    """Three steps, and two samples that fill no microbatch."""
    return TensorDataset(*words(50))


def of_43():
    """Two steps, one of two microbatches, and three samples that fill none."""
    return TensorDataset(*words(43))


def of_37():
    """Two steps, one of one microbatch, and one sample that fills none."""
    return TensorDataset(*words(37))


def ten():
    """Steps of two microbatches; two samples fill none."""
    return TensorDataset(*words(10))


def loader():
    """A DataLoader of 43 samples."""
    return DataLoader(of_43(), batch_size=SAMPLES)


class Stream(IterableDataset):
    """43 samples."""

    def __iter__(self):
        return iter(of_43())


def whole_steps():
    """Two steps in each epoch."""
    return DataLoader(of_43(), batch_size=SAMPLES, drop_last=True)


def stream_loader():
    """Batches of a stream."""
    return DataLoader(Stream(), batch_size=SAMPLES)


# ------------------------------------------------------------------------------ data with a state


class EpochSampler(Sampler):
    """Counts its own epochs, and has no set_epoch."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 43

    def __iter__(self):
        chance = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(43, generator=chance).tolist())


def counted_epochs():
    """A DataLoader with that sampler."""
    return DataLoader(of_43(), batch_size=SAMPLES, sampler=EpochSampler())


class ShuffledInPlace(EpochSampler):
    """Shuffles its list in each epoch, by a generator without a seed."""

    def __init__(self):
        self.order, self.chance = [*range(43)], random.Random()

    def __iter__(self):
        self.chance.shuffle(self.order)
        return iter(self.order)


class StatefulSampler(EpochSampler):
    """Begins somewhere, and says where it is."""

    def __init__(self):
        self.epoch = random.SystemRandom().randrange(2**30)

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def stateful_sampler():
    """A DataLoader with that sampler."""
    return DataLoader(of_43(), batch_size=SAMPLES, sampler=StatefulSampler())


class Drawing(Dataset):
    """Draws words from generators of its own, one of them in a transform."""

    def __init__(self):
        self.x, self.y = words(43)
        self.chance, self.others = np.random.default_rng(5), [random.Random(3)]
        self.of_torch, self.old = torch.Generator().manual_seed(2), np.random.RandomState(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index].clone()
        x[self.chance.integers(LENGTH)] = self.others[0].randrange(WORDS)
        x[self.old.randint(LENGTH)] = torch.randint(WORDS, (), generator=self.of_torch)
        return x, self.y[index]


def drawing():
    """The same, shuffled."""
    return DataLoader(Drawing(), batch_size=SAMPLES, shuffle=True)


def half_drawing():
    """The same in steps of half as many samples."""
    return DataLoader(Drawing(), batch_size=SAMPLES // 2, shuffle=True)


def drawing_workers():
    """The same in a worker process."""
    return DataLoader(Drawing(), batch_size=SAMPLES, num_workers=1)


class Collator:
    """Masks words by a generator of its own."""

    def __init__(self):
        self.chance = np.random.default_rng(5)

    def __call__(self, samples):
        x, y = torch.utils.data.default_collate(samples)
        return x.where(torch.from_numpy(self.chance.random(x.shape) < 0.7), 0), y


def collating():
    """A DataLoader with that collate_fn."""
    return DataLoader(of_43(), batch_size=SAMPLES, collate_fn=Collator())


class StatefulStream(IterableDataset):
    """Goes on where it was; draws from a generator of its own, usually without a seed."""

    def __init__(self, seed=None):
        self.at, self.chance = 0, np.random.default_rng(seed)

    def __iter__(self):
        x, y = words(43)
        while self.at < 43:
            self.at += 1
            noisy = x[self.at - 1].clone()
            noisy[self.chance.integers(LENGTH)] = 0
            yield noisy, y[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "chance": self.chance.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.chance.bit_generator.state = state["at"], state["chance"]


def stateful_loader():
    """Batches of that stream."""
    return DataLoader(StatefulStream(), batch_size=SAMPLES)


def seeded_loader():
    """The same with a seed."""
    return DataLoader(StatefulStream(3), batch_size=SAMPLES)


class DrawingStream(IterableDataset):
    """Draws from a generator of its own."""

    def __init__(self):
        self.chance = np.random.default_rng(4)

    def __iter__(self):
        for x, y in of_43():
            noisy = x.clone()
            noisy[self.chance.integers(LENGTH)] = 0
            yield noisy, y


# ------------------------------------------------------------------------------ by torch


def batches_of(dataset):
    """The batches of an epoch, without samples that fill no microbatch."""
    given = DataLoader(dataset, batch_size=SAMPLES)
    whole = [tuple(one[: len(one) // BATCH * BATCH] for one in batch) for batch in given]
    return [batch for batch in whole if len(batch[0])]


def by_torch(batches, steps):
    """Losses and parameters of a plain loop over batches, again and again: one cross-entropy of all
    targets of each.
    """
    module, losses = Net().double(), []
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=0.9)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in module.named_parameters()}


# ------------------------------------------------------------------------------ by plans


def write_plans(folder, model):
    """Strategies of one device and of two."""
    names, chance = tuple(one.name for one in model.graph.operators), random.Random(1)
    third, half = len(names) // 3, len(names) // 2
    parts = names[:third], names[third : 2 * third], names[2 * third :]
    split = random_sharding(model, (2,), chance)
    lies = {"split": split} | {f"zero{n}": cut_further(split, model, n, chance) for n in (1, 2, 3)}
    two = [Stage.whole(names[:half], (0,), 2, False), Stage.whole(names[half:], (1,), 1, False)]
    stages = {
        "alone": [Stage.whole(names, (0,), 1, False)],
        "half": [Stage.whole(names, (0,), 1, False)],  # of the microbatches
        "pipeline": two, "gpipe": two,
        "recomputed": [Stage.whole(names[:half], (0,), 2, True),
                       Stage.whole(names[half:], (1,), 1, True)],
        "to and fro": [Stage.whole(part, (s % 2,), 4, False) for s, part in enumerate(parts)],
        "replicas": [Stage.whole(names, (0, 1), 1, False)],
        "flow": [Stage.whole(names, (0, 1), 1, False)],
        **{name: [Stage(names, ((0, 1),), 1, False, one)] for name, one in lies.items()},
    }  # fmt: skip
    kinds = {"flow": ScheduleName.PIPEDREAM, "gpipe": ScheduleName.GPIPE,
             "to and fro": ScheduleName.GPIPE}  # fmt: skip
    for name, some in stages.items():
        kind = kinds.get(name, ScheduleName.ONE_F_ONE_B)
        count = 2 if name == "half" else MICROBATCHES
        strategy = Strategy(tuple(some), kind, count)
        write_plan(plan_of(model, strategy, optimizer="momentum"), folder / f"{name}.json")


def run_all(folder, launches):
    """Runs launches on two ranks; gives what rank 0 has told, by name."""
    (folder / "launches.json").write_text(json.dumps(launches))
    forked(ROOT / "tests/support/remainder_runs.py", 2, folder)
    return json.loads((folder / "told.json").read_text())


def launched(folder, plan, data, *, keep=None, resume=None, own=False, **how):
    """Losses and notes of a launch; None on rank 1.

    Args:
        keep, resume: folders of checkpoints in the folder.
        own: whether the loop is the user's, over a DataLoader of the data.
    """
    asked = {
        "model": folder / "net.onnx", "learning_rate": RATE, "threads": 1,
        "checkpoint": folder / keep if keep else None,
        "resume": folder / resume if resume else None, **how,
    }  # fmt: skip
    if own:
        with planner.trainer(folder / f"{plan}.json", **asked) as trainer:
            losses = [trainer.step(batch) for batch in batches_of(globals()[data]())]
            trainer.save()
        return {"losses": losses}
    report = planner.launch(folder / f"{plan}.json", data=f"{HERE}:{data}", shuffle=False, **asked)
    return None if report is None else {"losses": report.loss, "notes": report.notes}


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), launched)
        sys.exit(0)
