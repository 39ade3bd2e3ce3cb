"""Datasets of the user in a launch: the samples of each microbatch, epochs, seeds, bad data."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from planner import launch
from planner.artefacts.losses import losses as model_losses
from planner.model.load import ReadOptions, load
from planner.operators import randomness
from planner.support.errors import LaunchError
from planner.training.data.batching import BatchLayout, BatchSizeHistory
from planner.training.data.datasets import dataset_feed, given_data
from planner.training.data.samples import BatchReader, NeededData
from tests.support import datasets
from tests.support.mode_runs import SEED, launched, net, profile_of, run_all, write_strategy

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.support.datasets"
LAYOUT = BatchLayout(size=4, count=4, seed=SEED, shuffle=True)
ALL = NeededData(frozenset({"x"}), frozenset({"logits"}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, and its profile."""
    folder = tmp_path_factory.mktemp("datasets")
    net(folder / "net.onnx")
    return folder, profile_of(folder / "net.onnx")


@pytest.fixture
def feed(made):
    """Makes the feed of a device, by the name of a dataset."""
    model = load(made[0] / "net.onnx", ReadOptions(batch=4))

    def make(name, mine=(0, 1, 2, 3), needs=ALL, **changes):
        where, data = given_data(f"{HERE}:{name}", "--data", SEED)
        reader = BatchReader(model.graph, model_losses(model.graph), needs)
        layout = replace(LAYOUT, **changes)
        return Asked(dataset_feed(where, data, layout, mine, reader), mine, layout)

    return make


class Asked:
    """A feed that is asked for microbatches by step and index."""

    def __init__(self, feed, mine, layout):
        self.feed, self.mine = feed, mine
        self.history = BatchSizeHistory.begun(layout.samples, feed.least)
        self._step, self.coming, self.here = None, None, {}

    def __call__(self, step, microbatch):
        self.number_at(step)
        return self.here[microbatch]

    def number_at(self, step):
        """The number of microbatches of a step, which is read."""
        if step != self._step:
            if self._step is None or step != self._step + 1:
                self.coming = self.feed.steps(step, self.history)
            self._step, data = step, next(self.coming)
            self.number = data.num_microbatches
            due = [m for m in self.mine if m < self.number]
            self.here = dict(zip(due, data.batches, strict=True))
        return self.number


def step_of(feed, step):
    """Inputs and targets of a step."""
    batches = [feed(step, m) for m in range(feed.number_at(step))]
    return (
        torch.cat([one.inputs["x"] for one in batches]),
        torch.cat([one.targets["logits"] for one in batches]),
    )


# ------------------------------------------------------------------------------ which samples


@pytest.mark.parametrize(
    "name", ["samples", "named_samples", "Stream", "SizedStream", "stream_loader"]
)
def test_steps_have_the_batches_of_a_plain_data_loader(feed, name):
    """Two whole batches of 16 in 41 samples, and one of two microbatches of 4; a sample is left
    out, and the next epoch begins.
    """
    ours = feed(name, shuffle=False)
    *whole, (x, classes) = DataLoader(datasets.samples(), batch_size=16)
    theirs = [*whole, (x[:8], classes[:8])]
    for step in range(7):
        x, classes = step_of(ours, step)
        assert torch.equal(x, theirs[step % 3][0]), step
        assert torch.equal(classes, theirs[step % 3][1]), step
    said = "1 of 41 samples of each epoch fills no microbatch of 4 and is left out"
    assert ours.feed.notes() == (said,)


def test_a_data_loader_shuffles_as_it_says_and_by_the_seed(feed):
    first, again, other = feed("loader"), feed("loader"), feed("loader", seed=9)
    orders = [step_of(first, step)[0] for step in range(4)]
    assert all(torch.equal(one, step_of(again, step)[0]) for step, one in enumerate(orders))
    assert not torch.equal(orders[0], step_of(other, 0)[0])
    assert not torch.equal(orders[0], orders[2]), "each epoch has an order of its own"
    seen = torch.cat(orders[:2]).flatten(1)
    assert len(torch.unique(seen, dim=0)) == 32, "no sample comes twice in an epoch"
    assert not torch.equal(orders[0], datasets.tensors()[0][:16])


def test_each_device_gets_its_own_microbatches_of_the_same_step(feed):
    whole, odd = feed("Augmented"), feed("Augmented", mine=(1, 3))
    for step, here in enumerate([[1, 3], [1, 3], [1]]):
        assert whole.number_at(step) == odd.number_at(step) == (4, 4, 2)[step]
        assert [*odd.here] == here
        for m in here:
            assert torch.equal(whole(step, m).inputs["x"], odd(step, m).inputs["x"])


@pytest.mark.parametrize("name", ["Augmented", "loader_with_workers", "masking_loader"])
def test_inputs_and_targets_of_two_stages_are_of_the_same_draw(feed, name):
    first = feed(name, needs=NeededData(frozenset({"x"}), frozenset()), shuffle=False)
    last = feed(name, needs=NeededData(frozenset(), frozenset({"logits"})), shuffle=False)
    x, classes = datasets.tensors()
    moved = set()
    for m in range(4):
        rows = slice(4 * m, 4 * m + 4)
        by = (first(0, m).inputs["x"] - x[rows])[:, 0, 0, 0].round().long()
        assert torch.equal((classes[rows] + by) % 5, last(0, m).targets["logits"])
        moved |= {*by.tolist()}
    assert len(moved) > 1


def test_all_ranks_draw_the_same_dataset():
    """Each rank calls the function, with generators in another state."""
    ranks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        ranks.append(given_data(f"{HERE}:drawn", "--data", SEED)[1].tensors)
        assert torch.equal(torch.rand(3), expected), "it leaves other draws alone"
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][1], ranks[1][1])


def test_workers_end_with_their_feed_and_wait_for_no_garbage_collector(feed):
    gc.disable()
    try:
        ours = feed("loader_with_workers")
        ours(0, 0)
        read = ours.coming.gi_frame.f_locals["coming"]
        workers, coming = read._workers, weakref.ref(read)
        del read
        assert all(worker.is_alive() for worker in workers)
        del ours
        assert coming() is None
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
    finally:
        gc.enable()


def test_data_that_draws_leaves_other_draws_alone(feed):
    ours = feed("Augmented")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    ours(0, 0)
    assert torch.equal(torch.rand(3), expected)


def test_a_training_that_goes_on_elsewhere_reads_what_is_due(feed):
    """After three steps of 8 samples: 41 - 24 samples are left in the epoch, one step of 16."""
    ours = feed("samples", shuffle=False)
    ours.history = BatchSizeHistory.begun(8, 4).then(3, 16, 4)
    x, _ = datasets.tensors()
    stream = feed("Stream")
    stream.history = ours.history
    for one in (ours, stream):
        assert torch.equal(step_of(one, 3)[0], x[24:40])
        assert torch.equal(step_of(one, 4)[0], x[:16])


@pytest.mark.parametrize("name", ["samples", "Stream", "SizedStream", "stream_loader"])
def test_a_training_that_began_with_whole_steps_goes_on_with_shorter_ones(feed, name):
    """A checkpoint of before says nothing of shorter steps: its epochs have two steps of 16, the
    ones after it three.
    """
    ours = feed(name, shuffle=False)
    ours.history = BatchSizeHistory.read([[0, 16]]).then(3, 16, 4)
    assert ours.history.parts == ((0, 16, 16), (3, 16, 4))
    x, _ = datasets.tensors()
    for step, rows in enumerate((slice(16, 32), slice(32, 40), slice(0, 16)), 3):
        assert torch.equal(step_of(ours, step)[0], x[rows])


@pytest.mark.parametrize(("parts", "step", "position"), [
    ([[0, 4]], 0, (0, 0, 4)), ([[0, 4]], 1, (0, 4, 4)), ([[0, 4]], 2, (1, 0, 4)),
    ([[0, 4]], 5, (2, 4, 4)), ([[0, 4], [1, 2]], 1, (0, 4, 2)), ([[0, 4], [1, 2]], 3, (1, 0, 2)),
    ([[0, 4], [1, 6]], 1, (1, 0, 6)), ([[0, 4], [3, 2]], 4, (1, 6, 2)),
    ([[0, 4], [3, 2], [4, 4]], 4, (2, 0, 4)),
    ([[0, 4, 1]], 2, (0, 8, 1)), ([[0, 4, 1]], 3, (1, 0, 4)), ([[0, 4, 1]], 8, (2, 8, 1)),
    ([[0, 4, 2]], 2, (1, 0, 4)), ([[0, 6, 2]], 1, (0, 6, 2)), ([[0, 6, 2]], 3, (1, 6, 2)),
    ([[0, 12, 2]], 0, (0, 0, 8)), ([[0, 12, 2]], 3, (3, 0, 8)),
    ([[0, 4], [1, 4, 1]], 2, (0, 8, 1)), ([[0, 4, 1], [3, 2, 2]], 3, (1, 0, 2)),
    ([[0, 4, 1], [1, 3, 3]], 2, (1, 0, 3)), ([[0, 6, 2], [1, 4, 2]], 1, (0, 6, 2)),
    ([[0, 6, 2], [1, 4, 4]], 1, (1, 0, 4)),
])  # fmt: skip
def test_positions_with_nine_samples(parts, step, position):
    assert BatchSizeHistory.read(parts).position(step, 9) == position


@pytest.mark.parametrize(("parts", "epochs", "steps"), [
    ([[0, 4]], 3, 6), ([[0, 4, 1]], 3, 9), ([[0, 12, 2]], 3, 3),
    ([[0, 4], [4, 4, 1]], 3, 7), ([[0, 4], [3, 4, 1]], 2, 5), ([[0, 4, 1], [3, 2, 2]], 2, 7),
    ([[0, 4, 1], [3, 2, 2], [7, 4, 1]], 2, 7),
])  # fmt: skip
def test_epochs_of_nine_samples_end_where_their_steps_do(parts, epochs, steps):
    history = BatchSizeHistory.read(parts)
    assert history.end_of(epochs, 9) == steps
    before, after = (history.position(step, 9) for step in (steps - 1, steps))
    assert (before.epoch, *after[:2]) == (epochs - 1, epochs, 0)


def test_a_history_forgets_what_was_undone():
    history = BatchSizeHistory.begun(8, 2).then(5, 16, 2).then(7, 4, 2)
    assert history.parts == ((0, 8, 2), (5, 16, 2), (7, 4, 2))
    assert history.then(5, 8, 2).parts == ((0, 8, 2),)
    assert history.then(6, 16, 2).parts == ((0, 8, 2), (5, 16, 2))
    assert history.then(6, 16, 16).parts == ((0, 8, 2), (5, 16, 2), (6, 16, 16))


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("dropping_loader", [4, 4], "9 of 41 samples of each epoch fill no step of 16"),
        ("of_batch_sampler", [4, 4, 2], "1 of 41 samples of each epoch fills no microbatch of 4"),
        ("few_samples", [3], "3 of 15 samples of each epoch fill no microbatch of 4"),
        ("Stream", [4, 4, 2], "1 of 41 samples of each epoch fills no microbatch of 4"),
        ("FewStream", [3], "3 of 15 samples of each epoch fill no microbatch of 4"),
        ("dropping_stream", [4, 4], "9 of 41 samples of each epoch fill no step of 16"),
        ("even", [4, 4, 1], None),
    ],
)
def test_the_end_of_an_epoch_makes_a_shorter_step(feed, name, sizes, said):
    ours = feed(name)
    assert [ours.number_at(step) for step in range(2 * len(sizes))] == sizes * 2
    ours.number_at(2 * len(sizes))  # of a stream it is known when an epoch is over
    assert said is None or ours.feed.notes()[0].startswith(said)
    assert len(ours.feed.notes()) == (said is not None)


@pytest.mark.parametrize("name", ["samples", "stream_loader", "Stream"])
def test_asynchronous_schedules_leave_the_end_of_an_epoch_out(feed, name):
    ours = feed(name, short_steps=False)
    assert [ours.number_at(step) for step in range(5)] == [4] * 5
    said = "9 of 41 samples of each epoch fill no step of 16 (4 microbatches of 4) and are left out"
    assert ours.feed.notes() == (said,)


def test_batches_of_a_stream_may_be_short_at_the_end_alone(feed):
    ours = feed("uneven_stream")
    assert ours.number_at(0) == 4
    with pytest.raises(LaunchError, match=r"step 1: expected a batch of 16 .* got 8"):
        ours.number_at(1)


# ------------------------------------------------------------------------------ a launch


def by_torch(path, data, steps):
    """Losses and state of a plain loop over a DataLoader, with microbatches of 4; the last batch of
    an epoch makes whole ones, too.
    """
    module, losses = net(path.parent / "same.onnx"), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = [*DataLoader(data, batch_size=16)]
    for step in range(steps):
        x, classes = batches[step % len(batches)]
        losses.append(0.0)
        for m in range(len(x) // 4):
            rows = slice(4 * m, 4 * m + 4)
            with randomness.random_operators(SEED, step, m):
                loss = nn.functional.cross_entropy(module(x[rows]), classes[rows]) / (len(x) // 4)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.state_dict()


@pytest.fixture(scope="module")
def together(made):
    """Losses and state by rank: two epochs of a dataset, in one start of torchrun on two ranks."""
    folder, profile = made
    how = {"data": f"{HERE}:samples", "shuffle": False, "epochs": 2}
    for name, widths in {"pipeline": (1, 1), "replicas": (2,)}.items():
        write_strategy(folder / f"{name}.strategy.json", profile, widths)
        (folder / f"{name}.settings.json").write_text(json.dumps(how))
    write_strategy(folder / "streamed.strategy.json", profile, (1, 1))
    streamed = {"data": f"{HERE}:stream_loader", "epochs": 2}
    (folder / "streamed.settings.json").write_text(json.dumps(streamed))
    run_all(folder, 2)
    names = ("pipeline", "replicas", "streamed")
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in (0, 1)] for name in names}


@pytest.mark.parametrize("name", ["pipeline", "replicas", "streamed"])
def test_any_partition_trains_on_the_same_samples(made, together, name):
    losses, state = by_torch(made[0] / "net.onnx", datasets.samples(), 6)
    ranks = together[name]
    assert ranks[0][0] == pytest.approx(losses, rel=1e-7)
    for _, held, running in ranks:
        for key in held.keys() - {*running}:
            torch.testing.assert_close(held[key], state[key], rtol=1e-7, atol=1e-7)


def test_a_dataset_itself_may_be_given(made):
    folder, profile = made
    path = write_strategy(folder / "alone.json", profile, (1,))
    report, _, _ = launched(path, None, data=datasets.samples(), shuffle=False, epochs=1)
    losses, _ = by_torch(folder / "net.onnx", datasets.samples(), 3)
    assert report.loss == pytest.approx(losses, rel=1e-7)


# ------------------------------------------------------------------------------ bad data


WRONG = {
    "three_samples": "expected at least the samples of one microbatch, 4, got 3;"
    " give more data, or plan with smaller microbatches",
    "small_loader": "expected a DataLoader with the samples of a whole step, batch_size=16 (4"
    " microbatches of 4), got 4",
    "wide": "step 0, microbatch 0: input 'x': expected a tensor of shape (4, 3, 6, 6) and"
    " torch.float64, got shape (4, 3, 6, 5) and torch.float64",
    "float_targets": "step 0, microbatch 0: target of 'logits': expected a tensor of shape (4,) and"
    " torch.int64, got shape (4,) and torch.float64",
    "long_classes": "step 0, microbatch 0: target of 'logits': expected class indices from 0 to 4,"
    " or -100 for elements to ignore, got 7",
    "alone": "step 0, microbatch 0: expected ('x', target of 'logits'), or a dict of them by name,"
    " got (Tensor)",
    "failing": "FileNotFoundError: no such folder: pictures",
    "of_two": "expected a function of three required arguments (step, microbatch, inputs), or one"
    " of none that returns a dataset, got one of 2",
    "number": "expected a map-style dataset, an iterable one or a DataLoader, got int",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_data_is_told_before_the_first_step(made, name):
    folder, profile = made
    path = write_strategy(folder / "wrong.json", profile, (1,))
    done = []
    with pytest.raises(LaunchError) as error:
        launch(path, data=f"{HERE}:{name}", shuffle=False, progress=lambda *step: done.append(step))
    assert str(error.value) == f"--data {HERE}:{name}: {WRONG[name]}"
    assert not done


def test_data_that_ends_early_says_after_how_many_steps(made):
    folder, profile = made
    path = write_strategy(folder / "early.json", profile, (1,))
    with pytest.raises(LaunchError) as error:
        launch(path, data=f"{HERE}:generator", steps=5)
    assert str(error.value) == (
        f"--data {HERE}:generator: expected a dataset that can be read again in epoch 1, got"
        " nothing after the first 3 steps; return one whose __iter__ begins anew, or give --steps 3"
    )


def test_epochs_need_a_length(made):
    folder, profile = made
    path = write_strategy(folder / "endless.json", profile, (1,))
    with pytest.raises(LaunchError) as error:
        launch(path, data=f"{HERE}:Stream", epochs=2)
    assert str(error.value) == (
        f"--epochs 2: expected data with a length, got --data {HERE}:Stream; give the dataset a"
        " __len__, or give --steps"
    )
