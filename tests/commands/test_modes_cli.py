"""`planner profile --batch-norm`, and the notes on what an evaluation graph leaves out."""

import json

import pytest

from planner.artefacts.files import read_profile
from tests.support.commands import run
from tests.support.mode_runs import net

COMPUTED = ("--batch", "4", "--device", "T4", "-o", "net.json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_form_is_the_files_unless_another_one_is_asked_for(folder):
    net(folder / "net.onnx")
    shown = run("profile", "net.onnx", *COMPUTED)
    assert "2 batch normalizations: by the statistics of each microbatch" in shown.stdout
    assert "note" not in shown.stderr
    assert read_profile(folder / "net.json").batch_norm == "training"
    frozen = run("profile", "net.onnx", "--batch-norm", "frozen", *COMPUTED)
    assert "by running statistics, which stay as they are" in frozen.stdout
    assert "--batch-norm is frozen, the file says training" in " ".join(frozen.stderr.split())
    assert "another form of batch normalizations" in " ".join(frozen.stderr.split())
    assert "batch_norm" not in (folder / "net.json").read_text()


def test_an_evaluation_graph_says_what_it_leaves_out_and_can_be_trained(folder):
    net(folder / "net.onnx", training=False)
    shown = run("profile", "net.onnx", "--json", *COMPUTED)
    assert json.loads(shown.stdout)["batch_norm"] == "frozen"
    note = "2 BatchNormalizations use running statistics and 1 Dropout drops nothing: the file was"
    assert note in " ".join(shown.stderr.split())
    trained = run("profile", "net.onnx", "--batch-norm", "training", "--json", *COMPUTED)
    assert json.loads(trained.stdout)["batch_norm"] == "training"
    assert "note: 1 Dropout drops nothing" in " ".join(trained.stderr.split())


def test_batch_norm_is_for_models(folder):
    net(folder / "net.onnx")
    run("profile", "net.onnx", *COMPUTED)
    failed = run(
        "profile", "net.json", "--device", "A100-SXM4-80GB", "--batch-norm", "frozen", code=1
    )
    assert "--batch-norm frozen is for an ONNX model" in failed.output
