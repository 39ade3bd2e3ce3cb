"""No plan of `solve` is worse, by the simulator, than any row of its table or than plain data
parallelism: on the shipped profiles and presets.
"""

import pytest

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Objective
from planner.artefacts.problem import Options, Problem
from planner.artefacts.topology import take
from planner.clusters.yaml.read import device_table, find_topology, preset_names, read_topology
from planner.planning.judge import judge_unchanged, objective_s, predicted_s
from planner.planning.portfolio import compare

COUNTS = (2, 4, 8, 16)
PROFILES = sorted(path.stem for path in shipped("profiles").glob("*.json"))


def problem(profile, preset, count, **options):
    """None if the preset has fewer devices."""
    path = find_topology(preset)
    topology = read_topology(path)
    if len(topology.devices) < count:
        return None
    topology = take(topology, count)
    smallest = read_any_profiles(shipped("profiles") / f"{profile}.json")[0]
    own = {kind.name: kind for kind in topology.device_types}
    measured_on = (device_table() | own).get(smallest.device_type)
    return Problem(smallest, topology, Options(2 * count, **options), measured_on)


def check(asked, time_limit_s=1.0):
    """Every row that has a plan is no better than the one chosen, which is what it was said."""
    found = compare(asked, time_limit_s=time_limit_s)
    rows = {row.solver: row for row in found.rows}
    assert "data-parallel" in rows
    for row in found.rows:
        assert (row.plan is None) == bool(row.reason)
    if found.best is None:
        assert all(row.plan is None for row in found.rows)
        return
    best = found.best.plan
    figures = {row.solver: objective_s(row.plan) for row in found.rows if row.plan}
    assert objective_s(best) == min(figures.values()), figures
    assert best.certificate.gap >= -1e-12
    again, _ = judge_unchanged(asked, best.strategy)
    assert not again.notes  # it fits
    assert predicted_s(again.prediction, asked.options.objective) == objective_s(best)


@pytest.mark.parametrize(
    ("profile", "preset", "count"),
    [("resnet50", "dgx-1v", 8), ("bert", "mixed-a100-t4", 4), ("llama7b-a100", "dgx-a100", 4),
     pytest.param("gpt2", "p3-16xlarge-x2", 16, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_plan_is_the_best_row(profile, preset, count):
    asked = problem(profile, preset, count)
    assert asked is not None
    check(asked)


@pytest.mark.parametrize("objective", Objective)
def test_the_plan_is_the_best_row_by_every_objective(objective):
    check(problem("resnet50", "titan-rtx-5", 3, objective=objective))


@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("profile", PROFILES)
def test_the_plan_is_the_best_row_everywhere(profile, preset):
    asked = [problem(profile, preset, count) for count in COUNTS]
    if not any(asked):
        pytest.skip(f"{preset} has one device")
    for one in asked:
        if one is not None:
            check(one, time_limit_s=3.0)
