"""Numbers of Python and attributes of ONNX in modules of float64; and sums of large numbers."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import (
    DOUBLE,
    EQUAL,
    FLOAT32_ATTRIBUTES,
    Kind,
    around,
    rows,
)


class Normalized(nn.Module):
    """A normalization of images, and of what follows."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, bias=False), norm
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def images():
    return (torch.randn(4, 2, 6, 6),)


class HugeSum(nn.Module):
    """A loss of its own that is a sum over large numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = 1e6 * self.second(torch.tanh(self.first(x)))
        return {"loss": y.square().sum()}


class TinySum(HugeSum):
    """The same of small ones."""

    def forward(self, x):
        return {"loss": 1e-12 * super().forward(x)["loss"] * 1e-9}


class Smoothed(nn.Module):
    """A cross-entropy with smoothed labels."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x, labels):
        return {"loss": functional.cross_entropy(self.head(x), labels, label_smoothing=0.1)}


def double(between):
    """A module of float64 alone."""
    return Kind(around(between), "autograd's own", EQUAL, dtypes=DOUBLE)


def attribute(between):
    """The same with numbers that are attributes in ONNX."""
    return Kind(around(between), "autograd's own", EQUAL, dtypes=DOUBLE, within=FLOAT32_ATTRIBUTES)


KINDS = {
    "scalar-factor": double(lambda: lambda h: h * 0.1),
    "scalar-summand": double(lambda: lambda h: h + 0.1),
    "scalar-divisor": double(lambda: lambda h: h / 0.3),
    "scalar-power": double(lambda: lambda h: h.abs() ** 1.7),
    "scalar-alpha": double(lambda: lambda h: torch.add(h, h, alpha=0.1)),
    "scalar-clamp": double(lambda: lambda h: h.clamp(-0.3, 0.3)),
    "scalar-fill": double(lambda: lambda h: h.masked_fill(h > 0.1, 0.1)),
    "scalar-where": double(lambda: lambda h: torch.where(h > 0.1, h, 0.1)),
    "scalar-full": double(lambda: lambda h: h * torch.full_like(h, 0.1)),
    "scalar-lerp": double(lambda: lambda h: torch.lerp(h, h.square(), 0.1)),
    "scalar-tensor": double(lambda: lambda h: h * torch.tensor(0.1, dtype=h.dtype)),
    "layer-norm": attribute(lambda: nn.LayerNorm(8)),
    "rms-norm": attribute(lambda: nn.RMSNorm(8, eps=1e-5)),
    "leaky-relu": attribute(lambda: nn.LeakyReLU(0.1)),
    "elu": attribute(lambda: nn.ELU(0.3)),
    "softplus": attribute(lambda: nn.Softplus(beta=1.7)),
    "hardsigmoid": attribute(nn.Hardsigmoid),
    "hardswish": attribute(nn.Hardswish),
    "gelu": attribute(nn.GELU),
    "gelu-tanh": attribute(lambda: nn.GELU(approximate="tanh")),
    "silu": attribute(nn.SiLU),
    "mish": attribute(nn.Mish),
    "group-norm": Kind(lambda: (Normalized(nn.GroupNorm(2, 4)), images()), "autograd's own", EQUAL,
        dtypes=DOUBLE, within=FLOAT32_ATTRIBUTES),
    "instance-norm": Kind(lambda: (Normalized(nn.InstanceNorm2d(4, affine=True)), images()),
        "autograd's own", EQUAL, dtypes=DOUBLE, within=FLOAT32_ATTRIBUTES),
    "local-response-norm": Kind(lambda: (Normalized(nn.LocalResponseNorm(2)), images()),
        "autograd's own", EQUAL, dtypes=DOUBLE, within=FLOAT32_ATTRIBUTES),
    "batch-norm": Kind(lambda: (Normalized(nn.BatchNorm2d(4)), images()), "autograd's own", EQUAL,
        within=FLOAT32_ATTRIBUTES),
    "batch-norm-evaluated": Kind(lambda: (Normalized(nn.BatchNorm2d(4)), images()),
        "autograd's own, with running statistics", EQUAL, training=False,
        within=FLOAT32_ATTRIBUTES),
    "smoothed-labels": Kind(
        lambda: (Smoothed(), (*rows(), torch.randint(4, (4,)))), "autograd's own", EQUAL,
        loss="own", within=FLOAT32_ATTRIBUTES),
    "huge-sum": Kind(lambda: (HugeSum(), rows()), "autograd's own", EQUAL, loss="own",
        rate={"sgd": 1e-16, "adamw": 1e-2}),
    "tiny-sum": Kind(lambda: (TinySum(), rows()), "autograd's own", EQUAL, loss="own",
        rate={"sgd": 1e5, "adamw": 1e-2}),
}  # fmt: skip
