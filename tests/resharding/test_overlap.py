"""Where collectives are started: by hand, and what holds of any plan."""

from dataclasses import replace
from random import Random

import pytest

from planner.artefacts.graph import ITEM_BYTES, parameters_by_name, tensors_by_name
from planner.artefacts.sharding import local_shape
from planner.artefacts.strategy import indices_of
from planner.resharding import reshardings
from planner.resharding.conversion import sends
from planner.resharding.over_replicas import over_replicas
from planner.resharding.overlap import held_ahead_bytes, pass_order
from tests.costs.test_overlap import MB, chain_of, replicas_of
from tests.support.split_models import MODELS, loaded
from tests.support.split_plans import cut_further, random_sharding, stage_of


def shared(sizes_mb, prefetch, zero=3):
    graph = chain_of(sizes_mb)
    stage = replicas_of(graph, 2).stages[0]
    return replace(stage, over=2, zero=zero, prefetch=prefetch), graph


@pytest.mark.parametrize(
    ("prefetch", "start", "again"),
    [
        (None, [0, 1, 2, 3, 4], {4: [4], 3: [3], 2: [2], 1: [1]}),
        (0, [0, 1, 2, 3, 4], {4: [4], 3: [3], 2: [2], 1: [1]}),
        (40, [0, 0, 1, 2, 3], {4: [4, 3], 3: [2], 2: [1]}),
        (80, [0, 0, 0, 1, 2], {4: [4, 3, 2], 3: [1]}),
        (10**6, [0] * 5, {4: [4, 3, 2, 1]}),
    ],
)
def test_parameters_are_gathered_as_far_ahead_as_a_budget_says(prefetch, start, again):
    """Five operators with 40 MB each; the first one has no input with a gradient, so that its
    backward reads no parameter.
    """
    stage, graph = shared([40] * 5, None if prefetch is None else prefetch * MB)
    order = pass_order(stage, graph)
    assert [*order.start] == start
    assert {i: [*places] for i, places in order.again.items()} == again


def test_a_small_parameter_does_not_overtake_a_large_one():
    stage, graph = shared([40, 40, 40, 1], 41 * MB)
    assert pass_order(stage, graph).start == (0, 0, 1, 1)


def random_stages(name, seed, tmp_path):
    """Stages of a model with random rules and all levels of ZeRO on one mesh."""
    random = Random(seed)
    model = loaded(MODELS[name](tmp_path / "model.onnx"))
    for mesh in ((2,), (2, 2)):
        whole = random_sharding(model, mesh, random)
        for zero in (0, 1, 2, 3):
            yield stage_of(model, cut_further(whole, model, zero, random) if zero else whole), model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_holds_of_any_plan(tmp_path, name):
    for stage, model in random_stages(name, 5, tmp_path):
        graph = model.graph
        most = max(1, held_ahead_bytes(stage, graph)[1])
        for prefetch in (None, 0, most // 7, most // 2, 10 * most):
            _check(replace(stage, prefetch=prefetch), graph)


def _check(stage, graph):
    order, every = pass_order(stage, graph), reshardings(stage, graph)
    known = {**tensors_by_name(graph), **parameters_by_name(graph)}
    made = {name: i + 1 for i, v in enumerate(indices_of(stage, graph))
            for name in graph.operators[v].outputs}  # fmt: skip
    held = [0] * (len(stage.operators) + 1)
    for c, one in enumerate(every):
        first, start = order.first[c], order.start[c]
        assert made.get(one.tensor, 0) <= start <= first
        if one.readers:
            assert stage.operators[first] == one.readers[0]
        if not stage.prefetch or not (sends(one.forward) or sends(one.backward)):
            assert start == first
        whole = known[one.tensor]
        size = ITEM_BYTES[whole.dtype]
        for length in local_shape(whole.shape, one.new, over_replicas(stage, graph).mesh):
            size *= length
        for i in range(start, first):
            held[i] += size
    assert max(held) <= (stage.prefetch or 0)
    assert sorted(order.order) == [*range(len(every))]
    starts = [order.start[c] for c in order.order]
    assert starts == sorted(starts)
    gathered = {name for one in every for name in one.again}
    planned = [stage.operators[j] for places in order.again.values() for j in places]
    assert sorted(planned) == sorted(gathered)
    assert all(i >= j for i, places in order.again.items() for j in places)
