"""Modules that compute their loss themselves, with denominators that differ between microbatches,
trained by plans of one and two devices.

    torchrun --nproc-per-node 2 tests/support/own_losses.py FOLDER

The plain loop is one forward pass of the module over the whole batch.
"""

import json
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.graph import tensors_by_name
from planner.artefacts.losses import losses
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Sharding, reads, rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.launcher.denominators import denominators
from planner.profilers.rules import split_rules
from planner.schedules.orders import default_warmups
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.gradient_kinds.trial import within
from tests.support.ranks import forked
from tests.support.split_plans import cut_further, lines_for, random_sharding

SAMPLES, NUM_MICROBATCHES, LENGTH, CLASSES, STEPS, RATE = 4, 3, 6, 8, 4, 0.5
IGNORED = -100


class Tokens(nn.Module):
    """A small language model whose output is its loss.

    Args:
        loss: of the module, its scores (N, LENGTH, CLASSES) and labels (N, LENGTH).
    """

    def __init__(self, loss: Callable[["Tokens", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("weights", torch.linspace(0.5, 2.0, CLASSES))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.scores(tokens), labels)

    def scores(self, tokens: Tensor) -> Tensor:
        """(N, LENGTH, CLASSES) of each token."""
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def each(scores, labels):
    """The cross-entropy of each token, 0 of those that are ignored."""
    return functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def shifted(module, scores, labels):
    return functional.cross_entropy(scores[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def weighted(module, scores, labels):
    return functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), module.weights, ignore_index=IGNORED
    )


def smoothed(module, scores, labels):
    return functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), module.weights, label_smoothing=0.25
    )


def likelihood(module, scores, labels):
    """The exporter writes a loss of rank 3 by other operators."""
    return functional.nll_loss(scores.log_softmax(-1).transpose(1, 2), labels, module.weights)


def masked(module, scores, labels):
    mask = (labels != IGNORED).to(scores.dtype)
    return (each(scores, labels) * mask).sum() / mask.sum()


def clamped(module, scores, labels):
    return each(scores, labels).sum() / (labels != IGNORED).sum().clamp(min=1)


def shifted_up(module, scores, labels):
    mask = (labels != IGNORED).to(scores.dtype)
    return (each(scores, labels) * mask).sum() / (mask.sum() + 0.5)


def of_means(module, scores, labels):
    mask = (labels != IGNORED).to(scores.dtype)
    return (each(scores, labels) * mask).mean() / mask.mean().clamp(min=1e-6)


def normalized(module, scores, labels):
    """Weights that add up to one."""
    mask = (labels != IGNORED).to(scores.dtype)
    return (each(scores, labels) * (mask / mask.sum())).sum()


def inverse(module, scores, labels):
    return each(scores, labels).sum() * (1.0 / (labels != IGNORED).to(scores.dtype).sum())


def guarded(module, scores, labels):
    count = (labels != IGNORED).sum()
    total = each(scores, labels).sum()
    return torch.where(count > 0, total / count.clamp(min=1), total * 0)


def of_rows(module, scores, labels):
    """A mean over the samples with a label of their own means."""
    mask = (labels != IGNORED).to(scores.dtype)
    means = (each(scores, labels) * mask).sum(1) / mask.sum(1).clamp(min=1)
    some = mask.any(1).to(scores.dtype)
    return (means * some).sum() / some.sum()


def several(module, scores, labels):
    """Two terms with denominators, one of them with a learned weight, and a mean without."""
    squares = scores.square().mean()
    first = weighted(module, scores, labels) * torch.exp(-module.scale)
    return first + module.scale + 0.1 * squares - 0.25 * masked(module, scores, labels)


def regression(module, scores, labels):
    mask = labels != IGNORED
    error = (scores[..., 0] - labels) * mask
    return functional.mse_loss(error, torch.zeros_like(error), reduction="sum") / mask.sum()


LOSSES = {
    one.__name__: one
    for one in (
        shifted, weighted, smoothed, likelihood, masked, clamped, shifted_up, of_means, normalized,
        inverse, guarded, of_rows, several, regression,
    )
}  # fmt: skip
ALONE = ("one", "adamw", "alone")
PLANS = ("pipeline", "replicas", "tensor", "samples", "zero", "recomputed")


def build(name):
    """The module of a loss, and the example inputs of a microbatch."""
    torch.manual_seed(3)
    tokens = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % CLASSES
    module = Tokens(LOSSES[name]).double().train()
    return module, {"tokens": tokens, "labels": tokens}


def batches(num=STEPS):
    """Inputs of whole steps. Samples have from 1 to LENGTH labels, and those of the second
    microbatch of each step none.
    """
    chance = torch.Generator().manual_seed(1)
    made = []
    for _ in range(num):
        shape = (SAMPLES * NUM_MICROBATCHES, LENGTH)
        tokens = torch.randint(CLASSES, shape, generator=chance)
        counted = (
            torch.arange(LENGTH)
            < torch.randint(1, LENGTH + 1, shape[:1], generator=chance)[:, None]
        )
        counted[SAMPLES : 2 * SAMPLES] = False
        made.append({"tokens": tokens, "labels": torch.where(counted, tokens, IGNORED)})
    return made


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    state: dict[str, Tensor]


def by_torch(name, steps):
    """The plain loop over whole batches."""
    module, _ = build(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for inputs in steps:
        optimizer.zero_grad()
        loss = module(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {key: one.detach() for key, one in module.state_dict().items()})


def trained(strategy, steps, **how):
    """A training by a plan."""
    with planner.trainer(strategy, learning_rate=RATE, threads=1, **how) as trainer:
        losses = [trainer.step(one) for one in steps]
        return Trained(losses, trainer.state_dict())


# ------------------------------------------------------------------------------ plans


def prepare(name, folder):
    """Writes the file of a module and its plans."""
    with within(folder), warnings.catch_warnings(action="ignore"):
        planner.export(*build(name), "model.onnx")
        model = planner.read_model("model.onnx")
        profile = planner.profile(model, repetitions=1, budget_s=0.0, cache=False, contention=False)
        for plan, strategy in strategies(model).items():
            optimizer = Optimizer.ADAMW if plan == "adamw" else Optimizer.SGD
            options = asked(NUM_MICROBATCHES, optimizer=optimizer)
            count = 1 if plan in ALONE else 2
            topology = cluster([unit_type("cpu")] * count, bandwidth=1e9)
            one = planned(Problem(profile, topology, **options), strategy)
            write_plan(one, Path(f"{plan}.json"))
    return model


def strategies(model):
    """By name: a device, a pipeline of two, one with recomputation whose second stage begins with a
    division by what the first one makes of the labels, two replicas, random rules, cut samples,
    ZeRO-3.
    """
    names = tuple(operator.name for operator in model.graph.operators)
    middle = 1 + next(i for i, one in enumerate(model.graph.operators) if one.type == "Tanh")
    warmups = default_warmups([1, 1], NUM_MICROBATCHES)
    last = max(one.operator for one in denominators(model, losses(model.graph)[0]).of)

    def pipeline(cut, recompute):
        parts = enumerate((names[:cut], names[cut:]))
        return tuple(Stage.whole(some, (s,), warmups[s], recompute) for s, some in parts)

    def split(sharding):
        return (Stage(names, ((0, 1),), 1, False, sharding),)

    chance = random.Random(5)
    rules = split_rules(model)
    cut = by_samples(model, rules)
    stages = {
        **dict.fromkeys(ALONE, (Stage(names, ((0,),), 1, False),)),
        "pipeline": pipeline(middle, False),
        "recomputed": pipeline(last, True),
        "replicas": (Stage(names, ((0,), (1,)), 1, False),),
        "tensor": split(random_sharding(model, (2,), chance, rules=rules)),
        "samples": split(cut),
        "zero": split(cut_further(cut, model, 3, chance)),
    }
    schedules = {"alone": ScheduleName.PIPEDREAM}
    return {
        plan: Strategy(some, schedules.get(plan, ScheduleName.ONE_F_ONE_B), NUM_MICROBATCHES)
        for plan, some in stages.items()
    }


def by_samples(model, rules):
    """Every operator by the rule that cuts most of its tensors along dimension 0; a loss operator
    by a mean of the means of parts, which has no rule to be found.
    """
    chosen, graph = {}, model.graph
    described = tensors_by_name(graph)
    for operator in graph.operators:
        held = [name in operator.parameters for name in reads(operator)]

        def worth(line, held=held):
            read = line.partition("->")[0].split(",")
            kept = all(part == "R" for part, is_held in zip(read, held, strict=True) if is_held)
            return kept * line.count("S0")

        lines = lines_for(model, operator, rules, 2)
        if operator.type == "SoftmaxCrossEntropyLoss" and not described[operator.outputs[0]].shape:
            lines.append(",".join(["S0", "S0", *["R"] * len(operator.parameters)]) + "->A")
        chosen[operator.name] = rule_of([max(lines, key=worth)])
    parameters = {one.name: ("R",) for one in graph.parameters}
    return Sharding((2,), chosen, parameters, dict.fromkeys(graph.inputs, ("S0",)), {})


# ------------------------------------------------------------------------------ two ranks


def on_two_ranks(folder, names):
    """What each plan has trained, by (name, plan)."""
    (folder / "names.json").write_text(json.dumps(names))
    forked(Path(__file__), 2, folder, folder=folder, timeout_s=60 + 20 * len(names))
    return {
        (name, plan): one
        for name in names
        for plan, one in torch.load(folder / name / "trained.pt", weights_only=False).items()
    }


def main(folder):
    """Trains every plan of every loss in a folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in json.loads((folder / "names.json").read_text()):
        with within(folder / name):
            found = {plan: trained(f"{plan}.json", batches()) for plan in PLANS}
            if os.environ["RANK"] == "0":
                torch.save({plan: vars(one) for plan, one in found.items()}, "trained.pt")


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
