"""Stages that are split, on real processes: weights after two steps equal those of one process."""

import json

import pytest

from tests.support.ranks import ROOT, forked
from tests.support.split_models import MODELS
from tests.support.split_worker import BESIDE, CASES

LIMIT = 1e-9


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Relative errors by case, and what was posted, of all ranks, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("split")
    for name, make in MODELS.items():
        make(folder / f"{name}.onnx")
    forked(ROOT / "tests/support/split_worker.py", 4, folder, timeout_s=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [*CASES, *BESIDE])
def test_steps_equal_those_of_one_process(told, name):
    found = [one[name][0] for one in told]
    assert all("loss" in one for one in found if one) and any(found)
    assert {
        (rank, what): error
        for rank, one in enumerate(found)
        for what, error in one.items()
        if not error < LIMIT
    } == {}


@pytest.mark.parametrize("name", BESIDE)
def test_all_ranks_of_a_mesh_post_the_same(told, name):
    by_mesh = {}
    for one in told:
        for mesh, posted in one[name][1].items():
            by_mesh.setdefault(mesh, []).append(posted)
    assert by_mesh
    for some in by_mesh.values():
        assert len(some) > 1 and some[0]
        assert all(one == some[0] for one in some)


def test_gradients_are_scattered_before_and_parameters_gathered_after_a_step(told):
    """In two steps: every scatter comes before the gathers of its step."""
    posted = next(iter(told[0]["zero 1 on 2, beside"][1].values()))
    words = [one.split()[0].strip("\"'(") for one in posted]
    steps = [one for one in words if one in ("_scatter", "_gather")]
    half = steps[: len(steps) // 2]
    assert steps == half * 2
    assert half == sorted(half, reverse=True) and len({*half}) == 2
