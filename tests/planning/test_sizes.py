"""Sizes of the microbatch that a search chooses: between those profiled, with samples for all
devices, and any size where the profile is good for that.
"""

import signal
from dataclasses import replace

import pytest

import planner
from planner.artefacts.options import Objective, Optimizer
from planner.artefacts.profile import BatchNorm, Source
from planner.costs.bounds import lower_bound_s
from planner.planning import beside as processes
from planner.planning import portfolio as judging
from planner.planning.judge import comparable_s, objective_s, samples_in
from planner.planning.portfolio import compare, portfolio, wide_size
from planner.planning.sizes import MAX_WHOLE, _sizes_between, best_over_sizes
from planner.profilers.interpolate import interpolated
from planner.reports.plans import comparison_table
from planner.solvers.intra import solve as intra
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.layout import NOTHING_TO_SPLIT, divisors
from tests.costs.test_split_bounds import with_rules
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.growing import growing
from tests.support.split import mlp

FAST = unit_type(bandwidth=1e12)
SPLITTING = {"megatron", "zero"}
WAITING = {"intra-op", "inter-op"}


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
    assert (stage.sharding, stage.over, stage.num_replicas) == (None, 3, 6)


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
    # Solvers that wait for plans to beat have a row of their own only where they were asked.
    assert by_size[1] | WAITING == by_size[24] | WAITING == set(portfolio())
    for size in (6, 12):  # neither profiled nor a power of two
        assert by_size[size] - WAITING == SPLITTING
    assert set().union(*by_size.values()) >= WAITING
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
    def between(*ranks):
        return _sizes_between([1, 2, 4, 8, 16, 32], dict(zip((1, 8, 32), ranks, strict=True)))

    assert between((3.0,), (1.0,), (2.0,)) == [4, 16, 2]
    assert between((1.0,), (2.0,), None) == [2, 4]
    assert between(None, None, (1.0,)) == [16]
    assert between(None, None, None) == []


# --------------------------------------------------------------- profiles good for any size


def problem_at(profile, size, samples, devices=4, **options):
    """The problem with microbatches of a size, and one device per `devices`."""
    return problem_of(
        interpolated([profile], size), cluster([FAST] * devices, 1e6, 1e-7), samples // size,
        measured_on=FAST, **{"optimizer": Optimizer.ADAM, "reserve": 0, **options},
    )  # fmt: skip


def planned(profile, samples, names=None, devices=4, limit_s=60.0, **options):
    problem = problem_at(profile, profile.microbatch_size, samples, devices, **options)
    return best_over_sizes([problem], [profile], names, limit_s)


def sizes_of(plans):
    """By size of the microbatch, the solvers that were asked."""
    asked = {}
    for row in plans.comparison.rows:
        asked.setdefault(row.microbatch_size, set()).add(row.solver)
    return asked


def test_solvers_that_wait_are_asked_at_the_best_size_though_only_scouts_were_asked_there():
    """In little memory `zero` is best with microbatches of 4, of 64 samples."""
    plans = planned(growing(), 64, device_memory=24_000)
    others = [row for row in plans.comparison.rows if row.solver not in WAITING and row.plan]
    best = min(others, key=lambda row: row.rank)
    assert sizes_of(plans)[best.microbatch_size] - WAITING == {
        name for name in portfolio() if SOLVERS[name].is_scout
    }
    asked = {(row.solver, row.microbatch_size) for row in plans.comparison.rows
             if row.solver in WAITING and row.solve_s is not None}  # fmt: skip
    assert ("intra-op", best.microbatch_size) in asked


@pytest.mark.parametrize(
    ("preset", "count", "wide"),
    [("p4d", 8, 8), ("p4d", 4, 4), ("p4d-x8", 16, 8), ("p5-x8", 16, 16)],
)
def test_samples_are_split_over_a_host_and_over_all_that_are_linked_as_fast(preset, count, wide):
    """Eight p4d have 50 GB/s between them, and p5 400."""
    assert wide_size(problem_of(profile_at(1), planner.read_topology(preset, count), 1)) == wide


def test_intra_op_is_asked_first_with_a_sample_for_each_device(monkeypatch):
    sizes, function = [], intra.solve

    def watching(problem, *given):
        sizes.append(problem.profile.microbatch_size)
        return function(problem, *given)

    monkeypatch.setattr(intra, "solve", watching)
    monkeypatch.setattr(processes, "cores", lambda: 1)
    planned(growing(), 32, ("intra-op",), 4)
    assert (sizes[0], len(sizes) > 1) == (4, True)
    sizes.clear()
    planned(growing(), 30, ("intra-op",), 4)  # 3 and 5 divide the samples
    assert sizes[0] == 5


def test_beside_others_intra_op_is_asked_with_a_sample_for_each_device_too(monkeypatch):
    """The scouts' sizes are 1, 2, 5, 10 and 30."""
    asked, function = [], judging.Search.ask

    def watching(search, problems, names):
        asked.extend((one.profile.microbatch_size, tuple(names)) for one in problems)
        function(search, problems, names)

    monkeypatch.setattr(judging.Search, "ask", watching)
    planned(growing(), 30, ("single", "intra-op"), 3)
    assert [names for size, names in asked if size == 3] == [("intra-op",)]


def best_alone(profile, samples, **options):
    """The time of zero's best plan over all sizes, each asked for itself."""
    problems = {size: problem_at(profile, size, samples, **options) for size in divisors(samples)}
    found = {
        size: compare(replace(problem, any_size=True), ("zero",)).best
        for size, problem in problems.items()
    }
    times = {n: row.plan.prediction.iteration_s for n, row in found.items() if row is not None}
    return min(times, key=times.get), min(times.values())


@pytest.mark.parametrize("own", [1, 4, 16])
@pytest.mark.parametrize("memory", [10**6, 24_000, 19_000])
def test_zero_takes_the_best_of_all_sizes(own, memory):
    """Gathers and launches are paid per microbatch, so that is a large one, while it fits."""
    plans = planned(growing(own), 32, ("zero",), device_memory=memory)
    size, time_s = best_alone(growing(own), 32, device_memory=memory)
    assert (plans.best.microbatch_size, plans.best.source) == (size, Source.ANALYTIC)
    assert plans.plan.prediction.iteration_s == pytest.approx(time_s)
    assert plans.plan.strategy.num_microbatches == 32 // size


def test_beyond_the_sizes_profiled_scouts_are_asked_first():
    asked = sizes_of(planned(growing(), 32))
    first = {*portfolio()} - WAITING
    asked = {size: some - WAITING for size, some in asked.items()}
    assert asked[1] == first
    scouts = {name for name in portfolio() if SOLVERS[name].is_scout}
    assert {frozenset(some) for size, some in asked.items() if size > 1} == {
        frozenset(scouts),
        frozenset(first),
    }
    whole = [size for size, some in asked.items() if some == first]
    assert len(whole) == 1 + MAX_WHOLE


@pytest.mark.parametrize("objective", [Objective.ITERATION, Objective.BOTTLENECK])
@pytest.mark.parametrize("samples", [12, 30])
def test_no_plan_of_any_size_is_below_the_bound(objective, samples):
    profile = growing()
    plans = planned(profile, samples, ("zero", "data-parallel"), 3, objective=objective)
    bounds = {}
    for size in divisors(samples):
        each = samples_in(objective, size)
        problem = problem_at(profile, size, samples, 3, objective=objective)
        bounds[size] = lower_bound_s(problem) / each
        for row in compare(problem, time_limit_s=0.5).rows:
            if row.plan is not None:
                value_s = objective_s(row.plan) / each
                assert value_s >= (1 - 1e-12) * plans.comparison.lower_bound_s / min(
                    samples_in(objective, one) for one in sizes_of(plans)
                )
    least = min(samples_in(objective, one) for one in sizes_of(plans))
    assert plans.comparison.lower_bound_s == pytest.approx(min(bounds.values()) * least, rel=1e-12)
    # The least bound is that of a size that was not asked.
    assert min(bounds, key=bounds.get) not in sizes_of(plans) or len(sizes_of(plans)) > 3
    gap = comparable_s(plans.plan) / min(bounds.values()) - 1
    assert plans.plan.certificate.gap == pytest.approx(gap)


def test_a_size_that_is_pinned_is_the_only_one():
    profile = growing()
    problem = problem_at(profile, 2, 32, microbatch_size=2)
    plans = best_over_sizes([problem], [problem.profile], ("zero",), 60.0)
    assert set(sizes_of(plans)) == {2}
    assert plans.comparison.lower_bound_s == lower_bound_s(problem)
    own = planned(profile, 32, ("zero",), microbatch_size=1)
    assert set(sizes_of(own)) == {1}
    assert "microbatch" in [column.head for column in comparison_table(own.comparison).columns]


def test_ctrl_c_ends_the_search_for_other_sizes(monkeypatch):
    profile, real = growing(), intra.LayoutSearch.make_fit
    assert len(sizes_of(planned(profile, 64, ("intra-op",)))) > 1

    def interrupted(search, layout):
        made = real(search, layout)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(intra.LayoutSearch, "make_fit", interrupted)
    plans = planned(profile, 64, ("intra-op",))
    assert len(sizes_of(plans)) == 1
    assert plans.comparison.best is not None


def test_latencies_are_those_of_one_microbatch_so_its_size_stays():
    assert set(sizes_of(planned(growing(4), 32, ("single",), objective=Objective.LATENCY))) == {4}


def test_replicas_that_share_are_asked_instead_of_a_mesh_along_samples():
    profile = growing()
    for form, any_size, meshes in (
        (BatchNorm.FROZEN, True, False),
        (BatchNorm.FROZEN, False, True),
        (BatchNorm.TRAINING, True, True),
    ):
        problem = problem_at(replace(profile, batch_norm=form), 8, 32)
        result = SOLVERS["zero"](replace(problem, any_size=any_size), 60.0)
        found = [one.stages[0] for one in (result.strategy, *result.others)]
        cut = [one for one in found if one.sharding is not None]
        assert all(one.sharding.inputs == {"x": ("S0",)} for one in cut)
        assert bool(cut) == meshes
        assert any(one.over > 1 for one in found)


def test_batch_normalizations_keep_wide_sizes():
    profile = growing()
    in_line = {"overlap": False}  # else replicas that share are best
    asked = sizes_of(planned(profile, 64, SPLITTING, 4, **in_line))
    training = replace(profile, batch_norm=BatchNorm.TRAINING)
    normal = sizes_of(planned(training, 64, SPLITTING, 4, **in_line))
    assert "megatron" in normal[16]
    assert "megatron" not in asked[16]


def test_the_same_is_found_beside_other_work(monkeypatch):
    """In one process, and in two."""
    found = []
    for count in (1, 2):
        monkeypatch.setattr(processes, "cores", lambda count=count: count)
        monkeypatch.setattr(judging, "FEW_OPERATORS", 0)
        monkeypatch.setattr(judging, "LEAST_BESIDE_S", 0.0)
        rows = planned(growing(), 32, limit_s=2.0).comparison.rows
        found.append([(row.solver, row.microbatch_size, row.plan) for row in rows])
    assert found[0] == found[1]
