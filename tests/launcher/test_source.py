"""The file that a launch reads its model from, and what each rank reads of it."""

from dataclasses import replace
from types import SimpleNamespace

import onnx
import pytest

from planner import launch
from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.options import LossOptions
from planner.launcher.device_part import make_part
from planner.launcher.job import prepare
from planner.launcher.rendezvous import ProcessRank
from planner.launcher.source import read_model
from planner.model import weights
from planner.model.annotated import weights as carried
from planner.model.annotated import write_partition
from planner.model.weights import ModelFile
from planner.support.errors import FileError, LaunchError
from tests.support.launch_worker import Case, load_model, make_model, make_plan

TWO_STAGES = Case((1, 1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """net.onnx, strategy.json and strategy.onnx, which refers to weights in net.onnx."""
    monkeypatch.setattr(weights, "MIN_WALKED_BYTES", 64)
    monkeypatch.setattr(weights, "MIN_LEFT_BYTES", 64)
    monkeypatch.setattr(carried, "MAX_INLINE_BYTES", 0)
    planned(tmp_path, TWO_STAGES)
    return tmp_path


def planned(folder, case):
    make_model(folder / "net.onnx", case.dtype)
    model = load_model(folder / "net.onnx")
    plan = make_plan(case, model)
    write_plan(plan, folder / "strategy.json")
    write_partition(model, plan, folder / "strategy.onnx")
    return plan


def prepared(folder, rank=0, num_ranks=2):
    path = folder / "strategy.json"
    seat = ProcessRank(rank, num_ranks, rank, num_ranks)
    return prepare(read_plan(path), path, None, seat, (LossOptions(), "cpu"))


def change_weights(path):
    """Turns a bit of a large initializer in place."""
    stored = next(filter(weights.is_inline, ModelFile(path).proto().graph.initializer))
    content = bytearray(path.read_bytes())
    content[weights.place_of(stored).offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def read(monkeypatch):
    """Names of the initializers that are read whole, once for each time. The rules that tell
    constants from parameters map some more, and look at a few rows.
    """
    names, own = [], ModelFile.copy

    def noted(self, tensor, write):
        names.append(tensor.name)
        own(self, tensor, write)

    monkeypatch.setattr(ModelFile, "copy", noted)
    return names


def test_a_launch_reads_the_annotated_model(folder):
    assert prepared(folder).model.path == folder / "strategy.onnx"


def test_the_original_need_not_be_there_if_the_weights_are(tmp_path):
    planned(tmp_path, Case((1,)))
    expected = launch(tmp_path / "strategy.json", steps=2).loss
    (tmp_path / "net.onnx").unlink()
    assert launch(tmp_path / "strategy.json", steps=2).loss == expected


def test_without_an_annotated_model_the_original_is_read(folder):
    (folder / "strategy.onnx").unlink()
    assert prepared(folder).model.path == folder / "net.onnx"
    (folder / "net.onnx").unlink()
    with pytest.raises(LaunchError, match=r"net\.onnx, which is not there; give --model FILE"):
        prepared(folder)


def test_a_rank_reads_its_own_weights_and_one_of_a_host_hashes_all(folder, read):
    plan = read_plan(folder / "strategy.json")
    for rank in (1, 0):
        found = prepared(folder, rank)
        hashed, own = (
            sorted(read),
            make_part(found, SimpleNamespace(device=plan.ranks[rank])).values,
        )
        stored = {t.name for t in found.model.proto.graph.initializer if weights.is_inline(t)}
        assert hashed == ([] if rank else sorted(stored))
        assert sorted(read[len(hashed) :]) == sorted(stored & set(own))
        assert stored - set(own)  # the other one's
        read.clear()


def test_other_trained_parameters_do_not_hash_again(folder, read):
    path = folder / "strategy.json"
    plan = read_plan(path)
    model = read_model(replace(plan, train=("w1", "frozen")), path, None, hashes=True)
    assert {p.name for p in model.graph.parameters if p.trainable} == {"w1", "frozen"}
    assert len(read) == len(set(read))


def test_weights_that_changed_are_refused_by_the_rank_that_hashes(folder):
    change_weights(folder / "net.onnx")
    with pytest.raises(FileError, match=r"strategy\.onnx: it is model .*, the strategy is for"):
        prepared(folder)
    assert prepared(folder, rank=1).model.hash == read_plan(folder / "strategy.json").model_hash


def test_an_original_that_is_not_the_annotated_model_is_refused(folder, monkeypatch):
    monkeypatch.setattr(carried, "MAX_INLINE_BYTES", 10**9)
    planned(folder, TWO_STAGES)
    change_weights(folder / "net.onnx")
    with pytest.raises(FileError, match=r"strategy\.json: made for model .*net\.onnx is .*--model"):
        prepared(folder)


def test_other_stages_are_refused_by_every_rank(folder):
    target = folder / "strategy.onnx"
    proto = onnx.load(target, load_external_data=False)
    proto.graph.node[0].device_configurations[0].pipeline_stage = 1
    onnx.save(proto, target)
    for rank in (0, 1):
        with pytest.raises(FileError, match=r"strategy\.onnx: it puts .* in stage 1, the strategy"):
            prepared(folder, rank)


def test_a_given_model_is_read_and_compared(tmp_path):
    planned(tmp_path, Case((1,)))
    (tmp_path / "net.onnx").rename(tmp_path / "moved.onnx")
    path, moved = tmp_path / "strategy.json", tmp_path / "moved.onnx"
    assert read_model(read_plan(path), path, moved, hashes=True).path == moved
    with pytest.raises(FileError, match=r"none\.onnx: expected an ONNX model, found no file"):
        read_model(read_plan(path), path, tmp_path / "none.onnx", hashes=True)
    proto = onnx.load(moved)
    proto.graph.initializer[0].name += "_"
    onnx.save(proto, moved)
    with pytest.raises(FileError, match=r"made for model .*moved\.onnx is"):
        read_model(read_plan(path), path, moved, hashes=True)


def test_a_rank_that_does_not_hash_has_the_same_model(folder):
    one, other = (prepared(folder, rank) for rank in (0, 1))
    assert one.model.graph == other.model.graph
    assert one.model.hash == other.model.hash
    assert one.program.lists == other.program.lists
