"""Sums of gradients over lines and replicas, worked out by hand on a product of a 4 x 4 weight."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import GradientSum, ScheduleName, Stage, Strategy
from planner.resharding.sums import (
    gather_starts,
    gathered_together,
    gradient_sums,
    non_contributing,
    owns,
    state_steps,
)

BYTES = 4 * 4 * 4


def graph():
    """y = x w and z = y w, which share the weight; a second weight v behind."""
    tensors = [Tensor(name, (4, 4), "float32", name != "x") for name in "xyzu"]
    made = [("one", "x", "y", "w"), ("two", "y", "z", "w"), ("three", "z", "u", "v")]
    return Graph(
        tuple(Operator(n, "MatMul", (a,), (b,), (w,)) for n, a, b, w in made),
        tuple(tensors),
        tuple(Parameter(name, (4, 4), "float32", True) for name in "wv"),
        ("x",), ("u",),
    )  # fmt: skip


def stage(operators, groups, mesh=None, lines=(), **how):
    lies = None
    if mesh is not None:
        rules = {name: rule_of(lines) for name in operators}
        how = {"parameters": {}, "inputs": {}, "outputs": {}, **how}
        lies = Sharding(mesh, rules, **how)
    return Stage(operators, groups, 1, False, lies)


def strategy(*stages):
    return Strategy(stages, ScheduleName.ONE_F_ONE_B, 4)


ALL = ("one", "two", "three")
BATCH = ["S0,R->S0"]


def sums(*stages):
    return gradient_sums(strategy(*stages), graph())


def test_a_cut_batch_is_one_sum_over_the_line():
    assert sums(stage(ALL, ((0, 1),), (2,), BATCH)) == (GradientSum((0, 1), ("v", "w"), 2 * BYTES),)


def test_replicas_of_a_mesh_are_in_the_same_sum():
    (found,) = sums(stage(ALL, ((0, 1), (2, 3)), (2,), BATCH))
    assert found.devices == (0, 1, 2, 3)


def test_each_part_of_a_cut_weight_is_summed_over_replicas():
    columns = stage(ALL, ((0, 1), (2, 3)), (2,), ["R,S1->S1"], parameters={
        "w": ("S1",), "v": ("S1",)
    })  # fmt: skip
    assert sums(columns) == (
        GradientSum((0, 2), ("v", "w"), BYTES),
        GradientSum((1, 3), ("v", "w"), BYTES),
    )
    assert sums(replace(columns, groups=((0, 1),))) == ()


def test_no_sum_waits_for_one_that_is_ready_later():
    """A backward completes the gradient of v before that of w, which all devices sum."""
    one = stage(("one", "two"), ((0, 1), (2, 3)), (2,), BATCH)
    rules = {**one.sharding.rules, "three": rule_of(["R,S1->S1"])}
    lies = replace(one.sharding, rules=rules, parameters={"v": ("S1",)})
    found = sums(replace(one, operators=ALL, sharding=lies))
    assert [(each.devices, each.parameters) for each in found] == [
        ((0, 2), ("v",)), ((1, 3), ("v",)), ((0, 1, 2, 3), ("w",))
    ]  # fmt: skip


def test_devices_that_all_do_the_same_sum_nothing():
    assert sums(stage(ALL, ((0, 1),), (2,), ["R,R->R"])) == ()


def test_lines_of_the_batch_axis_are_apart_where_the_other_axis_cuts():
    both = stage(ALL, ((0, 1, 2, 3),), (2, 2), ["S0,R->S0", "R,S1->S1"], parameters={
        "w": ("R", "S1"), "v": ("R", "S1")
    })  # fmt: skip
    assert [one.devices for one in sums(both)] == [(0, 2), (1, 3)]


def test_a_state_that_is_cut_keeps_parts():
    """ZeRO-1: a reduce-scatter, then replicas sum what they keep; after the step, an all-gather."""
    states = {"w": ("S0",), "v": ("S1",)}
    one = stage(ALL, ((0, 1), (2, 3)), (2,), BATCH, states=states)
    (found,) = sums(one)
    assert found == GradientSum((0, 1, 2, 3), ("v", "w"), 2 * BYTES, ((0, 2), (1, 3)))
    steps = state_steps(one, graph())
    assert [s.kind.value for s in steps["w"].scatter] == ["reduce-scatter"]
    assert [(s.kind.value, s.source) for s in steps["v"].gather] == [("all-gather", "S1")]


def test_a_gradient_that_is_cut_in_every_pass_is_summed_over_replicas_alone():
    """ZeRO-2: the reduce-scatter is a resharding of the backward."""
    cut = {"w": ("S0",), "v": ("S0",)}
    one = stage(ALL, ((0, 1), (2, 3)), (2,), BATCH, gradients=cut, states=cut)
    assert sums(one) == (
        GradientSum((0, 2), ("v", "w"), BYTES),
        GradientSum((1, 3), ("v", "w"), BYTES),
    )
    assert all(not steps.scatter for steps in state_steps(one, graph()).values())


def test_tied_parameters_of_two_meshes_that_are_whole():
    """Stage 0 has summands, stage 1 the same on both devices: the first of these gives it."""
    parts = (
        stage(("one",), ((0, 1),), (2,), BATCH),
        stage(("two", "three"), ((2, 3),), (2,), ["R,R->R"]),
    )
    assert sums(*parts) == (GradientSum((0, 1, 2, 3), ("w",), BYTES),)
    assert [non_contributing(strategy(*parts), graph(), d) for d in range(4)] == [
        frozenset(), frozenset(), frozenset(), {"w"}
    ]  # fmt: skip


def test_tied_parameters_of_a_mesh_and_one_device():
    parts = stage(("one",), ((0,),)), stage(("two", "three"), ((1, 2),), (2,), ["R,R->R"])
    assert sums(*parts) == (GradientSum((0, 1, 2), ("w",), BYTES),)
    assert non_contributing(strategy(*parts), graph(), 2) == {"w"}
    assert (
        non_contributing(strategy(*parts), graph(), 1)
        == non_contributing(strategy(*parts), graph(), 0)
        == set()
    )


def test_tied_parameters_in_other_parts_are_refused():
    cut = stage(("one",), ((0, 1),), (2,), ["R,S1->S1"], parameters={"w": ("S1",)})
    whole = stage(("two", "three"), ((2, 3),), (2,), BATCH)
    with pytest.raises(ValueError, match="parameter w lies differently"):
        sums(cut, whole)


def test_every_element_is_counted_once():
    """Over all devices, each part of each parameter has one owner."""
    both = stage(ALL, ((0, 1, 2, 3), (4, 5, 6, 7)), (2, 2), ["S0,R->S0", "R,S1->S1"],
                 parameters={"w": ("R", "S1")}, states={"w": ("S0", "S1")})  # fmt: skip
    one = strategy(both)
    assert [d for d in range(8) if owns(one, graph(), d, "w")] == [0, 1, 2, 3]
    assert [d for d in range(8) if owns(one, graph(), d, "v")] == [0]


def test_a_parameter_of_several_devices_belongs_to_the_first():
    """The tied weight is held by the stages of `one` and `two`; the second one has replicas."""
    tied = strategy(stage(("one",), ((3,),)), stage(("two", "three"), ((1,), (2,))))
    owned = {d: [n for n in "wv" if owns(tied, graph(), d, n)] for d in (1, 2, 3)}
    assert owned == {1: ["v"], 2: [], 3: ["w"]}


def test_a_tensor_belongs_to_the_first_device_along_axes_that_do_not_cut_it():
    """Of the parameter, of a count that all have whole, and of the second replica's statistics."""
    both = strategy(stage(ALL, ((0, 1, 2, 3), (4, 5, 6, 7)), (2, 2), ["S0,R->S0", "R,S1->S1"],
                          parameters={"w": ("R", "S1")}, states={"w": ("S0", "S1")}))  # fmt: skip
    assert [d for d in range(8) if owns(both, graph(), d, "w", ("R", "S1"))] == [0, 1]
    assert [d for d in range(8) if owns(both, graph(), d, "w", ("R", "R"))] == [0]
    assert [d for d in range(8) if owns(both, graph(), d, "w", ("R", "S1"), 1)] == [4, 5]


def test_parameters_are_gathered_after_a_step_in_the_order_in_which_a_forward_reads_them():
    # Each is as large as a bucket.
    large = replace(graph(), parameters=tuple(
        Parameter(name, (2**13, 2**13), "float32", True) for name in "vw"
    ))  # fmt: skip
    one = stage(ALL, ((0, 1),), (2,), BATCH, states={"v": ("S0",), "w": ("S0",)})
    assert gathered_together(one, large) == (("w",), ("v",))
    assert gathered_together(one, graph()) == (("w", "v"),)


@pytest.mark.parametrize(
    ("ahead", "starts"),
    [(None, (-1, -1)), (0, (0, 1)), (2**28 - 1, (0, 1)), (2**28, (-1, 1)), (2**29, (-1, -1))],
)
def test_parameters_are_on_their_way_behind_a_step_as_far_as_the_bytes_allow(ahead, starts):
    large = replace(graph(), parameters=tuple(
        Parameter(name, (2**13, 2**13), "float32", True) for name in "vw"
    ))  # fmt: skip
    one = stage(ALL, ((0, 1),), (2,), BATCH, states={"v": ("S0",), "w": ("S0",)})
    assert gather_starts(replace(one, gathered_ahead=ahead), large) == starts
