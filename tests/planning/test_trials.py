"""Which of a solver's strategies the judge simulates."""

import pytest

from planner.artefacts.problem import Result, Status
from planner.costs.evaluate import closed_form_s, evaluate, evaluation_work_s, pricing_work_s
from planner.costs.overlap import evaluated_with_overlap
from planner.planning import judge as judging
from planner.planning.judge import judge, with_deeper_warmup
from planner.simulator.objective import objective_s
from tests.support.builders import graph_of, islands, problem_of, profile_of, unit_type
from tests.support.programs import split

GRAPH = graph_of([[], [0]], [1000, 10], [10, 10])


@pytest.fixture
def problem():
    """Two operators, whose tensor crosses hosts slowly; two devices of a host share its card."""
    topology = islands([2, 2], 1e6, 600.0, unit_type())
    return problem_of(profile_of(GRAPH, [1.0, 1.0]), topology, 8)


@pytest.fixture
def simulated(monkeypatch):
    """The strategies that the judge evaluates."""
    seen = []
    monkeypatch.setattr(
        judging,
        "evaluated_with_overlap",
        lambda problem, one: seen.append(one) or evaluated_with_overlap(problem, one),
    )
    return seen


def pipeline(*widths):
    cuts = [1] if len(widths) == 2 else []
    return split(GRAPH, cuts, widths, 8)


def judged(problem, first, *others, **how):
    verdict, _ = judge(problem, "test", Result(Status.FEASIBLE, first, others=others), **how)
    return verdict


def test_the_simulator_has_the_last_word_where_cards_are_shared(problem):
    """The closed form does not know that replicas share a card: the pipeline is faster there."""
    crossing, replicas = pipeline(2, 2), pipeline(2)
    assert closed_form_s(problem, crossing) < closed_form_s(problem, replicas)
    assert objective_s(problem, crossing) > objective_s(problem, replicas)
    assert judged(problem, crossing, replicas).strategy == replicas


def test_what_is_certainly_slower_is_not_simulated(problem, simulated):
    best, slow, close = pipeline(4), pipeline(2), pipeline(3)
    verdict = judged(problem, best, slow, close)
    assert verdict.strategy == best
    assert set(simulated) == {best, with_deeper_warmup(best)}
    assert not verdict.notes


def test_what_may_be_as_fast_is_simulated(problem, simulated, monkeypatch):
    monkeypatch.setattr(judging, "least_s", lambda problem, one: closed_form_s(problem, one) / 1.6)
    best, slow, close = pipeline(4), pipeline(2), pipeline(3)
    judged(problem, best, slow, close)
    assert close in simulated
    assert slow not in simulated


def test_variants_of_the_fastest_come_first(problem, simulated):
    slow, fast = pipeline(2, 2), pipeline(1, 1)
    works = [evaluation_work_s(one, evaluate(problem, one)) for one in (slow, fast)]
    limit_s = sum(works) + 1.2 * works[1] + pricing_work_s(fast)
    verdict = judged(problem, slow, fast, limit_s=limit_s)
    assert objective_s(problem, fast) < objective_s(problem, slow)
    assert simulated == [slow, fast, with_deeper_warmup(fast)]
    assert verdict.notes == (
        "1 of 4 variants of the test plan were not simulated: the work for that was done",
    )
