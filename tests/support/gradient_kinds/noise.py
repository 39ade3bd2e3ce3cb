"""Modules that draw numbers; the plain loop is fed the launcher's, where that can be done."""

import random

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import (
    DRAWN,
    EQUAL,
    REFUSED,
    TOLD,
    Around,
    Kind,
    Outcome,
    around,
    rows,
)


class ScaledNoise(nn.Module):
    """Noise times a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, h):
        return h + torch.randn_like(h) * self.scale


class Reparametrized(nn.Module):
    """A variational autoencoder with its own loss."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_variance, self.back = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        mean, log_variance = self.mean(x), self.log_variance(x)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return {"loss": functional.mse_loss(self.back(z), x) + divergence}


class NoisyWithStop(nn.Module):
    """Noise, and a gradient that is stopped: draws are no excuse."""

    def forward(self, h):
        return h * torch.sigmoid(h + torch.randn_like(h)).detach()


class DroppedPath(nn.Module):
    """Stochastic depth: a branch that some samples leave out."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(8, 8)

    def forward(self, h):
        kept = (torch.rand(h.shape[0], 1, dtype=h.dtype) + 0.8).floor() / 0.8
        return h + self.branch(h) * kept


class Sampled(nn.Module):
    """Keeps elements by a Bernoulli draw of the module's own probabilities."""

    def forward(self, h):
        return h * torch.bernoulli(torch.sigmoid(h).detach())


class BranchByTorch(nn.Module):
    """Takes a branch by a draw of torch."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(8, 8)

    def forward(self, h):
        return self.branch(h) if torch.rand(()) < 0.5 else h


class BranchByPython(BranchByTorch):
    """Takes a branch by a draw of Python's own, which no trace shows."""

    def forward(self, h):
        return self.branch(h) if random.random() < 0.5 else h


class DropoutAround(Around):
    """Dropout before and behind the second layer."""

    def __init__(self, kind):
        super().__init__(nn.Identity())
        self.one, self.two = kind(0.3), kind(0.3)

    def forward(self, x):
        return self.two(self.second(self.one(torch.tanh(self.first(x)))))


def gumbel(*, hard):
    return lambda h: functional.gumbel_softmax(h, hard=hard)


KINDS = {
    "dropout": Kind(lambda: (DropoutAround(nn.Dropout), rows()), "autograd's own", EQUAL,
        draws=True, dtypes=(torch.float32,)),
    "dropout-double": Kind(lambda: (DropoutAround(nn.Dropout), rows()), "autograd's own", EQUAL,
        draws=True, dtypes=(torch.float64,),
        within={torch.float64: 1e-6}),
    "dropout-evaluated": Kind(lambda: (DropoutAround(nn.Dropout), rows()), "autograd's own", EQUAL,
        training=False),
    "dropout-of-alpha": Kind(lambda: (DropoutAround(nn.AlphaDropout), rows()), "autograd's own",
        DRAWN, draws=True),
    "rrelu": Kind(around(nn.RReLU), "autograd's own", DRAWN | {Outcome.REFUSED}, draws=True),
    "rrelu-evaluated": Kind(around(nn.RReLU), "autograd's own, with the mean slope",
        EQUAL | {Outcome.REFUSED},
        training=False, within={torch.float32: 1e-5, torch.float64: 1e-6}),
    "noise": Kind(around(ScaledNoise), "autograd's own", EQUAL, draws=True),
    "noise-and-a-stop": Kind(around(NoisyWithStop), "the gate has no gradient", EQUAL,
        draws=True),
    "variational": Kind(lambda: (Reparametrized(), rows()), "autograd's own", EQUAL, draws=True,
        loss="own"),
    "dropped-path": Kind(around(DroppedPath), "autograd's own", EQUAL, draws=True),
    "bernoulli-of-a-gate": Kind(around(Sampled), "the draw has no gradient anyway", DRAWN,
        draws=True),
    "gumbel-softmax": Kind(around(lambda: gumbel(hard=False)), "autograd's own", DRAWN, draws=True),
    "gumbel-softmax-hard": Kind(around(lambda: gumbel(hard=True)),
        "a draw of classes with the gradient of softmax", EQUAL, draws=True),
    "branch-by-torch": Kind(around(BranchByTorch), "that of the branch which is drawn", REFUSED,
        ("branch",), draws=True),
    "branch-by-python": Kind(around(BranchByPython), "that of the branch which is drawn", TOLD,
        ("random", "branch"), draws=True),
}  # fmt: skip
