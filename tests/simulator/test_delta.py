from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import violations
from planner.artefacts.topology import Sharing
from planner.costs.evaluate import evaluate
from planner.simulator.delta import simulated
from planner.simulator.events import run
from tests.support.builders import asked, cluster, profile_of, unit_type
from tests.support.moves import operator_moves, replication_moves, with_devices, with_operator
from tests.support.often import often
from tests.support.programs import SYNCHRONOUS, split_graphs, with_sharing

SPARE = 2


@st.composite
def problems_and_strategies(draw):
    """A strategy for a graph with skips and tied parameters, and devices that it leaves free; links
    of every kind.
    """
    graph, strategy = draw(split_graphs(max_warmup=4, schedules=SYNCHRONOUS))
    size = len(graph.operators)
    times = st.floats(0.1, 3.0)
    profile = profile_of(
        graph,
        draw(st.lists(times, min_size=size, max_size=size)),
        draw(st.lists(times, min_size=size, max_size=size)),
    )
    count = SPARE + sum(stage.num_replicas for stage in strategy.stages)
    kinds = [unit_type(bandwidth=1e9), unit_type("other", flops=4e12, bandwidth=0.25e9)]
    types = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    topology = cluster(types, draw(st.sampled_from([1.0, 10.0, 1e3])), draw(st.just(0.25)))
    sharing = draw(st.sampled_from([*Sharing, Sharing.EXCLUSIVE]))
    options = asked(strategy.num_microbatches, schedule=strategy.schedule)
    problem = Problem(profile, with_sharing(topology, sharing), **options, measured_on=kinds[0])
    return problem, strategy


def another(draw, problem, strategy):
    """A strategy that differs in one decision."""
    graph, num_devices = problem.profile.graph, len(problem.topology.devices)
    near = operator_moves(strategy, graph, neighbours=True)
    far = operator_moves(strategy, graph, neighbours=False)
    wide = replication_moves(strategy, num_devices)
    moves = draw(st.sampled_from([one for one in (near, far, wide) if one] or [[]]))
    if not moves:
        return strategy
    what, where = draw(st.sampled_from(moves))
    if moves is wide:
        return with_devices(strategy, what, where)
    return with_operator(strategy, graph, what, where)


def same(found, problem, strategy):
    """Whether all times are those of a full simulation, to the last bit."""
    evaluation = evaluate(problem, strategy)
    times = run(evaluation.program, evaluation.costs, problem.topology)
    assert found.costs == evaluation.costs
    assert found.program.sums == evaluation.program.sums
    for field in type(times.code).__dataclass_fields__:
        assert np.array_equal(getattr(found.times.code, field), getattr(times.code, field)), field
    for field in ("start_s", "end_s", "post_s", "posted_s"):
        assert getattr(found.times, field).tobytes() == getattr(times, field).tobytes(), field
    return found.times.iteration_s == times.iteration_s


def or_none(make):
    try:
        return make()
    except ValueError:
        return None


@often(50, 150, problems_and_strategies(), st.data())
def test_a_chain_of_changes_gives_the_times_of_full_simulations(case, data):
    problem, strategy = case
    assert not violations(strategy, problem.profile.graph, len(problem.topology.devices))
    now = or_none(partial(simulated, problem, strategy))
    if now is None:
        with pytest.raises(ValueError, match=r"waits|sends|expects"):
            evaluate(problem, strategy)
        return
    assert same(now, problem, strategy)
    for _ in range(data.draw(st.integers(1, 5))):
        strategy = another(data.draw, problem, now.strategy)
        new = or_none(partial(now.moved, strategy))
        if new is None:
            with pytest.raises(ValueError, match=r"waits|sends|expects"):
                evaluate(problem, strategy)
        else:
            assert same(new, problem, strategy)
            # A search may go on from the new one, or from the old one again.
            now = data.draw(st.sampled_from([now, new]))


def example():
    """Three stages of two operators each, on the first three of five devices."""
    from tests.support.programs import chain, split

    graph = chain(6)
    topology = with_sharing(cluster([unit_type()] * 5), Sharing.EXCLUSIVE)
    problem = Problem(profile_of(graph, [1e-3] * 6), topology, **asked(4))
    return problem, split(graph, [2, 4], [1, 1, 1], 4)


def test_what_a_change_leaves_alone_is_taken_over():
    problem, strategy = example()
    before = simulated(problem, strategy)
    after = before.moved(with_operator(strategy, problem.profile.graph, 1, 1))
    # The tensor between stages 0 and 1 is another one, and the lists are the same but for its name.
    assert all(a is b for a, b in zip(before._blocks, after._blocks, strict=True))
    assert after._prepared is before._prepared
    assert after._prices[2] is before._prices[2]
    assert after._prices[1] is not before._prices[1]
    wider = before.moved(with_devices(strategy, 2, (2, 3)))
    assert wider._blocks[0] is not before._blocks[0]  # Its warm-up is deeper.
    assert wider._prices[0] is before._prices[0]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda s: (replace(s[0], operators=s[0].operators[:1]), *s[1:]), "operators are not"),
        (lambda s: (*s[:2], replace(s[2], groups=((9,),))), "device index is not in 0..4"),
        (lambda s: (*s[:2], replace(s[2], warmup=9)), "stage 2 is empty, or has too many"),
        (lambda s: (*s[:2], replace(s[2], groups=((1,),))), "a device runs several stages"),
        (lambda s: (replace(s[0], operators=s[1].operators),
                    replace(s[1], operators=s[0].operators), s[2]), "goes back"),
    ],
)  # fmt: skip
def test_a_strategy_that_is_wrong_is_an_error(change, wrong):
    problem, strategy = example()
    before = simulated(problem, strategy)
    with pytest.raises(ValueError, match=wrong):
        before.moved(replace(strategy, stages=change(strategy.stages)))
