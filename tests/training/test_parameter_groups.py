"""Groups of parameters beside the same groups of PyTorch's optimizers, in float64."""

import pytest
import torch

from tests.support.checkpoint_runs import tensors_of
from tests.support.group_runs import HALF, by_torch, launched, run_all, write_model, write_plans

TOGETHER = ("pipeline", "replicas", "split", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module", params=["adamw", "momentum"])
def told(request, tmp_path_factory):
    """The folder of all launches on two ranks, their losses, and PyTorch's loop."""
    folder = tmp_path_factory.mktemp(request.param)
    write_plans(folder, write_model(folder), request.param)
    launches = {
        **{name: {} for name in TOGETHER},
        "trainer": {"strategy": "zero1", "learning_rate": 1.0},
        "begun": {"strategy": "zero2", "steps": HALF},
        "resumed": {"strategy": "pipeline", "resume": "kept-begun"},
        "resumed on zero3": {"strategy": "zero3", "resume": "kept-begun"},
    }
    return folder, run_all(folder, launches), by_torch(request.param)


def assert_like_torch(folder, name, losses, expected):
    """Losses, and what a launch has kept, to 1e-9."""
    wanted, parameters, states = expected
    assert losses == pytest.approx(wanted[-len(losses) :], rel=1e-9)
    held = tensors_of(folder / f"kept-{name}")
    for parameter, value in parameters.items():
        torch.testing.assert_close(held[f"parameters/{parameter}"], value, rtol=1e-9, atol=1e-12)
    for (parameter, word), value in states.items():
        found = held[f"optimizer/{parameter}/{word}"]
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*TOGETHER, "trainer", "resumed", "resumed on zero3"])
def test_two_ranks_train_groups_as_torch_does(told, name):
    folder, losses, expected = told
    assert_like_torch(folder, name, losses[name], expected)


def test_one_process_trains_groups_as_torch_does(told):
    folder, _, expected = told
    assert_like_torch(folder, "alone", launched(folder, "alone"), expected)


def test_an_asynchronous_schedule_trains_groups_as_torch_does(told):
    folder, _, _ = told
    losses = launched(folder, "asynchronous", clip=None, nan=None)
    optimizer = folder.name.rstrip("0123456789")
    assert_like_torch(folder, "asynchronous", losses, by_torch(optimizer, asynchronous=True))
