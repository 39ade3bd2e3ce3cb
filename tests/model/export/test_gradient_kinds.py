"""Modules with a say in their backward pass: equal to PyTorch's loop, or refused with the cause."""

from functools import partial

import pytest
import torch

import planner
from tests.support import gradient_kinds
from tests.support.gradient_kinds import KINDS
from tests.support.gradient_kinds.kind import Outcome
from tests.support.gradient_kinds.trial import build, trials

QUICK = (
    "detach", "function-loss", "tensor-hook-logs", "embedding-padding", "noise", "scalar-factor",
    "checkpoint-reentrant", "frozen-block-under-no-grad",
    "points-levels", "points-certain",
)  # fmt: skip
"""Kinds that `make test` runs; the others take more than ten minutes together. Those that an export
has to refuse are in tests/operators/gradients/test_check.py, too.
"""

NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_in_silence(name, tmp_path):
    kind = KINDS[name]
    made = dict(trials(name, kind, kind.dtypes[-1], tmp_path, kind.optimizers[:1]))
    assert {one.outcome for one in made.values()} <= kind.accepted, made


def test_a_trial_sees_a_gradient_that_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "export", partial(planner.export, check=False))
    made = dict(trials("function-reverses", KINDS["function-reverses"], torch.float64, tmp_path))
    assert {one.outcome for one in made.values()} == {Outcome.WRONG}
    assert min(one.weight for one in made.values()) > 1e-3


def test_a_trial_of_a_plain_module_is_equal(tmp_path):
    made = dict(trials("plain", KINDS["plain"], torch.float64, tmp_path))
    assert {one.outcome for one in made.values()} == {Outcome.EQUAL}
    assert made.keys() == {"sgd", "adamw"}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_the_same_module_each_time(name):
    states = [build(name, KINDS[name], KINDS[name].dtypes[0])[0].state_dict() for _ in range(2)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])


def test_no_two_kinds_have_one_name():
    modules = vars(gradient_kinds).values()
    families = [one for one in modules if getattr(one, "KINDS", KINDS) is not KINDS]
    assert sum(len(one.KINDS) for one in families) == len(KINDS)
