"""A network exported, cut into two stages in the middle, and trained by the launcher."""

import re

import torch

import planner
from planner import launch
from planner.artefacts.files import write_plan
from planner.artefacts.graph import losses_of
from planner.artefacts.plan import (
    Certificate,
    DevicePrediction,
    MemoryParts,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, crossings, used_devices
from planner.model.modes import batch_norm_form
from planner.schedules.orders import default_warmups
from planner.solvers.manual import stages_of
from tests.support.zoo import ZOO
from tests.support.zoo.reference import LEARNING_RATE, NUM_MICROBATCHES, STEPS, batches

FEED = """\
from pathlib import Path
import torch

NAMES, STEPS = torch.load(Path(__file__).with_suffix(".pt"))


def batch(step, microbatch, inputs):
    values, target = STEPS[step % len(STEPS)][microbatch]
    return dict(zip(NAMES, values, strict=True)), target
"""


def read(name, path):
    """The model of a network, with the network's loss."""
    network = ZOO[name]
    return planner.read_model(path, loss=network.loss, class_dim=network.class_dim)


def middle(graph):
    """The operator whose predecessors, itself included, are nearest to half of all operators."""
    half = len(graph.operators) / 2
    names = [operator.name for operator in graph.operators[:-1]]
    return min(names, key=lambda name: abs(len(stages_of(graph, (name,))[0]) - half))


def two_stages(model, devices=(0, 0)):
    """A plan of two stages, made without a profile."""
    stages = [tuple(model.graph.operators[v].name for v in inside)
              for inside in stages_of(model.graph, (middle(model.graph),))]  # fmt: skip
    where = [(device,) for device in devices]
    warmups = default_warmups(
        [1, 1], NUM_MICROBATCHES, schedule=ScheduleName.ONE_F_ONE_B, devices=where
    )
    strategy = Strategy(
        tuple(Stage.whole(operators, place, warmup, False)
              for operators, place, warmup in zip(stages, where, warmups, strict=True)),
        ScheduleName.ONE_F_ONE_B,
        NUM_MICROBATCHES,
    )  # fmt: skip
    used = used_devices(strategy)
    return Plan(
        strategy=strategy,
        prediction=Prediction(
            iteration_s=1.0, bottleneck_s=1.0, latency_s=1.0, throughput=1.0, bubble_fraction=0.0,
            closed_form_s=1.0,
            stages=(StagePrediction(0.1, 0.2),) * 2,
            devices=tuple(
                DevicePrediction(d, f"cpu{d}", "cpu", 0.5, 0.1, 0.4, MemoryParts()) for d in used
            ),
        ),
        certificate=Certificate("iteration", 1.0, 0.0, None, ""),
        solver="manual", status="feasible", reproducible=True, ranks=used,
        crossings=crossings(strategy, model.graph),
        model_path=model.path.name, model_hash=model.hash,
        train=tuple(p.name for p in model.graph.parameters if p.trainable),
        profile_hash="", topology="test", topology_hash="", dimensions=model.dimensions,
        microbatch_size=model.batch, dtype="float32", optimizer="adamw", threads=1, seed=0,
        notes=(), versions={}, batch_norm=batch_norm_form(model.nodes),
        losses=losses_of(model.graph),
    )  # fmt: skip


def write_feed(name, model, folder):
    """Writes the network's data; gives the value of --data."""
    stem = re.sub(r"\W", "_", f"feed_{name}_{folder.name}")  # a module that no other one is
    names = [value.name for value in model.proto.graph.input]
    torch.save((names, batches(name)), folder / f"{stem}.pt")
    (folder / f"{stem}.py").write_text(FEED)
    return f"{stem}:batch"


def train(name, model, folder):
    """The losses of the network's steps, by the launcher, both stages in this process.

    Args:
        folder: the current one, that of the model.
    """
    strategy = folder / "strategy.json"
    write_plan(two_stages(model), strategy)
    data = write_feed(name, model, folder)
    return launch(strategy, steps=STEPS, learning_rate=LEARNING_RATE, data=data).loss
