"""Conversions, on numpy arrays of a simulated mesh, and against Alpa's Table 2."""

from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.resharding import Collective, conversion
from planner.resharding.conversion import LOCAL, spec_after
from tests.support.meshes import done, put, taken

MESHES = [(2,), (4,), (2, 2), (3, 2), (2, 2, 2)]
SHAPE = (24, 72)
PARTS = ["R", "P", "S0", "S1"]


def specs(mesh, parts=PARTS):
    every = product(parts, repeat=len(mesh))
    return [spec for spec in every if not ("S1/3" in spec and sum("S1" in p for p in spec) > 1)]


def text(steps):
    return " ".join(f"{s.kind.value}({s.bytes}, {s.axis})" for s in steps)


@given(st.data())
def test_the_steps_make_the_wanted_parts_of_the_same_tensor(data):
    mesh = data.draw(st.sampled_from(MESHES))
    old, new = (data.draw(st.sampled_from(specs(mesh, [*PARTS, "S1/3"]))) for _ in range(2))
    rng = np.random.default_rng(0)
    whole = rng.normal(size=SHAPE)
    parts = put(whole, mesh, old, rng)
    steps = conversion(SHAPE, 8, mesh, old, new)
    for step in steps:
        largest = max(part.nbytes for part in parts)
        parts = done(parts, mesh, step)
        grows = step.kind in (Collective.ALL_GATHER, Collective.SCATTER)
        assert step.bytes == (max(part.nbytes for part in parts) if grows else largest)
    assert spec_after(old, steps) == new
    assert np.allclose(taken(parts, mesh, new, SHAPE), whole)


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
def test_alpas_table_2(mesh):
    n0, n1 = mesh
    size = 24 * 72 * 8
    rows = {
        (("R", "R"), ("S0", "S1")): "",
        (("S0", "R"), ("R", "R")): f"all-gather({size}, 0)",
        (("S0", "S1"), ("S0", "R")): f"all-gather({size // n0}, 1)",
        (("S0", "R"), ("S1", "R")): f"all-to-all({size // n0}, 0)",
        (("S0", "S1"), ("S0", "S0")): f"all-to-all({size // (n0 * n1)}, 1)",
    }
    for (old, new), wanted in rows.items():
        steps = conversion(SHAPE, 8, mesh, old, new)
        assert text(s for s in steps if s.kind not in LOCAL) == wanted


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("S0", "R", "all-gather(13824, 0)"), ("S0", "S1", "all-to-all(6912, 0)"),
        ("P", "R", "all-reduce(13824, 0)"), ("P", "S1", "reduce-scatter(13824, 0)"),
        ("R", "S1", "slice(13824, 0)"), ("R", "P", "first(13824, 0)"),
        ("S1", "P", "scatter(13824, 0)"), ("P", "P", ""), ("R", "R", ""),
    ],
)  # fmt: skip
def test_one_axis_takes_one_step(old, new, wanted):
    assert text(conversion(SHAPE, 8, (2,), (old,), (new,))) == wanted


def received(steps, mesh):
    """Bytes that a device receives."""
    total = 0.0
    for step in steps:
        if step.kind not in LOCAL:
            n = mesh[step.axis]
            total += (2 if step.kind is Collective.ALL_REDUCE else 1) * (n - 1) / n * step.bytes
    return total


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_no_path_over_other_specs_receives_less(mesh):
    """The shortest paths over direct conversions of one axis, found by networkx."""
    graph = nx.DiGraph()
    for old in specs(mesh):
        for axis, part in product(range(2), PARTS):
            new = (*old[:axis], part, *old[axis + 1 :])
            if new != old and len(steps := conversion(SHAPE, 8, mesh, old, new)) == 1:
                graph.add_edge(old, new, weight=received(steps, mesh))
    for old, new in product(specs(mesh), repeat=2):
        # Sums are made only where they are asked for: integers cannot be summed.
        may = [spec for spec in graph if all(
            part != "P" or "P" in (old[axis], new[axis]) for axis, part in enumerate(spec)
        )]  # fmt: skip
        least = nx.dijkstra_path_length(graph.subgraph(may), old, new)
        assert received(conversion(SHAPE, 8, mesh, old, new), mesh) == pytest.approx(least)


@pytest.mark.parametrize(
    ("shape", "new", "wrong"),
    [
        ((6, 4), ("S0",), "S0: 6 cannot be cut into 4 equal parts"),
        ((8,), ("S1",), "S1: expected one of the 1 dimensions"),
        ((8,), ("S0", "R"), "expected a spec for each of the 1 axes, got 2"),
    ],
)
def test_a_spec_that_does_not_fit_is_an_error(shape, new, wrong):
    with pytest.raises(ValueError, match=wrong):
        conversion(shape, 4, (4,), ("R",), new)
