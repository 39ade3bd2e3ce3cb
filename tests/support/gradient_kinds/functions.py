"""Functions with a backward pass of their own: `torch.autograd.Function`, and custom operators."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

import planner
from tests.support.gradient_kinds.kind import (
    EITHER,
    EQUAL,
    REFUSED,
    SMALL_STEPS,
    TOLD,
    Around,
    Kind,
    around,
    growing,
    large,
    rows,
)


class ReverseGradient(Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class ScaleGradient(Function):
    """A tenth of the gradient; in the newer form, with a context of its own."""

    @staticmethod
    def forward(h, factor):
        return h.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class ClipGradient(Function):
    """A gradient within bounds."""

    @staticmethod
    def forward(ctx, h, bound):
        ctx.bound = bound
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-ctx.bound, ctx.bound), None


class RoundFunction(Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx, h):
        return (4 * h).round() / 4

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient


class LinearWithoutWeightGradient(Function):
    """A product whose backward gives nothing for the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None


class FusedLinear(Function):
    """A product whose backward is that of autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class FrugalSwish(Function):
    """x sigmoid(x), which keeps x alone, with the backward of autograd."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h * h.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (h,) = ctx.saved_tensors
        s = h.sigmoid()
        return gradient * (s + h * s * (1 - s))


class FusedCrossEntropy(Function):
    """The mean cross-entropy, whose gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx, logits, labels):
        logarithms = logits.log_softmax(-1)
        right = functional.one_hot(labels, logits.shape[-1]).to(logits.dtype)
        ctx.save_for_backward((logarithms.exp() - right) / len(labels))
        return -(logarithms * right).sum() / len(labels)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class TwoWeights(nn.Module):
    """Two products by a function."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.function = function

    def forward(self, x):
        return self.function.apply(torch.tanh(self.function.apply(x, self.one)), self.two)


class FusedLoss(Around):
    """A loss of its own by a function."""

    def forward(self, x, labels):
        return {"loss": FusedCrossEntropy.apply(super().forward(x), labels)}


class TwoHeads(nn.Module):
    """A domain classifier behind gradient reversal beside a classifier, as in DANN."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(6, 8)
        self.labels, self.domains = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.tanh(self.features(x))
        return {"labels": self.labels(h), "domains": self.domains(ReverseGradient.apply(h))}


@torch.library.custom_op("trial::reverse", mutates_args=())
def reverse(h: torch.Tensor) -> torch.Tensor:
    """The identity."""
    return h.clone()


@reverse.register_fake
def _(h):
    return torch.empty_like(h)


reverse.register_autograd(lambda ctx, gradient: -gradient)


def reverse_in_torch(x: torch.Tensor) -> torch.Tensor:
    """The launcher's function of trial::reverse."""
    return ReverseGradient.apply(x)


def registered():
    """What a user does before an export of trial::reverse."""
    planner.operators.register("reverse", reverse_in_torch, domain="trial")


KINDS = {
    "function-reverses": Kind(around(lambda: ReverseGradient.apply), "the gradient's sign changes",
        REFUSED, ("ReverseGradient",)),
    "function-reverses-in-a-branch": Kind(lambda: (TwoHeads(), rows()),
        "one of two heads sends its gradient reversed", REFUSED, ("ReverseGradient",),
        outputs=("labels", "domains")),
    "function-scales": Kind(around(lambda: lambda h: ScaleGradient.apply(h, 0.1)),
        "a tenth of the gradient goes on", REFUSED, ("ScaleGradient",)),
    "function-clips": Kind(around(lambda: lambda h: ClipGradient.apply(h, 1e-3)),
        "the gradient is clipped in every step", REFUSED, ("ClipGradient",)),
    "function-clips-unseen": Kind(growing(lambda h: ClipGradient.apply(h, 10.0)),
        "the gradient is clipped on the data, and not on the example inputs", TOLD,
        ("ClipGradient",), data=large, loss="own", rate=SMALL_STEPS),
    "function-clips-nothing": Kind(around(lambda: lambda h: ClipGradient.apply(h, 1e6)),
        "the bound is never reached", EITHER, ("ClipGradient",)),
    "function-rounds": Kind(around(lambda: RoundFunction.apply),
        "rounding with the gradient of the identity", REFUSED, ("RoundFunction",)),
    "function-without-a-gradient": Kind(lambda: (TwoWeights(LinearWithoutWeightGradient), rows()),
        "weights have no gradient", REFUSED, ("LinearWithoutWeightGradient",)),
    "function-linear": Kind(lambda: (TwoWeights(FusedLinear), rows()), "autograd's own", EQUAL),
    "function-swish": Kind(around(lambda: FrugalSwish.apply), "autograd's own", EQUAL),
    "function-loss": Kind(
        lambda: (FusedLoss(nn.Identity()), (torch.randn(4, 6), torch.randint(4, (4,)))),
        "autograd's own, made in the forward pass", EQUAL, loss="own"),
    "custom-operator": Kind(around(lambda: reverse), "the gradient's sign changes", EITHER,
        ("trial",), prepare=registered),
}  # fmt: skip
