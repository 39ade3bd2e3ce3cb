"""NetSplit's annealing times only what a move has changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.annealing import Annealing
from planner.solvers.netsplit.fine import blocks_of
from planner.solvers.netsplit.kernels import state_of
from planner.solvers.netsplit.moves import anneal
from planner.solvers.netsplit.search import arrays_of
from planner.solvers.placement.problem import placement_problem_of
from tests.solvers.test_netsplit import alone, partly_trained
from tests.support.netsplit_instances import problem_from


def assert_timed_anew(model, state):
    """The schedule is, to the tick, that of its placement and orders from the beginning."""
    anew = state_of(model, state.where, state.orders)
    assert state.ends.tolist() == anew.ends.tolist()
    for name in ("end", "done", "turn", "previous"):
        assert np.array_equal(getattr(state.kept, name), getattr(anew.kept, name)), name
        assert np.array_equal(getattr(state.kept, name), getattr(state.tried, name)), name
    sent = anew.kept.there >= 0
    assert np.array_equal(state.kept.there[sent], anew.kept.there[sent])
    assert np.array_equal(state.critical[0, : state.num_critical[0]],
                          anew.critical[0, : anew.num_critical[0]])  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_a_move_leaves_alone_need_not_be_timed_anew(seed, tied):
    devices, size, moves = 2 + seed % 4, 30 + 7 * seed, 60
    problem = placement_problem_of(problem_from(seed, devices, num_operators=size))
    instance, order = alone(problem), range(size)
    model = arrays_of(instance, blocks_of(problem))
    state = state_of(model, [i % devices for i in order], (order, order[::-1]))
    before = float(state.ends.sum())
    # A later move that is timed from the beginning would hide what was wrong before.
    for number in range(moves):
        anneal(model, state, Annealing(2, 0.05 * before, 0.01 * before, 100 * seed + number), tied)
        assert_timed_anew(model, state)


@settings(max_examples=40)
@given(partly_trained(7), st.integers(0, 99), st.booleans())
def test_nor_where_devices_and_links_differ_and_gradients_are_missing(problem, seed, tied):
    order = range(problem.num_operators)
    model = arrays_of(alone(problem), blocks_of(problem))
    state = state_of(model, [i % problem.num_devices for i in order], (order, order[::-1]))
    before = float(state.ends.sum())
    for number in range(30):
        anneal(model, state, Annealing(3, 0.2 * before, 0.1 * before, 100 * seed + number), tied)
        assert_timed_anew(model, state)


def test_most_moves_are_timed_in_part():
    """Both phases are 200 operators. Half of the moves change nothing but lists and orders."""
    problem = placement_problem_of(problem_from(0, 4))
    model, order = arrays_of(alone(problem)), range(100)
    state = state_of(model, [i % 4 for i in order], (order, order[::-1]))
    before = float(state.ends.sum())
    anneal(model, state, Annealing(5000, 1e-3 * before, 1e-5 * before, 0), True)
    begun = int(state.timed[0])
    anneal(model, state, Annealing(5000, 1e-3 * before, 1e-5 * before, 1), True)
    assert 0 < state.timed[0] - begun < 5000 * 200 / 2
