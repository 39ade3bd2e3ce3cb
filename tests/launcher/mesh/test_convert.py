"""Steps on local tensors, on a mesh of threads, beside the same in numpy."""

import random

import numpy as np
import pytest
import torch

from planner.artefacts.sharding import Sharding
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.launcher.mesh.convert import Conversion, converted, finished
from planner.launcher.mesh.lines import all_lines, line_of
from planner.resharding import conversion
from tests.support.meshes import put, taken
from tests.support.programs import chain
from tests.support.split_plans import fits
from tests.support.threads import meshes, on_all

SHAPE = (8, 12, 4)
PARTS = ("R", "P", "S0", "S1", "S2", "S1/3")


def some_spec(mesh, chance):
    while True:
        spec = tuple(chance.choice(PARTS) for _ in mesh)
        if fits(SHAPE, spec, mesh):
            return spec


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 1, 2)])
def test_every_conversion_gives_what_the_new_spec_says(mesh):
    chance, rng = random.Random(0), np.random.default_rng(0)
    for _ in range(30):
        old, new = some_spec(mesh, chance), some_spec(mesh, chance)
        whole = rng.normal(size=SHAPE)
        parts = [torch.from_numpy(part.copy()) for part in put(whole, mesh, old, rng)]
        steps = conversion(SHAPE, 8, mesh, old, new)
        found, _ = on_all(mesh, lambda one, p=parts, s=steps: converted(p[one.index], s, one))
        after = taken([part.numpy() for part in found], mesh, new, SHAPE)
        np.testing.assert_allclose(after, whole, rtol=1e-12, err_msg=f"{old} -> {new}")


def test_the_part_of_a_device_is_that_of_the_mesh():
    whole = torch.arange(96.0).reshape(SHAPE[0], SHAPE[1])
    for mesh in meshes((2, 2))[0]:
        for spec in (("S0", "S0"), ("S1", "S0"), ("R", "S1/3"), ("R", "R")):
            expected = put(whole.numpy(), (2, 2), spec)[mesh.index]
            assert torch.equal(mesh.local_part(whole, spec), torch.from_numpy(expected))


def test_a_copy_whose_gradient_is_a_sum_sends_nothing_forward():
    """The steps forward do nothing here, and those backward add up: f of Megatron-LM."""

    def work(mesh):
        steps = conversion((4,), 8, (2,), ("P",), ("R",))
        leaf = torch.ones(4, requires_grad=True)
        made = finished(Conversion("x", mesh, (), steps)(leaf))
        (made * (1.0 + mesh.index)).sum().backward()
        return leaf.grad

    found, counts = on_all((2,), work)
    assert all(grad.tolist() == [3.0] * 4 for grad in found)
    assert counts == [{"all-reduce": 1}]


def test_a_gradient_goes_into_a_sink_that_has_another_shape():
    def work(mesh):
        taken_up = []
        leaf = torch.ones(4, requires_grad=True)
        steps = conversion((4,), 8, (2,), ("P",), ("S0",))
        conversion_of = Conversion("w", mesh, (), steps)
        conversion_of.sink = taken_up.append
        (finished(conversion_of(leaf)) * torch.arange(4.0)).sum().backward()
        return leaf.grad, taken_up[0].tolist()

    found, _ = on_all((2,), work)
    assert found == [(None, [0.0, 2.0]), (None, [4.0, 6.0])]


def test_lines_are_those_of_all_axes_and_replicas():
    assert line_of((2, 3), 4, 0) == (1, 4)
    lies = Sharding((2, 2), {}, {}, {}, {})
    stage = Stage(("v",), ((7, 1, 2, 3), (4, 5, 6, 0)), 1, False, lies)
    found = all_lines(Strategy((stage,), ScheduleName.GPIPE, 2), chain(1))
    assert found == (
        (7, 2), (1, 3), (7, 1), (2, 3), (4, 6), (5, 0), (4, 5), (6, 0)
    )  # fmt: skip
