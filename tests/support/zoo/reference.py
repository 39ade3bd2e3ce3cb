"""The plain PyTorch loop over the original module: what a launch has to equal."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW

from tests.support.zoo import ZOO, build

STEPS, NUM_MICROBATCHES, LEARNING_RATE = 10, 2, 1e-3
SEED = 5


def first_output(result):
    """The first tensor that a module returns, alone, in a tuple, or in a dictionary."""
    if isinstance(result, Tensor):
        return result
    values = result.values() if hasattr(result, "values") else result
    return next(value for value in values if isinstance(value, Tensor))


def batches(name):
    """Inputs and target of every microbatch of every step.

    Inputs are the example's numbers in another order, so their range stays; targets are random.

    Returns:
        A list of steps, each a list of (inputs, target), one per microbatch.
    """
    module, example = build(name)
    with torch.no_grad():
        output = first_output(module(*example))
    generator = torch.Generator().manual_seed(SEED)

    def one():
        return tuple(shuffled(t, generator) for t in example), target(name, output, generator)

    return [[one() for _ in range(NUM_MICROBATCHES)] for _ in range(STEPS)]


def shuffled(tensor, generator):
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.flatten()[order].view(tensor.shape)


def target(name, output, generator):
    """A random target for the first output of a network."""
    class_dim = ZOO[name].class_dim
    if class_dim is None:
        return torch.randn(output.shape, generator=generator)
    shape = list(output.shape)
    num_classes = shape.pop(class_dim)
    return torch.randint(num_classes, shape, generator=generator)


def loss_of(name, output, target):
    """PyTorch's own loss of one microbatch."""
    class_dim = ZOO[name].class_dim
    if class_dim is None:
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.movedim(class_dim, 1), target)


def train(name, draws=None):
    """The losses of the steps, and the names of the parameters that got a gradient.

    Args:
        name: of the network.
        draws: gives a context for (step, microbatch), in which the forward pass takes the numbers
            that the launcher drew; None for networks that draw none.
    """
    module, _ = build(name)
    optimizer = AdamW([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    for step, microbatches in enumerate(batches(name)):
        optimizer.zero_grad()
        total = 0.0
        for m, (inputs, goal) in enumerate(microbatches):
            if draws is None:
                output = first_output(module(*inputs))
            else:
                with draws(step, m):
                    output = first_output(module(*inputs))
            loss = loss_of(name, output, goal) / len(microbatches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, [n for n, p in module.named_parameters() if p.grad is not None]
