"""Peak memory of tensors on 2 and 3 ranks under `--schedule pipedream`, predicted and tracked."""

import pytest

from planner.artefacts.files import write_plan
from planner.artefacts.graph import parameters_by_name
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Options, Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.schedules.orders import default_warmups
from tests.bench.memory import profiled
from tests.support.accuracy_plans import planned
from tests.support.builders import cluster, unit_type
from tests.support.memory_runs import run

COUNT = 6
# Replicas, how a strategy differs, and older versions that each rank keeps, counted by hand: W - 1
# of them, or with vertical sync as many as stage 0, and one more than that behind two replicas.
CASES = {
    "two": ((1, 1), {"optimizer": Optimizer.ADAM}, (1, 0)),
    "three": ((1, 1, 1), {"optimizer": Optimizer.MOMENTUM}, (2, 1, 0)),
    "three-again": ((1, 1, 1), {"recompute": True}, (2, 1, 0)),
    "three-vertical": ((1, 1, 1), {"vertical_sync": True}, (2, 2, 2)),
    "front": ((2, 1), {}, (1, 1, 0)),
    "front-vertical": ((2, 1), {"vertical_sync": True}, (1, 1, 2)),
    "behind": ((1, 2), {"optimizer": Optimizer.ADAM}, (2, 0, 0)),
    "alone": ((2,), {}, (0, 0)),
}


def strategy_of(profile, widths, *, recompute=False, vertical_sync=False):
    """Equally many operators in each stage."""
    names = [operator.name for operator in profile.graph.operators]
    bounds = [len(names) * s // len(widths) for s in range(len(widths) + 1)]
    warmups = default_warmups(widths, COUNT, schedule=ScheduleName.PIPEDREAM)
    stages, first = [], 0
    for s, width in enumerate(widths):
        inside, devices = tuple(names[bounds[s] : bounds[s + 1]]), range(first, first + width)
        stages.append(Stage.whole(inside, devices, warmups[s], recompute))
        first += width
    return Strategy(tuple(stages), ScheduleName.PIPEDREAM, COUNT, vertical_sync)


def trained_bytes(graph, stage):
    """Of the parameters that a stage trains."""
    known, inside = parameters_by_name(graph), {*stage.operators}
    held = {n for o in graph.operators if o.name in inside for n in o.parameters}
    return sum(known[name].bytes for name in held if known[name].trainable)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Plans by name, and the peaks of all ranks, from one start of torchrun."""
    folder, plans = tmp_path_factory.mktemp("memory"), {}
    profile = profiled("llama", folder)
    for name, (widths, how, _) in CASES.items():
        options = {key: how[key] for key in how if key != "optimizer"}
        strategy = strategy_of(profile, widths, **options)
        chosen = Options(
            COUNT, schedule=ScheduleName.PIPEDREAM, optimizer=how.get("optimizer", Optimizer.SGD)
        )
        topology = cluster([unit_type("cpu")] * sum(widths), bandwidth=1e9)
        plans[name] = planned(Problem(profile, topology, chosen), strategy)
        write_plan(plans[name], folder / f"{name}.strategy.json")
    peaks = run(folder, 3, timeout_s=600)
    return profile.graph, plans, peaks


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_versions_are_part_of_the_peak(runs, name):
    graph, plans, peaks = runs
    strategy, devices = plans[name].strategy, plans[name].prediction.devices
    own = [trained_bytes(graph, one) for one in strategy.stages for _ in one.devices]
    older = [one.memory.version_bytes for one in devices]
    assert older == [count * size for count, size in zip(CASES[name][2], own, strict=True)]
    found = [one for one in peaks if one.plan == f"{name}.strategy.json"]
    assert [one.rank for one in found] == [*range(len(devices))]
    for one, versions_bytes in zip(found, older, strict=True):
        print(f"{name} {one.rank}: {one.predicted_bytes / 1e6:.2f} {one.live_bytes / 1e6:.2f} MB")
        assert one.right, one
        assert versions_bytes == 0 or one.predicted_bytes - versions_bytes < 0.97 * one.live_bytes
