"""Stages that are split, on CUDA: four ranks share one GPU, and equal one process on the CPU."""

import json

import pytest
import torch

from tests.support.ranks import ROOT, under_torchrun
from tests.support.split_models import MODELS
from tests.support.split_worker import BESIDE, CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 1e-9


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Relative errors by case, of all ranks."""
    folder = tmp_path_factory.mktemp("split")
    for name, make in MODELS.items():
        make(folder / f"{name}.onnx")
    under_torchrun(ROOT / "tests/support/one_gpu.py", 4, folder, timeout_s=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [*CASES, *BESIDE])
def test_steps_on_streams_equal_those_of_one_process(told, name):
    found = [one[name] for one in told]
    assert all("loss" in one for one in found if one) and any(found)
    assert {
        (rank, what): error
        for rank, one in enumerate(found)
        for what, error in one.items()
        if not error < LIMIT
    } == {}
