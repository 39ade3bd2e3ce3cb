"""Losses that a model computes itself, with denominators that differ between microbatches: by every
plan they are those of one forward pass over the whole batch, and so are the weights.
"""

import math

import pytest
import torch

from planner import trainer
from tests.support import own_losses
from tests.support.gradient_kinds.trial import within
from tests.support.own_losses import (
    IGNORED,
    LOSSES,
    NUM_MICROBATCHES,
    PLANS,
    RATE,
    SAMPLES,
    Trained,
    batches,
    build,
    by_torch,
    trained,
)

QUICK = ("several",)
EXACT = {"rel": 1e-9, "abs": 1e-9}


def check(made, wanted):
    assert made.losses == pytest.approx(wanted.losses, **EXACT)
    for name, value in made.state.items():
        torch.testing.assert_close(value, wanted.state[name], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The folder with the plans of a loss."""
    folder, known = tmp_path_factory.mktemp("losses"), set()

    def of(name):
        if name not in known:
            (folder / name).mkdir()
            own_losses.prepare(name, folder / name)
            known.add(name)
        return folder / name

    return of


def check_all(names, prepared):
    """Trains losses by all plans."""
    folders = {name: prepared(name) for name in names}
    made = own_losses.on_two_ranks(folders[names[0]].parent, names)
    for name in names:
        wanted = by_torch(name, batches())
        with within(folders[name]):
            check(trained("one.json", batches()), wanted)
        for plan in PLANS:
            check(Trained(**made[name, plan]), wanted)


def test_some_losses_are_those_of_the_whole_batch(prepared):
    check_all(QUICK, prepared)


@pytest.mark.slow
def test_all_losses_are_those_of_the_whole_batch(prepared):
    check_all([name for name in LOSSES if name not in QUICK], prepared)


def without_labels():
    """Three steps; in the second one nothing counts."""
    steps = batches(3)
    steps[1]["labels"] = torch.full_like(steps[1]["labels"], IGNORED)
    return steps


def test_a_step_in_which_nothing_counts_is_left_out(prepared):
    first, second, third = without_labels()
    wanted = by_torch("shifted", [first, third])
    with within(prepared("shifted")), trainer("one.json", learning_rate=RATE, threads=1) as own:
        losses = [own.step(first)]
        message = "nothing counts in input 'labels', by which 'cross_entropy_loss' is divided"
        with pytest.warns(UserWarning, match=message):
            assert math.isnan(own.step(second))
        losses.append(own.step(third))
        check(Trained(losses, own.state_dict()), wanted)


def test_a_loss_with_other_parts_is_trained_where_nothing_counts(prepared):
    """In PyTorch's loop 0 / 0 is no number; here such a term adds zero."""
    with within(prepared("several")):
        made = trained("one.json", without_labels())
    assert all(map(math.isfinite, made.losses))
    module, _ = build("several")
    assert not torch.equal(made.state["scale"], module.scale)


def test_a_clamped_denominator_makes_a_step_of_nothing_as_in_pytorch(prepared):
    """Its loss is 0, and the optimizer's weight decay goes on."""
    module, _ = build("clamped")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for inputs in without_labels():
        optimizer.zero_grad()
        loss = module(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    how = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "threads": 1}
    with within(prepared("clamped")), trainer("adamw.json", **how) as own:
        made = [own.step(one) for one in without_labels()]
        names = {"scale"}  # has no gradient, so that torch's optimizer leaves it as it is
        state = {name: one for name, one in own.state_dict().items() if name not in names}
    check(Trained(made, state), Trained(losses, module.state_dict()))


def test_an_evaluation_is_one_pass_over_all_data(prepared):
    """Its data is one batch of two steps, and has microbatches without labels."""
    both = {name: torch.cat([one[name] for one in batches(2)]) for name in batches(1)[0]}
    module, _ = build("several")
    with within(prepared("several")), trainer("one.json", threads=1) as own:
        assert own.evaluate([both])["loss"] == pytest.approx(module(**both).item(), **EXACT)


def test_an_evaluation_of_nothing_has_no_loss(prepared):
    (_, inputs, _) = without_labels()
    with within(prepared("shifted")), trainer("one.json", threads=1) as own:
        assert math.isnan(own.evaluate([inputs])["loss"])


def test_minibatches_of_an_asynchronous_schedule_count_alone(prepared):
    """Each is a step of its own, and one without labels changes nothing."""
    module, _ = build("several")
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for inputs in batches(2):
        parts = [
            {name: one[m * SAMPLES : (m + 1) * SAMPLES] for name, one in inputs.items()}
            for m in range(NUM_MICROBATCHES)
        ]
        for part in parts:
            optimizer.zero_grad()
            counts = bool((part["labels"] != IGNORED).any())
            loss = module(**part) if counts else other_parts(module, part)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    wanted = [sum(losses[i : i + NUM_MICROBATCHES]) / NUM_MICROBATCHES for i in (0, 3)]
    with within(prepared("several")):
        made = trained("alone.json", batches(2))
    check(made, Trained(wanted, module.state_dict()))


def other_parts(module, inputs):
    """The loss `several` without its denominators."""
    scores = module.scores(inputs["tokens"])
    return module.scale + 0.1 * scores.square().mean()
