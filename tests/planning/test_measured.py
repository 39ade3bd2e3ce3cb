"""Rows of a table as runs: their plans, and `planner calibrate --measured` from end to end."""

import json
import re
from dataclasses import replace

import pytest

from planner.artefacts.calibration import Calibration
from planner.artefacts.files import read_plan, write_profile
from planner.artefacts.measured import MeasuredRow
from planner.clusters.yaml.write import write_topology
from planner.costs.evaluate import evaluate
from planner.planning.measured import Place, timed_runs
from planner.simulator.events import run as simulated
from planner.support.errors import OptionError
from tests.support import split_models
from tests.support.builders import cluster, unit_type
from tests.support.commands import run
from tests.support.split_profiles import profiled

KIND = unit_type("T4", bandwidth=1e12)
TRUE = Calibration(
    device_type="T4", forward=1.25, backward=1.25, launch_s=2e-3, collectives=2.0, sums=2.0,
    wire=2.0,
)  # fmt: skip
DEGREES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small model, and four devices on slow links."""
    path = tmp_path_factory.mktemp("model") / "mlp.onnx"
    split_models.mlp(path)
    profile = replace(profiled(split_models.loaded(path)), device_type="T4", model_path="mlp.onnx")
    return Place([profile], cluster([KIND] * 4, 1e6, 1e-6), KIND)


def row(line, degrees, num_microbatches, time_s=1.0, **others):
    tensor, data, pipeline = degrees
    size = split_models.BATCH
    return MeasuredRow(
        line, tensor, data, pipeline, size, num_microbatches * data * size, time_s, **others
    )


def rows_of(place, known=TRUE):
    """What would be measured on devices that are as a calibration says."""
    rows = [row(line, degrees, 2 + line % 3) for line, degrees in enumerate(DEGREES, 2)]
    runs = timed_runs(rows, place)
    return [replace(one, time_s=measured_s(run, known))
            for one, run in zip(rows, runs, strict=True)]  # fmt: skip


def measured_s(run, known):
    problem = replace(run.problem, calibration=known)
    evaluation = evaluate(problem, run.strategy)
    return simulated(evaluation.program, evaluation.costs, problem.topology).iteration_s


def test_a_row_has_the_plan_of_its_degrees(place):
    rows = [row(line, degrees, 2) for line, degrees in enumerate(DEGREES, 2)]
    told = []
    runs = timed_runs(rows, place, lambda done, total: told.append((done, total)))
    for one, timed in zip(rows, runs, strict=True):
        stages = timed.strategy.stages
        assert len(stages) == one.pipeline
        assert {len(stage.devices) for stage in stages} == {one.tensor * one.data}
        assert len(timed.problem.topology.devices) == one.num_devices
        size = timed.problem.profile.microbatch_size
        assert timed.problem.num_microbatches * size == one.batch
    assert told[-1] == (len(rows), len(rows))


def test_rows_without_a_plan_are_all_named(place):
    rows = [row(2, (1, 1, 1), 2), row(3, (1, 8, 1), 2), row(4, (3, 1, 1), 2, model="gpt3"),
            row(5, (1, 1, 4096), 2)]  # fmt: skip
    with pytest.raises(OptionError) as error:
        timed_runs(rows, place)
    first, second, third = str(error.value).splitlines()
    assert "line 3: t 1, d 8, p 1" in first
    assert "expected at most the 4 devices" in first
    assert "line 4" in second and "model: expected one of mlp, got 'gpt3'" in second
    assert "line 5" in third and "got 4096" in third


def test_of_several_models_a_row_says_which(place):
    (profile,) = place.profiles
    several = replace(place, profiles=[profile, replace(profile, model_path="other.onnx")])
    with pytest.raises(OptionError, match="model: expected one of mlp, other, as there are"):
        timed_runs([row(2, (1, 1, 1), 2)], several)
    (one,) = timed_runs([row(2, (1, 1, 1), 2, model="other")], several)
    assert one.problem.profile.model_path == "other.onnx"
    twice = replace(place, profiles=[profile, replace(profile, device_type="V100")])
    with pytest.raises(OptionError, match="--profile: expected one of the model mlp, got several"):
        timed_runs([row(2, (1, 1, 1), 2)], twice)


@pytest.fixture
def folder(place, tmp_path, monkeypatch):
    """The profile, the topology, and a table of runs on it."""
    monkeypatch.chdir(tmp_path)
    (profile,) = place.profiles
    write_profile(profile, tmp_path / "profiles" / "mlp.json")
    write_topology(place.topology, tmp_path / "four.yaml", [])
    lines = ["t,d,p,microbatch,batch,time_ms"]
    for one in rows_of(place):
        counts = one.tensor, one.data, one.pipeline, one.microbatch, one.batch
        lines.append(",".join(map(str, (*counts, 1000 * one.time_s))))
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    return tmp_path


def test_calibrate_finds_the_factors_of_a_table_and_solve_uses_them(folder):
    arguments = ("calibrate", "--measured", "runs.csv", "--topology", "four.yaml")
    found = json.loads(run(*arguments, "--json").output)
    known = found["calibration"]
    names = ("forward", "backward", "launch_s", "collectives", "sums", "wire")
    assert [known[name] for name in names] == pytest.approx(
        [getattr(TRUE, name) for name in names], rel=0.03
    )
    assert found["error_after"] < 0.03 < 0.1 < found["error_before"]
    assert len(found["runs"]) == len(DEGREES) and found["left_out"] == "run"
    said = run(*arguments).output
    assert "efficiency: computations have 0.80 of the profile's speed" in said
    assert "launch: each computation, sum and step takes 2.0" in said
    assert re.search(r"network: communication takes (1\.9|2\.0)\d of its predicted time", said)
    run("solve", "--topology", "four.yaml", "--solver", "data-parallel", "-o", "with.json")
    assert (
        f"calibrated from {len(DEGREES)} runs of 1 model" in read_plan(folder / "with.json").notes
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t,d,p,microbatch,batch\n", "runs.csv: expected one of the columns time"),
        ("t,d,p,microbatch,batch,time\n1,1,1,8,8,0 s\n", "runs.csv: line 2: time: expected a time"),
        ("t,d,p,microbatch,batch,time\n" + 4 * "1,1,1,8,8,1 s\n", "expected at least 5 runs"),
        ("t,d,p,microbatch,batch,time\n" + 5 * "64,1,1,8,8,1 s\n", "runs.csv: line 2: t 64, d 1"),
    ],
)
def test_a_wrong_table_changes_no_calibration(folder, text, said):
    (folder / "runs.csv").write_text(text)
    output = run("calibrate", "--measured", "runs.csv", "--topology", "four.yaml", code=1).output
    assert said in output
    assert not (folder / "profiles" / "mlp.calibration.json").exists()


def test_a_table_is_given_in_place_of_traces_and_for_one_topology(folder):
    arguments = ("calibrate", "--measured", "runs.csv", "--topology", "four.yaml")
    assert "not both" in run(*arguments, "run1.json", code=1).output
    assert "got 2" in run(*arguments, "--topology", "four.yaml", code=1).output
    assert "or a table with --measured" in run("calibrate", code=2).output
