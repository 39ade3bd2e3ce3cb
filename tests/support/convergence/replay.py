"""PipeDream's rule in one process, over the module itself: what an asynchronous launch is compared
with.

A stage with W minibatches in flight has done k - W + 1 steps when minibatch k comes, of those since
the pipeline was last empty. Forward and backward pass take the weights of that time; the step
changes those of now (Narayanan et al., "PipeDream", SOSP 2019, section 3.3). A launch lets the
pipeline run empty before each evaluation.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data.distributed import DistributedSampler

import planner
from tests.support.convergence.curves import Curves
from tests.support.convergence.networks import Task
from tests.support.convergence.rivals import Feeding, judged
from tests.support.convergence.samples import NUM_MICROBATCHES, STEPS_PER_EPOCH


def ages(strategy: Path, model: Path) -> dict[str, int]:
    """Steps by which the weights of each trained parameter are older than those of now: W - 1."""
    stages = planner.read_strategy(strategy).strategy.stages
    stage_of = {operator: stage for stage in stages for operator in stage.operators}
    graph = planner.read_model(model).graph
    trained = {parameter.name for parameter in graph.parameters if parameter.trainable}
    return {
        name: stage_of[operator.name].warmup - 1
        for operator in graph.operators
        for name in operator.parameters
        if name in trained
    }


def replayed(task: Task, num_epochs: int, feeding: Feeding, age: Mapping[str, int]) -> Curves:
    """A training by the rule, with a step for each microbatch.

    Args:
        age: of the weights of each parameter, in steps, once the pipeline is full.
    """
    module = task.module().train()
    optimizer = task.by_torch(module.parameters(), lr=task.learning_rate / NUM_MICROBATCHES)
    rate = CosineAnnealingLR(optimizer, num_epochs * STEPS_PER_EPOCH)
    loader, curves = task.batches(), Curves()
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in range(num_epochs):
        loader.sampler.set_epoch(epoch)
        versions = deque([_copies(module)], maxlen=1 + max(age.values()))
        for x, y in loader:
            total = 0.0
            parts = zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
            for m, (inputs, target) in enumerate(parts):
                met = {name: versions[-1 - min(age[name], len(versions) - 1)][name] for name in age}
                with feeding(len(curves.losses), m):
                    output = torch.func.functional_call(module, met, (inputs,))
                loss = cross_entropy(output.flatten(0, -2), target.flatten())
                gradients = torch.autograd.grad(loss, [*met.values()])
                for name, gradient in zip(met, gradients, strict=True):
                    module.get_parameter(name).grad = gradient
                optimizer.step()
                versions.append(_copies(module))
                total += loss.item()
            curves.losses.append(total / NUM_MICROBATCHES)
            rate.step()
        curves.judge(*judged(module, task))
    return curves


def _copies(module: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of now, by name, that gradients can be asked for."""
    return {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
