"""Replicas with microbatches of their own, and a mesh that splits the samples of one microbatch as
large as all of theirs, are one plan: times and memory agree.
"""

from dataclasses import replace

import pytest

from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import stage_memory
from planner.resharding import reshardings
from planner.resharding.sums import gradient_sums, parameter_specs
from planner.simulator.events import run
from tests.support.builders import cluster, problem_of
from tests.support.counted_runs import NAMES, ROWS, model_of
from tests.support.split import sharding
from tests.support.split_profiles import FAST, profiled

COUNT, BATCH, WIDTH = 4, 3, 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    return [model_of(folder, batch, WIDTH)[0] for batch in (BATCH, COUNT * BATCH)]


def names_of(model):
    return tuple(one.name for one in model.graph.operators)


def timed(model, factor):
    """A profile whose operators take so many times as long. The first one takes next to no time: no
    part of an operator takes less than the fastest operator.
    """
    profile = profiled(model)
    times = [
        replace(one, forward_s=factor * one.forward_s * by, backward_s=factor * one.backward_s * by)
        for one, by in zip(profile.operators, [1e-4, *[1] * len(profile.operators)], strict=False)
    ]
    return replace(profile, operators=tuple(times))


def priced(profile, stage, count):
    """Time of an iteration and memory of a device."""
    topology = cluster([FAST] * COUNT, bandwidth=1e9, latency=1e-7)
    options = {"measured_on": FAST, "optimizer": Optimizer.ADAM}
    problem = problem_of(profile, topology, count, **options)
    known = evaluate(problem, Strategy((stage,), ScheduleName.ONE_F_ONE_B, count))
    return run(known.program, known.costs, topology).iteration_s, known.memory[0].total_bytes


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_and_a_mesh_along_samples_are_one_plan(models, level, recompute):
    small, large = models
    devices = tuple((d,) for d in range(COUNT))
    own = Stage(names_of(small), devices, 1, recompute, over=COUNT, zero=level)
    cut = dict.fromkeys(NAMES, ("S0",))
    lies = {1: {"states": cut}, 2: {"states": cut, "gradients": cut}, 3: {"parameters": cut}}
    rows = {one.name: [ROWS[one.type]] for one in large.graph.operators}
    (output,) = large.graph.outputs
    split = sharding(
        (COUNT,), rows, inputs={"x": ("S0",)}, outputs={output: ("S0",)}, **lies[level]
    )
    mesh = Stage(names_of(large), (tuple(range(COUNT)),), 1, recompute, split)
    time_s, size = priced(timed(small, 1), own, COUNT)
    other_s, other = priced(timed(large, COUNT), mesh, 1)
    assert time_s == pytest.approx(other_s, rel=0.01)
    assert size == pytest.approx(other, rel=0.01)


def test_what_does_not_divide_is_padded_in_buffers_and_counted(models):
    """Of 24 rows over 5 replicas each buffer has 5, and the last replica keeps 4."""
    model, _ = models
    devices = tuple((d,) for d in range(5))
    stage = Stage(names_of(model), devices, 1, recompute=False, over=5, zero=3)
    gathers = {one.tensor: one.forward[0] for one in reshardings(stage, model.graph)}
    item = model.graph.parameters[0].bytes // (24 * WIDTH)
    assert (gathers["words"].rows, gathers["words"].bytes) == (24, 25 * WIDTH * item)
    held = stage_memory(profiled(model), stage).static
    rows = {"words": 5, "g": 4, "b": 4, "w1": 4, "w2": 7}
    whole = {one.name: one for one in model.graph.parameters}
    each = {n: whole[n].bytes // whole[n].shape[0] * count for n, count in rows.items()}
    assert held.state == sum(each.values())


@pytest.mark.parametrize(("level", "lies"), [(2, "R"), (3, "C")])
def test_what_is_not_trained_lies_in_parts_as_parameters_do(models, level, lies):
    graph = models[0].graph
    frozen = replace(
        graph,
        parameters=tuple(
            replace(one, trainable=one.trainable and one.name != "w1") for one in graph.parameters
        ),
    )
    devices = tuple((d,) for d in range(4))
    stage = Stage(names_of(models[0]), devices, 1, recompute=False, over=4, zero=level)
    found = parameter_specs(stage, frozen)["w1"]
    assert (found.parameter, found.gradient, found.state) == ((lies,),) * 3


def test_groups_of_replicas_sum_their_parts_with_the_others(models):
    """HSDP: parts over two replicas, and sums of each part over both groups."""
    model, _ = models
    devices = tuple((d,) for d in range(4))
    stage = Stage(names_of(model), devices, 1, recompute=False, over=2, zero=3)
    sums = gradient_sums(Strategy((stage,), ScheduleName.ONE_F_ONE_B, 4), model.graph)
    assert {one.devices for one in sums} == {(0, 2), (1, 3)}
    assert {one.gradient for one in parameter_specs(stage, model.graph).values()} == {("C",)}
