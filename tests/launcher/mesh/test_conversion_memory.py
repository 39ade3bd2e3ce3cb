"""Bytes that conversions are said to take, beside those that a tracker of storages sees."""

import random
from contextlib import nullcontext
from itertools import cycle
from math import prod

import pytest
import torch

from planner.artefacts.sharding import local_shape
from planner.costs.mesh_memory import conversion_bytes, gather_bytes, scatter_bytes
from planner.launcher.mesh import lines as meshes
from planner.launcher.mesh.convert import converted
from planner.launcher.mesh.lines import Mesh, ProcessGroupAxis, SingleDeviceAxis, line_of
from planner.launcher.mesh.shards import OptimizerShards
from planner.profilers.storages import StorageTracker
from planner.resharding import conversion
from planner.resharding.sums import gradient_sums, parameter_specs, scattered_buckets
from tests.support.split import HIDDEN, WIDTH, mlp, one_stage, sharding, zero
from tests.support.split_plans import fits

SHAPE = (1, 8, 12, 4)
PARTS = ("R", "P", "S0", "S1", "S2", "S3", "S2/3")
ITEM = 8


@pytest.fixture
def last_of(monkeypatch):
    """Gives the last device of a mesh whose collectives send nothing."""
    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(meshes.dist, name, lambda *_, **__: None)
    for name in ("_GATHER", "_SCATTER"):
        monkeypatch.setattr(meshes, name, lambda *_, **__: None)

    def made(sizes):
        last = prod(sizes) - 1
        lines = [line_of(sizes, last, axis) for axis in range(len(sizes))]
        groups = [
            ProcessGroupAxis(None, line, last, nullcontext) if len(line) > 1 else SingleDeviceAxis()
            for line in lines
        ]
        return Mesh(sizes, last, groups)

    return made


def taken(there, work):
    """The most bytes that live tensors take while something is done, and those of what it gives
    unless that lies in what is there.
    """
    with StorageTracker(there) as tracker:
        before = tracker.now_bytes()
        tracker.peak_bytes()
        made = work()
        most = tracker.peak_bytes() - before
        own = tracker.now_bytes() - before
    del made
    return most, own


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 1, 2)])
def test_a_conversion_takes_what_the_tracker_sees(last_of, sizes):
    chance, mesh, seen = random.Random(0), last_of(sizes), 0
    while seen < 60:
        old, new = (tuple(chance.choice(PARTS) for _ in sizes) for _ in range(2))
        if not (fits(SHAPE, old, sizes) and fits(SHAPE, new, sizes)):
            continue
        seen += 1
        steps = conversion(SHAPE, ITEM, sizes, old, new)
        local = torch.zeros(local_shape(SHAPE, old, sizes), dtype=torch.float64)
        expected = taken([local], lambda one=local, some=steps: converted(one, some, mesh))
        found = conversion_bytes(local.shape, ITEM, sizes, steps)
        assert found == expected, f"{old} -> {new}: {[step.kind.value for step in steps]}"


WEIGHT, SCALE = 4 * WIDTH * HIDDEN, 4 * WIDTH


def test_bytes_of_zero_by_hand():
    """The MLP has a scale and two weights. With ZeRO-1 all are in one bucket, and cut along their
    first dimension.
    """
    every = SCALE + 2 * WEIGHT
    for stage, scattered, gathered in (
        (1, 2 * every + every // 2, every // 2 + every),
        (2, 0, every // 2 + every),
        (3, 0, 0),
    ):
        made = one_stage(mlp(), zero(2, stage), [[0, 1]], 2).stages[0]
        assert scatter_bytes(made, mlp().graph) == scattered
        assert gather_bytes(made, mlp().graph) == gathered


STATES = {
    "first dimension": ((2,), {"up": ["S0,R->S0"]}, [("S0",)]),
    "second dimension": ((2,), {"up": ["S0,R->S0"]}, [("S1",)]),
    "one gather after the other": ((2,), {"up": ["S0,R->S0"]}, [("S0",), ("S1",)]),
    "two axes": ((2, 2), {"up": ["S0,R->S0", "S0,R->S0"]}, [("S0", "S1")]),
    "the same on an axis": ((2, 2), {"up": ["S0,R->S0", "R,R->R"]}, [("S0", "S1")]),
    "chunks": ((2,), {"up": ["S0,R->S0"]}, [("C",)]),
    "uneven chunks": ((5,), {"up": ["R,R->R"]}, [("C",)]),
}


@pytest.mark.parametrize("name", STATES)
def test_gathers_of_parameters_and_scatters_of_gradients_take_what_the_tracker_sees(last_of, name):
    sizes, rules, specs = STATES[name]
    graph = mlp().graph
    names = [one.name for one in graph.parameters if len(one.shape) == 2]
    split = sharding(sizes, rules, states=dict(zip(names, cycle(specs), strict=False)))
    stage = one_stage(mlp(), split, [range(prod(sizes))], 2).stages[0]
    mesh = last_of(sizes)
    lies, values = parameter_specs(stage, graph), {}
    for one in graph.parameters:
        shape = local_shape(one.shape, lies[one.name].parameter, sizes)
        values[one.name] = torch.zeros(shape, requires_grad=True)
        values[one.name].grad = torch.zeros(shape)
    states = OptimizerShards(stage, mesh, values, graph)
    for shard in states.shards.values():
        shard.grad = torch.zeros_like(shard)
    there = [t for one in (*values.values(), *states.shards.values()) for t in (one, one.grad)]
    assert taken(there, states.gather)[0] == gather_bytes(stage, graph)
    most = max(
        (
            taken(there, lambda b=bucket: states.scatter([one.name for one in b]))[0]
            for bucket in scattered_buckets(stage, graph)
        ),
        default=0,
    )
    assert most == scatter_bytes(stage, graph)


def test_buckets_are_those_of_the_sums():
    strategy = one_stage(mlp(), zero(2, 1), [[0, 1]], 2)
    sums = [one.parameters for one in gradient_sums(strategy, mlp().graph) if one.shards]
    buckets = scattered_buckets(strategy.stages[0], mlp().graph)
    assert [tuple(one.name for one in bucket) for bucket in buckets] == sums
    assert sums
