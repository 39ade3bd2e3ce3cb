"""Trainings of bfloat16 parameters with float32 copies, by several plans, and the same by plain
PyTorch loops.

    torchrun --nproc-per-node 2 tests/support/short_runs.py FOLDER

FOLDER/launches.json has the options of each launch by name, as `split_launches` has them.
"""

import math
import sys
from functools import cache
from pathlib import Path

import torch
from onnx import TensorProto
from torch.nn import functional
from torch.utils.data import TensorDataset

from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.clusters.yaml.read import shipped_device_type
from planner.commands.errors import ranks_leave_at_once
from planner.profilers.analytic import analytic
from tests.support import split_launches
from tests.support.accuracy_plans import planned
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import sharding
from tests.support.split_models import LENGTH, WORDS, Net, loaded

HERE = "tests.support.short_runs"
BATCH, WIDTH, COUNT, STEPS, RATE, CLIP = 2, 6, 4, 6, 0.02, 0.4
"""A step has `COUNT` microbatches of `BATCH` samples."""
NAMES = ("words", "g", "b", "w1", "bias", "w2")


def write_model(path):
    """(BATCH, LENGTH) tokens -> (BATCH, LENGTH, WORDS) scores; gives the parameters by name."""
    net = Net()
    h = net.add("Gather", net.weight("words", WORDS, WIDTH), "x")
    h = net.add("LayerNormalization", h, net.weight("g", WIDTH), net.weight("b", WIDTH))
    h = net.add("MatMul", h, net.weight("w1", WIDTH, 2 * WIDTH))
    h = net.add("Add", h, net.weight("bias", 2 * WIDTH))
    h = net.add("Gelu", h)
    h = net.add("MatMul", h, net.weight("w2", 2 * WIDTH, WORDS))
    net.save(
        path, ((BATCH, LENGTH), TensorProto.INT64), (h, (BATCH, LENGTH, WORDS)),
        dtype=TensorProto.FLOAT,
    )  # fmt: skip
    return {name: torch.tensor(net.held[name]).float() for name in NAMES}


@cache
def samples():
    """Of all steps."""
    chance = torch.Generator().manual_seed(3)
    shape = STEPS * COUNT * BATCH, LENGTH
    return tuple(torch.randint(WORDS, shape, generator=chance) for _ in range(2))


def data():
    """For --data."""
    return TensorDataset(*samples())


def problem(model, num_ranks=2, **types):
    """Of a computed profile under autocast with types of parameters and gradients."""
    profile = analytic(
        model, model_path="net.onnx", kind=shipped_device_type("A100-SXM4-80GB"),
        dtype="bfloat16", **types,
    )  # fmt: skip
    kinds = [unit_type()] * num_ranks
    return problem_of(profile, cluster(kinds, 1e9, 1e-7), COUNT, optimizer="adamw")


def stages(model):
    """The stages of each plan by its name; those that split samples train the same numbers."""
    names = tuple(one.name for one in model.graph.operators)
    both, (output,) = ((0,), (1,)), model.graph.outputs
    products = [one.name for one in model.graph.operators if one.type == "MatMul"]
    adds = [one.name for one in model.graph.operators if one.type in ("Add", "Gelu")]
    megatron = sharding(
        (2,),
        {products[0]: ["R,S1->S2"], adds[0]: ["S2,S0->S2"], adds[1]: ["S2->S2"],
         products[1]: ["S2,S0->P"]},
        parameters={"w1": ("S1",), "bias": ("S0",), "w2": ("S0",)}, outputs={output: ("R",)},
    )  # fmt: skip
    return {
        "one": [Stage(names, ((0,),), 1, False)],
        "replicas": [Stage(names, both, 1, False)],
        **{f"zero{level}": [Stage(names, both, 1, False, over=2, zero=level)]
           for level in (1, 2, 3)},
        "beside": [Stage(names, both, 1, False, over=2, zero=3, prefetch=2**20)],
        "again": [Stage(names, both, 1, True, over=2, zero=3)],
        "megatron": [Stage(names, ((0, 1),), 1, False, megatron)],
        "pipeline": [Stage(names[:3], ((0,),), 2, False), Stage(names[3:], ((1,),), 1, False)],
    }  # fmt: skip


def write(folder, model):
    """A strategy of each kind: with gradients in bfloat16; "in full", with those in float32; and
    "cast", with float32 parameters.
    """
    short = {"parameters": "bfloat16"}
    for end, types in {
        "": short,
        " in full": {**short, "gradients": "float32"},
        " cast": {},
    }.items():
        for name, own in stages(model).items():
            given = problem(model, 1 if name == "one" else 2, **types)
            plan = planned(given, Strategy(tuple(own), ScheduleName.ONE_F_ONE_B, COUNT))
            write_plan(plan, folder / f"{name}{end}.json")


def model_of(folder):
    """The model, and its parameters."""
    values = write_model(folder / "net.onnx")
    return loaded(folder / "net.onnx"), values


# ------------------------------------------------------------------------------ plain loops


class Loop:
    """A plain loop with bfloat16 parameters, float32 copies of them, and AdamW.

    Args:
        values: float32 parameters by name.
        dtype: of gradients as they are added up; None for those of float32 parameters, which are
            trained themselves.
        clip: the largest norm of gradients.
        count: microbatches of a step.
    """

    def __init__(self, values, dtype=torch.bfloat16, clip=math.inf, count=COUNT):
        self.dtype, self.clip, self.count = dtype, clip, count
        self.copies = {name: value.clone().requires_grad_() for name, value in values.items()}
        self.held = self.copies
        if dtype is not None:
            self.held = {n: value.bfloat16().requires_grad_() for n, value in values.items()}
        self.optimizer = torch.optim.AdamW(self.copies.values(), RATE, fused=True)

    def gradients(self, x, y):
        """Of a microbatch, by parameter, and its part of the loss of a step."""
        own = self.held
        with torch.autocast("cpu", torch.bfloat16):
            h = functional.embedding(x, own["words"])
            h = functional.layer_norm(h, (WIDTH,), own["g"], own["b"])
            h = functional.gelu(h @ own["w1"] + own["bias"])
            scores = (h @ own["w2"]).flatten(0, 1)
            loss = functional.cross_entropy(scores, y.flatten(), reduction="sum")
            loss = loss / (self.count * y.numel())
        found = torch.autograd.grad(loss, [*own.values()])
        return loss.item(), [one.to(self.dtype or one.dtype) for one in found]

    def step(self, microbatches, together):
        """One step; gives its loss.

        Args:
            together: the sums of gradients, from those of microbatches.
        """
        losses, found = zip(*(self.gradients(*one) for one in microbatches), strict=True)
        for copy, gradient in zip(self.copies.values(), together(found), strict=True):
            copy.grad = gradient.float()
        if self.clip < math.inf:
            torch.nn.utils.clip_grad_norm_(self.copies.values(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, copy in self.copies.items() if self.dtype is not None else ():
                self.held[name].copy_(copy)
        return sum(losses)


def in_turn(found):
    """One device: microbatch by microbatch."""
    first, *others = ([one.clone() for one in each] for each in found)
    for each in others:
        for total, one in zip(first, each, strict=True):
            total.add_(one)
    return first


def by_replica(found):
    """Two replicas, whose sums are added up after the last microbatch."""
    return in_turn([in_turn(found[0::2]), in_turn(found[1::2])])


def by_round(found):
    """Two replicas, whose gradients are added up after each microbatch."""
    return in_turn([in_turn(pair) for pair in zip(found[0::2], found[1::2], strict=True)])


def by_torch(values, together, *how):
    """Losses and float32 parameters of a plain loop on one thread, as ranks have."""
    torch.set_num_threads(1)
    x, y = samples()
    loop, losses = Loop(values, *how), []
    for first in range(0, len(x), loop.count * BATCH):
        parts = [slice(at, at + BATCH) for at in range(first, first + loop.count * BATCH, BATCH)]
        losses.append(loop.step([(x[one], y[one]) for one in parts], together))
    return losses, {name: one.detach() for name, one in loop.copies.items()}


if __name__ == "__main__":
    with ranks_leave_at_once():
        split_launches.main(Path(sys.argv[1]))
        sys.exit(0)
