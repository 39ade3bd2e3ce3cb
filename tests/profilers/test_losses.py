"""What losses cost: by hand, beside PyTorch's own profiler, and in the costs of plans."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from planner.artefacts.graph import LossChoice
from planner.artefacts.growth import Work
from planner.artefacts.profile import LossCost
from planner.artefacts.roofline import loss_times_s, rescaled_times
from planner.artefacts.topology import DeviceType
from planner.costs.operators import operator_times
from planner.profilers.analytic import analytic, rescale
from planner.profilers.efficiencies import SINGLE
from planner.profilers.engines import profile_with
from planner.profilers.interpolate import interpolated
from planner.profilers.losses import computed_losses, measured_losses
from planner.profilers.options import Measuring, ProfileEngine
from tests.profilers.test_profilers import read
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

GPU = DeviceType("made-up", 10**10, {"float32": 1e12}, 1e11, "made up")
OTHER = DeviceType("other", 10**10, {"float32": 1e12}, 2e11, "made up")
FLOAT = 4  # bytes


def chain():
    """Two operators of 0.3 s and 0.1 s forward, 0.5 s and 0.2 s backward."""
    return profile_of(graph_of([(), (0,)]), [0.3, 0.1], [0.5, 0.2])


def scores(folder, rows=512, classes=1000):
    text = f"agraph (float[N,8] x) => (float[N,{classes}] y) {{ y = MatMul (x, w) }}"
    return read(folder, text, {"w": (8, classes)}, batch=rows)


def of(model, kind=GPU):
    return analytic(model, model_path="model.onnx", kind=kind)


def test_a_mean_square_by_hand(tmp_path):
    model = read(
        tmp_path, "agraph (float[8,3,64,64] x) => (float[8,3,64,64] y) { y = Mul (x, s) }", {"s": 1}
    )
    (cost,) = of(model).loss_costs
    size_bytes = 8 * 3 * 64 * 64 * FLOAT
    share = SINGLE.efficiencies[Work.ELEMENTWISE].memory
    # Forward reads output and target; backward reads both and the gradient, and writes one.
    forward_s = SINGLE.launch_s + (2 * size_bytes + FLOAT) / (share * 1e11)
    assert cost.output == "y"
    assert cost.forward_s == pytest.approx(forward_s, rel=1e-3)
    assert cost.backward_s > SINGLE.launch_s + 3 * size_bytes / (share * 1e11)


@pytest.mark.serial
def test_the_measured_time_is_that_of_torchs_own_profiler(tmp_path):
    model = scores(tmp_path, rows=2048)
    (cost,), unknown = measured_losses(model.graph, device="cpu", threads=1, seed=0)
    output = torch.randn(2048, 1000, requires_grad=True)
    target = torch.randint(1000, (2048,))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(output, target)
            with torch.profiler.profile() as run:
                torch.nn.functional.cross_entropy(output, target)
                loss.backward()
            runs.append({e.key: e.self_cpu_time_total for e in run.key_averages()})
    finally:
        torch.set_num_threads(before)
    # The shortest: the first ones wait for memory, and any may wait for a core.
    forward_s = min(taken_us["aten::_log_softmax"] for taken_us in runs) / 1e6
    backward_s = min(taken_us["aten::_log_softmax_backward_data"] for taken_us in runs) / 1e6
    assert not unknown
    # The main kernels are a part of it, and most of it; in other units it would be 1,000 times more
    # or less, and a very busy machine makes it 10 times more.
    assert forward_s / 30 < cost.forward_s < 30 * forward_s
    assert backward_s / 30 < cost.backward_s < 30 * backward_s


def test_a_users_loss_that_is_not_there_is_left_out_and_said(tmp_path):
    model = scores(tmp_path)
    graph = replace(model.graph, losses=(LossChoice("y", "no_such_module:loss"),))
    known, unknown = measured_losses(graph, device="cpu", threads=1, seed=0)
    assert known == ()
    assert len(unknown) == 1
    assert "'y'" in unknown[0]
    assert "no_such_module" in unknown[0]
    computed, also_unknown = computed_losses(graph)
    assert (computed, also_unknown) == ({}, unknown)


def counted(output, target):
    """A loss that says how much it counts."""
    known = target >= 0
    return (output.logsumexp(1) * known).sum(), known.sum()


def test_a_users_loss_that_says_how_much_it_counts_is_priced(tmp_path):
    graph = replace(scores(tmp_path).graph, losses=(LossChoice("y", f"{__name__}:counted"),))
    known, unknown = measured_losses(graph, device="cpu", threads=1, seed=0)
    computed, also_unknown = computed_losses(graph)
    assert (unknown, also_unknown) == ((), ())
    assert known[0].backward_s > 0
    assert computed.keys() == {"y"}
    assert computed["y"].forward
    assert computed["y"].backward


def test_engines_measure_losses(tmp_path):
    model = scores(tmp_path)
    how = Measuring(contention=False, cache=False, repetitions=1, budget_s=0.01)
    for engine in (ProfileEngine.TORCH, ProfileEngine.ONNXRUNTIME):
        profile = profile_with(engine, model, "model.onnx", how)
        (cost,) = profile.loss_costs
        assert cost.output == "y"
        assert cost.forward_s > 0
        assert cost.backward_s > 0


def test_the_device_that_makes_an_output_pays_for_its_loss():
    profile = chain()
    (output,) = profile.graph.outputs
    with_loss = replace(profile, loss_costs=(LossCost(output, 0.01, 0.02),))
    forward, backward = loss_times_s(with_loss)
    assert forward.tolist() == [0, 0.01]
    assert backward.tolist() == [0, 0.02]
    times = operator_times(problem_of(with_loss, cluster([unit_type()])), 0)
    assert times.forward_s == pytest.approx([0.3, 0.11])
    assert times.backward_s == pytest.approx([0.5, 0.22])


def test_another_device_moves_the_bytes_of_a_loss_at_its_own_speed(tmp_path):
    profile = of(scores(tmp_path))
    here, there = (rescaled_times(profile, kind, GPU) for kind in (GPU, OTHER))
    without = replace(profile, loss_costs=())
    bare = [rescaled_times(without, kind, GPU) for kind in (GPU, OTHER)]
    (cost,) = profile.loss_costs
    assert (here.device_s - bare[0].device_s)[0].sum() == pytest.approx(cost.forward_s)
    assert (there.device_s - bare[1].device_s)[0].sum() == pytest.approx(cost.forward_s / 2)
    again = rescale(profile, OTHER, GPU)
    assert again.loss_costs == ()
    np.testing.assert_allclose(
        rescaled_times(again, OTHER, OTHER).backward_s, there.backward_s, rtol=1e-12
    )


def test_losses_lie_between_those_of_two_sizes(tmp_path):
    low, high = (of(scores(tmp_path, rows=n)) for n in (2_000, 4_000))
    between = interpolated((low, high), 3_000)
    (cost,), (small,), (large,) = (p.loss_costs for p in (between, low, high))
    assert small.backward_s < cost.backward_s < large.backward_s


def test_a_cost_of_what_is_no_output_is_refused():
    profile = chain()
    with pytest.raises(ValueError, match=r"loss_costs\[0\].output: expected outputs"):
        replace(profile, loss_costs=(LossCost("nothing", 0.1, 0.1),))
    (output,) = profile.graph.outputs
    with pytest.raises(ValueError, match=r"loss_costs\[1\].output"):
        replace(profile, loss_costs=(LossCost(output, 0.1, 0.1),) * 2)
    with pytest.raises(ValueError, match="backward_s: expected at least 0"):
        LossCost(output, 0.1, -0.1)
