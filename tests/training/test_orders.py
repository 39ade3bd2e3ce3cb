"""Orders of epochs from samplers of a user, and the state of what these and datasets hold."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from planner.training.data.batching import BatchLayout
from planner.training.data.datasets import EvalData, MapSource
from planner.training.data.orders import EpochOrders
from planner.training.data.samples import Named
from planner.training.data.states import (
    bring_back,
    decoded,
    encoded,
    held,
    kept,
    left_as_it_is,
    state_of,
)
from tests.support.remainder_runs import (
    Collator,
    Drawing,
    EpochSampler,
    ShuffledInPlace,
    StatefulSampler,
    StatefulStream,
)

LAYOUT = BatchLayout(size=4, count=4, seed=3, shuffle=True)
DATA = TensorDataset(torch.arange(43))


def plain(sampler, epochs=5):
    """The orders that a plain loop gets."""
    return [[*sampler] for _ in range(epochs)]


def source(sampler, **how):
    return MapSource("x", DataLoader(DATA, batch_size=16, sampler=sampler), LAYOUT, **how)


def seeded():
    sampler = ShuffledInPlace()
    sampler.chance.seed(4)
    return sampler


@pytest.mark.parametrize("make", [EpochSampler, seeded])
def test_orders_are_those_of_a_plain_loop_however_epochs_are_asked_for(make):
    expected = plain(make())
    assert [source(make()).order(epoch) for epoch in range(5)] == expected
    one = source(make())
    assert [one.order(epoch) for epoch in (0, 0, 3, 4, 1, 4, 0, 2)] == [
        expected[epoch] for epoch in (0, 0, 3, 4, 1, 4, 0, 2)
    ]


def test_a_batch_sampler_of_such_a_sampler_counts_too():
    batches = BatchSampler(EpochSampler(), 16, drop_last=False)
    one = MapSource("x", DataLoader(DATA, batch_sampler=batches), LAYOUT)
    assert one.order(3) == plain(EpochSampler())[3]


def test_a_generator_in_an_inner_sampler_draws_on():
    def inner():
        return RandomSampler(DATA, generator=torch.Generator().manual_seed(5))

    batches = BatchSampler(inner(), 16, drop_last=False)
    one = MapSource("x", DataLoader(DATA, batch_sampler=batches), LAYOUT)
    assert one.order(2) == plain(inner())[2]


def test_an_evaluation_leaves_the_sampler_of_a_training_as_it_is():
    sampler, expected = EpochSampler(), plain(EpochSampler())
    training = source(sampler)
    assert source(sampler, in_steps=False).order(0) == expected[1]
    assert [training.order(epoch) for epoch in range(5)] == expected


class Drawn(EpochSampler):
    """Draws on from a generator without a seed."""

    def __init__(self):
        self.chance = np.random.default_rng()

    def __iter__(self):
        return iter(self.chance.permutation(43).tolist())


@pytest.mark.parametrize("make", [EpochSampler, seeded, StatefulSampler, Drawn])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_sampler_goes_on_from_its_state(make, at):
    before = source(make())
    orders = [before.order(epoch) for epoch in range(5)]
    state = source_state(before, at)
    after = source(make())
    assert after.restore(state, False) == []
    assert [after.order(epoch) for epoch in range(at, 5)] == orders[at:]


def test_an_order_that_cannot_be_drawn_again_is_said():
    """Its list is shuffled by a generator without a seed, again and again."""
    before = source(ShuffledInPlace())
    for epoch in range(3):
        before.order(epoch)
    after = source(ShuffledInPlace())
    said = ["the order of epoch 2 by ShuffledInPlace"]
    assert after.restore(source_state(before, 2), False) == said


def source_state(one, epoch):
    """The state in an epoch, read out of JSON."""
    return json.loads(json.dumps(one.state(epoch)))


def test_states_of_epochs_before_the_last_ones_are_kept_for_workers_that_read_ahead():
    one = source(StatefulSampler())
    for epoch in range(40):
        one.order(epoch)
    assert one.state(30)["sampler"][0] == 30
    assert one.state(3)["sampler"][0] == 0


def test_what_datasets_hold_has_a_place():
    found = held(Drawing(), "dataset")
    assert sorted(found) == [
        "dataset.chance", "dataset.of_torch", "dataset.old", "dataset.others[0]",
    ]  # fmt: skip
    inner = torch.utils.data.Subset(Drawing(), range(3))
    assert "dataset.dataset.chance" in held(inner, "dataset")
    assert [*held(Collator(), "collate_fn")] == ["collate_fn.chance"]
    assert [*held(Collator().__call__, "collate_fn")] == ["collate_fn.chance"]
    assert sorted(held(StatefulStream(3), "dataset")) == ["dataset", "dataset.chance"]
    assert held(torch.nn.Linear(1, 1), "dataset") == {}
    assert held([random.Random(1)] * 1000, "dataset") == {}, "a list of samples"
    loop = SimpleNamespace(chance=random.Random(1))
    loop.itself = loop
    assert [*held(loop, "dataset")] == ["dataset.chance"]


def test_generators_go_on_from_their_states():
    one, other = Drawing(), Drawing()
    for _ in range(5):
        one[0]
    states = kept(held(one, "dataset"))
    assert bring_back(held(other, "dataset"), states) == []
    assert torch.equal(one[3][0], other[3][0])
    del states["dataset.old"]
    assert bring_back(held(other, "dataset"), states) == ["dataset.old"]


def test_generators_are_left_as_they_are():
    one, other = Drawing(), Drawing()
    with left_as_it_is(held(one, "dataset")):
        one[0]
    assert torch.equal(one[3][0], other[3][0])


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**80, 0.1, float("inf"), "x", b"\x00x", [1, [2]], (1, (2, "y")), {},
        {"a": {3: (None,)}, (1, 2): []},
    ],
)  # fmt: skip
def test_values_come_back_from_json(value):
    found = decoded(json.loads(json.dumps(encoded(value))))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_from_json(dtype, shape):
    value = torch.rand(shape).mul(3).to(dtype)
    found = decoded(encoded(value))
    assert found.dtype == dtype and torch.equal(found, value)
    if dtype is torch.float64:
        array = decoded(encoded(value.numpy()))
        assert array.dtype == np.float64 and array.shape == shape and (array == value.numpy()).all()
        assert decoded(encoded(np.float32(0.5))) == np.float32(0.5)


def test_a_state_that_json_cannot_have_is_left_out():
    one = SimpleNamespace(state_dict=lambda: {"file": object()}, load_state_dict=print)
    some = held(one, "dataset")
    assert kept(some) == {} and bring_back(some, {}) == ["dataset"]
    assert state_of(one)
    with pytest.raises(TypeError, match="a checkpoint cannot keep a object"):
        encoded(object())


def test_evaluations_draw_the_same_each_time():
    data = Drawing()

    class Reader:
        reads = True

        def named(self, item, where):
            return Named({"x": item[0]}, {"y": item[1]})

        def microbatch(self, item, where):
            return item[0]

    one = EvalData(data, "--eval-data", LAYOUT, range(4), Reader())
    first, second = (torch.cat([*one.microbatches(43, filled=True)]) for _ in "12")
    assert torch.equal(first, second)
    x = data.x[:4]
    assert not torch.equal(first[:4], x), "it draws"


def test_orders_without_a_sampler_are_drawn_at_any_time():
    drawn = []
    orders = EpochOrders(lambda epoch: drawn.append(epoch) or [epoch], None)
    assert [orders(epoch) for epoch in (5, 5, 2)] == [[5], [5], [2]]
    assert drawn == [5, 2] and orders.state(3) is None
