"""The launcher comes to the weights of PyTorch loops that `make bench-launch` runs beside it."""

import pytest

from tests.bench.launch import ROOT, over_loopback
from tests.support.launch_rivals import DUELS, LAUNCH, TORCH, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", DUELS)
def test_both_loops_run_and_train_the_same(folder, name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    times_s = over_loopback(name, folder, 1, 1)
    assert len(times_s[LAUNCH]) == len(times_s[TORCH]) == 1
