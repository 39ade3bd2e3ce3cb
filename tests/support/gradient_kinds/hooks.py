"""Hooks on tensors, modules and parameters, and what else stands around a backward pass."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.gradient_kinds.kind import (
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

LOG: list[float] = []


def log(gradient):
    """Keeps a figure of a gradient."""
    LOG.append(gradient.detach().abs().max())


def hooked(hook):
    """The identity, with a hook on its result where there is a gradient."""

    def between(h):
        made = h * 1
        if made.requires_grad:
            made.register_hook(hook)
        return made

    return lambda: between


def always_hooked(hook):
    """The same without asking whether there is a gradient."""

    def between(h):
        made = h * 1
        made.register_hook(hook)
        return made

    return lambda: between


def retained(h):
    made = h * 1
    if made.requires_grad:
        made.retain_grad()
    return made


def hooked_module(register):
    """A module on which something is registered."""

    def make():
        module = Around(nn.Identity())
        register(module)
        return module, rows()

    return make


def log_all(module, *gradients):
    for one in gradients[-1]:
        if one is not None:
            log(one)


def halve_all(module, *gradients):
    return tuple(None if one is None else one / 2 for one in gradients[0])


def halve_grad(parameter):
    parameter.grad.mul_(0.5)


def masked(gradient):
    """Only the first row learns, as where a part of an embedding is frozen."""
    kept = torch.zeros_like(gradient)
    kept[0] = gradient[0]
    return kept


class OnCpu(Around):
    """What autograd keeps is kept elsewhere."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Packed(Around):
    """What autograd keeps is kept in half precision."""

    def forward(self, x):
        pack, unpack = lambda one: (one.dtype, one.half()), lambda one: one[1].to(one[0])
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return super().forward(x)


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.inside, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, h):
        return checkpoint(self._block, h, use_reentrant=self.reentrant)

    def _block(self, h):
        return torch.tanh(self.inside(h))


HOOK = ("hook",)

KINDS = {
    "tensor-hook-halves": Kind(around(hooked(lambda gradient: gradient / 2)),
        "half of the gradient goes on", REFUSED, HOOK),
    "tensor-hook-clips": Kind(around(hooked(lambda gradient: gradient.clamp(-1e-3, 1e-3))),
        "the gradient is clipped", REFUSED, HOOK),
    "tensor-hook-clips-unseen": Kind(
        growing(hooked(lambda gradient: gradient.clamp(-10, 10))()),
        "the gradient is clipped on the data, and not on the example inputs", TOLD, HOOK,
        data=large, loss="own", rate=SMALL_STEPS),
    "tensor-hook-always": Kind(around(always_hooked(lambda gradient: gradient / 2)),
        "half of the gradient goes on; fails without grad mode", REFUSED, HOOK),
    "tensor-hook-logs": Kind(around(hooked(log)), "the gradient is logged", EQUAL),
    "retain-grad": Kind(around(lambda: retained), "the gradient is kept", EQUAL),
    "module-hook-halves": Kind(
        hooked_module(lambda one: one.second.register_full_backward_hook(halve_all)),
        "half of the gradient goes on", REFUSED, HOOK),
    "module-hook-logs": Kind(
        hooked_module(lambda one: one.second.register_full_backward_hook(log_all)),
        "gradients are logged", EQUAL),
    "module-pre-hook-halves": Kind(
        hooked_module(lambda one: one.first.register_full_backward_pre_hook(halve_all)),
        "half of the gradient goes on", REFUSED, HOOK),
    "forward-hook-detaches": Kind(
        hooked_module(lambda one: one.first.register_forward_hook(lambda *all_: all_[2].detach())),
        "nothing reaches the first layer", EQUAL),
    "parameter-hook-masks": Kind(
        hooked_module(lambda one: one.first.weight.register_hook(masked)),
        "one row of the weight has a gradient", REFUSED, HOOK),
    "parameter-hook-logs": Kind(hooked_module(lambda one: one.first.weight.register_hook(log)),
        "a gradient is logged", EQUAL),
    "post-accumulate-hook-halves": Kind(
        hooked_module(
            lambda one: one.first.weight.register_post_accumulate_grad_hook(halve_grad)),
        "the gradient is halved where it is added up", REFUSED, HOOK),
    "post-accumulate-hook-logs": Kind(
        hooked_module(
            lambda one: one.first.weight.register_post_accumulate_grad_hook(
                lambda p: log(p.grad))),
        "a gradient is logged", EQUAL),
    "save-on-cpu": Kind(lambda: (OnCpu(nn.Identity()), rows()), "autograd's own", EQUAL),
    "saved-in-half": Kind(lambda: (Packed(nn.Identity()), rows()),
        "gradients have the rounding of half precision", REFUSED,
        dtypes=(torch.float64,)),
    "checkpoint": Kind(around(lambda: Checkpointed(reentrant=False)), "autograd's own", EQUAL),
    "checkpoint-reentrant": Kind(around(lambda: Checkpointed(reentrant=True)), "autograd's own",
        EQUAL),
}  # fmt: skip
