"""A training that goes on from a checkpoint is the one that was not interrupted."""

import errno
import json
import threading
from pathlib import Path

import pytest
import torch

import planner
from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints import files
from planner.training.checkpoints.folder import find
from planner.training.trainer import Trainer
from tests.support.checkpoint_runs import tensors_of
from tests.support.mode_runs import net, profile_of, write_strategy
from tests.support.ranks import forked

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 6, 2


def launch(path, steps=STEPS, **options):
    data = options.pop("data", None)
    return planner.launch(path, steps=steps, learning_rate=0.1, data=data, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same(one, other):
    """Two checkpoints have the same tensors, bit by bit."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, and its profile."""
    folder = tmp_path_factory.mktemp("checkpoints")
    net(folder / "net.onnx")
    return folder, profile_of(folder / "net.onnx")


@pytest.fixture(scope="module")
def alone(made):
    """A strategy for one device, and checkpoints of six steps of Adam."""
    folder, profile = made
    path = write_strategy(folder / "alone.json", profile, (1,), optimizer="adam")
    report = launch(path, checkpoint=folder / "alone", checkpoint_every=EVERY)
    return path, folder / "alone", report


def test_a_checkpoint_has_parameters_statistics_the_optimizer_s_state_and_generators(alone):
    _, folder, _ = alone
    record = find(folder).record
    parameters = {
        *("conv1.weight", "conv2.weight", "fc.weight", "fc.bias"),
        *("bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"),
    }
    assert record.trained == parameters
    running = {f"{norm}.running_{what}" for norm in ("bn1", "bn2") for what in ("mean", "var")}
    expected = {f"parameters/{name}" for name in parameters}
    expected |= {f"statistics/0/{name}" for name in running}
    words = ("exp_avg", "exp_avg_sq", "step")
    expected |= {f"optimizer/{name}/{word}" for name in parameters for word in words}
    states = ("torch", "python", "python-left", "numpy", "numpy-left")
    assert {*record.tensors} == expected | {f"random/0/{state}" for state in states}
    assert (record.step, record.optimizer, record.num_ranks) == (STEPS, "Adam", 1)
    assert record.model_path == "../net.onnx"
    assert record.versions.keys() == {"planner", "torch"}


def test_checkpoints_are_written_every_n_steps_and_at_the_end(alone, tmp_path):
    path, folder, _ = alone
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]
    launch(path, steps=5, checkpoint=tmp_path / "some", checkpoint_every=2, checkpoint_keep=2)
    assert names(tmp_path / "some") == ["step-00000004", "step-00000005"]
    launch(path, steps=1, checkpoint=tmp_path / "last")
    assert names(tmp_path / "last") == ["step-00000001"]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_resumed_is_uninterrupted_bit_by_bit(made, tmp_path, optimizer):
    folder, profile = made
    path = write_strategy(folder / f"{optimizer}.json", profile, (1,), optimizer=optimizer)
    whole = launch(path, steps=4, checkpoint=tmp_path / "whole", checkpoint_every=2)
    after = launch(
        path, steps=4, checkpoint=tmp_path / "after", resume=tmp_path / "whole" / "step-00000002"
    )
    assert after.loss == whole.loss[2:]
    assert after.notes[-1] == f"went on from {tmp_path / 'whole' / 'step-00000002'}"
    assert_same(tmp_path / "whole", tmp_path / "after")


DRAWING = """
import random, numpy, torch


def batch(step, microbatch, inputs):
    shape, dtype = inputs["x"]
    noise = random.gauss(0, 1) + numpy.random.normal() + torch.randn(shape, dtype=dtype)
    return {"x": noise}, torch.randint(5, shape[:1])
"""


def test_generators_that_the_user_s_data_draws_from_go_on(alone, tmp_path, monkeypatch):
    path, _, _ = alone
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(tmp_path)
    whole = launch(path, 5, data="drawing:batch", checkpoint=tmp_path / "whole", checkpoint_every=3)
    torch.rand(3)
    start = tmp_path / "whole" / "step-00000003"
    after = launch(path, 5, data="drawing:batch", checkpoint=tmp_path / "after", resume=start)
    assert after.loss == whole.loss[3:]
    assert_same(tmp_path / "whole", tmp_path / "after")


def test_extras_of_the_trainer_come_back(alone, tmp_path, monkeypatch):
    path, _, _ = alone
    monkeypatch.setattr(Trainer, "extras", lambda self: {"rate": 0.5, "at": [1, None, "x"]})
    launch(path, 1, checkpoint=tmp_path / "first")
    restored = []
    usual = Trainer.restore
    monkeypatch.setattr(
        Trainer, "restore",
        lambda self, extras, step: (restored.append((extras, step)), usual(self, extras, step)),
    )  # fmt: skip
    launch(path, 2, resume=tmp_path / "first")
    assert restored == [({"rate": 0.5, "at": [1, None, "x"]}, 1)]


def test_the_index_of_torch_is_not_unpickled(alone, tmp_path):
    path, folder, report = alone
    for one in folder.iterdir():
        (one / ".metadata").write_bytes(b"x" * (one / ".metadata").stat().st_size)
    after = launch(path, resume=folder / "step-00000004")
    assert after.loss == report.loss[4:]


def test_training_goes_on_while_a_checkpoint_is_written(alone, tmp_path, monkeypatch):
    path, _, report = alone
    free, steps = threading.Event(), []
    write = files.write

    def slow(*given):
        assert free.wait(60)
        return write(*given)

    def progress(step, total, loss):
        steps.append(step)
        if step == 3:
            assert not list(tmp_path.glob("step-*")), "the second step is not written yet"
            free.set()

    monkeypatch.setattr(files, "write", slow)
    kept = {"checkpoint": tmp_path, "checkpoint_every": 2}
    found = planner.launch(path, steps=3, learning_rate=0.1, **kept, progress=progress)
    assert found.loss == report.loss[:3]
    assert steps == [1, 2, 3]
    assert_same(tmp_path / "step-00000002", alone[1] / "step-00000002")


def test_a_full_disk_ends_the_launch_with_one_message(alone, tmp_path, monkeypatch):
    path, _, _ = alone

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.FileSystemWriter, "write_data", full)
    said = r"new: rank 0 cannot write a checkpoint: No space left on device; make room for it, or"
    with pytest.raises(LaunchError, match=said):
        launch(path, checkpoint=tmp_path / "new", checkpoint_every=2)


def test_a_checkpoint_that_failed_ends_the_launch_after_the_next_step(alone, tmp_path, monkeypatch):
    path, steps = alone[0], []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def progress(step, total, loss):
        steps.append(step)
        for thread in threading.enumerate():
            if thread.name.endswith("(_run)"):  # of the checkpoint
                thread.join()

    monkeypatch.setattr(files.FileSystemWriter, "write_data", full)
    kept = {"checkpoint": tmp_path / "new", "checkpoint_every": 2}
    with pytest.raises(LaunchError, match="No space left on device"):
        planner.launch(path, steps=6, learning_rate=0.1, **kept, progress=progress)
    assert steps == [1, 2, 3]


def test_a_damaged_file_of_the_right_size_is_named(alone, tmp_path):
    path, folder, _ = alone
    file = folder / "step-00000002" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with pytest.raises(FileError, match=r"step-00000002: damaged: .*; take another checkpoint"):
        launch(path, resume=folder / "step-00000002")
    file.write_bytes(content)


# ---------------------------------------------------------------------- what does not fit


def test_a_checkpoint_of_another_model_is_refused(alone, tmp_path):
    _, folder, _ = alone
    net(tmp_path / "net.onnx", noise=False)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    with pytest.raises(FileError, match=r"a checkpoint of model \w{12}, but .*net\.onnx is \w{12}"):
        launch(path, resume=folder)


def test_a_checkpoint_of_other_parameters_is_refused(alone, made):
    _, folder, _ = alone
    profile = profile_of(made[0] / "net.onnx", freeze=["fc.bias"])
    path = write_strategy(made[0] / "frozen.json", profile, (1,), optimizer="adam")
    with pytest.raises(FileError, match=r"'fc\.bias' is trained by the checkpoint alone"):
        launch(path, resume=folder)


def test_a_checkpoint_of_another_optimizer_is_refused(alone, made):
    _, folder, _ = alone
    path = write_strategy(made[0] / "other.json", made[1], (1,), optimizer="momentum")
    said = "has the state of Adam, this launch trains with SGD with momentum; choose the same"
    with pytest.raises(FileError, match=said):
        launch(path, STEPS + 1, resume=folder)


def test_steps_count_from_the_very_first(alone):
    path, folder, _ = alone
    with pytest.raises(LaunchError, match=r"6 steps are done.*expected more than 6, got 6"):
        launch(path, 6, resume=folder)


def test_an_optimizer_whose_state_is_no_tensor_is_refused(alone, tmp_path, monkeypatch):
    path, _, _ = alone

    class Counting(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["calls"] = 1

    monkeypatch.setattr(
        "planner.training.trainer.make_optimizer",
        lambda name, parameters, rate, decay: Counting(parameters),
    )
    with pytest.raises(LaunchError, match=r"the state of Counting for .* has 'calls', a int"):
        launch(path, 1, checkpoint=tmp_path)


# ------------------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def together(made, tmp_path_factory):
    """Reports of launches on up to three ranks, in one start of torchrun; and their folder."""
    source, profile = made
    folder = tmp_path_factory.mktemp("together")
    for name, widths in {
        "pair": (1, 1),
        "three": (1, 1, 1),
        "copies": (2,),
        "mixed": (2, 1),
    }.items():
        write_strategy(source / f"{name}.json", profile, widths, optimizer="adam")

    def case(strategy, to, start=None, steps=STEPS, every=3):
        return {
            "strategy": str(source / f"{strategy}.json"), "steps": steps, "every": every,
            "folder": to, "resume": start,
        }  # fmt: skip

    cases = {
        "whole": case("pair", "whole"),
        "again": case("pair", "again", "whole/step-00000003"),
        "onto three": case("three", "on3", "whole/step-00000003"),
        "onto copies": case("copies", "on2", "whole/step-00000003"),
        "copies": case("copies", "copies"),
        "copies again": case("copies", "copies2", "copies/step-00000003"),
        "onto mixed": case("mixed", "mixed", "copies/step-00000003"),
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    forked(ROOT / "tests/support/checkpoint_runs.py", 3, folder)
    return folder, json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize(("again", "whole"), [("again", "whole"), ("copies2", "copies")])
def test_a_resumed_plan_of_several_ranks_is_uninterrupted_bit_by_bit(together, again, whole):
    folder, losses = together
    assert losses[{"copies2": "copies again"}.get(again, again)] == losses[whole][3:]
    assert_same(folder / again, folder / whole)


@pytest.mark.parametrize("name", ["onto three", "onto copies", "onto mixed"])
def test_a_checkpoint_of_one_strategy_goes_on_with_another(together, name):
    _, losses = together
    assert losses[name] == pytest.approx(losses["whole"][3:], rel=1e-6)


def test_every_tensor_is_written_once_by_the_first_rank_that_holds_it(together):
    folder, _ = together
    pair = find(folder / "whole" / "step-00000003").record
    files = {
        name.removeprefix("parameters/"): place.file
        for name, saved in pair.tensors.items()
        for place in saved.parts
        if name.startswith("parameters/")
    }
    assert files["conv1.weight"] == "__0_0.distcp" and files["fc.weight"] == "__1_0.distcp"
    copies = find(folder / "copies").record
    writers = {
        name: place.file
        for name, saved in copies.tensors.items()
        for place in saved.parts
        if "random/1" not in name
    }
    assert {file for name, file in writers.items() if not name.startswith("statistics/1")} == {
        "__0_0.distcp"
    }
    assert {file for name, file in writers.items() if name.startswith("statistics/1")} == {
        "__1_0.distcp"
    }


def test_replicas_keep_statistics_of_their_own(together):
    folder, _ = together
    tensors = tensors_of(folder / "copies")
    mean = "bn1.running_mean"
    assert not torch.equal(tensors[f"statistics/0/{mean}"], tensors[f"statistics/1/{mean}"])
