"""`planner compare --run`: the plans of several solvers, launched one after the other."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import read_plan, read_profile, write_profile
from planner.artefacts.profile import with_times
from tests.commands.test_cli import TOPOLOGY
from tests.support.commands import run
from tests.support.mlp_towers import write_mlp_towers

ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a topology of two processes and an empty folder for temporary
    files.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "pair.yaml").write_text(TOPOLOGY)
    return tmp_path


def profile_of_towers():
    """Profiles two small towers, and writes times that no load of this machine changes: so short
    that no solver spreads them over two processes.
    """
    write_mlp_towers(Path("model.onnx"), (2, 2), width=16, batch=2)
    run("profile", "model.onnx", "--batch", "2", "--repetitions", "1")
    path = Path("profiles/model.json")
    profile = read_profile(path)
    operators = [with_times(one, 1e-6, 1e-6) for one in profile.operators]
    write_profile(replace(profile, operators=tuple(operators)), path)


# A module of the user's that cannot be imported by two processes together.
ALONE = 'import os\nassert os.environ.get("WORLD_SIZE") != "2", "no room for two"\n'
TWO = ["--topology", "pair.yaml", "--microbatches", "2"]


def test_plans_run_one_after_the_other_and_failures_are_rows(folder, monkeypatch):
    profile_of_towers()
    (folder / "alone.py").write_text(ALONE)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    monkeypatch.setenv("PLANNER_OPERATORS", "alone")
    monkeypatch.syspath_prepend(str(folder))
    solvers = [f"--solver={name}" for name in ("single", "data-parallel", "pesto")]
    more = ["--run", "3", "--csv", "rows.csv"]
    found = json.loads(run("compare", *TWO, *solvers, *more, "--json").stdout)
    single, replicas, pesto = found["compared"]
    assert len(single["measured"]["iterations_s"]) == 3
    figures = [single["measured"][f"{name}throughput"] for name in ("least_", "", "most_")]
    assert figures == sorted(figures)
    assert figures[1] == pytest.approx(3 * 4 / sum(single["measured"]["iterations_s"]))
    assert single["not_measured"] is None
    assert replicas["measured"] is None
    assert "no room for two" in replicas["not_measured"]
    assert str(folder / "tmp") not in replicas["not_measured"]
    assert pesto["measured"] == {**single["measured"], "same_as": "single"}
    assert found["order"] == {"pairs": 0, "as_predicted": 0}
    rows = list(csv.DictReader(Path("rows.csv").read_text().splitlines()))
    assert [row["measured_steps"] for row in rows] == ["3", "", "3"]
    assert float(rows[0]["measured_throughput"]) == figures[1]
    assert "no room for two" in rows[1]["not_measured"]
    run("compare", *TWO, "--solver=single", "--csv", "rows.csv")  # replaces its own table
    assert list((folder / "tmp").glob("planner-*")) == []


def test_a_plan_for_more_or_other_devices_is_not_started(folder):
    write_mlp_towers(folder / "model.onnx", (2, 2), width=16, batch=2)
    run("profile", "model.onnx", "--batch", "2", "--repetitions", "1")
    text = TOPOLOGY.replace("count: 2", "count: 64")
    (folder / "many.yaml").write_text(text)
    (folder / "gpus.yaml").write_text(text.replace("device: cpu", "device: T4"))
    for name, words in (("many", "needs 64 processes; this host has"), ("gpus", "needs 64 T4")):
        more = ["--microbatches", "64", "--run", "1", "--solver", "data-parallel"]
        text = run("compare", "--topology", f"{name}.yaml", *more).output
        assert f"not run: {words}" in " ".join(text.split())


def test_a_model_that_is_not_there_is_missed_before_the_search(folder):
    write_mlp_towers(folder / "model.onnx", (1, 1), width=16, batch=2)
    run("profile", "model.onnx", "--batch", "2", "--repetitions", "1")
    (folder / "model.onnx").rename(folder / "moved.onnx")
    text = run("compare", *TWO, "--run", "1", code=1).output
    assert "is not where the profile says; give it with --model FILE" in text
    assert "Strategies" not in text


# A module of the user's that two processes together never finish importing.
ENDLESS = 'import os, time\nif os.environ.get("WORLD_SIZE") == "2": time.sleep(600)\n'


def ranks_of(folder):
    """Number of ranks of the plan that is run now."""
    strategies = list((folder / "tmp").glob("planner-*/strategy.json"))
    return len(read_plan(strategies[0]).ranks) if strategies else 0


@pytest.mark.slow
def test_after_ctrl_c_the_plans_that_ran_are_shown_and_nothing_is_left(folder):
    write_mlp_towers(folder / "model.onnx", (2, 2), width=16, batch=2)
    run("profile", "model.onnx", "--batch", "2", "--repetitions", "1")
    (folder / "endless.py").write_text(ENDLESS)
    words = [*TWO, "--solver=single", "--solver=data-parallel", "--run", "2"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), "compare", *words, "--operators", "endless"],
        env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    latest_s = time.monotonic() + 120
    while ranks_of(folder) != 2:
        assert process.poll() is None
        assert time.monotonic() < latest_s
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "stopped\n"
    table = shown[shown.index("Launched on this machine") :]
    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert float(lines["single"].split()[2]) > 0
    assert "not run: the command was stopped" in lines["data-parallel"]
    assert list((folder / "tmp").glob("planner-*")) == []


@pytest.mark.slow
def test_the_order_predicted_is_the_order_measured_with_contention(folder):
    """A branched network on two processes of this machine, whose links are measured first: towers
    side by side, replicas with large sums of gradients, everything in one process.
    """
    write_mlp_towers(folder / "model.onnx", (4, 4), width=1024, batch=128)
    run("profile", "model.onnx", "--batch", "128")
    subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "topology", "probe", "--nproc", "2",
         "--largest", "16 MiB", "-o", "here.yaml"],
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    solvers = ("single", "data-parallel", "netsplit")
    found = json.loads(
        run("compare", "--topology", "here.yaml", "--microbatches", "2", "--run", str(STEPS),
            *(f"--solver={name}" for name in solvers), "--json").stdout
    )  # fmt: skip
    for row in found["compared"]:
        assert row["not_measured"] is None, row["solver"]
        assert len(row["measured"]["iterations_s"]) == STEPS
    assert found["order"] == {"pairs": 3, "as_predicted": 3}
    assert found["solver"] == "netsplit"
