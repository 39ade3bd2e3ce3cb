"""Schedules of the learning rate, beside those of torch."""

import pytest
import torch
from torch.optim import lr_scheduler as torch_rates

from planner.launcher.options import Loop, check
from planner.launcher.rates import rate_factor
from planner.support.errors import LaunchError, OptionError

STEPS = 12


def by_torch(make):
    """The rates of STEPS steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def warmed(after, warmup):
    """torch's own way to put a warm-up before a schedule."""

    def make(optimizer):
        before = torch_rates.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
        return torch_rates.SequentialLR(optimizer, [before, after(optimizer)], [warmup])

    return make


@pytest.mark.parametrize(("text", "make"), [
    ("constant", torch_rates.ConstantLR),
    ("linear", lambda it: torch_rates.LinearLR(it, 1.0, 0.0, total_iters=STEPS)),
    ("cosine", lambda it: torch_rates.CosineAnnealingLR(it, STEPS)),
    ("cosine:0:20", lambda it: torch_rates.CosineAnnealingLR(it, 20)),
    ("linear:4:12", warmed(lambda it: torch_rates.LinearLR(it, 1.0, 0.0, total_iters=8), 4)),
    ("cosine:3", warmed(lambda it: torch_rates.CosineAnnealingLR(it, STEPS - 3), 3)),
])  # fmt: skip
def test_schedules_are_those_of_torch(text, make):
    if text == "constant":
        make = lambda it: torch_rates.ConstantLR(it, 1.0)  # noqa: E731
    factor = rate_factor(text, STEPS)
    assert [factor(step) for step in range(STEPS)] == pytest.approx(by_torch(make), abs=1e-12)


def test_after_the_end_the_rate_is_0():
    assert [rate_factor("linear:0:2", 9)(step) for step in range(4)] == [1.0, 0.5, 0.0, 0.0]
    assert rate_factor("cosine:0:2", 9)(5) == 0.0


def halves(step):
    return 0.5**step


def below_0(step):
    return -1.0


def fails(step):
    raise KeyError("no rate")


def test_a_function_of_the_user():
    factor = rate_factor("tests.training.test_rates:halves", STEPS)
    assert [factor(step) for step in range(3)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(("name", "message"), [
    ("below_0", "step 3: expected a finite factor of at least 0, got -1.0"),
    ("fails", "step 3: KeyError: 'no rate'"),
])  # fmt: skip
def test_a_function_that_fails_is_named(name, message):
    factor = rate_factor(f"tests.training.test_rates:{name}", STEPS)
    with pytest.raises(LaunchError) as error:
        factor(3)
    assert str(error.value) == f"--lr-schedule tests.training.test_rates:{name}: {message}"


@pytest.mark.parametrize(
    "text", ["", "step", "linear:x", "constant:3", "cosine:1:2:3", "linear:-1"]
)
def test_an_unknown_schedule_is_refused(text):
    with pytest.raises(OptionError, match="--lr-schedule: expected constant, linear:W:N"):
        rate_factor(text, STEPS)


def test_a_warm_up_longer_than_the_training_is_refused():
    with pytest.raises(OptionError, match=r"warm-up of at most the 12 steps .* got 13"):
        rate_factor("linear:13", STEPS)


def test_the_warm_up_of_epochs_is_checked_when_their_steps_are_known():
    how = {"data": "tests.support.datasets:samples", "epochs": 5}
    check(Loop(lr_schedule="cosine:20", **how))
    with pytest.raises(OptionError, match="--lr-schedule: expected constant"):
        check(Loop(lr_schedule="cosine:x", **how))
