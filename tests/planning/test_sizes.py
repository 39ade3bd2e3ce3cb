"""Microbatches with samples for all devices, for solvers that split samples."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.artefacts.options import Optimizer
from planner.planning.portfolio import portfolio
from planner.planning.sizes import _sizes_between, best_over_sizes
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.layout import NOTHING_TO_SPLIT
from tests.costs.test_split_bounds import with_rules
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import mlp

FAST = unit_type(bandwidth=1e12)
SPLITTING = {"megatron", "zero"}


def profile_at(rows):
    """Each row takes as long as the others."""
    times = tuple(rows * one for one in (0.5, 4.0, 2.0, 4.0))
    return with_rules(mlp(times, (rows, 16, 64)))


def compared(sizes, samples, devices, names=None, **options):
    profiles = [profile_at(n) for n in sizes]
    topology = cluster([FAST] * devices, 1e4, 1e-7)
    options = {"optimizer": Optimizer.ADAM, "reserve": 0, **options}
    problems = [
        problem_of(one, topology, samples // one.microbatch_size, measured_on=FAST, **options)
        for one in profiles
    ]
    plans = best_over_sizes(problems, profiles, names, 60.0)
    return plans.comparison, plans.problems


@pytest.fixture(scope="module")
def wide():
    """48 samples on 6 devices."""
    return compared([1, 24], 48, 6)


def test_zero_splits_samples_where_there_are_enough():
    comparison, asked = compared([1, 24], 48, 6, ("zero",))
    found = {row.microbatch_size: row for row in comparison.rows if row.solver == "zero"}
    assert [one.profile.microbatch_size for one in asked] == sorted(found)
    (stage,) = found[6].plan.strategy.stages
    # Half of the devices and two replicas move less than all of them.
    assert (stage.sharding.mesh, stage.num_replicas) == ((3,), 2)
    assert stage.sharding.inputs == {"x": ("S0",)}
    assert found[6].plan.strategy.num_microbatches == 8
    # Microbatches of a single row are dealt to replicas that share.
    (stage,) = found[1].plan.strategy.stages
    assert (stage.sharding, stage.over, stage.num_replicas) == (None, 6, 6)


def test_nothing_can_be_split_where_no_number_of_devices_divides_a_dimension():
    comparison, _ = compared([1], 1, 5, ("zero",))
    (row,) = (row for row in comparison.rows if row.microbatch_size == 1)
    assert row.plan is None
    assert row.reason == NOTHING_TO_SPLIT


def test_where_no_mesh_divides_the_samples_zero_takes_one_on_which_anything_can_be_cut():
    """Eight rows of one sample on 6 devices: meshes of 6 and 3 cut nothing, one of 2 does."""
    profile = replace(profile_at(8), microbatch_size=1)
    problem = problem_of(profile, cluster([FAST] * 6, 1e4, 1e-7), 6, measured_on=FAST,
                         optimizer=Optimizer.ADAM, reserve=0)  # fmt: skip
    result = SOLVERS["zero"](problem, 60.0)
    found = [one.stages[0] for one in (result.strategy, *result.others)]
    (stage,) = [one for one in found if one.sharding is not None]
    assert (stage.sharding.mesh, stage.num_replicas) == ((2,), 3)


def test_at_wide_sizes_only_solvers_that_split_samples_are_asked(wide):
    comparison, _ = wide
    by_size = {}
    for row in comparison.rows:
        by_size.setdefault(row.microbatch_size, set()).add(row.solver)
    assert by_size[1] == by_size[24] == set(portfolio())
    for size in (6, 12):  # neither profiled nor a power of two
        assert by_size[size] == SPLITTING
    assert comparison.lower_bound_s <= comparison.best.plan.prediction.iteration_s


def test_without_such_a_solver_no_wide_size_is_asked():
    _, asked = compared([1, 24], 48, 6, ("antichain",))
    assert {6, 12}.isdisjoint(one.profile.microbatch_size for one in asked)


def test_samples_may_be_split_over_a_part_of_the_devices_with_replicas():
    """4 samples on 8 devices: 4 devices split them, and two replicas take turns."""
    comparison, _ = compared([4], 16, 8, ("zero",))
    (stage,) = comparison.best.plan.strategy.stages
    assert (stage.sharding.mesh, stage.num_replicas) in (((4,), 2), ((2,), 4))


def test_sizes_between_are_next_to_the_best_one():
    profiles = [SimpleNamespace(microbatch_size=size) for size in (1, 8, 32)]
    problems = [
        SimpleNamespace(profile=one, num_microbatches=64 // one.microbatch_size) for one in profiles
    ]

    def between(*ranks):
        answers = [SimpleNamespace(best_rank=rank) for rank in ranks]
        return _sizes_between(problems, profiles, answers)

    assert between((3.0,), (1.0,), (2.0,)) == [4, 16, 2]
    assert between((1.0,), (2.0,), None) == [2, 4]
    assert between(None, None, (1.0,)) == [16]
    assert between(None, None, None) == []
