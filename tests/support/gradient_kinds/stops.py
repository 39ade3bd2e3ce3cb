"""Gradients that a module stops: `detach`, `no_grad`, `.data`; and stops where there are none."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import (
    EQUAL,
    REFUSED,
    Around,
    Kind,
    around,
    rows,
)


def where_detached(h):
    return torch.where(h > 0, h, h.detach())


def under_no_grad(h):
    with torch.no_grad():
        return h * 2


@torch.no_grad()
def decorated(h):
    return h * 2


def partly_disabled(h):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    stopped = h * 2
    torch.set_grad_enabled(before)
    return stopped + h


def under_inference_mode(h):
    with torch.inference_mode():
        made = h * 2
    return made.clone()


class EnabledWithin(nn.Module):
    """`enable_grad` within `no_grad`: the scale learns, what comes before it does not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, h):
        with torch.no_grad():
            stopped = h * 2
            with torch.enable_grad():
                return stopped * self.scale


class BlockUnderNoGrad(Around):
    """The first layer runs under `no_grad`."""

    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.second(h)


class FrozenBlockUnderNoGrad(BlockUnderNoGrad):
    """The same, and its parameters are frozen, as those of a pretrained backbone."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.first.requires_grad_(False)


class Frozen(Around):
    """Frozen parameters behind trained ones, whose gradients flow through them."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.second.requires_grad_(False)


class WeightStopped(Around):
    """The first layer's weight without its gradient; the bias has its own."""

    def __init__(self, stopped):
        super().__init__(nn.Identity())
        self.stopped = stopped

    def forward(self, x):
        made = functional.linear(x, self.stopped(self.first.weight), self.first.bias)
        return self.second(torch.tanh(made))


class UsedTwice(nn.Module):
    """A weight that is used twice, once without its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        return functional.linear(torch.tanh(x @ self.weight), self.weight.detach())


class TiedHead(nn.Module):
    """The embedding as the head, where it has no gradient."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, tokens):
        h = torch.tanh(self.mix(self.embedding(tokens)))
        return functional.linear(h, self.embedding.weight.detach())


class SimSiam(nn.Module):
    """Two views, and the other's projection as a target without gradient."""

    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, a, b):
        z = torch.tanh(self.encoder(a)), torch.tanh(self.encoder(b))
        p = self.predictor(z[0]), self.predictor(z[1])
        pairs = ((p[0], z[1]), (p[1], z[0]))
        return {"loss": torch.stack([functional.mse_loss(x, y.detach()) for x, y in pairs]).sum()}


class FrozenTarget(nn.Module):
    """A frozen target network under `no_grad`, as in BYOL."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            wanted = torch.tanh(self.target(b))
        return {"loss": functional.mse_loss(torch.tanh(self.online(a)), wanted)}


class TwoOutputs(Around):
    """A second output without a gradient."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return {"y": self.second(h), "features": h.detach() * 2}


class LossAndLogits(Around):
    """A loss of its own, and its logits for a log."""

    def forward(self, x, labels):
        y = self.second(torch.tanh(self.first(x)))
        with torch.no_grad():
            accuracy = (y.argmax(-1) == labels).to(y.dtype).mean()
        return {
            "loss": functional.cross_entropy(y, labels), "logits": y.detach(), "accuracy": accuracy,
        }  # fmt: skip


class Chosen(nn.Module):
    """A codebook read at the index of the largest element: there is no gradient to stop."""

    def __init__(self):
        super().__init__()
        self.book = nn.Embedding(8, 8)

    def forward(self, h):
        return h + self.book(h.detach().argmax(-1))


class Buffered(nn.Module):
    """A buffer that is detached, which has no gradient anyway."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(8))

    def forward(self, h):
        return h * self.scale.detach()


class FrozenDetached(Around):
    """A frozen weight that is detached, too."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        made = functional.linear(x, self.first.weight.detach(), self.first.bias)
        return self.second(torch.tanh(made))


class InputDetached(Around):
    """The input without its gradient, which nothing needs."""

    def forward(self, x):
        return super().forward(x.detach())


def stable_softmax(h):
    """By a detached maximum: the gradient is that without `detach`, because the maximum cancels."""
    shifted = (h - h.amax(-1, keepdim=True).detach()).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def with_labels():
    return LossAndLogits(nn.Identity()), (torch.randn(4, 6), torch.randint(4, (4,)))


def views():
    return torch.randn(4, 6), torch.randn(4, 6)


KINDS = {
    "detach": Kind(around(lambda: lambda h: h.detach()), "nothing reaches the first layer", EQUAL),
    "detach-of-a-residual": Kind(around(lambda: lambda h: h + torch.sin(h).detach()),
        "the branch beside the identity has no gradient", EQUAL),
    "detach-of-a-gate": Kind(around(lambda: lambda h: h * torch.sigmoid(h).detach()),
        "the gate has no gradient", EQUAL),
    "where-detached": Kind(around(lambda: where_detached), "positive elements alone have one",
        EQUAL),
    "data": Kind(around(lambda: lambda h: h + h.data), "half of the sum has none", REFUSED,
        (".data", "detach")),
    "no-grad-between": Kind(around(lambda: under_no_grad), "nothing reaches the first layer",
        EQUAL),
    "no-grad-decorated": Kind(around(lambda: decorated), "nothing reaches the first layer", EQUAL),
    "no-grad-block": Kind(lambda: (BlockUnderNoGrad(nn.Identity()), rows()),
        "the first layer is not trained", EQUAL),
    "no-grad-partly": Kind(around(lambda: partly_disabled),
        "set_grad_enabled(False) for one of two branches", EQUAL),
    "enable-grad-within-no-grad": Kind(around(EnabledWithin),
        "the scale alone learns, not what comes before it", EQUAL),
    "inference-mode": Kind(around(lambda: under_inference_mode), "nothing reaches the first layer",
        EQUAL),
    "weight-detached": Kind(lambda: (WeightStopped(torch.Tensor.detach), rows()),
        "the weight has no gradient, its bias has", EQUAL),
    "weight-data": Kind(lambda: (WeightStopped(lambda w: w.data), rows()),
        "the weight has no gradient, its bias has", REFUSED, (".data", "detach", "first.weight")),
    "weight-used-twice": Kind(lambda: (UsedTwice(), rows()), "one of two uses has a gradient",
        EQUAL),
    "tied-head-detached": Kind(lambda: (TiedHead(), (torch.randint(10, (4, 5)),)),
        "the embedding learns where it is read, not in the head", EQUAL),
    "two-branches": Kind(lambda: (SimSiam(), views()), "targets have no gradient", EQUAL,
        loss="own"),
    "frozen-target": Kind(lambda: (FrozenTarget(), views()),
        "no parameter has a gradient where grad mode is off", EQUAL, loss="own"),
    "frozen-block-under-no-grad": Kind(lambda: (FrozenBlockUnderNoGrad(), rows()),
        "no parameter has a gradient where grad mode is off, only the input would", EQUAL),
    "frozen-parameters": Kind(lambda: (Frozen(), rows()),
        "gradients flow through parameters that have none", EQUAL),
    "frozen-and-detached": Kind(lambda: (FrozenDetached(), rows()), "no gradient is stopped",
        EQUAL),
    "buffer-detached": Kind(around(Buffered), "no gradient is stopped", EQUAL),
    "input-detached": Kind(lambda: (InputDetached(nn.Identity()), rows()),
        "only the input would have a gradient", EQUAL),
    "detach-before-argmax": Kind(around(Chosen), "an index has no gradient anyway", EQUAL),
    "detached-maximum": Kind(around(lambda: stable_softmax),
        "the gradient through the maximum is zero anyway", EQUAL),
    "second-output-detached": Kind(lambda: (TwoOutputs(nn.Identity()), rows()),
        "an output without a gradient, which is not trained", EQUAL),
    "second-output-detached-and-trained": Kind(lambda: (TwoOutputs(nn.Identity()), rows()),
        "an output without a gradient, which is trained", REFUSED, ("detach", "features"),
        outputs=("y", "features")),
    "loss-and-detached-logits": Kind(with_labels, "outputs beside the loss have no gradient", EQUAL,
        loss="own"),
}  # fmt: skip
