"""How operators lie on a mesh: tiles, rules as text, and stages that are refused until they run."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.sharding import AxisRule, Rule, Sharding, rule_of, tile
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from tests.support.builders import graph_of

ALL, UPPER, LOWER = (0, 8), (0, 4), (4, 8)


@pytest.mark.parametrize(
    ("spec", "tiles"),
    [
        (("R", "R"), [(ALL, ALL)] * 4),
        (("S0", "S1"), [(UPPER, UPPER), (UPPER, LOWER), (LOWER, UPPER), (LOWER, LOWER)]),
        (("S1", "S0"), [(UPPER, UPPER), (LOWER, UPPER), (UPPER, LOWER), (LOWER, LOWER)]),
        (("S0", "R"), [(UPPER, ALL), (UPPER, ALL), (LOWER, ALL), (LOWER, ALL)]),
        (("R", "S0"), [(UPPER, ALL), (LOWER, ALL), (UPPER, ALL), (LOWER, ALL)]),
        (("S0", "S0"), [((0, 2), ALL), ((2, 4), ALL), ((4, 6), ALL), ((6, 8), ALL)]),
        (("S1", "R"), [(ALL, UPPER), (ALL, UPPER), (ALL, LOWER), (ALL, LOWER)]),
        (("R", "S1"), [(ALL, UPPER), (ALL, LOWER), (ALL, UPPER), (ALL, LOWER)]),
        (("S1", "S1"), [(ALL, (0, 2)), (ALL, (2, 4)), (ALL, (4, 6)), (ALL, (6, 8))]),
        (("P", "S0"), [(UPPER, ALL), (LOWER, ALL), (UPPER, ALL), (LOWER, ALL)]),
    ],
)
def test_the_tiles_of_a_matrix_on_4_devices(spec, tiles):
    """Table 1 of Alpa (OSDI 2022), which names the axes of the mesh at the dimensions instead: its
    S^1 S^0 is ("S1", "S0") here, and its S^01 R is ("S0", "S0").
    """
    assert [tile((8, 8), spec, (2, 2), device) for device in range(4)] == tiles


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_tiles_along_cut_axes_cover_the_tensor_once(mesh, data):
    part = st.sampled_from(["R", "P", "S0", "S1"])
    spec = tuple(data.draw(st.lists(part, min_size=len(mesh), max_size=len(mesh))))
    shape = (64 * 27, 64 * 27)  # every product of three sizes up to 4 divides it
    tiles = [tile(shape, spec, mesh, device) for device in range(prod(mesh))]
    assert len({prod(stop - start for start, stop in box) for box in tiles}) == 1
    copies = prod(n for n, one in zip(mesh, spec, strict=True) if not one.startswith("S"))
    assert all(tiles.count(box) == copies for box in tiles)
    areas = [prod(stop - start for start, stop in box) for box in set(tiles)]
    assert sum(areas) == prod(shape)
    for (a, b), (c, d) in product(set(tiles), repeat=2):
        apart = any(one[1] <= two[0] or two[1] <= one[0] for one, two in ((a, c), (b, d)))
        assert apart or (a, b) == (c, d)


@pytest.mark.parametrize(
    ("shape", "spec", "wrong"),
    [
        ((8,), ("S1", "R"), "S1: expected one of the 1 dimensions"),
        ((6,), ("S0", "S0"), "S0: 3 cannot be cut into 2 equal parts"),
        ((8,), ("S0",), "a spec for each of the 2 axes, got 1"),
        ((8,), ("S0", "s0"), "expected R, P or S with a dimension, such as S0, got 's0'"),
    ],
)
def test_a_spec_that_does_not_fit_the_tensor_is_an_error(shape, spec, wrong):
    with pytest.raises(ValueError, match=wrong):
        tile(shape, spec, (2, 2), 0)


@pytest.mark.parametrize(
    "lines",
    [
        ("S0,R->S0", "R,S1->S2"),
        ("S0->S0", "S2->S2 shape[2]"),
        ("S2,S0->P",),
        ("S1->A,R num_heads q_num_heads", "R->P,S0"),
        ("->R",),
    ],
)
def test_a_rule_is_its_text(lines):
    assert rule_of(lines).lines == lines


def test_a_rule_has_a_spec_for_each_tensor():
    rule = rule_of(["S0,R->A", "R,S1->S2 shape[2]"])
    assert rule.inputs == (("S0", "R"), ("R", "S1"))
    assert rule.outputs == (("P", "S2"),)
    assert rule.axes == (
        AxisRule(("S0", "R"), ("A",)), AxisRule(("R", "S1"), ("S2",), ("shape[2]",)),
    )  # fmt: skip
    assert rule.num_means((3, 4)) == (3,)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["S0,R"], "expected a rule such as 'S0,R->S0', got 'S0,R'"),
        (["S0->"], "expected a rule such as"),
        (["A->R"], "expected R, P or S with a dimension, such as S0, got 'A'"),
        (["S0->S0", "S0,R->S0"], "all with the same numbers of tensors"),
        ([], "expected a line for each axis"),
        (["S2->S2 @halo", "S2->S2 @halo"], "@halo: expected a dimension to be cut along one axis"),
        (["S2->S2 @halo", "S2->S2"], "to be cut along one axis, got S2,S2"),
        (["S0->S0 @moments", "S2->S2 @halo"], "expected one mark, got @halo, @moments"),
    ],
)
def test_a_text_that_is_no_rule_is_an_error(lines, wrong):
    with pytest.raises(ValueError, match=wrong):
        rule_of(lines)


def test_a_rule_that_contradicts_itself_is_an_error():
    with pytest.raises(ValueError, match="expected the spec of an output, got none"):
        AxisRule(("R",), ())
    with pytest.raises(ValueError, match="such as S0, got 'A'"):
        AxisRule(("A",), ("R",))
    with pytest.raises(ValueError, match="S0/2: expected no other axis to cut dimension 0"):
        Rule((AxisRule(("S0/2",), ("R",)), AxisRule(("S0",), ("R",))))


def test_a_rule_is_called_split_by_what_the_devices_do():
    cases = {"R,R->R": (False, False), "P->P": (True, False), "S0,R->P": (True, True)}
    cases["S0,R->P @rows"] = (True, False)  # each device looks up all the indices
    rules = {line: AxisRule.parse(line) for line in cases}
    assert {line: (one.is_split, one.shares_work) for line, one in rules.items()} == cases


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"mesh": ()}, "mesh: expected sizes of at least 1"),
        ({"mesh": (2, 0)}, "mesh: expected sizes of at least 1"),
        ({"rules": {"op": rule_of(["R->R"])}}, "rules.op: expected a line for each of the 2 axes"),
        ({"parameters": {"w": ("R",)}}, "parameters.w: expected a spec for each of the 2 axes"),
        ({"inputs": {"x": ("P", "R")}}, "inputs.x: expected S or R for each axis, got P"),
        ({"outputs": {"y": ("S0", "P")}}, "outputs.y: expected S or R for each axis, got P"),
    ],
)
def test_a_sharding_that_contradicts_itself_is_an_error(change, wrong):
    with pytest.raises(ValueError, match=wrong):
        replace(Sharding((2, 2), {}, {}, {}, {}), **change)


def stages(groups, mesh=None):
    sharding = None if mesh is None else Sharding(mesh, {}, {}, {}, {})
    return Strategy((Stage(("op0",), groups, 1, False, sharding),), ScheduleName.ONE_F_ONE_B, 4)


def test_devices_stand_one_replica_after_the_other():
    (stage,) = stages(((4, 5), (0, 1)), (2,)).stages
    assert stage.devices == (4, 5, 0, 1)
    assert stage.num_replicas == 2
    assert Stage.whole(("op0",), (3, 1), 1, False).groups == ((3,), (1,))


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        (stages(((0,), (1,))), ()),
        (stages(((0, 1),)), ("stage 0 has no mesh, and its replicas have 2 devices; expected 1"
                             " each",)),
        (stages(((0, 1), (2,)), (2, 1)),
         ("stage 0 has a mesh of 2 devices, and its replicas have 2, 1 devices; expected 2 each",)),
        (stages(((0, 1),), (1, 2)), ()),
    ],
)  # fmt: skip
def test_groups_have_the_devices_of_their_mesh(strategy, wrong):
    assert violations(strategy, graph_of([[]]), 4) == wrong
