"""Computed profiles that are good for any size: the profile of a size equals the one that is
computed from the model with that batch.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from planner import api
from planner.api.lookup import profile_of
from planner.artefacts.files import (
    artefact_hash,
    read_plan,
    read_profile,
    shipped,
    to_plain,
    write_profile,
)
from planner.artefacts.graph import MAX_TENSOR_BYTES
from planner.artefacts.growth import Growing, GrowingKernel, Growth, Rates, Work, on_line
from planner.artefacts.profile import Source
from planner.artefacts.weight_gradients import without_parameter_work
from planner.clusters.yaml.read import shipped_device_type
from planner.model.load import ReadOptions, load, resized
from planner.profilers.analytic import computed, rescale
from planner.profilers.efficiencies import rates_of
from planner.profilers.interpolate import interpolated, span
from planner.profilers.roofline.grown import grown
from planner.profilers.roofline.growth import with_growth
from planner.profilers.rules import split_rules, with_rules
from planner.reports.profile import profile_lines
from planner.support.errors import FileError, ModelError, OptionError
from tests.profilers.test_profilers import read
from tests.support.commands import run
from tests.support.models import MODELS, bert, gpt2, light, llama

A100 = shipped_device_type("A100-SXM4-80GB")
T4 = shipped_device_type("T4")
TINY = {
    "gpt2": partial(gpt2, layers=1, width=128, vocabulary=300),
    "bert": partial(bert, layers=1, width=128, vocabulary=300),
    "llama": partial(llama, 2, 64, 4, 96, 200, seed=0),
    "squeezenet": partial(light, "squeezenet"),
    "resnet50 in training": partial(light, "resnet50", train=True),
}
SEQUENCES = ("gpt2", "bert", "llama")
SIZES = (1, 2, 4, 5, 16)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """The file of a model, written once."""

    @cache
    def written(name):
        path = tmp_path_factory.mktemp("models") / "model.onnx"
        path.write_bytes({**MODELS, **TINY}[name]().SerializeToString())
        return path

    return written


def costs(model, kind=A100, dtype=None, compiled=False):
    return computed(model, model_path="model.onnx", kind=kind, dtype=dtype, compiled=compiled)


def growing(model, dtype=None, *, rules=False, compute=costs, compiled=False):
    own = costs(model, dtype=dtype, compiled=compiled)
    compute = partial(compute, compiled=True) if compiled else compute
    if rules:
        own = replace(own, profile=with_rules(own.profile, model))
    return with_growth(
        own,
        model,
        rates_of(A100, own.profile.dtype, compiled=compiled),
        compute=partial(compute, dtype=dtype),
        rules_of=split_rules,
    )


def check_sizes(path, dimensions, dtype, *, compiled=False):
    """Of operators times, FLOPs, bytes and stash; of tensors shapes; views; losses."""
    models = {n: load(path, ReadOptions(batch=n, dimensions=dimensions)) for n in SIZES}
    due = {n: costs(one, dtype=dtype, compiled=compiled).profile for n, one in models.items()}
    for own in (growing(models[size], dtype, compiled=compiled) for size in (1, 4)):
        assert own.warnings == ()
        assert span([own]) == (1, None)
        for size in SIZES:
            found = without_parameter_work(interpolated([own], size))
            assert replace(found, growth=None) == due[size]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", None), ("gpt2", "bfloat16"), ("bert", None), ("llama", "bfloat16"),
     ("squeezenet", None), ("resnet50 in training", "float16")],
)  # fmt: skip
def test_a_size_by_lines_is_the_size_computed_from_the_model(name, dtype, path_of):
    check_sizes(path_of(name), {"seq": 80} if name in SEQUENCES else {}, dtype)


@pytest.mark.parametrize("name", ["llama", "resnet50 in training"])
def test_a_size_of_a_compiled_step_by_lines_is_the_size_computed_from_the_model(name, path_of):
    dimensions = {"seq": 80} if name in SEQUENCES else {}
    check_sizes(path_of(name), dimensions, "float16", compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_so_it_is_of_whole_transformers(name, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    check_sizes(path, {"seq": 80}, "bfloat16")


def test_blocks_of_rules_are_as_many_as_samples(path_of, own_cache):
    models = {
        n: load(path_of("gpt2"), ReadOptions(batch=n, dimensions={"seq": 16})) for n in (1, 4, 6)
    }
    due = split_rules(models[6])
    assert any("/6" in one.line for rules in due for one in rules)
    for own in (growing(models[1], rules=True), growing(models[4], rules=True)):
        assert tuple(one.rules for one in interpolated([own], 6).operators) == due
        single = interpolated([own], 1).operators
        for found, rules in zip(single, split_rules(models[1]), strict=True):
            assert {*rules} <= {*found.rules}
            assert not any("/1" in one.line for one in found.rules)


PRODUCT = "agraph (float[N,400] x) => (float[N,500] y) { y = MatMul (x, w) }"


def product(folder, batch=2):
    return read(folder, PRODUCT, {"w": (400, 500)}, batch=batch)


def test_the_lines_of_a_product_by_hand(tmp_path):
    growth = growing(product(tmp_path)).growth
    (cost,) = growth.classes
    (kernel,) = cost.forward
    weight = 400 * 500
    assert (kernel.work, kernel.flops) == (Work.PRODUCT, (2 * 2 * weight, 3 * 2 * weight))
    assert kernel.bytes == tuple(4 * (weight + n * 400 + n * 500) for n in (2, 3))
    assert on_line(kernel.flops, 1000) == 1000 * 2 * weight
    assert (growth.tensors, growth.parameters) == ((0, 0), (1,))
    assert (growth.steps, growth.dimensions) == (((1, 0), (0, 0)), {"N": 1})
    assert growth.operators == growth.single == (0,)


def test_another_device_takes_the_kernels_at_its_own_speed(path_of):
    for batch in (1, 4):
        options = ReadOptions(batch=batch, dimensions={"seq": 80})
        model = load(path_of("gpt2"), options)
        found = rescale(growing(model), T4, A100)
        due = costs(model, T4).profile
        assert replace(without_parameter_work(found), growth=None) == due
        other = without_parameter_work(interpolated([found], 7))
        assert other == replace(costs(resized(model, 7), T4).profile, model_path="model.onnx")
    half = rescale(growing(model, "bfloat16"), T4, A100)
    assert half.warnings == ("no speed of T4 in bfloat16 is known; its speed in float32 was taken",)
    assert rescale(half, A100, T4) == growing(model, "bfloat16")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("agraph (float[4,8] x) => (float[4,8] y) { y = MatMul (x, w) }",
         r"model.onnx: the batch of 4 is written into the file; export it with a symbolic"),
        ("agraph (float[N,8] x) => (float[N,N] y) { h = MatMul (x, w) t = Transpose (h)"
         " y = MatMul (h, t) }",
         r"the FLOPs of \w+ do not grow evenly: 64 for 2 samples, 144 for 3"),
        ("agraph (float[N,8] x) => (float[N,8] y) <int64[2] fixed = {4, 8}>"
         " { h = MatMul (x, w) y = Reshape (h, fixed) }",
         r"Reshape"),
    ],
)  # fmt: skip
def test_without_straight_lines_the_profile_is_of_its_size_and_says_why(text, reason, tmp_path):
    model = read(tmp_path, text, {"w": (8, 8)}, **({} if "[4,8] x" in text else {"batch": 4}))
    profile = growing(model)
    assert profile.growth is None
    assert span([profile]) == (4, 4)
    (warning,) = profile.warnings
    assert warning.startswith("good for microbatches of 4 only: ")
    assert re.search(reason, warning), warning
    assert replace(profile, warnings=()) == costs(model).profile
    with pytest.raises(OptionError, match="expected a size that was profiled, 4"):
        interpolated([profile], 8)


@pytest.mark.parametrize(
    ("given", "grows"), [({"S": 4}, {"N": 1}), ({}, {"N": 1, "S": 1}), ({"S": 5}, {"N": 1})]
)
def test_a_dimension_that_is_given_by_name_does_not_grow(given, grows, tmp_path):
    text = (
        "agraph (float[N,8] x, float[S,8] z) => (float[N,8] y)"
        " { h = MatMul (x, w) m = ReduceMax <axes=[0]> (z) y = Add (h, m) }"
    )
    profile = growing(read(tmp_path, text, {"w": (8, 8)}, batch=4, dimensions=given))
    assert profile.growth.dimensions == grows
    assert interpolated([profile], 6).dimensions == {"N": 6, "S": given.get("S", 6)}


@pytest.mark.parametrize("own", [1, 4])
def test_a_tensor_of_other_ranks_at_one_sample_is_no_mistake(own, tmp_path):
    text = (
        "agraph (float[N,8] x) => (float y) { h = MatMul (x, w) s = Squeeze (h) y = ReduceMax (s) }"
    )
    profile = growing(read(tmp_path, text, {"w": (8, 8)}, batch=own))
    assert profile.growth is None
    assert "s" in profile.warnings[0]


def test_a_model_that_cannot_have_one_sample_is_good_from_two_on(tmp_path):
    def compute(model, **options):
        if model.batch == 1:
            raise ModelError("a batch normalization needs more than one value")
        return costs(model, **options)

    profile = growing(product(tmp_path, 4), compute=compute)
    assert span([profile]) == (2, None)
    assert any("any microbatch size from 2 on: " in line for line in profile_lines(profile))
    assert interpolated([profile], 2).microbatch_size == 2
    with pytest.raises(OptionError, match="a microbatch of 1: expected at least 2 samples"):
        interpolated([profile], 1)


def test_a_figure_that_leaves_its_line_is_said_with_its_operator(tmp_path):
    def compute(model, **options):
        one = costs(model, **options)
        (cost,) = one.profile.operators
        off = replace(cost, flops=cost.flops + (model.batch == 8))
        return replace(one, profile=replace(one.profile, operators=(off,)))

    (warning,) = growing(product(tmp_path), compute=compute).warnings
    assert warning == (
        "good for microbatches of 2 only: the FLOPs of MatMul_0 for 8 samples is 3200001, which is"
        " not on the straight line through 2 and 3 samples (3200000)"
    )


def test_a_constant_that_becomes_a_parameter_in_larger_microbatches_is_said(path_of):
    profile = growing(load(path_of("llama"), ReadOptions(batch=1, dimensions={"seq": 16})))
    (warning,) = profile.warnings
    assert "Expand_10, a constant that layers.0.RotaryEmbedding_13 reads, grows" in warning
    assert "is a parameter from more than 64 elements on" in warning


# ---- files and plans


def test_a_file_with_growth_is_of_a_format_of_its_own_and_gives_the_same_sizes(tmp_path):
    profile = growing(product(tmp_path))
    write_profile(profile, tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["format"] == "planner-profile/3"
    again = read_profile(tmp_path / "p.json")
    assert again == profile
    assert interpolated([again], 9) == interpolated([profile], 9)
    assert interpolated([again], 9) is interpolated([again], 9)
    bare = replace(profile, growth=None)
    assert artefact_hash(bare) == artefact_hash(profile)
    write_profile(bare, tmp_path / "bare.json")
    assert json.loads((tmp_path / "bare.json").read_text())["format"] == "planner-profile/3"
    assert read_profile(tmp_path / "bare.json") == bare
    of_cpu = [replace(one, host_forward_s=0.0, host_backward_s=0.0) for one in bare.operators]
    of_none = without_parameter_work(replace(bare, operators=tuple(of_cpu), loss_costs=()))
    write_profile(of_none, tmp_path / "bare.json")
    assert "host" not in (tmp_path / "bare.json").read_text()
    assert json.loads((tmp_path / "bare.json").read_text())["format"] == "planner-profile/2"
    assert "any microbatch size: computed from kernels at 2 and 3 samples" in profile_lines(profile)
    assert not any("microbatch size:" in line for line in profile_lines(bare))


def test_problems_of_a_growth_are_all_said(tmp_path):
    plain = {"format": "planner-profile/3", **to_plain(growing(product(tmp_path)))}
    growth = plain["growth"]
    growth |= {"operators": [7], "tensors": [0], "views": [{"tensor": "y", "base": "z"}]}
    growth["classes"][0]["rules"] = ["S0/n,Q->S0"]
    growth["stash_tensors"] = {"nothing": []}
    path = tmp_path / "p.json"

    def problems():
        path.write_text(json.dumps(plain))
        with pytest.raises(FileError) as raised:
            read_profile(path)
        return str(raised.value)

    assert "growth.operators[0]: expected the index of one of 1, got 7" in problems()
    growth["operators"] = [0]
    said = problems()
    assert "growth.tensors: expected one per element of the graph (2), got 1" in said
    assert "growth.views[0].base: expected an input or parameter" in said
    assert "growth.stash_tensors: expected operators, got 'nothing'" in said
    assert "growth.classes[0].rules: " in said
    growth["classes"][0]["forward"][0]["flops"] = [9, 3]
    assert "flops: expected figures of at most 1e+30 that grow" in problems()
    growth["classes"][0]["forward"][0]["flops"] = [3, 9]
    assert "from 0 on at one sample, got [3, 9]" in problems()


@pytest.mark.parametrize("size", [10**12, 10**15])
def test_a_size_beyond_the_limits_of_artefacts_is_refused(size, tmp_path):
    with pytest.raises(OptionError, match=rf"a microbatch of {size}: "):
        interpolated([growing(product(tmp_path))], size)


def test_speeds_are_of_devices():
    for wrong in (0.0, float("nan"), 1e31):
        with pytest.raises(ValueError, match=r"flops_per_s.product: expected a speed"):
            Rates(0.0, {Work.PRODUCT: wrong}, {})
    with pytest.raises(ValueError, match="expected a speed of 'copy'"):
        Growth(
            Rates(0.0, {}, {}), (Growing((GrowingKernel(Work.COPY, (1, 2), (1, 2)),), ()),), (0,),
            (0,), (), (), (), {},
        )  # fmt: skip


def test_a_plan_of_any_size_finds_its_profile_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    product(tmp_path)
    run("profile", "model.onnx", "--batch", "2,8", "--device", "A100-SXM4-80GB", "--no-cache",
        "-o", "p.json")  # fmt: skip
    first, second = api.read_profiles("p.json")
    assert (first.growth is None, second.growth is None) == (False, True)
    assert artefact_hash(interpolated([first], 8)) == artefact_hash(second)
    run("solve", "--profile", "p.json", "--topology", "dgx-a100", "--gpus", "2",
        "--global-batch", "24", "--microbatch-size", "6")  # fmt: skip
    plan = read_plan(Path("strategy.json"))
    assert (plan.microbatch_size, plan.source, plan.dimensions) == (6, Source.ANALYTIC, {"N": 6})
    found = profile_of(plan, "strategy.json", (first, second), "p.json")
    assert artefact_hash(found) == plan.profile_hash
    assert "iteration" in run("simulate", "strategy.json").stdout


def test_another_size_takes_neither_torch_nor_onnx():
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from planner.artefacts.files import read_profile\n"
        "from planner.profilers.interpolate import interpolated\n"
        f"profile = read_profile(Path({str(shipped('profiles') / 'llama7b-a100.json')!r}))\n"
        "assert interpolated([profile], 12).microbatch_size == 12\n"
        "print({'torch', 'onnx', 'numba'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("path", sorted(shipped("profiles").glob("*-*.json")), ids=lambda p: p.stem)
def test_shipped_computed_profiles_are_good_for_any_size(path):
    profile = read_profile(path)
    assert span([profile]) == (1, None)
    own = grown(profile, profile.growth, profile.microbatch_size)
    assert own == replace(profile, growth=None)
    kind = shipped_device_type(profile.device_type)
    assert profile.growth.rates == rates_of(kind, profile.dtype)
    flops = [sum(o.flops for o in interpolated([profile], n).operators) for n in (2, 20)]
    assert flops[1] == pytest.approx(10 * flops[0], rel=0.01)  # weights are cast once


# ---- large microbatches


def test_a_microbatch_over_many_devices_has_tensors_larger_than_any_device(tmp_path):
    text = "agraph (float[N,2048,8] x) => (float[N,2048,32000] y) { y = MatMul (x, w) }"
    read(tmp_path, text, {"w": (8, 32000)}, batch=1)
    sample = 2048 * 32000 * 4
    whole = load(tmp_path / "model.onnx", ReadOptions(batch=32_768))
    assert whole.graph.tensors[-1].bytes == 32_768 * sample > 10**12
    assert costs(whole).profile.operators[0].output_bytes == 32_768 * sample
    with pytest.raises(ModelError, match=r"expected at most 1e\+14 bytes"):
        load(tmp_path / "model.onnx", ReadOptions(batch=MAX_TENSOR_BYTES // sample + 1))
