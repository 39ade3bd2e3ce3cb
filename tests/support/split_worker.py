"""Runs under torchrun: steps of stages that are split, against one process.

    torchrun --nproc-per-node 4 tests/support/split_worker.py FOLDER [CASE ...]

FOLDER has the models of split_models.MODELS. Each rank writes FOLDER/RANK.json: {case: [{parameter:
relative error}, {mesh: what was posted in the queue of its collectives}]}. All cases run in one
start, which tests/launcher/mesh/test_runs.py makes; also with collectives beside computations.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from planner.artefacts.losses import losses
from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, crossings, violations
from planner.commands.errors import ranks_leave_at_once
from planner.launcher import device_part
from planner.launcher.job import TrainingJob
from planner.launcher.options import Loop
from planner.launcher.rendezvous import begin_generation
from planner.launcher.updates import make_optimizer
from planner.operators import parameters, synthetic, to_torch
from planner.schedules.dry_run import dry_run, meetings_of
from planner.schedules.program import program
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.edges import with_local_all_gathers
from planner.solvers.sharded.options import Megatron
from planner.training.trainer import Trainer
from tests.support.builders import islands, problem_of, profile_of
from tests.support.recording import RecordingQueue
from tests.support.split_models import loaded, megatron
from tests.support.split_plans import cut_further, error, mean_of, plan_of, random_sharding
from tests.support.split_profiles import planned, problem, profiled

STEPS, SEED, RATE = 2, 3, 0.05


@dataclass(frozen=True)
class Run:
    """A strategy of a model.

    Attributes:
        model: its name among MODELS.
        strategy: of the loaded model.
        prefetch, gathered_ahead: of all stages that are split.
    """

    model: str
    strategy: Callable[[object], Strategy]
    optimizer: str = "sgd"
    clip: float | None = None
    prefetch: int | None = None
    gathered_ahead: int | None = None

    def of(self, model):
        """The strategy."""
        made = self.strategy(model)
        ahead = {"prefetch": self.prefetch, "gathered_ahead": self.gathered_ahead}
        stages = [replace(one, **ahead) if one.sharding else one for one in made.stages]
        return replace(made, stages=tuple(stages))


def parted(model, at):
    """Indices of the operators of each stage, cut at fractions of the model."""
    count = len(model.graph.operators)
    ends = [0, *(round(count * one) for one in at), count]
    return [range(a, b) for a, b in pairwise(ends)]


def strategy(
    meshes, at=(), replicas=None, count=4, seed=0, recompute=False, gpipe=False, tied=(), zero=0
):
    """Random rules on the meshes of stages; None for a stage that is not split.

    Args:
        at: where the stages are cut.
        replicas: of each stage.
        tied: specs that parameters of several stages have everywhere.
    """
    replicas = replicas or [1] * len(meshes)

    def made(model):
        chance, stages, first = random.Random(seed), [], 0
        for s, (mesh, some) in enumerate(zip(meshes, parted(model, at), strict=True)):
            size = prod(mesh or ())
            last = first + size * replicas[s]
            numbers = list(range(first, last))[::-1]
            groups = tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))
            names = tuple(model.graph.operators[i].name for i in some)
            held = {n for i in some for n in model.graph.operators[i].parameters}
            fixed = [(n, spec) for n, spec in tied if n in held]
            lies = None if mesh is None else random_sharding(model, mesh, chance, some, fixed)
            if zero:
                lies = cut_further(lies, model, zero, chance)
            warmup = count if gpipe else min(-(-count // replicas[s]), len(meshes) - s)
            stages.append(Stage(names, groups, -(-warmup // replicas[s]), recompute, lies))
            first = last
        kind = ScheduleName.GPIPE if gpipe else ScheduleName.ONE_F_ONE_B
        return Strategy(tuple(stages), kind, count)

    return made


def of_megatron(size, *, sequence=False):
    def made(model):
        names = tuple(one.name for one in model.graph.operators)
        lies = megatron(model, size, sequence)
        return Strategy(
            (Stage(names, (tuple(range(size)),), 1, False, lies),), ScheduleName.GPIPE, 1
        )

    return made


def of_solver(**degrees):
    """What the solver `megatron` makes: with classes that are cut."""

    def made(model):
        switches = Megatron(sequence_parallel=False, **degrees)
        chosen = planned(model, switches, prod(degrees.values()))
        (logits,) = model.graph.outputs
        assert chosen.stages[-1].sharding.outputs[logits] == ("S2",)
        return chosen

    return made


def of_program(count, num_microbatches=1):
    """What the solver `intra-op` makes, over slow links."""

    def made(model):
        given = problem(profiled(model), count, num_microbatches, bandwidth=1e8)
        return SOLVERS["intra-op"](given, 5.0).strategy

    return made


def over_slow_links(made, counts):
    """A strategy whose tensors cross stages whole, cut by the planner where they cross slow links.

    Args:
        counts: devices of each host.
    """

    def cut(model):
        plain = made(model)
        crossing = {one.tensor for one in crossings(plain, model.graph)}
        whole = tuple(
            stage
            if stage.sharding is None
            else replace(
                stage,
                sharding=replace(
                    stage.sharding,
                    inputs={n: s for n, s in stage.sharding.inputs.items() if n not in crossing},
                    outputs={n: s for n, s in stage.sharding.outputs.items() if n not in crossing},
                ),
            )
            for stage in plain.stages
        )
        topology = islands(counts, inside=1e12, between=1e6)
        times = [1e-3] * len(model.graph.operators)
        problem = problem_of(profile_of(model.graph, times), topology, plain.num_microbatches)
        chosen = with_local_all_gathers(problem, replace(plain, stages=whole))
        for s, stage in enumerate(chosen.stages):
            if stage.sharding is not None:
                assert stage.sharding != whole[s].sharding
        return chosen

    return cut


CASES = {
    "mlp on 2": Run("mlp", strategy([(2,)], seed=1), "adam"),
    "gpt on 2": Run("gpt", strategy([(2,)], seed=2), "momentum"),
    "cnn on 2": Run("cnn", strategy([(2,)], seed=3)),
    "gpt on 4": Run("gpt", strategy([(4,)], seed=4)),
    "gpt on 2x2": Run("gpt", strategy([(2, 2)], seed=5)),
    "cnn on 2x2, clipped": Run("cnn", strategy([(2, 2)], seed=6), clip=0.1),
    "megatron": Run("gpt", of_megatron(2)),
    "megatron on 4, along the sequence": Run("gpt", of_megatron(4, sequence=True)),
    "the solver's, with cut classes": Run("gpt", of_solver(tensor_degree=2), "momentum"),
    "the solver's, in 2 stages": Run("gpt", of_solver(tensor_degree=2, pipeline_degree=2)),
    "intra-op on 4": Run("gpt", of_program(4), "momentum"),
    "intra-op on 4, two microbatches": Run("cnn", of_program(4, 2), clip=0.1),
    "2 replicas on 2": Run("gpt", strategy([(2,)], replicas=[2], count=3, seed=7), clip=0.1),
    "2 then 2": Run("gpt", strategy([(2,), (2,)], [0.5], seed=8, tied=[("words", ("S0",))])),
    "2 then 1": Run("mlp", strategy([(2,), None], [0.5], seed=9)),
    "1 then 2, again": Run(
        "gpt", strategy([None, (2,)], [0.5], seed=10, recompute=True, tied=[("words", ("R",))])
    ),
    "1x2 then 2x1": Run("cnn", strategy([(1, 2), (2, 1)], [0.4], seed=11, gpipe=True)),
    "1, 2, 1": Run("mlp", strategy([None, (2,), None], [0.3, 0.6], seed=12, count=5)),
    "2 replicas, then 2": Run("mlp", strategy([None, (2,)], [0.5], [2, 1], seed=13, count=3)),
    "2, then 2 replicas": Run("mlp", strategy([(2,), None], [0.5], [1, 2], seed=14, count=3)),
    "2 then 2, over slow links": Run(
        "gpt", over_slow_links(
            strategy([(2,), (2,)], [0.5], seed=22, tied=[("words", ("S0",))]), [2, 2]
        ),
    ),
    "1 then 2, over slow links": Run(
        "gpt", over_slow_links(
            strategy([None, (2,)], [0.5], seed=23, recompute=True, tied=[("words", ("R",))]), [1, 2]
        ),
    ),
    "2 then 1, over slow links": Run(
        "cnn", over_slow_links(strategy([(2,), None], [0.5], seed=24), [2, 1])
    ),
    "zero 1 on 2": Run("mlp", strategy([(2,)], seed=15, zero=1), "adam"),
    "zero 2 on 2": Run("gpt", strategy([(2,)], seed=16, zero=2), clip=0.1),
    "zero 3 on 2": Run("cnn", strategy([(2,)], seed=17, zero=3)),
    "zero 1 on 2x2": Run("mlp", strategy([(2, 2)], seed=18, zero=1), clip=0.1),
    "zero 2 on 2x2": Run("gpt", strategy([(2, 2)], seed=19, zero=2)),
    "zero 1, 2 replicas on 2": Run("cnn", strategy([(2,)], replicas=[2], seed=20, zero=1)),
    "zero 2, 2 replicas on 2": Run("mlp", strategy([(2,)], replicas=[2], seed=21, zero=2)),
}  # fmt: skip
BESIDE = {
    f"{name}, beside": replace(
        one, prefetch=(0, 1_000, 2**20)[i % 3], gathered_ahead=(None, 0, 1_000)[i % 3]
    )
    for i, (name, one) in enumerate(CASES.items())
}


def alone(model, case, count):
    """How some steps of one process change the parameters, and the losses."""
    values = parameters(model, [one.name for one in model.graph.parameters])
    module = to_torch(model, values=values)
    trained = [one for one in values.values() if one.requires_grad]
    optimizer = make_optimizer(Optimizer(case.optimizer), trained, RATE)
    (loss,) = losses(model.graph)
    told = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for m in range(count):
            inputs = synthetic.inputs(model, seed=SEED, microbatch=m)
            (output,) = module(*(inputs[name] for name in module.input_names))
            target = synthetic.target(loss, seed=SEED, microbatch=m)
            total = total + mean_of(loss, output, target) / count
        total.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, case.clip)
        optimizer.step()
        told.append(total.item())
    before = parameters(model, values)
    return {n: (v - before[n]).detach() for n, v in values.items() if v.requires_grad}, told


def run_case(case, folder, rank, device="cpu"):
    """Relative errors of the changes of parameters on this rank in some steps, and what its queue
    was given, by the devices of its meshes; {} if it has no part.
    """
    model = loaded(folder / f"{case.model}.onnx")
    chosen = case.of(model)
    plan = plan_of(model, chosen, optimizer=case.optimizer)
    if rank >= len(plan.ranks):
        return {}, {}
    assert violations(chosen, model.graph, max(plan.ranks) + 1) == ()
    lists = program(chosen, model.graph, plan.prediction.stages)
    assert dry_run(lists, meetings_of(chosen)) is None
    job = TrainingJob(plan, model, lists, losses(model.graph), device)
    loop = Loop(steps=STEPS, learning_rate=RATE, clip=case.clip)
    trainer = Trainer(job, loop, rank)
    before = {name: value.detach().clone() for name, value in trainer.part.trained.items()}
    told = [trainer.step().loss for _ in range(STEPS)]
    trainer.part.shards.settle()
    told = trainer.groups.add_up(told)
    expected, wanted = alone(model, case, chosen.num_microbatches)
    errors = {}
    for name, value in trainer.part.trained.items():
        place = next(iter(trainer.part.places.values()))
        whole = place.part(expected[name], place.spec("parameters", name))
        errors[name] = error((value.detach() - before[name]).cpu(), whole)
    errors["loss"] = max(abs(a - b) / abs(b) for a, b in zip(told, wanted, strict=True))
    trainer.groups.close()
    posted = {
        str(place.stage.groups[place.replica]): [*map(str, place.mesh.queue.posted)]
        for place in trainer.part.places.values()
        if isinstance(place.mesh.queue, RecordingQueue)
    }
    return errors, posted


def main(folder, names):
    torch.set_num_threads(1)
    device_part.queue_on = lambda _: RecordingQueue()
    rank = int(os.environ["RANK"])
    found, every = {}, CASES | BESIDE
    for name in names or every:
        begin_generation(name)  # or a case would meet the addresses of the last one
        found[name] = run_case(every[name], folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), sys.argv[2:])
