"""Which segments of a stage searches run again."""

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Offload, Recompute
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.artefacts.topology import HostLink
from planner.costs.evaluate import evaluate
from planner.planning.judge import judge, judge_unchanged
from planner.solvers import SOLVERS
from planner.solvers.fewest import with_least_again
from planner.solvers.segments import (
    Again,
    choice_orders,
    in_order,
    running_again,
    segments_by_worth,
    with_fewer,
)
from planner.support.errors import TopologyError
from tests.bench.solvers import ROOT
from tests.support.builders import KB, cluster, graph_of, problem_of, profile_of, unit_type

LAYERS = 6


def residual(times=None, unit=KB):
    """An operator, layers of three with a connection around them, and the output."""
    feeds, sizes, last = [[]], [unit], 0
    for _ in range(LAYERS):
        at = len(feeds)
        feeds += [[last], [at], [at + 1, last]]
        sizes += [unit, 10 * unit, unit]
        last = at + 2
    graph = graph_of([*feeds, [last]], [*sizes, unit])
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


def test_a_later_stage_has_the_layers_of_its_own():
    """What it reads was read before it, too."""
    profile = residual()
    names = whole(profile).operators
    later = replace(whole(profile), operators=names[8:])
    segments = in_order(later, segments_by_worth(profile, later))
    assert segments[1:] == tuple(names[k : k + 3] for k in range(10, 3 * LAYERS, 3))


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


def test_of_a_pipeline_only_stages_without_room_run_again():
    """The judge's plan is faster, and its first stage could not do without its last."""
    profile, two = residual(unit=100 * KB), cluster([unit_type()] * 2, bandwidth=1e12)

    def needs(problem, stages):
        strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, 16)
        return [one.total_bytes for one in evaluate(problem, strategy).memory.values()]

    roomy = problem_of(profile, two, 16, recompute="auto")
    first, last = needs(roomy, SOLVERS["even"](roomy, 1.0).strategy.stages)
    assert first > 1.2 * last
    tight = replace(roomy, training=replace(roomy.training, device_memory=round(1.1 * last)))
    result = SOLVERS["even"](tight, 1.0)
    assert all(one.recompute for one in result.strategy.stages)
    verdict, _ = judge(tight, "even", result)
    own, _ = judge_unchanged(tight, result.strategy)
    assert verdict.prediction.iteration_s < own.prediction.iteration_s
    one, two = verdict.strategy.stages
    assert one.recomputed and not two.recompute
    assert max(needs(tight, (one, two))) <= tight.training.device_memory
    worth = segments_by_worth(profile, one)[: len(one.recomputed)]
    assert one.recomputed == in_order(one, worth)
    less = replace(one, recomputed=in_order(one, worth[:-1]))
    assert needs(tight, (less, two))[0] > tight.training.device_memory


def test_what_runs_again_may_wait_in_the_hosts_memory_instead():
    profile = residual(unit=100 * KB)
    problem = problem_of(profile, linked(FAST), 16, offload=Offload.AUTO)
    (one, two) = SOLVERS["even"](problem, 1.0).strategy.stages
    need = evaluate(problem, Strategy((one, two), ScheduleName.ONE_F_ONE_B, 16)).memory[0]
    training = replace(problem.training, device_memory=round(0.8 * need.total_bytes))
    tight = replace(problem, training=training)
    again = Strategy((running_again(tight, one, Again.LAYERS), two), ScheduleName.ONE_F_ONE_B, 16)
    ((found, _), *_) = with_least_again(tight, again)
    assert found.stages[0].offloaded and not found.stages[0].recompute
    assert not found.stages[1].offloaded


def test_a_plan_that_runs_nothing_again_has_no_variant():
    problem = problem_of(residual(), cluster([unit_type()] * 2), 2)
    assert [*with_least_again(problem, SOLVERS["even"](problem, 1.0).strategy)] == []


def test_asked_everywhere_all_layers_run_again_and_asynchronous_stages_as_a_whole():
    profile, two = residual(), cluster([unit_type()] * 2)
    full = problem_of(profile, two, 2, recompute=Recompute.FULL)
    (stage,) = SOLVERS["data-parallel"](full, 1.0).strategy.stages
    assert len(stage.recomputed) == LAYERS
    later = problem_of(profile, two, 2, recompute=Recompute.FULL, schedule="pipedream")
    for stage in SOLVERS["data-parallel"](later, 1.0).strategy.stages:
        assert stage.reruns_whole


def kinds(profile, names):
    types = {one.name: one.type for one in profile.graph.operators}
    return [types[name] for name in names]


def test_of_a_llamas_layers_every_second_product_runs_again_and_attention_does_not():
    profile = read_any_profiles(ROOT / "profiles" / "llama7b-a100.json")[0]
    stage = whole(profile)
    layers, selected = (
        in_order(stage, segments_by_worth(profile, stage, what))
        for what in (Again.LAYERS, Again.SELECTED)
    )
    assert len(selected) == len(layers) == 32
    for every, some in zip(layers, selected, strict=True):
        assert "Attention" in kinds(profile, every) and "Attention" not in kinds(profile, some)
        products = [name for name in every if kinds(profile, [name]) == ["MatMul"]]
        # Queries, values, gate and what comes down again are kept.
        assert len(products) == 7
        assert [name for name in products if name in some] == products[1::2]
        assert [name for name in every if name not in products] == [
            name for name in every if name in some or kinds(profile, [name]) == ["Attention"]
            if name not in products
        ]  # fmt: skip
    again = replace(stage, recompute=True, recomputed=selected)
    assert violations(Strategy((again,), ScheduleName.GPIPE, 1), profile.graph, 1) == ()


def test_products_whose_weights_are_transposed_count():
    """As those of an exported BERT."""
    profile = read_any_profiles(ROOT / "profiles" / "bert.json")[0]
    stage = whole(profile)
    whole_layers = {some[0]: some for some in segments_by_worth(profile, stage)}
    kept = [
        kinds(profile, [name])[0]
        for some in segments_by_worth(profile, stage, Again.SELECTED)
        for name in whole_layers[some[0]]
        if name not in some
    ]
    assert {*kept} == {"MatMul"} and len(kept) >= 24


def with_products():
    """The same with products in the middle of layers, and 4 KB more in each that are not theirs."""
    profile = residual([1e-3, *[1e-3, 4e-3, 1e-3] * LAYERS, 1e-3])
    graph, first = profile.graph, {f"t{3 * k + 1}" for k in range(LAYERS)}
    operators = tuple(
        replace(one, type="MatMul") if v % 3 == 2 else one for v, one in enumerate(graph.operators)
    )
    tensors = tuple(
        replace(one, shape=(5 * KB,)) if one.name in first else one for one in graph.tensors
    )
    return replace(profile, graph=replace(graph, operators=operators, tensors=tensors))


def test_selected_operators_run_again_before_whole_layers_and_beside_them():
    profile = with_products()
    two = cluster([unit_type()] * 2)
    stage = SOLVERS["zero"](problem_of(profile, two, 2), 1.0).strategy.stages[0]

    def needs(stage):
        strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 2)
        return evaluate(problem_of(profile, two, 2), strategy).memory[0].total_bytes

    roomy = problem_of(profile, two, 2)
    selected, layers = (
        running_again(roomy, stage, what) for what in (Again.SELECTED, Again.LAYERS)
    )
    assert needs(layers) < needs(selected) < needs(stage)
    between = problem_of(profile, two, 2, device_memory=(needs(layers) + needs(selected)) // 2)
    (found,) = SOLVERS["zero"](between, 1.0).strategy.stages
    whole_layers = [some for some in found.recomputed if some in layers.recomputed]
    others = [some for some in found.recomputed if some in selected.recomputed]
    assert 0 < len(whole_layers) < LAYERS and len(whole_layers) + len(others) == LAYERS
    above = problem_of(profile, two, 2, device_memory=(needs(stage) + needs(selected)) // 2)
    (found,) = SOLVERS["zero"](above, 1.0).strategy.stages
    assert 0 < len(found.recomputed) < LAYERS
    assert {*found.recomputed} <= {*selected.recomputed}


def test_asked_everywhere_selected_operators_run_again():
    profile, two = with_products(), cluster([unit_type()] * 2)
    problem = problem_of(profile, two, 2, recompute=Recompute.SELECTIVE)
    for name in ("data-parallel", "zero"):
        (stage,) = SOLVERS[name](problem, 1.0).strategy.stages
        assert len(stage.recomputed) == LAYERS
        assert "MatMul" not in kinds(profile, sum(stage.recomputed[1:], ()))
    whole_stages = problem_of(profile, two, 2, recompute=Recompute.SELECTIVE, schedule="pipedream")
    for stage in SOLVERS["data-parallel"](whole_stages, 1.0).strategy.stages:
        assert stage.reruns_whole


def test_a_layer_of_which_selected_operators_free_nothing_runs_again_as_a_whole():
    profile = with_products()
    # What a product makes is as large as all that its layer stashes else.
    made = {one.outputs[0] for one in profile.graph.operators if one.type == "MatMul"}
    tensors = tuple(
        replace(one, shape=(20 * KB if one.name in made else KB,)) for one in profile.graph.tensors
    )
    costs = tuple(
        replace(one, stash_tensors=())
        if one.name in {f"op{3 * k + 2}" for k in range(LAYERS)}
        else one
        for one in profile.operators
    )
    held = replace(profile, graph=replace(profile.graph, tensors=tensors), operators=costs)
    stage = whole(held)
    selected = segments_by_worth(held, stage, Again.SELECTED)
    assert selected == segments_by_worth(held, stage) and selected


# ------------------------------------------------------------------ waiting in the host's memory

# Each forward of `residual` takes 20 ms, and each microbatch keeps about 7 MB.
FAST, SLOW = HostLink(1e9), HostLink(1e6)


def linked(link, count=2):
    return cluster([unit_type()] * count, host_link=link)


def tight(link, **how):
    """`zero`'s stage where memory is between that of all activations and that of none."""
    profile, topology = residual(unit=100 * KB), linked(link)
    plain = SOLVERS["zero"](problem_of(profile, topology, 2), 1.0).strategy.stages[0]
    roomy = problem_of(profile, topology, 2)

    def needs(stage):
        strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 2)
        return evaluate(roomy, strategy).memory[0].total_bytes

    waiting = running_again(roomy, plain, Again.HOST)
    most, least = needs(plain), needs(waiting)
    assert least < most - 2000 * KB
    problem = problem_of(profile, topology, 2, device_memory=(most + least) // 2, **how)
    (found,) = SOLVERS["zero"](problem, 1.0).strategy.stages
    return found, waiting, needs, problem


def test_as_few_layers_as_fit_wait_where_copies_hide():
    found, waiting, needs, problem = tight(FAST, offload=Offload.AUTO)
    count = len(found.offloaded)
    assert not found.recompute and 0 < count < len(waiting.offloaded)
    places = [waiting.offloaded.index(some) for some in found.offloaded]
    distances = {b - a for a, b in pairwise([*places, LAYERS])}
    assert places[0] == 0 and max(distances) - min(distances) <= 1
    limit = problem.training.device_memory
    fewer = with_fewer(problem, waiting, Again.HOST, max(count - 1, 1))
    assert needs(found) <= limit
    assert count == 1 or needs(fewer) > limit


@pytest.mark.parametrize(
    ("link", "how"),
    [(SLOW, {"offload": Offload.AUTO}), (None, {"offload": Offload.AUTO}), (FAST, {})],
)
def test_layers_run_again_where_copies_do_not_hide_or_nothing_may_wait(link, how):
    if link is None:
        problem = problem_of(residual(unit=100 * KB), linked(None), 2, **how)
        assert choice_orders(problem) == (
            (Again.NOTHING, Again.SELECTED, Again.LAYERS, Again.STAGE),
        )
        return
    found, *_ = tight(link, **how)
    assert found.recomputed and not found.offloaded


def test_asked_everywhere_all_layers_wait():
    profile = residual(unit=100 * KB)
    problem = problem_of(profile, linked(FAST), 2, offload=Offload.YES)
    (stage,) = SOLVERS["data-parallel"](problem, 1.0).strategy.stages
    assert len(stage.offloaded) == LAYERS and not stage.recompute
    both = problem_of(profile, linked(FAST), 2, offload=Offload.YES, recompute=Recompute.FULL)
    (stage,) = SOLVERS["zero"](both, 1.0).strategy.stages
    assert stage.offloaded == stage.recomputed and len(stage.offloaded) == LAYERS


def test_what_selected_operators_read_waits_where_all_have_to():
    profile, topology = with_products(), linked(FAST)
    problem = problem_of(
        profile, topology, 2, offload=Offload.YES, recompute=Recompute.SELECTIVE
    )  # fmt: skip
    (stage,) = SOLVERS["data-parallel"](problem, 1.0).strategy.stages
    assert stage.offloaded == stage.recomputed and len(stage.offloaded) == LAYERS
    assert "MatMul" not in kinds(profile, sum(stage.offloaded[1:], ()))


def test_both_orders_are_tried_that_first_which_takes_less_time():
    rerun, wait = (Again.SELECTED, Again.LAYERS), (Again.HOST,)
    last = Again.HOST_LAYERS, Again.STAGE
    for link, first, then in ((FAST, wait, rerun), (SLOW, rerun, wait)):
        problem = problem_of(residual(unit=100 * KB), linked(link), 2, offload=Offload.AUTO)
        assert choice_orders(problem) == tuple(
            (Again.NOTHING, *one, *other, *last) for one, other in ((first, then), (then, first))
        )


def test_without_links_nothing_can_wait():
    problem = problem_of(residual(unit=100 * KB), linked(None), 2, offload=Offload.YES)
    with pytest.raises(TopologyError, match="host has no host_link"):
        SOLVERS["zero"](problem, 1.0)


def test_asynchronous_stages_keep_all_on_their_devices():
    problem = problem_of(
        residual(unit=100 * KB), linked(FAST), 2, offload=Offload.AUTO, schedule="pipedream"
    )
    assert choice_orders(problem) == ((Again.NOTHING, Again.STAGE),)
