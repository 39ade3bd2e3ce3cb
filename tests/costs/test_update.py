"""Bytes and times of steps of bfloat16 parameters, counted by hand per element."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Parameter, with_parameters_in
from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.strategy import gradient_sums as unsplit_sums
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import stage_memory, static_bytes
from planner.costs.update import state_copies, step_s, update_copies
from planner.resharding import reshardings
from planner.resharding.sums import gradient_sums, state_steps
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

ROWS, COLUMNS, LAYERS = 64, 10, 3
ELEMENTS = LAYERS * ROWS * COLUMNS


def problem(parameters=None, gradients=None, count=2, **options):
    """A chain of operators, each with a parameter of ROWS x COLUMNS numbers."""
    graph = graph_of([[v - 1] if v else [] for v in range(LAYERS)])
    held = tuple(
        Parameter(one.name, (ROWS, COLUMNS), "float32", trainable=True) for one in graph.parameters
    )
    graph = replace(graph, parameters=held)
    if parameters is not None:
        graph = with_parameters_in(graph, parameters, gradients)
    profile = replace(profile_of(graph, [1.0] * LAYERS), parameter_dtype=parameters)
    topology = cluster([unit_type(bandwidth=100.0)] * count)
    return problem_of(profile, topology, 2, **options)


def stage(given, **how):
    names = tuple(one.name for one in given.profile.graph.operators)
    return Stage(names, ((0,), (1,)), 1, False, **how)


def memory(given, own):
    found = evaluate(given, Strategy((own,), ScheduleName.ONE_F_ONE_B, 2)).memory[0]
    parts = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes)
    return [one / ELEMENTS for one in parts]


@pytest.mark.parametrize(("optimizer", "state"), [
    (Optimizer.SGD, 4), (Optimizer.MOMENTUM, 8), (Optimizer.ADAM, 12), (Optimizer.ADAMW, 12),
])  # fmt: skip
def test_the_state_has_a_float32_copy_and_float32_moments(optimizer, state):
    given = problem("bfloat16", optimizer=optimizer)
    assert state_copies("bfloat16", optimizer) * 2 == state
    assert memory(given, stage(given)) == [2, 2, state]
    assert static_bytes(2, 2, given) == 2 + 2 + state


def test_float32_parameters_stay_as_they_were():
    given = problem(optimizer=Optimizer.ADAM)
    assert memory(given, stage(given)) == [4, 4, 8]


def test_gradients_that_are_added_up_in_float32_have_4_bytes():
    given = problem("bfloat16", "float32", optimizer=Optimizer.ADAM)
    assert memory(given, stage(given)) == [2, 4, 12]
    assert update_copies(given) * 2 == 4 + 12
    strategy = Strategy((stage(given),), ScheduleName.ONE_F_ONE_B, 2)
    assert sum(one.bytes for one in unsplit_sums(strategy, given.profile.graph)) == 4 * ELEMENTS
    short = problem("bfloat16").profile.graph
    assert sum(one.bytes for one in unsplit_sums(strategy, short)) == 2 * ELEMENTS


@pytest.mark.parametrize(("level", "expected"), [
    # Level 1 adds gradients up whole, and has buffers for those of parts.
    (1, [2, 2 + 1, 6]), (2, [2, 1, 6]), (3, [1, 1, 6]),
])  # fmt: skip
def test_copies_lie_in_parts_where_the_state_does(level, expected):
    given = problem("bfloat16", optimizer=Optimizer.ADAM)
    assert memory(given, stage(given, over=2, zero=level)) == expected


@pytest.mark.parametrize(("gradients", "item"), [(None, 2), ("float32", 4)])
def test_parts_are_gathered_in_bfloat16_and_scattered_in_the_gradients_type(gradients, item):
    given = problem("bfloat16", gradients)
    graph = given.profile.graph
    steps = state_steps(stage(given, over=2, zero=1), graph)["w0"]
    assert [one.bytes for one in steps.gather] == [2 * ROWS * COLUMNS]
    assert [one.bytes for one in steps.scatter] == [item * ROWS * COLUMNS]
    (copy, *_) = reshardings(stage(given, over=2, zero=3), graph)
    assert [one.bytes for one in copy.forward] == [2 * ROWS * COLUMNS]
    assert [one.bytes for one in copy.backward] == [item * ROWS * COLUMNS]
    strategy = Strategy((stage(given, over=2, zero=1),), ScheduleName.ONE_F_ONE_B, 2)
    assert sum(one.bytes for one in gradient_sums(strategy, graph)) == item * ELEMENTS


def test_a_step_reads_and_writes_copies_and_moments_in_float32():
    """In bytes per element: a gradient is read (2), written and read in float32 (8), two moments
    and the copy are read and written (24), the copy is read (4) and the parameter written (2), and
    the gradient cleared (2).
    """
    given, kind = problem("bfloat16", optimizer=Optimizer.ADAM), unit_type(bandwidth=100.0)
    assert step_s(given, 2 * 100, kind) == pytest.approx((2 + 8 + 24 + 4 + 2 + 2) * 100 / 100.0)
    full = problem("bfloat16", "float32", optimizer=Optimizer.ADAM)
    assert step_s(full, 2 * 100, kind) == pytest.approx((4 + 8 + 24 + 4 + 2 + 4) * 100 / 100.0)


def test_gradients_become_float32_a_bucket_at_a_time():
    given = problem("bfloat16")
    assert stage_memory(given.profile, stage(given)).static.step == 4 * ELEMENTS
    assert stage_memory(problem().profile, stage(given)).static.step == 0
    large = replace(
        given.profile,
        graph=replace(
            given.profile.graph,
            parameters=tuple(
                replace(one, shape=(16 * 2**20,)) for one in given.profile.graph.parameters
            ),
        ),
    )
    # Each is above the limit of a bucket.
    assert stage_memory(large, stage(given)).static.step == 4 * 16 * 2**20
