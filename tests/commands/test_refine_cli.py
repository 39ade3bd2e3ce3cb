"""`planner solve --refine`, as a user meets it."""

import json

import pytest

from planner.api.lookup import profile_of
from planner.artefacts.files import read_plan
from planner.artefacts.formats.any import read_any_profiles
from tests.support import split_models
from tests.support.commands import run

ASKED = (
    "--profile", "profiles/mlp.json", "--topology", "pair.yaml",
    "--solver", "megatron", "--tensor-degree", "2",
)  # fmt: skip
PAIR = """
format: planner-topology/1
name: pair
device: cpu
levels:
  - {name: gpu, count: 2, bandwidth: 1 TB/s, latency: 0 us}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small model and its measured profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("planner.profilers.measured.PRECISION", 1e9)  # three runs are enough here
    (tmp_path / "pair.yaml").write_text(PAIR)
    monkeypatch.setattr(split_models, "WIDTH", 256)  # parts are larger than the smallest operator
    split_models.mlp("mlp.onnx")
    run("profile", "mlp.onnx", "--budget", "1ms", "--no-contention")
    return tmp_path


def test_the_same_times_are_everywhere(folder):
    plain = json.loads(run("solve", *ASKED, "--json").stdout)
    assert "refined" not in plain
    found = json.loads(run("solve", *ASKED, "--refine", "--json").stdout)
    refined = found["refined"]
    assert refined["operators"] > 2
    assert refined["timed"] + refined["cached"] > 0
    assert refined["before_s"] == plain["iteration_s"]
    # By measured times another strategy of the solver may be the best.
    assert refined["after_s"] == found["iteration_s"] <= refined["before_refined_s"]
    assert found["iteration_s"] != plain["iteration_s"]
    again = json.loads(run("simulate", "strategy.json", "--json").stdout)
    assert again["iteration_s"] == found["iteration_s"]
    (profile,) = read_any_profiles(folder / "profiles" / "mlp.json")
    assert sum(bool(one.parts) for one in profile.operators) >= refined["operators"]
    plan = read_plan(folder / "strategy.json")
    assert profile_of(plan, "strategy.json", [profile], "mlp.json") is profile
    # The solver, too, knows the measured parts now, and may cut otherwise.
    known = json.loads(run("solve", *ASKED, "-o", "again.json", "--json").stdout)
    (row,) = json.loads(run("compare", *ASKED, "--json").stdout)["compared"]
    assert row["iteration_s"] == known["iteration_s"]


def test_the_user_sees_what_was_refined(folder):
    text = run("solve", *ASKED, "--refine").output
    assert "refined: parts of" in text
    assert "by measured parts" in text


def test_a_model_that_is_not_there_is_asked_for(folder):
    (folder / "mlp.onnx").rename(folder / "moved.onnx")
    text = run("solve", *ASKED, "--refine", code=1).output
    assert "--refine: mlp.onnx is not there" in text
    assert "--model FILE" in text
    assert "refined: parts of" in run("solve", *ASKED, "--refine", "--model", "moved.onnx").output


def test_computed_times_need_no_measurement(folder):
    run("profile", "mlp.onnx", "--device", "T4", "-o", "profiles/mlp.json")
    text = run("solve", *ASKED[:2], "--topology", "p3", "--refine", "--gpus", "2",
               "--solver", "zero").output  # fmt: skip
    assert "nothing to measure: the profile's times are computed" in text


def test_another_cluster_is_not_refined(folder):
    text = run("solve", *ASKED, "--refine", "--set", "hosts.host0.cores=8", code=1).output
    assert "--refine is for the topology as it is" in text
