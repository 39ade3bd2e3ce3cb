"""Stages that are split, on real processes: weights after two steps equal those of one process."""

import json

import pytest

from tests.support.ranks import ROOT, forked
from tests.support.split_models import MODELS
from tests.support.split_worker import CASES

LIMIT = 1e-9


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Relative errors by case, of all ranks, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("split")
    for name, make in MODELS.items():
        make(folder / f"{name}.onnx")
    forked(ROOT / "tests/support/split_worker.py", 4, folder, timeout_s=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_of_one_process(errors, name):
    found = [one[name] for one in errors]
    assert all("loss" in one for one in found if one) and any(found)
    assert {
        (rank, what): error
        for rank, one in enumerate(found)
        for what, error in one.items()
        if not error < LIMIT
    } == {}
