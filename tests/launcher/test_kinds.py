"""Modules of many kinds on two devices, as a pipeline and with split operators: losses and weights
are those of PyTorch's own loop in float64, or the kind is refused with the cause.
"""

import pytest

from tests.support.gradient_kinds import KINDS
from tests.support.gradient_kinds.two_ranks import PLANS, trials

QUICK = ("plain", "in-place", "lstm", "points-masked-attention")
"""Kinds that `make test` runs."""


def check(names, folder):
    made = trials(names, folder)
    assert all((name, "export") in made or (name, plan) in made for name in names for plan in PLANS)
    assert {
        key: one for key, one in made.items() if one.outcome not in KINDS[key[0]].accepted
    } == {}


def test_some_kinds_on_two_devices(tmp_path):
    check(QUICK, tmp_path)


@pytest.mark.slow
def test_all_kinds_on_two_devices(tmp_path):
    check([name for name in KINDS if name not in QUICK], tmp_path)
