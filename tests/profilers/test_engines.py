"""`planner profile` with every engine, as a user meets it."""

import json

import pytest

from planner.artefacts.files import read_plan, read_profile, shipped
from planner.artefacts.options import LossOptions, ModelOptions
from planner.artefacts.profile import Source
from planner.commands.profile import Comparing, Sizes
from planner.commands.profile import profile as profile_command
from planner.profilers.engines import engine_for
from planner.profilers.options import Measuring, ProfileEngine
from planner.support.errors import FileError
from planner.support.options import declared
from tests.commands.test_cli import mlp, run

QUICK = ("--budget", "1ms", "--repetitions", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a model; what is measured is kept in it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("planner.profilers.measured.signs_of_load", lambda *_: ())
    mlp(tmp_path / "model.onnx")
    return tmp_path


def test_a_type_of_device_is_computed_and_a_device_that_is_here_is_measured():
    assert engine_for("cpu", None) is engine_for("cuda:1", None) is ProfileEngine.TORCH
    assert engine_for("V100-SXM2-16GB", None) is ProfileEngine.ANALYTIC
    assert engine_for("cpu", "analytic") is ProfileEngine.ANALYTIC
    assert engine_for("cpu", "onnxruntime") is ProfileEngine.ONNXRUNTIME


def test_a_profile_for_a_device_that_is_not_here_says_so_everywhere(folder):
    shown = run("profile", "model.onnx", "--device", "V100-SXM2-16GB").output
    assert "analytic on V100-SXM2-16GB by roofline" in shown
    profile = read_profile(folder / "profiles/model-V100-SXM2-16GB.json")
    assert (profile.source, profile.engine, profile.repetitions) == (
        Source.ANALYTIC, "roofline", 0,
    )  # fmt: skip
    planned = run("solve", "--topology", "p3-8xlarge").output
    assert "operator times: analytic (roofline), of V100-SXM2-16GB" in planned
    assert read_plan(folder / "strategy.json").source is Source.ANALYTIC


def test_a_profile_of_a_compiled_step_says_so_everywhere(folder):
    device = ("--device", "V100-SXM2-16GB")
    shown = run("profile", "model.onnx", *device, "--compiled").output
    assert "analytic on V100-SXM2-16GB by roofline, compiled" in shown
    assert (folder / "profiles/model-V100-SXM2-16GB-compiled.json").exists()
    planned = run("solve", "--topology", "p3-8xlarge").output
    assert "operator times: analytic (roofline, compiled), of V100-SXM2-16GB" in planned


def test_a_measured_profile_is_rescaled_to_another_type_of_device(folder):
    run("profile", "model.onnx", *QUICK)
    shown = run("profile", "profiles/model.json", "--device", "T4", "-o", "t4.json").output
    assert "rescaled on T4" in shown
    assert "warning: rescaled from cpu (measured) by the ratio of the rooflines" in shown
    before, after = read_profile(folder / "profiles/model.json"), read_profile(folder / "t4.json")
    assert after.source is Source.RESCALED
    assert (after.graph, after.model_hash) == (before.graph, before.model_hash)
    assert sum(o.forward_s for o in after.operators) < sum(o.forward_s for o in before.operators)


@pytest.mark.parametrize("options", [("--batch", "2"), ("--engine", "torch"), ("--compare",),
                                     ("--dtype", "float16"), ("--dim", "n=2"), ("--threads", "1"),
                                     ("--budget", "5s"), ("--seed", "1")])  # fmt: skip
def test_options_of_measuring_say_nothing_for_a_profile(options, folder):
    given = shipped("profiles") / "resnet50.json"
    said = run("profile", str(given), "--device", "T4", "-o", "t4.json", *options, code=1).output
    flag, choice = options[0], f" {options[-1]}" if options[0] in ("--engine", "--dtype") else ""
    assert f"{flag}{choice} is for an ONNX model" in said
    assert not (folder / "t4.json").exists()


def test_every_option_is_of_measuring_or_of_rescaling_too(folder):
    """So that none is left out in silence."""
    given = shipped("profiles") / "resnet50.json"
    flags = ["--no-cache", "--no-contention"]
    for flag in flags:
        said = run("profile", str(given), "--device", "T4", "-o", "t4.json", flag, code=1).output
        assert f"{flag} is for an ONNX model" in said
    kinds = (Sizes, ModelOptions, LossOptions, Measuring, Comparing)
    of_models = {name for kind in kinds for name in declared(kind)}
    others = {one.name for one in profile_command.params} - of_models
    assert others == {"model", "path", "operators", "as_json"}


def test_forward_times_by_onnx_runtime_name_the_provider_that_ran(folder):
    shown = run("profile", "model.onnx", "--engine", "onnxruntime", "--repetitions", "2").output
    assert "measured on cpu by onnxruntime (CPUExecutionProvider)" in shown
    assert "warning: backward times are estimates" in shown


def test_an_unknown_type_of_device_lists_the_known_ones(folder):
    said = run("profile", "model.onnx", "--device", "V100", code=1).output
    assert "unknown device type 'V100'" in said
    assert "V100-SXM2-16GB" in said


def test_a_type_of_device_cannot_be_measured_here(folder):
    said = run("profile", "model.onnx", "--device", "T4", "--engine", "torch", code=1).output
    assert "--engine torch: expected --device cpu, cuda or cuda:N" in said


def test_onnx_runtime_computes_in_the_types_of_the_model(folder):
    options = ("--engine", "onnxruntime", "--dtype", "bfloat16")
    assert "--dtype is for --engine torch" in run("profile", "model.onnx", *options, code=1).output


def test_the_command_writes_the_types_of_parameters(folder):
    options = ("--device", "A100-SXM4-80GB", "--dtype", "bfloat16", "--parameters", "bfloat16")
    shown = run("profile", "model.onnx", *options, "--gradients", "float32").output
    assert "bfloat16 with bfloat16 parameters and float32 gradients, analytic on" in shown
    path = folder / "profiles/model-A100-SXM4-80GB-bfloat16-bfloat16-parameters.json"
    plain = json.loads(path.read_text())
    assert (plain["format"], plain["parameter_dtype"]) == ("planner-profile/3", "bfloat16")
    trained = [one for one in plain["graph"]["parameters"] if one["trainable"]]
    assert {(one["dtype"], one["gradient_dtype"]) for one in trained} == {("bfloat16", "float32")}
    assert read_profile(path).parameter_dtype == "bfloat16"
    plain["parameter_dtype"] = "int8"
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError, match="parameter_dtype: expected bfloat16, got 'int8'"):
        read_profile(path)
    said = run("profile", "model.onnx", "--parameters", "bfloat16", code=1).output
    assert "--parameters bfloat16: expected --dtype bfloat16, too" in said


def test_a_second_profile_takes_what_the_first_one_found(folder):
    first = run("profile", "model.onnx", *QUICK).output
    assert ": 3 timed in" in first
    second = run("profile", "model.onnx", *QUICK).output
    assert ": 0 timed in" in second
    assert "3 reused from earlier profiles" in second
    third = run("profile", "model.onnx", *QUICK, "--no-cache").output
    assert ": 3 timed in" in third


def test_engines_are_shown_beside_each_other(folder):
    shown = run("profile", "model.onnx", *QUICK, "--compare").output
    assert "Forward time per operator type by each engine" in shown
    assert "the roofline was fitted to this model" in shown
    found = json.loads(run("profile", "model.onnx", *QUICK, "--compare", "--json").stdout)
    assert {row["type"] for row in found["compared"]["types"]} == {"MatMul", "Relu"}
    assert found["compared"]["engine"] == "onnxruntime (CPUExecutionProvider)"
    assert found["compared"]["fit"]["peak_flops"] > 0
    assert found["effort"][0]["num_classes"] == 3
    assert found["source"] == "measured"


def test_comparing_needs_a_profile_that_torch_measured_here(folder):
    said = run("profile", "model.onnx", "--device", "T4", "--compare", code=1).output
    assert "--compare: expected a profile by --engine torch on --device cpu" in said


def test_edges_and_how_sure_times_are_stand_in_the_output(folder):
    shown = run("profile", "model.onnx", *QUICK).output
    assert "edges: 6 tensors between operators" in shown
    assert "by torch" in shown
    profile = read_profile(folder / "profiles/model.json")
    assert all(one.interval > 0 for one in profile.operators)
