"""Which segments of a stage searches run again."""

from dataclasses import replace

import pytest

from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Recompute
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.costs.evaluate import evaluate
from planner.solvers import SOLVERS
from planner.solvers.segments import Again, in_order, running_again, segments_by_worth
from tests.bench.solvers import ROOT
from tests.support.builders import KB, cluster, graph_of, problem_of, profile_of, unit_type

LAYERS = 6


def residual(times=None):
    """An operator, layers of three with a connection around them, and the output."""
    feeds, sizes, last = [[]], [KB], 0
    for _ in range(LAYERS):
        at = len(feeds)
        feeds += [[last], [at], [at + 1, last]]
        sizes += [KB, 10 * KB, KB]
        last = at + 2
    graph = graph_of([*feeds, [last]], [*sizes, KB])
    return profile_of(graph, times or [1e-3] * len(graph.operators))


def whole(profile):
    return Stage.whole(tuple(one.name for one in profile.graph.operators), (0,), 1, recompute=False)


def test_layers_lie_between_places_that_one_activation_crosses():
    stage = whole(residual())
    segments = in_order(stage, segments_by_worth(residual(), stage))
    assert segments == (
        tuple(f"op{v}" for v in range(4)),
        *(tuple(f"op{v}" for v in range(k, k + 3)) for k in range(4, 3 * LAYERS, 3)),
    )


def test_those_that_free_most_per_second_come_first():
    times = [1e-3] * (3 * LAYERS + 2)
    times[7:10], times[13:16] = [1e-4] * 3, [5e-4] * 3
    segments = segments_by_worth(residual(times), whole(residual(times)))
    assert [some[0] for some in segments[:2]] == ["op7", "op13"]


def test_named_modules_are_layers_and_single_operators_are_not():
    profile = residual()
    paths = ["stem", *(f"h.{k // 3}.x" for k in range(3 * LAYERS)), "head"]
    named = replace(profile, modules=tuple(paths))
    segments = in_order(whole(named), segments_by_worth(named, whole(named)))
    assert [some[0] for some in segments] == [f"op{k}" for k in range(1, 3 * LAYERS, 3)]
    chain = profile_of(graph_of([[], *([v] for v in range(7))]), [1e-3] * 8)
    alone = replace(chain, modules=tuple(map(str, range(8))))
    segments = in_order(whole(alone), segments_by_worth(alone, whole(alone)))
    # One reads a tensor and keeps one, two free what lies between them.
    assert all(len(some) >= 2 for some in segments) and segments


@pytest.mark.parametrize("name, layers", [("gpt2", 24), ("llama7b-a100", 32), ("bert", 25)])
def test_shipped_models_have_layers(name, layers):
    profile = read_any_profiles(ROOT / "profiles" / f"{name}.json")[0]
    stage = whole(profile)
    segments = in_order(stage, segments_by_worth(profile, stage))
    assert len(segments) == layers
    again = replace(stage, recompute=True, recomputed=segments)
    strategy = Strategy((again,), ScheduleName.GPIPE, 1)
    assert violations(strategy, profile.graph, 1) == ()


def test_as_few_layers_as_fit_run_again():
    profile, two = residual(), cluster([unit_type()] * 2)

    def needs(stage):
        problem = problem_of(profile, two, 2, recompute="auto")
        strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 2)
        return evaluate(problem, strategy).memory[0].total_bytes

    roomy = problem_of(profile, two, 2)
    plain = SOLVERS["zero"](roomy, 1.0).strategy.stages[0]
    every = running_again(roomy, plain, Again.LAYERS)
    most, least = needs(plain), needs(every)
    assert least < most - 30 * KB
    limit = (most + least) // 2
    tight = problem_of(profile, two, 2, device_memory=limit)
    (found,) = SOLVERS["zero"](tight, 1.0).strategy.stages
    assert needs(found) <= limit
    worth = segments_by_worth(profile, found)
    count = len(found.recomputed)
    assert found.recomputed == in_order(found, worth[:count]) and 0 < count < len(worth)
    assert needs(replace(found, recomputed=in_order(found, worth[: count - 1]))) > limit


def test_asked_everywhere_all_layers_run_again_and_asynchronous_stages_as_a_whole():
    profile, two = residual(), cluster([unit_type()] * 2)
    full = problem_of(profile, two, 2, recompute=Recompute.FULL)
    (stage,) = SOLVERS["data-parallel"](full, 1.0).strategy.stages
    assert len(stage.recomputed) == LAYERS
    later = problem_of(profile, two, 2, recompute=Recompute.FULL, schedule="pipedream")
    for stage in SOLVERS["data-parallel"](later, 1.0).strategy.stages:
        assert stage.reruns_whole
