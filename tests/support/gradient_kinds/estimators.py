"""Functions that are flat, with and without a gradient of another function."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import (
    EQUAL,
    TOLD,
    Kind,
    around,
)


def straight_through(flat):
    """A flat function forward, the identity backward."""
    return lambda h: h + (flat(h) - h).detach()


def one_hot_of_argmax(h):
    soft = h.softmax(-1)
    hard = functional.one_hot(soft.argmax(-1), h.shape[-1]).to(h.dtype)
    return hard - soft.detach() + soft


def clipped_sign(h):
    """The sign forward, the gradient of `clamp` backward, as in binarized networks."""
    near = h.clamp(-0.5, 0.5)
    return (h.sign() - near).detach() + near


def fake_quantized(h):
    return torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -10, 10)


class FakeQuantizedChannels(nn.Module):
    """Fake quantization by a scale per channel."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.05))
        self.register_buffer("zero", torch.zeros(8, dtype=torch.int32))

    def forward(self, h):
        return torch.fake_quantize_per_channel_affine(h, self.scale.float(), self.zero, 1, -10, 10)


class VectorQuantizer(nn.Module):
    """The nearest vector of a book, with the gradient of the identity and two losses."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 4), nn.Linear(4, 6)
        self.book = nn.Embedding(5, 4)

    def forward(self, x):
        z = self.inward(x)
        far = (z[:, None] - self.book.weight).square().sum(-1)
        code = self.book(far.argmin(-1))
        kept = functional.mse_loss(code, z.detach()) + functional.mse_loss(z, code.detach()) / 4
        back = self.outward(z + (code - z).detach())
        return {"loss": functional.mse_loss(back, x) + kept}


def beside(flat):
    """A flat function beside the identity, so that it does not end the training."""
    return lambda h: h + flat(h)


KINDS = {
    "straight-through-round": Kind(around(lambda: straight_through(lambda h: (8 * h).round() / 8)),
        "rounding with the gradient of the identity", EQUAL),
    "straight-through-sign": Kind(around(lambda: straight_through(torch.sign)),
        "the sign with the gradient of the identity", EQUAL),
    "straight-through-clipped-sign": Kind(around(lambda: clipped_sign),
        "the sign with the gradient of a clamp", EQUAL),
    "straight-through-one-hot": Kind(around(lambda: one_hot_of_argmax),
        "the largest class with the gradient of softmax", EQUAL),
    "vector-quantizer": Kind(lambda: (VectorQuantizer(), (torch.randn(4, 6),)),
        "the nearest code with the gradient of the identity", EQUAL, loss="own"),
    "fake-quantize": Kind(around(lambda: fake_quantized),
        "quantization with the gradient of a clamp", EQUAL),
    "fake-quantize-of-channels": Kind(around(FakeQuantizedChannels),
        "quantization with the gradient of a clamp", EQUAL,
        dtypes=(torch.float32,)),
    "round": Kind(around(lambda: beside(lambda h: (4 * h).round())), "rounding has none", EQUAL),
    "round-alone": Kind(around(lambda: lambda h: (4 * h).round()),
        "the first layer's gradients are zeros, by which AdamW's weight decay shrinks it",
        EQUAL | TOLD, ("gradient",)),
    "sign": Kind(around(lambda: beside(torch.sign)), "the sign has none", EQUAL),
    "floor": Kind(around(lambda: beside(lambda h: (4 * h).floor())), "floor has none", EQUAL),
    "remainder": Kind(around(lambda: lambda h: torch.remainder(h, 0.3)), "that of its dividend",
        EQUAL),
    "compared": Kind(around(lambda: lambda h: (h > 0).to(h.dtype)),
        "the first layer has no gradient at all, so that no optimizer touches it", EQUAL),
    "frac": Kind(around(lambda: lambda h: (4 * h).frac()), "that of the identity", EQUAL),
}  # fmt: skip
