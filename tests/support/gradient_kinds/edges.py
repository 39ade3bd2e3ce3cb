"""Gradients where a function has none: bounds, ties and zeros, which example inputs hit exactly.

The plain loop is the standard also there. An "unseen" kind has such points in its data alone.
"""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import EQUAL, REFUSED, Kind, Outcome


class At(nn.Module):
    """A function of the inputs plus zeros, which are trained, so that it is met at exact points.

    After the first step the zeros are no longer zeros; the first gradient has to be right.
    """

    def __init__(self, function):
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(6, 4)
        self.function = function

    def forward(self, x):
        return self.head(self.function(x + self.shift))


def points(values):
    """Rows with the points, in other orders."""
    return torch.stack([torch.tensor(values).roll(i) for i in range(4)])


def at(function, *values, **how):
    """A kind that meets a function at six points."""
    return Kind(
        lambda: (At(function), (points([*values, *[0.7] * 6][:6]),)),
        "torch's convention at a point without a derivative",
        how.pop("accepted", EQUAL),
        data=lambda generator: (points([*values, *[0.7] * 6][:6]),),
        **how,
    )


def unseen(function, *values, **how):
    """The same with example inputs elsewhere."""
    return Kind(
        lambda: (At(function), (torch.full((4, 6), 0.7),)),
        "torch's convention at a point without a derivative, which no example input meets",
        how.pop("accepted", EQUAL),
        data=lambda generator: (points([*values, *[0.7] * 6][:6]),),
        **how,
    )


class Reduced(nn.Module):
    """A reduction of equal numbers."""

    def __init__(self, function):
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(1, 3)
        self.function = function

    def forward(self, x):
        return self.head(self.function(x + self.shift).unsqueeze(-1))


def tied(function, rows=((2.0, 2.0, 1.0, 2.0, 0.5, -1.0),) * 4, **how):
    """A kind that reduces rows to numbers."""
    values = torch.tensor(rows)
    return Kind(
        lambda: (Reduced(function), (values.clone(),)),
        "torch's convention between equal elements", how.pop("accepted", EQUAL),
        data=lambda generator: (values.clone(),), **how,
    )  # fmt: skip


def untied(function, **how):
    """The same with example inputs that are all different."""
    values = torch.tensor(((2.0, 2.0, 1.0, 2.0, 0.5, -1.0),) * 4)
    return Kind(
        lambda: (Reduced(function), (torch.randn(4, 6),)),
        "torch's convention between equal elements, which no example input has",
        how.pop("accepted", EQUAL), data=lambda generator: (values.clone(),), **how,
    )  # fmt: skip


class Images(nn.Module):
    """A pooling of images after a convolution whose outputs are all equal."""

    def __init__(self, pooling):
        super().__init__()
        self.conv, self.pooling, self.head = nn.Conv2d(1, 2, 1), pooling, nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.pooling(self.conv(x)).mean((2, 3)))


class HalfWhere(nn.Module):
    """A logarithm that is not taken of zero: the gradient is no number all the same."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        h = x + self.shift
        return torch.where(h > 0, h.sqrt(), torch.zeros_like(h))


def ones(generator=None):
    return (torch.ones(2, 1, 4, 4),)


FLOAT32 = {"within": {torch.float32: 1e-5, torch.float64: 1e-6}}
ZEROS = ((0.0,) * 6, (1.0, 2.0, 0.5, 0.0, 0.0, 1.0), (0.0,) * 6, (0.0,) * 6)

KINDS = {
    "relu-at-zero": at(torch.relu, 0.0, -1.0, 1.0),
    "abs-at-zero": at(torch.abs, 0.0, -1.0, 1.0),
    "relu6-at-its-bounds": at(functional.relu6, 0.0, 6.0, -1.0, 7.0),
    "relu6-unseen": unseen(functional.relu6, 0.0, 6.0, -1.0, 7.0),
    "clamp-at-its-bounds": at(lambda h: h.clamp(-1, 1), -1.0, 1.0, 2.0, -2.0),
    "clamp-min-at-its-bound": at(lambda h: h.clamp(min=0), 0.0, 1.0, -2.0),
    "hardtanh-at-its-bounds": at(functional.hardtanh, -1.0, 1.0, 2.0, -2.0),
    "hardtanh-unseen": unseen(functional.hardtanh, -1.0, 1.0, 2.0, -2.0),
    "hardswish-at-its-bounds": at(functional.hardswish, -3.0, 3.0, 0.0, 4.0, **FLOAT32),
    "hardsigmoid-at-its-bounds": at(functional.hardsigmoid, -3.0, 3.0, 0.0, 4.0, **FLOAT32),
    "softshrink-at-its-bounds": at(functional.softshrink, -0.5, 0.5, 0.0, 1.0),
    "hardshrink-at-its-bounds": at(functional.hardshrink, -0.5, 0.5, 0.0, 1.0),
    "leaky-relu-at-zero": at(functional.leaky_relu, 0.0, -1.0, 1.0, **FLOAT32),
    "elu-at-zero": at(functional.elu, 0.0, -1.0, 1.0),
    "selu-at-zero": at(functional.selu, 0.0, -1.0, 1.0, **FLOAT32),
    "celu-at-zero": at(functional.celu, 0.0, -1.0, 1.0),
    "threshold-at-its-bound": at(lambda h: functional.threshold(h, 0.5, 0.1), 0.5, 0.4, 1.0,
        **FLOAT32),
    "prelu-at-zero": at(
        lambda h: functional.prelu(h, h.new_full((1,), 0.25)), 0.0, -1.0, 1.0),
    "maximum-of-equals": at(lambda h: torch.maximum(h, torch.ones_like(h)), 1.0, 2.0, 0.0),
    "minimum-of-equals": at(lambda h: torch.minimum(h, torch.ones_like(h)), 1.0, 2.0, 0.0),
    "maximum-of-equals-unseen": unseen(lambda h: torch.maximum(h, torch.ones_like(h)), 1.0, 2.0),
    "square-root-at-zero": at(lambda h: (h * h).sqrt(), 0.0, 1.0),
    "power-at-zero": at(lambda h: h.abs() ** 1.5, 0.0, 1.0, -1.0),
    "where-of-no-number": Kind(lambda: (HalfWhere(), (points([0.0, 1.0, 2.0, 0.5, 0.3, 0.1]),)),
        "zero times infinity: PyTorch's loop has no numbers either", EQUAL,
        data=lambda generator: (points([0.0, 1.0, 2.0, 0.5, 0.3, 0.1]),)),
    "amax-of-equals": tied(lambda h: h.amax(-1)),
    "amax-of-equals-unseen": untied(lambda h: h.amax(-1)),
    "max-of-equals": tied(lambda h: h.max(-1).values),
    "max-of-equals-unseen": untied(lambda h: h.max(-1).values),
    "amin-of-equals": tied(lambda h: h.amin(-1)),
    "min-of-equals": tied(lambda h: h.min(-1).values),
    "median-of-equals": tied(
        lambda h: h.median(-1).values, accepted=REFUSED, causes=("aten.median",)),
    "sort-of-equals": tied(lambda h: h.sort(-1).values[:, 0]),
    "top-of-equals": tied(lambda h: h.topk(2, -1).values.sum(-1), accepted=REFUSED),
    "logsumexp-of-equals": tied(lambda h: h.logsumexp(-1)),
    "norm-at-zero": tied(lambda h: h.norm(dim=-1), ZEROS),
    "norm-at-zero-unseen": Kind(
        lambda: (Reduced(lambda h: h.norm(dim=-1)), (torch.rand(4, 6) + 1,)),
        "zero, which no example input meets", EQUAL,
        data=lambda generator: (torch.tensor(ZEROS),)),
    "norm-of-ones-at-zero": tied(lambda h: h.norm(p=1, dim=-1), ZEROS),
    "normalize-at-zero": tied(lambda h: functional.normalize(h, dim=-1)[:, 0], ZEROS),
    "deviation-of-equals": tied(lambda h: h.std(-1), ((1.0,) * 6,) * 4),
    "product-of-zeros": tied(lambda h: h.prod(-1), ZEROS),
    "running-product-of-zeros": tied(lambda h: h.cumprod(-1)[:, -1], ZEROS),
    "distance-at-zero": tied(lambda h: torch.cdist(h[:, :3], h[:, 3:])[:, 0],
        ((1.0, 2.0, 3.0, 1.0, 2.0, 3.0),) * 4),
    "max-pooling-of-equals": Kind(lambda: (Images(nn.MaxPool2d(2)), ones()),
        "the first of equal elements", EQUAL, data=ones),
    "adaptive-max-pooling-of-equals": Kind(lambda: (Images(nn.AdaptiveMaxPool2d(2)), ones()),
        "the first of equal elements", EQUAL, data=ones),
}  # fmt: skip
assert not any(Outcome.WRONG in one.accepted for one in KINDS.values())
