import subprocess
import sys
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.growth import Kernel, Work
from planner.artefacts.profile import PartTime, Source, stash_bytes
from planner.artefacts.roofline import rescaled_times
from planner.artefacts.topology import DeviceType
from planner.clusters.yaml.read import device_table, shipped_device_type
from planner.profilers.analytic import analytic, fit_constants, rank_correlation, rescale
from planner.profilers.efficiencies import CPU, HALF, SINGLE, device_family, rates_of
from planner.profilers.facts import Facts, facts
from planner.profilers.kernels import listed
from planner.profilers.runnable import Stash
from planner.reports.profile import profile_lines
from planner.solvers import SOLVERS
from planner.support.errors import OptionError
from tests.bench.profile_analytic import rows
from tests.profilers.test_profilers import attention, read, residual
from tests.support.builders import cluster, graph_of, problem_of, profile_of

FLOAT = 4  # bytes
GPU = DeviceType("made-up", 10**10, {"float32": 1e12, "float16": 8e12}, 1e11, "made up")
OTHER = DeviceType("other", 10**10, {"float32": 3e12}, 2e11, "made up")


def product(folder, rows=600):
    text = f"agraph (float[{rows},400] x) => (float[{rows},500] y) {{ y = MatMul (x, w) }}"
    return read(folder, text, {"w": (400, 500)})


def of(model, kind=GPU, **options):
    return analytic(model, model_path="model.onnx", kind=kind, **options)


# ---- the analytic profile


def test_a_product_by_hand(tmp_path):
    (cost,) = of(product(tmp_path)).operators
    flops = 2 * 600 * 400 * 500
    gradient = 400 * 500  # of the weight; that of the input is not asked for
    share = SINGLE.efficiencies[Work.PRODUCT]
    adding = SINGLE.efficiencies[Work.UPDATE]
    product_s = flops / (share.compute * 1e12)
    sum_s = 3 * gradient * FLOAT / (adding.memory * 1e11)
    assert product_s > (600 * 400 + 400 * 500 + 600 * 500) * FLOAT / (share.memory * 1e11)
    assert cost.forward_s == pytest.approx(SINGLE.launch_s + product_s, abs=1e-9)
    assert cost.backward_s == pytest.approx(2 * SINGLE.launch_s + product_s + sum_s, abs=1e-9)
    assert (cost.flops, cost.output_bytes) == (flops, 600 * 500 * FLOAT)


def test_a_small_operator_takes_the_time_in_which_the_host_starts_its_kernels(tmp_path):
    text = "agraph (float[1,40] x) => (float[1,50] y) { y = MatMul (x, w) }"
    small = read(tmp_path, text, {"w": (40, 50)})
    (cost,) = of(small).operators
    assert SINGLE.launch_s < cost.forward_s < SINGLE.host_forward_s
    # A product, and the sum with the gradient that is there; views are not started.
    assert cost.host_forward_s == pytest.approx(2.4 * SINGLE.host_forward_s)
    assert cost.host_backward_s == pytest.approx((1.8 + 1.0) * SINGLE.host_backward_s)
    times = rescaled_times(replace(of(small), loss_costs=()), GPU, None)
    assert times.forward_s.tolist() == [cost.host_forward_s]
    assert times.device_s[0].tolist() == [cost.forward_s]
    (on_cpu,) = of(small, shipped_device_type("cpu")).operators
    assert CPU.launch_s < on_cpu.forward_s < SINGLE.host_forward_s
    assert (on_cpu.host_forward_s, on_cpu.host_backward_s) == (0.0, 0.0)  # the host computes


def test_a_cast_is_a_kernel_that_the_host_starts(tmp_path):
    kind = shipped_device_type("H100-SXM")
    bare, cast = (of(product(tmp_path), kind, dtype=d).operators[0] for d in (None, "bfloat16"))
    more = HALF.host_forward_s, HALF.host_backward_s
    # Of x there and of the weight's gradient back; the weight's own is there once per step.
    assert cast.host_forward_s - bare.host_forward_s == pytest.approx(more[0])
    assert cast.host_backward_s - bare.host_backward_s == pytest.approx(more[1])


def test_a_compiled_step_has_no_times_of_a_host(tmp_path):
    for cost in of(residual(tmp_path), compiled=True).operators:
        assert (cost.host_forward_s, cost.host_backward_s) == (0.0, 0.0)


def test_reports_say_how_long_the_host_starts_kernels(tmp_path):
    (line,) = (one for one in profile_lines(of(product(tmp_path))) if "host" in one)
    assert line.startswith("the host starts kernels in 26.4 us forward for ")
    on_cpu = profile_lines(of(product(tmp_path), shipped_device_type("cpu")))
    assert not any("host" in one for one in on_cpu)


def test_types_of_devices_have_shares_of_their_own(tmp_path):
    shares = {
        name: device_family(shipped_device_type(name), "bfloat16").efficiencies[Work.PRODUCT]
        for name in ("A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM", "B200", "L4")
    }
    assert [one.compute for one in shares.values()] == [0.76, 0.76, 0.7, 0.49, 0.79]
    on_v100 = device_family(shipped_device_type("V100-SXM2-16GB"), "float16")
    assert on_v100.efficiencies[Work.PRODUCT].compute == 0.63
    on_a100 = device_family(shipped_device_type("A100-SXM4-80GB"), "float32")
    assert on_a100 is SINGLE  # without tensor cores


# Of 64 products of 2,048 tokens into scores, and from them, by the width of a head: TFLOP/s on an
# A100 (github.com/EleutherAI/cookbook, sizing/results/transformer_data/h_sweep.out).
SCORES = {
    128: (91.6, 134.8), 144: (93.3, 127.1), 496: (198.1, 226.4), 504: (191.1, 225.8),
    134: (70.6, 88.6), 142: (73.7, 89.7), 490: (121.2, 142.9), 510: (129.8, 155.8),
}  # fmt: skip


@pytest.mark.parametrize("width", SCORES)
def test_products_of_attention_take_about_what_was_measured(width):
    """One of three makes scores; all are priced alike."""
    options = {"dtype": torch.float16, "device": "meta"}
    queries, keys = torch.empty(64, 2048, width, **options), torch.empty(64, width, 2048, **options)
    (kernel,) = listed(lambda: torch.bmm(queries, keys))
    rates = rates_of(shipped_device_type("A100-SXM4-40GB"), "float16")
    took_s = max(
        kernel.flops / rates.flops_per_s[kernel.work], kernel.bytes / rates.bytes_per_s[kernel.work]
    )
    into_s, from_s = (kernel.flops / (1e12 * rate) for rate in SCORES[width])
    assert took_s == pytest.approx((into_s + 2 * from_s) / 3, rel=0.15)
    assert (kernel.work is Work.UNALIGNED_PRODUCT) == (width % 8 > 0)


def test_what_is_bound_by_memory_takes_its_bytes(tmp_path):
    text = "agraph (float[1000,1000] x) => (float[1000,1000] y) { a = Mul (x, s) y = Relu (a) }"
    _, relu = of(read(tmp_path, text, {"s": 1000})).operators
    share = SINGLE.efficiencies[Work.ELEMENTWISE]
    expected = SINGLE.launch_s + 2 * 10**6 * FLOAT / (share.memory * 1e11)
    assert relu.forward_s == pytest.approx(expected, abs=1e-9)


def test_a_view_takes_no_time(tmp_path):
    model = attention(tmp_path)
    profile = of(model)
    for operator, cost in zip(model.graph.operators, profile.operators, strict=True):
        if operator.type in ("Split", "Identity", "Unsqueeze"):
            assert cost.forward_s == 0
        if operator.type in ("MatMul", "Softmax"):
            assert cost.forward_s > SINGLE.launch_s


def test_it_says_how_it_was_made(tmp_path):
    model = residual(tmp_path)
    profile = of(model)
    assert (profile.source, profile.engine) == (Source.ANALYTIC, "roofline")
    assert (profile.device_type, profile.dtype) == ("made-up", "float32")
    assert (profile.threads, profile.repetitions, profile.spread) == (None, 0, 0.0)
    assert (profile.whole_step, profile.warnings) == (None, ())
    assert profile.model_hash == model.hash
    assert of(model, shipped_device_type("cpu")).threads == 1
    expected = [one.stash.private_bytes for one in facts(model)]
    assert [cost.stash_private_bytes for cost in profile.operators] == expected
    assert stash_bytes(profile, range(len(profile.operators))) > 0


def test_half_precision_takes_the_speed_of_tensor_cores(tmp_path):
    model = product(tmp_path)
    (single,), (half,) = of(model).operators, of(model, dtype="float16").operators
    assert half.forward_s < single.forward_s
    assert of(model, dtype="float16").dtype == "float16"
    assert device_family(GPU, "float16") is HALF
    assert device_family(GPU, "bfloat16") is SINGLE  # of which no speed is known
    (warning,) = of(model, dtype="bfloat16").warnings
    assert "no speed of made-up in bfloat16 is known" in warning
    assert device_family(shipped_device_type("cpu"), "float16") is CPU


def test_an_unknown_device_type_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"unknown device type 'V100'; known: .*V100-SXM2-16GB"):
        shipped_device_type("V100")
    assert shipped_device_type("T4") == device_table()["T4"]


def test_every_kind_of_work_has_efficiencies_with_their_source():
    own = [device_family(kind, "float16") for kind in device_table().values()]
    for one in (SINGLE, HALF, CPU, *own):
        assert set(one.efficiencies) == set(Work)
        assert one.launch_source
        assert one.host_source
        for share in one.efficiencies.values():
            assert share.compute > 0
            assert share.memory > 0
            assert share.source


@pytest.mark.parametrize("kind", sorted(device_table()))
def test_more_rows_are_never_faster(kind, tmp_path):
    times = []
    for num_rows in (1, 2, 64, 128, 600):
        (cost,) = of(product(tmp_path, num_rows), shipped_device_type(kind)).operators
        times.append((cost.forward_s, cost.backward_s))
    assert times == sorted(times)
    assert [b for _, b in times] == sorted(b for _, b in times)


# ---- rescaled profiles


def measured(model):
    """A profile that claims to be measured on the made-up device."""
    return replace(of(model), source=Source.MEASURED, engine="torch", repetitions=3)


def test_a_rescaled_profile_has_the_times_that_solve_takes(tmp_path):
    profile = measured(attention(tmp_path))
    found = rescale(profile, OTHER, GPU)
    expected = rescaled_times(profile, OTHER, GPU)
    assert [cost.forward_s for cost in found.operators] == expected.device_s[0].tolist()
    assert [cost.backward_s for cost in found.operators] == expected.device_s[1].tolist()
    assert [cost.host_forward_s for cost in found.operators] == expected.host_s[0].tolist()
    assert expected.host_s[0].any()
    on_cpu = rescaled_times(profile, shipped_device_type("cpu"), GPU)
    assert not on_cpu.host_s.any()
    assert (found.source, found.engine, found.device_type) == (Source.RESCALED, "torch", "other")
    assert "rescaled from made-up (measured) by the ratio of the rooflines" in found.warnings
    assert (found.whole_step, found.threads) == (None, None)
    assert found.views == profile.views


def test_a_rescaled_profile_plans_as_the_measured_one_does_on_that_device(tmp_path):
    profile = measured(residual(tmp_path))
    topology = cluster([OTHER, OTHER])
    direct, found = (
        SOLVERS["antichain"](problem_of(one, topology, measured_on=kind), 10.0)
        for one, kind in ((profile, GPU), (rescale(profile, OTHER, GPU), OTHER))
    )
    assert found.strategy == direct.strategy
    assert found.bound_s == direct.bound_s


def test_a_rescaled_profile_leaves_out_what_was_measured_of_parts(tmp_path):
    """Their shares are those of the device that they were measured on."""
    profile = measured(residual(tmp_path))
    part = PartTime((2,), ("S0,R->S0",), 0.9, 0.9)
    parts = tuple(replace(one, parts=(part,)) for one in profile.operators)
    found = rescale(replace(profile, operators=parts), OTHER, GPU)
    assert not any(one.parts for one in found.operators)


def test_a_rescaled_profile_keeps_the_share_of_weights_in_the_backward(tmp_path):
    profile = measured(residual(tmp_path))
    apart = tuple(replace(one, backward_weight_s=0.3 * one.backward_s) for one in profile.operators)
    found = rescale(replace(profile, operators=apart), OTHER, GPU)
    for one, before in zip(found.operators, apart, strict=True):
        assert one.backward_weight_s == pytest.approx(0.3 * one.backward_s, abs=1e-9)
        assert one.backward_s != before.backward_s or not one.backward_s


def test_a_rescaled_profile_says_that_a_speed_is_not_known(tmp_path):
    profile = replace(measured(residual(tmp_path)), dtype="bfloat16")
    found = rescale(profile, OTHER, GPU)
    for kind in (OTHER, GPU):
        note = f"no speed of {kind.name} in bfloat16 is known; its speed in float32 was taken"
        assert (note in found.warnings) == ("bfloat16" not in kind.flops)
    assert any("in bfloat16 is known" in one for one in found.warnings)


def test_a_profile_for_the_device_already_stays_as_it_is(tmp_path):
    profile = measured(residual(tmp_path))
    assert rescale(profile, GPU, GPU) is profile


def test_views_of_an_analytic_profile_scale_with_the_bandwidth(tmp_path):
    profile = of(attention(tmp_path))
    times = rescaled_times(profile, OTHER, GPU)
    split = [o.type for o in profile.graph.operators].index("Split")
    assert times.forward_s[split] == 0
    assert times.device_s[1, split] == pytest.approx(profile.operators[split].backward_s / 2)


def test_rescaling_loads_no_torch():
    code = "import sys, planner.profilers.analytic; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_times_of_an_unknown_device_cannot_be_rescaled(tmp_path):
    with pytest.raises(OptionError, match="whose speed is not known"):
        rescale(measured(residual(tmp_path)), OTHER, None)
    imported = replace(profile_of(graph_of([[], [0]]), [1.0, 2.0]), device_type="imported")
    with pytest.raises(OptionError, match="does not name the device"):
        rescale(imported, OTHER, GPU)


# ---- fits


def test_the_fit_finds_the_constants_of_a_synthetic_profile(tmp_path):
    model = residual(tmp_path)
    one = Facts(Stash((), 0, ()), 0, 0, 0, 0)
    found = [
        replace(one, kernels=(Kernel(Work.PRODUCT, 10 ** (7 + i % 3), 10 ** (5 + i % 4)),))
        for i in range(len(model.graph.operators))
    ]
    share = SINGLE.efficiencies[Work.PRODUCT]
    times = [
        SINGLE.launch_s
        + max(
            one.kernels[0].flops / (share.compute * 2e12),
            one.kernels[0].bytes / (share.memory * 3e10),
        )
        for one in found
    ]
    profile = of(model)
    costs = zip(profile.operators, times, strict=True)
    profile = replace(
        profile,
        operators=tuple(replace(c, forward_s=t, backward_s=0.0) for c, t in costs),
    )
    fit = fit_constants(found, profile)
    assert fit.peak_flops == pytest.approx(2e12, rel=0.01)
    assert fit.memory_bandwidth_bytes_per_s == pytest.approx(3e10, rel=0.01)
    assert fit.rank_correlation == 1.0
    assert fit.median_error <= fit.p90_error < 0.01


def test_the_fit_of_an_analytic_profile_is_exact_and_reported(tmp_path):
    model = attention(tmp_path)
    profile = of(model, shipped_device_type("cpu"))
    ((name, correlation, median, p90),) = rows({"tiny": model.path}, {"tiny": profile})
    assert name == "tiny"
    assert correlation > 0.99
    assert median <= p90 < 0.01


def test_facts_of_another_model_cannot_be_fitted(tmp_path):
    with pytest.raises(ValueError, match="1 facts, but 7 operators"):
        fit_constants(facts(product(tmp_path)), of(residual(tmp_path)))


# ---- ranks


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 0.8),
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),  # ranks 1, 2.5, 2.5, 4
        ([5, 5], [5, 5], 1.0),
        ([5, 5], [1, 2], 0.0),
    ],
)
def test_rank_correlations_by_hand(a, b, expected):
    assert rank_correlation(a, b) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20))
def test_a_rank_correlation_is_symmetric_bounded_and_blind_to_scale(pairs):
    a, b = (np.array(values, dtype=float) for values in zip(*pairs, strict=True))
    found = rank_correlation(a, b)
    assert -1 <= found <= 1
    assert rank_correlation(b, a) == found
    assert rank_correlation(np.exp(a), 3 * b + 1) == found
    assert rank_correlation(a, a) == 1


def test_in_a_shorter_type_tensors_are_smaller_and_products_faster(tmp_path):
    model = product(tmp_path, 4096)
    kind = shipped_device_type("A100-SXM4-80GB")
    whole, short = of(model, kind), of(model, kind, dtype="bfloat16")
    assert short.dtype == "bfloat16"
    assert {p.dtype for p in short.graph.parameters} == {"float32"}
    made = [(t.dtype, t.bytes) for t in short.graph.tensors if t.name in model.graph.outputs]
    before = [(t.dtype, t.bytes) for t in whole.graph.tensors if t.name in model.graph.outputs]
    assert made == [("bfloat16", before[0][1] // 2)]
    assert short.operators[0].forward_s < whole.operators[0].forward_s


def test_autocast_neither_lengthens_nor_takes_other_types(tmp_path):
    kind = shipped_device_type("A100-SXM4-80GB")
    for dtype in ("float64", "int8"):
        with pytest.raises(OptionError, match="expected float32, the model's own, or"):
            of(product(tmp_path, 8), kind, dtype=dtype)


def test_bfloat16_parameters_are_read_and_gathered_as_they_are(tmp_path):
    """A product keeps no copy of its weight; the weight and its gradient have 2 bytes."""
    kind = shipped_device_type("A100-SXM4-80GB")
    model = attention(tmp_path)
    short = of(model, kind, dtype="bfloat16")
    made = of(model, kind, dtype="bfloat16", parameters="bfloat16")
    assert (short.parameter_dtype, made.parameter_dtype) == (None, "bfloat16")
    for one, own in zip(made.graph.parameters, model.graph.parameters, strict=True):
        assert one.dtype == ("bfloat16" if own.trainable else own.dtype)
        assert one.gradient_bytes == one.bytes
    elements = {p.name: prod(p.shape) for p in model.graph.parameters if p.trainable}
    differ = 0
    for operator, one, other in zip(
        made.graph.operators, made.operators, short.operators, strict=True
    ):
        read = sum(elements.get(name, 0) for name in operator.parameters)
        if operator.type == "MatMul" and read:
            differ += 1
            assert other.parameter_bytes - one.parameter_bytes == 2 * read
            # A longer gradient is made of the product's.
            assert one.backward_s < other.backward_s
    assert differ


def test_gradients_of_bfloat16_parameters_may_be_added_up_in_float32(tmp_path):
    how = {"dtype": "bfloat16", "parameters": "bfloat16"}
    full = of(product(tmp_path), **how, gradients="float32")
    (weight,) = full.graph.parameters
    assert (weight.dtype, weight.bytes, weight.gradient_bytes) == (
        "bfloat16", 2 * 400 * 500, 4 * 400 * 500,
    )  # fmt: skip
    assert full.operators[0].backward_s > of(product(tmp_path), **how).operators[0].backward_s


@pytest.mark.parametrize(("how", "said"), [
    ({"parameters": "bfloat16"}, "--parameters bfloat16: expected --dtype bfloat16, too"),
    ({"parameters": "bfloat16", "dtype": "float16"}, "expected --dtype bfloat16, too"),
    ({"gradients": "bfloat16"}, "--gradients bfloat16: expected --parameters bfloat16, too"),
])  # fmt: skip
def test_types_of_parameters_that_do_not_fit_are_refused(tmp_path, how, said):
    with pytest.raises(OptionError, match=said):
        of(product(tmp_path, 8), **how)
