"""The reshardings of a stage: Megatron-LM's counts, and specs that follow from rules."""

from collections import Counter
from dataclasses import replace

import pytest

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import Stage
from planner.resharding import Collective, reshardings
from planner.resharding.conversion import LOCAL
from planner.resharding.reshardings import homes
from planner.resharding.sent_types import with_products_in
from tests.support.blocks import block, megatron


def collectives(found):
    """How often each kind of collective runs, forward and backward."""
    return [
        Counter(step.kind for one in found for step in steps(one) if step.kind not in LOCAL)
        for steps in (lambda one: one.forward, lambda one: one.backward)
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_megatrons_block_has_two_all_reduces_each_way(size):
    forward, backward = collectives(reshardings(megatron(2), block()))
    assert forward == backward == {Collective.ALL_REDUCE: 2}


def test_queries_keys_and_values_read_one_copy():
    shared = [one for one in reshardings(megatron(2), block()) if one.tensor == "norm1"]
    assert [one.readers for one in shared] == [("q", "k", "v")]
    assert (shared[0].forward, [s.kind for s in shared[0].backward]) == (
        (),
        [Collective.ALL_REDUCE],
    )


def test_norms_along_the_sequence_gather_and_scatter_twice_each_way():
    forward, backward = collectives(reshardings(megatron(2, sequence=True), block()))
    assert forward == backward == {Collective.ALL_GATHER: 2, Collective.REDUCE_SCATTER: 2}


def test_the_gradient_of_a_norm_that_is_cut_is_a_sum():
    """Each device norms its part of the sequence, so each has a part of the weight's gradient."""
    found = homes(megatron(2, sequence=True), block())
    assert (found["g1"].spec, found["g1"].gradient) == (("R",), ("P",))
    assert (found["wq"].spec, found["wq"].gradient) == (("S1",), ("S1",))
    assert homes(megatron(2), block())["g1"].gradient == ("R",)


def data_parallel(**how):
    """One matrix product whose batch is cut, and its weight lying as `how` says."""
    graph = block()
    sharding = Sharding((2,), {"q": rule_of(["S0,R->S0"])}, **{
        "parameters": {}, "inputs": {}, "outputs": {}, **how,
    })  # fmt: skip
    return Stage(("q",), ((0, 1),), 1, False, sharding), graph


def without_backward(graph, *names):
    """A graph in which no gradient flows over some tensors."""
    tensors = (replace(t, gradient=t.gradient and t.name not in names) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def test_an_operator_without_a_backward_makes_no_sum_of_gradients():
    stage, graph = data_parallel()
    assert homes(stage, without_backward(graph, "q"))["wq"].gradient == ("R",)


def test_weights_that_only_products_read_are_gathered_in_the_type_of_autocast():
    """Their gradients are scattered in their own."""
    stage, graph = data_parallel(parameters={"wq": ("S0",)}, gradients={"wq": ("S0",)})
    tied = replace(graph, operators=tuple(
        replace(one, parameters=("wq",)) if one.name == "norm1" else one
        for one in graph.operators
    ))  # fmt: skip
    found = {}
    for name, given in (("short", graph), ("tied", tied)):
        (one,) = [
            one for one in reshardings(stage, with_products_in(given, "bfloat16"))
            if one.tensor == "wq"
        ]  # fmt: skip
        found[name] = one.dtype, one.forward[0].bytes, one.backward[0].bytes
    size = parameters_by_name(graph)["wq"].bytes
    assert found == {
        "short": ("bfloat16", size // 2, size), "tied": ("float32", size, size),
    }  # fmt: skip
    (slices,) = [
        one for one in reshardings(data_parallel()[0], with_products_in(graph, "bfloat16"))
        if one.tensor == "norm1"
    ]  # fmt: skip
    assert slices.dtype == "float32"


def test_a_copy_for_operators_without_a_backward_has_no_gradient():
    def of_norm(graph):
        found = reshardings(megatron(2), graph)
        return {
            one.readers: [s.kind for s in one.backward] for one in found if one.tensor == "norm1"
        }

    assert of_norm(without_backward(block(), "k", "v")) == {("q",): [Collective.ALL_REDUCE]}
    assert of_norm(without_backward(block(), "q", "k", "v")) == {}


def test_an_operator_without_a_backward_gathers_no_parameter_again():
    def again(graph):
        stage, _ = data_parallel(parameters={"wq": ("S0",)})
        (one,) = (one for one in reshardings(stage, graph) if one.tensor == "wq")
        return one.again

    assert again(block()) == ("q",)
    assert again(without_backward(block(), "q")) == ()


def steps_of(name, **how):
    found = {one.tensor: one for one in reshardings(*data_parallel(**how))}
    one = found.get(name)
    return ([], []) if one is None else tuple(
        [step.kind.value for step in steps] for steps in (one.forward, one.backward)
    )  # fmt: skip


def test_a_weight_that_lies_whole_adds_its_sums_up_and_converts_nothing():
    assert steps_of("wq") == ([], [])
    assert homes(*data_parallel())["wq"].gradient == ("P",)


def test_a_weight_that_lies_in_parts_is_gathered_and_its_gradient_scattered():
    """ZeRO-3 (Rajbhandari et al. 2020, section 5)."""
    assert steps_of("wq", parameters={"wq": ("S0",)}) == (["all-gather"], ["reduce-scatter"])


def test_a_gradient_that_lies_in_parts_is_scattered_alone():
    """ZeRO-2."""
    assert steps_of("wq", gradients={"wq": ("S0",)}) == ([], ["reduce-scatter"])


def test_what_enters_and_leaves_is_converted_at_the_edge():
    assert steps_of("norm1") == (["slice"], ["all-gather"])
    assert steps_of("q") == (["all-gather"], ["slice"])
    both = {"inputs": {"norm1": ("S0",)}, "outputs": {"q": ("S0",)}}
    assert steps_of("norm1", **both) == steps_of("q", **both) == ([], [])


def test_a_tensor_without_gradient_is_converted_forward_only():
    stage, graph = data_parallel()
    still = replace(graph, tensors=tuple(replace(t, gradient=False) for t in graph.tensors))
    assert all(one.backward == () for one in reshardings(stage, still) if one.tensor != "wq")


def test_two_axes_compose():
    graph = block()
    sharding = Sharding(
        (2, 2), {"q": rule_of(["S0,R->S0", "R,S1->S2"])}, {"wq": ("R", "S1")}, {}, {}
    )
    stage = Stage(("q",), ((0, 1, 2, 3),), 1, False, sharding)
    assert homes(stage, graph)["wq"].gradient == ("P", "S1")
    assert homes(stage, graph)["q"].gradient == ("S0", "S2")
    entering = next(one for one in reshardings(stage, graph) if one.tensor == "norm1")
    assert (entering.new, entering.gradient_old) == (("S0", "R"), ("S0", "P"))
    assert [step.kind.value for step in entering.backward] == ["all-reduce", "all-gather"]
