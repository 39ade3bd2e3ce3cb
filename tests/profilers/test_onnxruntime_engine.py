"""Profiles by ONNX Runtime: what is measured, what is estimated, and how they compare."""

import os
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import cli
from planner.artefacts.files import read_profile, shipped, write_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import View, tensors_by_name
from planner.artefacts.profile import Source
from planner.model.load import ReadOptions, load
from planner.operators import synthetic
from planner.profilers.backward import BackwardRatios, estimates, ratios, shipped_ratios
from planner.profilers.compare import compare_engines
from planner.profilers.facts import facts
from planner.profilers.measured import measure
from planner.profilers.onnx_runtime import engine, runs
from planner.profilers.onnx_runtime.engine import _run_warnings, _who_ran, measure_onnxruntime
from planner.reports.profile import compare_lines, compare_table
from planner.support.errors import OperatorError, OptionError
from tests.support.models import light


def read(folder, text, opset=21, external=False, **weights):
    """A model from ONNX's text syntax, with random weights of the shapes given."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    numbers = np.random.default_rng(0)
    for name, shape in weights.items():
        value = numbers.uniform(0.1, 0.9, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    path = folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=external, size_threshold=0, location="weights")
    return load(path)


ATTENTION = """agraph (int64[2,5] ids, int64[2,5] mask) => (float[2,5,11] logits) <
    int64[4] split = {2, 5, 2, 4}, int64[3] join = {2, 5, 8}, int64[2] last = {1, 2},
    int64[3] lengths = {8, 8, 8}, float low = {-10000.0}, float one = {1.0}
> {
    e = Gather (table, ids)
    n = LayerNormalization (e, scale, shift)
    qkv = MatMul (n, w)
    q, k, v = Split <axis = 2> (qkv, lengths)
    qs = Reshape (q, split)
    ks = Reshape (k, split)
    qt = Transpose <perm = [0,2,1,3]> (qs)
    kt = Transpose <perm = [0,2,3,1]> (ks)
    a = MatMul (qt, kt)
    wide = Unsqueeze (mask, last)
    seen = Cast <to = 1> (wide)
    unseen = Sub (one, seen)
    bias = Mul (unseen, low)
    masked = Add (a, bias)
    p = Softmax <axis = -1> (masked)
    o = MatMul (p, qt)
    ot = Transpose <perm = [0,2,1,3]> (o)
    joined = Reshape (ot, join)
    h = Add (joined, e)
    back = Transpose <perm = [1,0]> (table)
    logits = MatMul (h, back)
}"""
ATTENTION_WEIGHTS = {"table": (11, 8), "scale": 8, "shift": 8, "w": (8, 24)}

# HardSwish and GroupNormalization have no kernel on the CPU: their definitions run.
DEFINED = """agraph (float[2,4,6,6] x) => (float[2,4,6,6] y) {
    c = Conv <pads = [1,1,1,1]> (x, w)
    g = GroupNormalization <num_groups = 2> (c, scale, shift)
    h = HardSwish (g)
    y = Add (h, x)
}"""
DEFINED_WEIGHTS = {"w": (4, 4, 3, 3), "scale": 4, "shift": 4}


def attention(folder, **options):
    return read(folder, ATTENTION, **options, **ATTENTION_WEIGHTS)


def squeezenet(folder):
    path = folder / "squeezenet.onnx"
    path.write_bytes(light("squeezenet").SerializeToString())
    return load(path, ReadOptions(batch=1))


def profiled(model, **options):
    return measure_onnxruntime(model, model_path="model.onnx", **{"repetitions": 2, **options})


def by_name(profile):
    return {cost.name: cost for cost in profile.operators}


@pytest.mark.parametrize("build", [attention, squeezenet])
def test_every_operator_of_the_graph_has_a_time_and_nothing_else_has(build, tmp_path):
    model = build(tmp_path)
    done = []
    profile = profiled(model, repetitions=3, progress=lambda *at: done.append(at))

    assert profile.graph == model.graph
    assert [cost.name for cost in profile.operators] == [o.name for o in model.graph.operators]
    assert all(cost.forward_s > 0 for cost in profile.operators)
    assert all(cost.interval > 0 for cost in profile.operators)
    assert profile.source is Source.MEASURED
    assert profile.engine == "onnxruntime (CPUExecutionProvider)"
    assert (profile.device_type, profile.threads, profile.repetitions) == ("cpu", 1, 3)
    assert profile.whole_step is None
    assert profile.versions["onnxruntime"] == onnxruntime.__version__
    assert done == [(i, 5) for i in range(1, 6)]


def test_the_parts_are_about_the_whole(tmp_path):
    """Within the same runs, so that a busy machine does not matter."""
    model = squeezenet(tmp_path)
    image = synthetic.inputs(model, seed=0, microbatch=0)
    values = {name: value.numpy() for name, value in image.items()}
    found = runs.run(
        model, values, device="cpu", threads=1, repetitions=3, progress=lambda done, total: None
    )
    assert 0.1 < found.parts_per_whole < 10
    assert found.providers == {"CPUExecutionProvider": len(model.graph.operators)}


def test_stash_views_flops_and_bytes_are_those_of_torch(tmp_path):
    model = attention(tmp_path)
    known = facts(model)
    profile = profiled(model)
    assert profile.views == tuple(view for fact in known for view in fact.stash.views)
    for cost, fact in zip(profile.operators, known, strict=True):
        assert cost.stash_tensors == fact.stash.tensors
        assert cost.stash_private_bytes == fact.stash.private_bytes
        assert (cost.flops, cost.bytes_moved) == (fact.flops, fact.bytes_moved)


def outputs(proto, values, folder):
    """What a model computes; parameters among the values are for models that take them."""
    path = folder / "run.onnx"
    path.write_bytes(proto.SerializeToString())
    session = onnxruntime.InferenceSession(
        path, runs._options(threads=1), providers=["CPUExecutionProvider"]
    )
    wanted = {given.name for given in session.get_inputs()}
    return session.run(None, {name: values[name] for name in wanted})


@pytest.mark.parametrize(
    "text, weights",
    [
        (ATTENTION, ATTENTION_WEIGHTS),
        (DEFINED, DEFINED_WEIGHTS),
        # An output that nobody reads and Split must have, and lists as attributes.
        ("""agraph (float[2,6] x) => (float[2,3] y, float[2] z) <int64[2] parts = {3, 3}> {
            h = MatMul (x, w)
            y, unread = Split <axis = 1> (h, parts)
            n = MatMul (x, w)
            s = ReduceMean <axes = [1], keepdims = 0> (n)
            z = Relu (s)
        }""", {"w": (6, 6)}),
        # Shape arithmetic that is folded.
        ("""agraph (float[2,6] x) => (float[2,6] y) {
            shape = Shape (x)
            h = MatMul (x, w)
            r = Reshape (h, shape)
            d = Identity (r)
            y = Relu (d)
        }""", {"w": (6, 6)}),
    ],
)  # fmt: skip
def test_the_model_that_is_run_computes_what_the_file_does(text, weights, tmp_path):
    opset = 17 if "ReduceMean" in text else 21
    model = read(tmp_path, text, opset, **weights)
    given = synthetic.inputs(model, seed=0, microbatch=0)
    values = {name: value.numpy() for name, value in given.items()}
    values |= {p.name: model.values[p.name] for p in model.graph.parameters}
    ours = runs.runnable(model)
    assert [node.name for node in ours.graph.node] == [o.name for o in model.graph.operators]
    for one, other in zip(
        outputs(ours, values, tmp_path), outputs(model.proto, values, tmp_path), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_dropout_and_batch_normalization_are_those_of_inference(tmp_path):
    text = """agraph (float[2,4,3] x) => (float[2,4,3] y) <bool yes = {1}, float half = {0.5}> {
        b, m, v = BatchNormalization <training_mode = 1> (x, scale, shift, mean, var)
        d = Dropout (b, half, yes)
        y = Relu (d)
    }"""
    sizes = dict.fromkeys(("scale", "shift", "mean", "var"), 4)
    model = read(tmp_path, text, 17, **sizes)
    held = {name: model.values[name] for name in sizes}
    x = np.random.default_rng(1).standard_normal((2, 4, 3)).astype(np.float32)
    scale, shift, mean, var = (held[name][:, None] for name in sizes)
    expected = np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + shift, 0)
    (y,) = outputs(runs.runnable(model), {"x": x, **held}, tmp_path)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert any(
        "2 operators of the types BatchNormalization and Dropout were timed in evaluation" in one
        for one in profiled(model).warnings
    )


def test_an_empty_list_as_an_attribute_keeps_its_type():
    schema = onnx.defs.get_schema("Transpose", 21)
    assert runs._attribute("perm", (), schema).type == onnx.AttributeProto.INTS


def test_an_operator_without_a_kernel_has_the_time_of_its_definition(tmp_path):
    model = read(tmp_path, DEFINED, **DEFINED_WEIGHTS)
    costs = {
        o.type: c for o, c in zip(model.graph.operators, profiled(model).operators, strict=True)
    }
    assert costs["HardSwish"].forward_s > 0
    # More than twenty kernels, none of which is counted as less than half a microsecond.
    assert costs["GroupNormalization"].forward_s > 10e-6


def test_casts_between_kernels_belong_to_the_operator_that_needs_them(tmp_path):
    """x -> Cast -> Add -> Cast -> Relu -> y, where no Cast is the model's."""
    model = read(
        tmp_path, "agraph (float[4] x) => (float[4] y) { h = Add (x, w) y = Relu (h) }", w=4
    )
    add, relu = (o.name for o in model.graph.operators)
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["x16"], "InsertedCast_x"),
        onnx.helper.make_node("Cast", ["w"], ["w16"], "InsertedCast_w"),
        onnx.helper.make_node("Add", ["x16", "w16"], ["h16"], add),
        onnx.helper.make_node("Cast", ["h16"], ["h"], "InsertedCast_h"),
        onnx.helper.make_node("Relu", ["h"], ["y"], relu),
    ]
    assert runs._owners(nodes, model.graph) == [0, 0, 0, 0, 1]


def test_half_precision_on_the_cpu_has_times_casts_included(tmp_path):
    text = "agraph (float16[4,4] x) => (float16[4,4] y) { h = MatMul (x, w) y = Softmax (h) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    weight = np.ones((4, 4), np.float16)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "half.onnx")
    profile = profiled(load(tmp_path / "half.onnx"))
    assert profile.dtype == "float16"
    assert all(cost.forward_s > 0 for cost in profile.operators)


def test_weights_may_lie_in_a_file_of_their_own(tmp_path, monkeypatch):
    model = attention(tmp_path, external=True)
    assert (tmp_path / "weights").stat().st_size > 0
    monkeypatch.chdir("/")
    profile = profiled(model)
    assert all(cost.forward_s > 0 for cost in profile.operators)


# ---- backward


def test_backward_is_forward_times_the_ratio_that_ships_for_the_type(tmp_path):
    model = squeezenet(tmp_path)
    profile = profiled(model)
    known = shipped_ratios(on_cpu=True)
    cost = by_name(profile)
    convolutions = [o for o in model.graph.operators if o.type == "Conv"]
    assert len(convolutions) == 26
    for operator in convolutions:
        one = cost[operator.name]
        assert one.backward_s == pytest.approx(one.forward_s * known.by_type["Conv"], abs=2e-9)
    assert any("backward times are estimates" in text for text in profile.warnings)
    assert any("resnet50.json" in text and "Concat" in text for text in profile.warnings)


def test_the_ratios_that_ship_are_those_of_the_measured_profiles():
    known = shipped_ratios(on_cpu=True)
    assert set(known.files) <= {path.name for path in shipped("profiles").glob("*.json")}
    pairs = [
        (cost.forward_s, cost.backward_s)
        for name in known.files
        for profile in read_any_profiles(shipped("profiles") / name)
        for operator, cost in zip(profile.graph.operators, profile.operators, strict=True)
        if operator.type == "Conv" and cost.backward_s
        and profile.source is Source.MEASURED and profile.engine in ("", "torch")
    ]  # fmt: skip
    forward_s, backward_s = map(sum, zip(*pairs, strict=True))
    assert known.by_type["Conv"] == pytest.approx(backward_s / forward_s)
    assert "Transpose" not in known.by_type, "all are views there"


def test_no_backward_where_no_gradient_reaches(tmp_path):
    model = attention(tmp_path)
    profile = profiled(model)
    tensors = tensors_by_name(model.graph)
    for operator, cost in zip(model.graph.operators, profile.operators, strict=True):
        if not any(tensors[name].gradient for name in operator.outputs):
            assert cost.backward_s == 0
    silent = {o.type for o, c in zip(model.graph.operators, profile.operators, strict=True)
              if not c.backward_s}  # fmt: skip
    assert {"Unsqueeze", "Cast", "Sub", "Mul"} <= silent
    assert not {"MatMul", "Softmax", "Gather", "LayerNormalization"} & silent


def torch_profile(folder):
    """A chain of a product, a view and a product, with made-up times."""
    model = read(
        folder,
        """agraph (float[2,4] x) => (float[2,4] y) <int64[2] shape = {2, 4}> {
            a = MatMul (x, w)
            b = Reshape (a, shape)
            y = MatMul (b, v)
        }""",
        w=(4, 4),
        v=(4, 4),
    )
    profile = profiled(model)
    times = [(1.0, 2.0), (0.001, 5.0), (3.0, 4.0)]
    costs = tuple(
        replace(cost, forward_s=forward_s, backward_s=backward_s)
        for cost, (forward_s, backward_s) in zip(profile.operators, times, strict=True)
    )
    return model, replace(profile, operators=costs, views=(View("b", "a"),), engine="torch")


def test_views_and_operators_without_a_gradient_say_nothing_about_backward(tmp_path):
    _, profile = torch_profile(tmp_path)
    assert ratios([profile]) == {"MatMul": 6 / 4}
    first, *others = profile.operators
    unreached = replace(profile, operators=(replace(first, backward_s=0.0), *others))
    assert ratios([unreached]) == {"MatMul": 4 / 3}


def test_a_view_takes_as_long_back_and_an_unknown_type_as_its_bytes_say(tmp_path):
    model, _ = torch_profile(tmp_path)
    known = facts(model)
    found = estimates(model.graph, known, BackwardRatios({"Reshape": 5000.0}, ("some.json",)))
    product = known[0].backward_bytes / known[0].bytes_moved
    assert found.ratios == (product, 1.0, known[2].backward_bytes / known[2].bytes_moved)
    assert (found.by_type, found.by_facts, found.types) == (0, 3, ("MatMul", "Reshape"))

    heavy = [replace(fact, flops=10**9, backward_flops=3 * 10**9) for fact in known]
    assert estimates(model.graph, heavy, BackwardRatios({}, ())).ratios == (3.0, 1.0, 3.0)


# ---- providers and mistakes


def test_cuda_without_a_device_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OptionError, match=r"finds 0 of them here; use --device cpu, or"):
        profiled(attention(tmp_path), provider="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_onnx_runtime_does_not_fall_back_on_the_cpu_silently(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OptionError, match=r"falls back on CPUExecutionProvider here; use"):
        profiled(attention(tmp_path), provider="cuda")
    assert capfd.readouterr().err == ""


def test_cuda_must_not_have_started_because_launches_must_block(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="expected to run before PyTorch uses CUDA"):
        profiled(attention(tmp_path), provider="cuda")


@pytest.mark.parametrize("before", [None, "0"])
def test_blocking_launches_are_for_the_measurement_alone(tmp_path, monkeypatch, before):
    """Child processes inherit the environment. CUDA, once started so, may be measured again."""
    if before is None:
        monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    else:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", before)
    monkeypatch.setattr(engine, "_is_blocking", False)
    starts, during = [False], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: starts[0])

    def started(*_):
        starts[0] = True
        during.append(os.environ["CUDA_LAUNCH_BLOCKING"])
        raise OptionError("no such device")

    monkeypatch.setattr(engine, "check_measuring", started)
    for _ in range(2):
        with pytest.raises(OptionError, match="no such device"):
            profiled(attention(tmp_path), provider="cuda")
        assert os.environ.get("CUDA_LAUNCH_BLOCKING") == before
    assert during == ["1", "1"]


def event(name, category="Node"):
    return {"cat": category, "name": name, "dur": 1, "args": {}}


def test_kernels_that_the_profiler_dropped_are_noticed():
    run = [event("1_kernel_time"), event("0_kernel_time"), event("model_run", "Session")]
    first, second = runs._kernels([event("load", "Session"), *run, *run], 2, 2)
    assert first == second == [event("0_kernel_time"), event("1_kernel_time")]
    for events in (run, [*run, *run[1:]], [*run, event("Cast_9_kernel_time"), *run]):
        with pytest.raises(OptionError, match="use fewer --repetitions"):
            runs._kernels(events, 2, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"threads": 0}, "--threads: expected 1 or more, got 0"),
        ({"repetitions": 0}, "--repetitions: expected 1 or more, got 0"),
        ({"provider": "cuda:x"}, "--device: expected cpu, cuda or cuda:N, got 'cuda:x'"),
    ],
)
def test_numbers_and_names_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        profiled(attention(tmp_path), **options)


def test_a_type_that_onnx_runtime_has_no_kernel_for_is_named(tmp_path):
    path = tmp_path / "model.onnx"
    text = (
        "agraph (bfloat16[4] x) => (bfloat16[4] y) <bfloat16[4] w = {1,1,1,1}> { y = Div (x, w) }"
    )
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(OperatorError, match=r"does not run this model: .*Div.*--engine torch"):
        profiled(load(path))


def test_who_ran_and_what_does_not_add_up_is_said():
    mixed = {"CUDAExecutionProvider": 8, "CPUExecutionProvider": 2}
    assert _who_ran(mixed) == "8 operators CUDAExecutionProvider, 2 CPUExecutionProvider"
    found = runs.TimedRuns((), mixed, parts_per_whole=0.5)
    elsewhere, apart = _run_warnings(found, "cuda")
    assert elsewhere.startswith("2 operators ran on another provider than CUDAExecutionProvider")
    assert "sum up to 0.50 of the time of the whole model" in apart
    assert not [*_run_warnings(runs.TimedRuns((), {"CPUExecutionProvider": 1}, 0.9), "cpu")]


# ---- what it is used for


def test_solve_takes_the_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(profiled(squeezenet(tmp_path)), tmp_path / "profile.json")
    (tmp_path / "pair.yaml").write_text(
        "format: planner-topology/1\nname: pair\ndevice: cpu\n"
        "levels: [{name: process, count: 2, bandwidth: 1 GB/s, latency: 50 us}]\n"
    )
    arguments = ["solve", "--profile", "profile.json", "--topology", "pair.yaml"]
    done = CliRunner().invoke(cli.main, [*arguments, "--solver", "even", "--solver", "single"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "strategy.json").exists()


def test_the_profile_survives_its_file(tmp_path):
    profile = profiled(attention(tmp_path))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def compared(folder, analytic=False):
    """MatMul, Reshape, MatMul: 1 s, 1 ms, 3 s by torch, twice that and a copy of 2 s elsewhere."""
    _, by_torch = torch_profile(folder)
    times = [2.0, 2.0, 6.0]
    slower = replace(
        by_torch,
        operators=tuple(
            replace(cost, forward_s=time_s)
            for cost, time_s in zip(by_torch.operators, times, strict=True)
        ),
        engine="onnxruntime (CPUExecutionProvider)",
    )
    return compare_engines(by_torch, slower, by_torch if analytic else None)


def test_engines_are_compared_by_type_by_rank_and_by_operator(tmp_path):
    found = compared(tmp_path)
    assert [(row.type, row.count) for row in found.rows] == [("MatMul", 2), ("Reshape", 1)]
    assert [row.ratio for row in found.rows] == [2.0, pytest.approx(2000)]
    assert (found.total.torch_s, found.total.onnxruntime_s) == (pytest.approx(4.001), 10.0)
    assert found.total.analytic_s is None
    assert found.num_ranked == 2, "the view takes less than 0.1 % of the forward pass"
    assert found.rank_correlation == pytest.approx(1.0)
    assert [one.type for one in found.worst] == ["MatMul", "Reshape", "MatMul"]
    assert [one.onnxruntime_s for one in found.worst] == [6.0, 2.0, 2.0]


def test_the_comparison_is_shown(tmp_path):
    found = compared(tmp_path, analytic=True)
    table = compare_table(found)
    assert table.heads[-1] == "roofline"
    assert table.rows == (
        ("MatMul", "2", "4 s", "8 s", "2.00", "4 s"),
        ("Reshape", "1", "1 ms", "2 s", "2000.00", "1 ms"),
        ("all", "3", "4 s", "10 s", "2.50", "4 s"),
    )
    assert compare_table(compared(tmp_path)).heads[-1] == "ONNX Runtime/torch"
    first, worst, *_ = compare_lines(found)
    assert "over 2 operators above 0.1 % of the forward pass" in first
    assert "with onnxruntime (CPUExecutionProvider) 1.000, with the roofline 1.000" in first
    assert worst.endswith("(MatMul): 3 s by torch, 6 s by ONNX Runtime")


def test_profiles_of_different_models_are_not_compared(tmp_path):
    _, one = torch_profile(tmp_path)
    with pytest.raises(ValueError, match="expected profiles of one model and microbatch"):
        compare_engines(one, replace(one, microbatch_size=7))
    with pytest.raises(ValueError, match="expected profiles of one model and microbatch"):
        compare_engines(one, profiled(attention(tmp_path)))


def test_torch_and_onnx_runtime_measure_the_same_graph(tmp_path):
    model = attention(tmp_path)
    by_torch = measure(model, model_path="model.onnx", repetitions=1, cached=False)
    found = compare_engines(by_torch, profiled(model))
    assert sum(row.count for row in found.rows) == len(model.graph.operators)
    assert found.total.torch_s > 0
    assert found.total.onnxruntime_s > 0
