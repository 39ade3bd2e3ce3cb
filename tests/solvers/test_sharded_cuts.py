"""Where stages are cut, beside all cuts that there are."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.options import Optimizer, Recompute
from planner.artefacts.strategy import indices_of
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.cuts import balanced_cuts, even_cuts
from planner.solvers.sharded.options import Megatron
from planner.support.errors import OptionError
from tests.support.split_profiles import problem, profiled

TIMES = st.integers(0, 20).map(float)


def times_of(forward_s, backward_s, recompute, stages):
    """The time of each stage."""
    return [
        sum(backward_s[v] + forward_s[v] * (2 if again else 1) for v in inside)
        for inside, again in zip(stages, recompute, strict=True)
    ]


def largest(forward_s, backward_s, recompute, stages):
    """The time of the largest stage."""
    return max(times_of(forward_s, backward_s, recompute, stages))


def all_stages(size, count):
    for cuts in combinations(range(1, size), count - 1):
        ends = (0, *cuts, size)
        yield tuple(tuple(range(ends[s], ends[s + 1])) for s in range(count))


@given(st.data(), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_no_cuts_have_a_smaller_largest_stage(data, count, more, costly):
    """Where transfers are free; else what they cost in all may be worth as much."""
    size = count + more
    forward_s, backward_s = (
        np.array(data.draw(st.lists(TIMES, min_size=size, max_size=size))) for _ in range(2)
    )
    recompute = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    crossing_s = np.zeros((count - 1, size + 1))
    if costly:
        width = (count - 1) * (size + 1)
        drawn = data.draw(st.lists(TIMES, min_size=width, max_size=width))
        crossing_s = np.array(drawn).reshape(count - 1, size + 1)
    rounds = 4

    def value(stages):
        sent = sum(crossing_s[s][stages[s][-1] + 1] for s in range(count - 1))
        times = times_of(forward_s, backward_s, recompute, stages)
        return rounds * max(*times, (sum(times) + sent) / count) + sent

    made = balanced_cuts(forward_s, backward_s, crossing_s, recompute, rounds)
    assert [v for inside in made for v in inside] == list(range(size)) and all(made)
    least = min(map(value, all_stages(size, count)))
    if costly:
        # One of the shares is as large as that of the best cuts, or the next one above.
        least_largest = min(
            largest(forward_s, backward_s, recompute, one) for one in all_stages(size, count)
        )
        cheapest = min(
            value(one)
            for one in all_stages(size, count)
            if largest(forward_s, backward_s, recompute, one) <= least_largest * (1 + 1e-9)
        )
        assert least - 1e-9 <= value(made) <= cheapest + 1e-9
    else:
        assert value(made) == pytest.approx(least)


def test_more_stages_than_operators_are_refused():
    with pytest.raises(ValueError, match="expected at least 3 operators"):
        balanced_cuts(np.ones(2), np.ones(2), np.zeros((2, 3)), (False,) * 3, 1)


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    from planner.model.load import load
    from tests.support.split_models import gpt

    return profiled(load(gpt(tmp_path_factory.mktemp("gpt") / "gpt.onnx", blocks=2, tied=False)))


def planned(block, count, **options):
    given = problem(block, count, 8, bandwidth=1e12, optimizer=Optimizer.SGD, **options)
    return SOLVERS["megatron"](given, 1.0).strategy


def test_stages_of_megatron_are_balanced_on_their_meshes(block):
    """No cut of the two stages has a smaller largest one, at the times of one device."""
    degrees = Megatron(tensor_degree=1, data_degree=1, pipeline_degree=2)
    strategy = planned(block, 2, switches=(degrees,))
    costs = block.operators
    forward_s, backward_s = ([getattr(c, n) for c in costs] for n in ("forward_s", "backward_s"))
    stages = [indices_of(stage, block.graph) for stage in strategy.stages]
    found = largest(forward_s, backward_s, (False, False), stages)
    least = min(
        largest(forward_s, backward_s, (False, False), one) for one in all_stages(len(costs), 2)
    )
    assert found <= least * 1.01


def test_only_stages_that_are_short_of_memory_recompute(block):
    """The first stage has more microbatches in flight, so it recomputes first, and gets less."""
    degrees = Megatron(tensor_degree=1, data_degree=1, pipeline_degree=2)
    limits = range(100_000, 4_000_000, 10_000)
    seen = set()
    for limit in limits:
        given = {"device_memory": limit, "reserve": 0}
        strategy = planned(block, 2, switches=(degrees,), **given)
        if strategy is not None:
            seen.add(tuple(stage.recompute for stage in strategy.stages))
            if seen >= {(True, False), (False, False)}:
                break
    assert {(True, False), (False, False)} <= seen
    none = planned(block, 2, switches=(degrees,), recompute=Recompute.NONE)
    assert not any(stage.recompute for stage in none.stages)


MODULES = ["embed", *(f"h.{layer}.{part}" for layer in range(12) for part in ("a", "b")), "head"]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (12, 4, [3, 3, 3, 3]),  # dealt evenly, with the embedding and the head at the ends
        (10, 4, [2, 3, 3, 2]),  # not without the ends: 12 in all
        (9, 4, [2, 2, 2, 3]),  # not at all
        (4, 4, [1, 1, 1, 1]),
        (5, 5, [1, 1, 1, 1, 1]),
        (6, 4, [1, 2, 2, 1]),
        (5, 4, [1, 1, 1, 2]),
    ],
)
def test_stages_have_as_many_layers_as_each_other(layers, stages, expected):
    modules = ["embed", *MODULES[1 : 1 + 2 * layers], "head"]
    cuts = even_cuts(modules, stages)
    assert [v for some in cuts for v in some] == [*range(len(modules))]
    dealt = [{modules[v].rpartition(".")[0] for v in some} - {""} for some in cuts]
    assert [len(some) for some in dealt] == expected
    assert sum(expected) == layers == len(set.union(*dealt))


def test_there_are_no_even_stages_without_a_layer_for_each():
    assert even_cuts(MODULES, 13) is None
    assert even_cuts(["", ""], 1) is None


def test_even_layers_are_refused_where_no_module_is_numbered(block):
    degrees = Megatron(data_degree=1, pipeline_degree=2, even_layers=True)
    with pytest.raises(OptionError, match=r"--even-layers: expected a layer.* for each of 2"):
        planned(block, 2, switches=(degrees,))


def test_one_stage_needs_no_numbered_module(block):
    (stage,) = planned(block, 2, switches=(Megatron(pipeline_degree=1, even_layers=True),)).stages
    assert len(stage.operators) == len(block.graph.operators)


def test_degrees_with_more_stages_than_layers_are_left_out(block):
    names = [operator.name for operator in block.graph.operators]
    modules = tuple("h.0" if i < len(names) // 3 else "h.1" for i in range(len(names)))
    layered = replace(block, modules=modules)
    pipelines = Megatron(tensor_degree=1, data_degree=1, even_layers=True)
    first, second = planned(layered, 2, switches=(pipelines,)).stages
    assert [len(first.operators), len(second.operators)] == [
        modules.count("h.0"), modules.count("h.1"),
    ]  # fmt: skip
    single = replace(block, modules=("h.0",) * len(names))
    whole = planned(single, 2, switches=(Megatron(even_layers=True),))
    assert len(whole.stages) == 1
