"""Names and records of checkpoints: what is whole, what is taken, what is removed."""

import json
import os

import pytest

from planner.support.errors import FileError, OptionError
from planner.training.checkpoints import folder as folders
from planner.training.checkpoints.folder import (
    CheckpointRecord,
    SavedTensor,
    TensorPlace,
    find,
    latest,
)
from planner.training.checkpoints.start import RESTARTS, start_of
from planner.training.options import Checkpoints
from planner.training.options import check_folder as check


def make(folder, *steps, size=10, model="../net.onnx", index=b"y"):
    """Checkpoints with one file each; gives the last one."""
    for step in steps:
        part = folders.begin(folder, step)
        (part / "__0_0.distcp").write_bytes(b"x" * size)
        if index:
            (part / ".metadata").write_bytes(index)
        place = TensorPlace((0,), (2,), "__0_0.distcp", 0, size)
        places = {"parameters/w": SavedTensor((2,), "float32", (place,))}
        needed = {"__0_0.distcp": size}
        files = folders.sizes(part, needed)
        record = CheckpointRecord(step, model, "ab", (), (), "SGD", 1, places, files)
        path = folders.publish(part, record)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_one_is_taken(tmp_path):
    make(tmp_path, 8, 10, 9)
    found = find(tmp_path)
    assert (found.path.name, found.record.step, found.notes) == ("step-00000010", 10, ())
    assert latest(tmp_path) == tmp_path / "step-00000010"
    assert found.record.trained == {"w"}
    assert found.model_path == tmp_path / "../net.onnx"


def test_one_is_taken_by_its_own_name(tmp_path):
    make(tmp_path, 8, 10)
    assert find(tmp_path / "step-00000008").record.step == 8


CUTS = {
    "no record": (lambda path: (path / "checkpoint.json").unlink(), "expected a file checkpoint"),
    "half a file": (
        lambda path: os.truncate(path / "__0_0.distcp", 4),
        "__0_0.distcp: expected 10 bytes, got 4",
    ),
    "a file is missing": (
        lambda path: (path / ".metadata").unlink(),
        ".metadata: expected 1 bytes, got no such file",
    ),
    "half a record": (
        lambda path: os.truncate(path / "checkpoint.json", 30),
        "this is no JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_one_that_is_cut_off_is_refused_by_name_and_the_one_before_is_taken(tmp_path, cut):
    spoil, said = CUTS[cut]
    spoil(make(tmp_path, 10, 20))
    found = find(tmp_path)
    assert found.record.step == 10
    (note,) = found.notes
    assert "step-00000020" in note and said in note and note.endswith("step-00000010 is taken")
    with pytest.raises(FileError, match=r"step-00000020.*to take the one before") as error:
        find(tmp_path / "step-00000020")
    assert said in str(error.value)


def test_where_none_is_whole_all_are_named(tmp_path):
    for path in (make(tmp_path, 10), make(tmp_path, 20)):
        (path / "checkpoint.json").unlink()
    with pytest.raises(FileError) as error:
        find(tmp_path)
    first, second, last = str(error.value).splitlines()
    assert "step-00000020: cut off" in first and "step-00000010: cut off" in second
    assert last == f"{tmp_path}: no checkpoint in it is whole; start again"


def test_an_empty_folder_and_one_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(FileError, match="expected checkpoints such as step-00000010 in it, found"):
        find(tmp_path)
    with pytest.raises(FileError, match="expected a folder with checkpoints, found none"):
        find(tmp_path / "none")
    assert latest(tmp_path / "none") is None


def test_a_record_with_an_unknown_field_is_refused(tmp_path):
    path = make(tmp_path, 10) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1}))
    with pytest.raises(FileError, match=r"checkpoint\.json: later: unknown field"):
        find(tmp_path / "step-00000010")


def test_remains_of_killed_runs_are_no_checkpoints_and_are_removed(tmp_path):
    make(tmp_path, 10)
    part = folders.begin(tmp_path, 20)
    (part / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".step-mine").mkdir()
    assert find(tmp_path).record.step == 10
    assert names(folders.begin(tmp_path, 20)) == []
    folders.tidy(tmp_path)
    assert names(tmp_path) == [".step-mine", "step-00000010"]


def test_the_newest_whole_ones_stay(tmp_path):
    (make(tmp_path, 10, 20, 30, 40) / "checkpoint.json").unlink()
    (tmp_path / "step-00000010" / "why.txt").write_text("mine")
    folders.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000010", "step-00000030", "step-00000040"]


def test_one_of_the_same_step_is_replaced_but_not_with_files_of_others(tmp_path):
    (make(tmp_path, 10) / "checkpoint.json").unlink()
    make(tmp_path, 10, size=20)
    assert find(tmp_path).record.files["__0_0.distcp"] == 20
    (tmp_path / "step-00000010" / "why.txt").write_text("mine")
    with pytest.raises(FileError, match=r"holds 'why\.txt', which is no part of a checkpoint"):
        make(tmp_path, 10)
    assert (tmp_path / "step-00000010" / "why.txt").exists()


def test_a_folder_that_hosts_do_not_share_is_named(tmp_path):
    part = folders.begin(tmp_path, 10)
    (part / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(FileError, match=r"expected a folder that all hosts share, but __1_0"):
        folders.sizes(part, {"__0_0.distcp": 1, "__1_0.distcp": 1})


# ----------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"checkpoint_every": 0},
            "--checkpoint-every: expected a whole number of at least 1, got 0",
        ),
        ({"checkpoint_keep": 0}, "--checkpoint-keep: expected a whole number of at least 1, got 0"),
        ({"checkpoint_every": 5}, "--checkpoint-every 5: expected a folder.*--checkpoint DIR"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        check(Checkpoints(**options))


def test_a_file_is_no_folder_for_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(FileError, match=r"expected a folder for checkpoints, .*file is none"):
            check(Checkpoints(checkpoint=folder))
    check(Checkpoints(checkpoint=tmp_path / "new" / "folder"))


def test_a_launch_starts_anew_in_an_empty_folder_only(tmp_path):
    assert start_of(Checkpoints(checkpoint=tmp_path), {}) is None
    make(tmp_path, 10)
    with pytest.raises(FileError, match=r"another launch, the last one step-00000010; .*--resume"):
        start_of(Checkpoints(checkpoint=tmp_path), {})
    assert start_of(Checkpoints(checkpoint=tmp_path, resume=tmp_path), {}).record.step == 10


def test_later_checkpoints_of_another_launch_are_not_mixed_with_new_ones(tmp_path):
    make(tmp_path, 10, 20)
    old = tmp_path / "step-00000010"
    with pytest.raises(FileError, match=r"has step-00000020, of a later step than step-00000010"):
        start_of(Checkpoints(checkpoint=tmp_path, resume=old), {})
    assert start_of(Checkpoints(checkpoint=tmp_path / "new", resume=old), {}).record.step == 10
    (tmp_path / "step-00000020" / "checkpoint.json").unlink()
    assert start_of(Checkpoints(checkpoint=tmp_path, resume=old), {}).record.step == 10


def test_a_launch_that_was_started_again_goes_on_from_its_own_last_one(tmp_path):
    again = {RESTARTS: "1"}
    assert start_of(Checkpoints(checkpoint=tmp_path), again) is None
    make(tmp_path / "first", 10)
    make(tmp_path / "own", 20, 30)
    keeping = Checkpoints(checkpoint=tmp_path / "own", resume=tmp_path / "first")
    assert start_of(keeping, again).record.step == 30
    assert start_of(Checkpoints(checkpoint=tmp_path / "own"), again).record.step == 30
    assert start_of(keeping, {}, restarted=True).record.step == 30
    keeping = Checkpoints(checkpoint=tmp_path / "none", resume=tmp_path / "first")
    assert start_of(keeping, again).record.step == 10
