"""The sizes of the microbatch that are measured where none is named."""

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import planner
from planner.artefacts.files import read_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.profile import WholeStep
from planner.costs.evaluate import evaluate
from planner.model.binding import batch_is_open
from planner.model.load import ReadOptions, load
from planner.profilers.measured import measure
from planner.profilers.reliability import free_bytes, training_bytes
from planner.profilers.sizes import FREE_SHARE, LONGEST_STEP_S, profiles_at_usual_sizes, step_bytes
from planner.solvers.baselines import single
from planner.support.errors import ModelError, OperatorError, OptionError
from tests.commands.test_cli import mlp
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.commands import run
from tests.support.models import llama

QUICK = ("--budget", "1ms", "--repetitions", "1", "--no-contention")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model of symbolic batch; measurements are kept in it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mlp("model.onnx", batch="batch")
    return tmp_path


def quickly(model):
    """A profile of one repetition."""
    return measure(model, model_path="model.onnx", repetitions=1, budget_s=0.0, cached=False)


def of_sample(sample_s, asked=None):
    """A function that measures: a step takes `sample_s` for each sample; sizes go into `asked`."""

    def profile(model):
        if asked is not None:
            asked.append(model.batch)
        time_s = sample_s * model.batch
        return replace(quickly(model), whole_step=WholeStep(0.9 * time_s, 1.1 * time_s))

    return profile


def read(size):
    return load(Path("model.onnx"), ReadOptions(batch=size))


def sizes_of(sized):
    return [profile.microbatch_size for profile in sized.profiles]


# ------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("sample_s", "sizes"),
    [
        (1e-4, [1, 8, 64]),
        (4.0 / 64, [1, 8, 64]),
        (4.1 / 64, [1, 8, 32]),
        (0.25, [1, 4, 16]),
        (0.9, [1, 2, 4]),
        (1.9, [1, 2]),
        (60.0, [1, 2]),
    ],
)
def test_the_largest_is_the_last_power_of_two_in_time_and_two_sizes_are_measured_at_least(
    folder, sample_s, sizes
):
    asked = []
    sized = profiles_at_usual_sizes(read, of_sample(sample_s, asked), "cpu")
    assert sizes_of(sized) == asked == sizes
    assert sized.model.batch == sizes[-1]
    assert sizes[-1] * sample_s <= LONGEST_STEP_S or sizes[-1] == 2
    assert 2 * sizes[-1] * sample_s > LONGEST_STEP_S or sizes[-1] == 64


@pytest.mark.parametrize(
    ("largest", "sizes", "words"),
    [(64, [1, 8, 64], "64 is the limit"), (16, [1, 4, 16], "a step of 32 needs"),
     (1, [1], "profiled microbatches of 1 sample: a step of 2 needs")],
)  # fmt: skip
def test_the_largest_fits_the_memory_that_is_free(folder, monkeypatch, largest, sizes, words):
    free = step_bytes(read(largest), quickly(read(1))) / FREE_SHARE
    monkeypatch.setattr("planner.profilers.sizes.free_bytes", lambda device: free)
    sized = profiles_at_usual_sizes(read, of_sample(1e-4), "cpu")
    assert sizes_of(sized) == sizes
    assert words in sized.choice


@pytest.mark.parametrize("size", [4, 16])
def test_a_step_needs_no_more_memory_than_the_choice_counts(folder, size):
    """The memory model has the tensors that autograd keeps, and counts no others."""
    Path("llama.onnx").write_bytes(llama(2, 32, 2, 48, 64, seed=0).SerializeToString())

    def model_of(size):
        return load(Path("llama.onnx"), ReadOptions(batch=size, dimensions={"seq": 16}))

    problem = problem_of(quickly(model_of(size)), cluster([unit_type("cpu")]), 1)
    (peak,) = evaluate(problem, single(problem, 0.0).strategy).memory.values()
    counted = step_bytes(model_of(size), quickly(model_of(1)))
    assert peak.total_bytes <= counted < 3 * peak.total_bytes


def test_memory_grows_with_what_operators_keep_for_themselves_but_not_with_weights(folder):
    def counted(size, **figures):
        first, *others = (replace(one, workspace_bytes=0) for one in quickly(read(1)).operators)
        operators = (replace(first, **figures), *others)
        return step_bytes(read(size), replace(quickly(read(1)), operators=operators))

    tensors = training_bytes(read(8).graph)
    assert counted(8, stash_private_bytes=1000) - tensors == 8 * 1000
    assert counted(8, workspace_bytes=10) - tensors == 8 * 10
    weights = quickly(read(1)).operators[0].parameter_bytes
    assert counted(8, workspace_bytes=weights + 10) - tensors == weights + 8 * 10


def test_memory_that_torch_keeps_of_the_smaller_sizes_is_free_for_larger_ones(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 500)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 200)
    assert free_bytes("cuda") == 1300


def test_a_model_that_needs_two_samples_begins_with_two(folder):
    def measured(model):
        if model.batch == 1:
            raise OperatorError("norm: expected several numbers per channel")
        return of_sample(1e-4)(model)

    sized = profiles_at_usual_sizes(read, measured, "cpu")
    assert sizes_of(sized) == [2, 16, 64]
    assert sized.warnings == (
        "a microbatch of 1 sample cannot be measured: norm: expected several numbers per channel",
    )


def test_an_operator_that_never_runs_is_an_error(folder):
    def measured(model):
        raise OperatorError(f"at {model.batch}")

    with pytest.raises(OperatorError, match="at 2"):
        profiles_at_usual_sizes(read, measured, "cpu")


def test_sizes_that_cannot_be_interpolated_are_said(folder):
    def measured(model):
        return replace(of_sample(1e-4)(model), threads=1 if model.batch < 64 else 2)

    sized = profiles_at_usual_sizes(read, measured, "cpu")
    (warning,) = sized.warnings
    assert "a microbatch of 16 cannot be interpolated between those of 8 and 64: threads" in warning


@pytest.mark.parametrize(
    ("shapes", "sizes", "is_open"),
    [
        ([["n", 3]], {}, True),
        ([["n", 3], ["n", "m"]], {}, True),
        ([["n", 3]], {"n": 4}, False),
        ([[2, 3]], {}, False),
        ([[2, 3], ["n", 3]], {}, False),
        ([["n", 3], ["seq", "seq"]], {}, False),
        ([["n", 3], ["seq", "seq"]], {"seq": 5}, True),
        ([[None, 3]], {}, True),
        ([[None, 3], [None, 3]], {}, False),
        ([[]], {}, False),
    ],
)
def test_a_batch_is_open_where_one_name_alone_has_no_size(shapes, sizes, is_open):
    kind = onnx.TensorProto.FLOAT
    inputs = [
        onnx.helper.make_tensor_value_info(f"x{i}", kind, shape) for i, shape in enumerate(shapes)
    ]
    assert batch_is_open(inputs, sizes) is is_open
    assert batch_is_open([], {}) is False


# ------------------------------------------------------------------------------ the command


def test_a_symbolic_batch_is_profiled_at_three_sizes_and_solve_says_the_batch(folder):
    shown = run("profile", "model.onnx", *QUICK).output
    assert "profiled microbatches of 1, 8 and 64 samples: 64 is the limit; --batch names" in shown
    profiles = read_any_profiles(Path("profiles/model.json"))
    assert [one.microbatch_size for one in profiles] == [1, 8, 64]
    assert [one.graph.tensors[0].shape[0] for one in profiles] == [1, 8, 64]
    words = "no --global-batch is given: an iteration has 512 samples, 4 microbatches of the"
    solving = ("solve", "--topology", "local", "--gpus", "2", "--solver", "data-parallel")
    assert words in run(*solving).output
    assert "no --global-batch" not in run(*solving, "--global-batch", "64").output
    assert "no --global-batch" not in run(*solving, "--microbatches", "8").output


def test_json_has_the_choice_and_all_sizes(folder):
    found = json.loads(run("profile", "model.onnx", *QUICK, "--json").stdout)
    assert found["choice_of_sizes"].startswith("profiled microbatches of 1, 8 and 64 samples: ")
    assert [one["microbatch_size"] for one in found["others"]] == [1, 8]
    assert found["microbatch_size"] == 64
    assert len(found["effort"]) == 3
    named = json.loads(run("profile", "model.onnx", *QUICK, "--json", "--batch", "4").stdout)
    assert named["choice_of_sizes"] is None


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("--batch", "3"), [3]),
        (("--batch", "8,2"), [2, 8]),
        (("--dim", "batch=5"), [5]),
        (("--batch", "4", "--device", "T4"), [4]),
    ],
)
def test_sizes_that_are_named_are_profiled(folder, options, sizes):
    shown = run("profile", "model.onnx", *QUICK, *options, "-o", "p.json").output
    assert [one.microbatch_size for one in read_any_profiles(Path("p.json"))] == sizes
    assert "profiled microbatches" not in shown


def test_a_fixed_batch_is_that_of_the_file(folder):
    mlp("model.onnx", batch=6)
    assert "profiled microbatches" not in run("profile", "model.onnx", *QUICK).output
    assert read_profile(Path("profiles/model.json")).microbatch_size == 6


def test_onnx_runtime_is_asked_at_the_same_sizes(folder):
    options = ("--engine", "onnxruntime", "--repetitions", "1", "--no-contention")
    run("profile", "model.onnx", *options, "-o", "p.json")
    profiles = read_any_profiles(Path("p.json"))
    assert [one.microbatch_size for one in profiles] == [1, 8, 64]
    assert {one.engine for one in profiles} == {"onnxruntime (CPUExecutionProvider)"}


def test_what_is_stopped_midway_leaves_the_earlier_profile(folder, monkeypatch):
    run("profile", "model.onnx", *QUICK, "--batch", "2")
    before = Path("profiles/model.json").read_bytes()
    usual = measure

    def stopped(model, **how):
        if model.batch > 1:
            raise KeyboardInterrupt
        return usual(model, **how)

    monkeypatch.setattr("planner.profilers.engines.measure", stopped)
    assert "stopped" in run("profile", "model.onnx", *QUICK, code=130).output
    assert Path("profiles/model.json").read_bytes() == before
    assert [*Path("profiles").iterdir()] == [Path("profiles/model.json")]


# ------------------------------------------------------------------------------ from Python


def test_the_function_tells_progress_of_every_size(folder):
    told = []
    sized = planner.profile_sizes(
        "model.onnx", sizes=(4, 2), budget_s=0.0, repetitions=1, contention=False,
        progress=lambda *one: told.append(one),
    )  # fmt: skip
    assert sizes_of(sized) == [2, 4]
    count = len(sized.model.graph.operators)
    assert told == [(done, count, size) for size in (2, 4) for done in range(1, count + 1)]
    with pytest.raises(OptionError, match="sizes"):
        planner.profile_sizes("model.onnx", sizes="4")
    with pytest.raises(ModelError, match="--batch"):
        planner.profile_sizes("model.onnx", device="T4")
