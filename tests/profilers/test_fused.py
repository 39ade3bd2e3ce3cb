import pytest

from planner.artefacts.files import read_profile, write_profile
from planner.artefacts.growth import Kernel, Work
from planner.artefacts.profile import COMPILED, is_computed
from planner.clusters.yaml.read import shipped_device_type
from planner.model.load import ReadOptions, load
from planner.profilers.analytic import computed, rescale
from planner.profilers.efficiencies import rates_of
from planner.profilers.engines import profile_file, profile_with
from planner.profilers.options import Measuring, ProfileEngine
from planner.support.errors import OptionError
from tests.profilers.test_growth import TINY
from tests.profilers.test_profilers import read

A100 = shipped_device_type("A100-SXM4-80GB")
FLOAT, HALF = 4, 2  # bytes
N = 64 * 64  # elements of every tensor of `CHAIN`

CHAIN = """agraph (float[64,64] x) => (float[64,64] y) {
    a = MatMul (x, v)
    b = Relu (a)
    c = Mul (b, s)
    d = MatMul (c, w)
    e = Add (d, c)
    y = MatMul (e, u)
}"""
"""Relu and Mul are one kernel, which reads a and writes c for d and e; Add is another."""


def chain(folder):
    return read(folder, CHAIN, {"v": (64, 64), "w": (64, 64), "u": (64, 64), "s": 64})


def compiled(model, dtype=None, kind=A100):
    return computed(model, model_path="model.onnx", kind=kind, dtype=dtype, compiled=True)


def moved(model, dtype=None):
    """By output of an operator, the bytes of its kernels that stream, forward and backward."""
    made = compiled(model, dtype)
    pairs = zip(model.graph.operators, made.operators, strict=True)
    return {
        operator.outputs[0]: tuple(
            [one.bytes for one in kernels if one.work not in (Work.PRODUCT, Work.GATHER)]
            for kernels in (own.forward, own.backward)
        )
        for operator, own in pairs
    }


def test_a_chain_in_single_precision_by_hand(tmp_path):
    found = moved(chain(tmp_path))
    whole = N * FLOAT
    # Relu reads a; backward it writes a's gradient, and computes b, which it needs, again.
    assert found["b"] == ([whole], [whole])
    # Mul writes c for d and e and reads s; backward it reads both gradients of c, and adds to s's.
    assert found["c"] == ([whole + 64 * FLOAT], [2 * whole + 2 * 64 * FLOAT])
    # Add reads d and c, and writes e, whose gradient is that of d and c as it is.
    assert found["e"] == ([3 * whole], [])
    # Products only add to the gradients of their weights, which are of the same type.
    assert found["d"] == ([], [3 * N * FLOAT])


def test_under_autocast_what_products_read_is_written_in_their_type(tmp_path):
    found = moved(chain(tmp_path), "bfloat16")
    whole, half = N * FLOAT, N * HALF
    assert found["b"] == ([half], [half])  # a is of the type of the product
    # c is written for the product d in half precision, for the sum e in the type that Mul makes.
    assert found["c"] == ([whole + half + 64 * FLOAT], [whole + half + 2 * 64 * FLOAT])
    # The weight is cast; its gradient is added up in its own type.
    assert found["d"] == ([N * (FLOAT + HALF)], [N * (HALF + 2 * FLOAT)])


def test_views_are_no_kernels_and_keep_others_together(tmp_path):
    text = """agraph (float[64,64] x) => (float[64,64] y) {
        a = MatMul (x, v)
        b = Relu (a)
        t = Transpose (b)
        c = Sigmoid (t)
        y = MatMul (c, w)
    }"""
    found = moved(read(tmp_path, text, {"v": (64, 64), "w": (64, 64)}))
    assert found["t"] == ([], [])
    assert (found["b"][0], found["c"][0]) == ([N * FLOAT], [N * FLOAT])


def test_the_loss_is_one_kernel_each_way(tmp_path):
    made = compiled(chain(tmp_path))
    (loss,) = made.losses.values()
    assert loss.forward == (Kernel(Work.NORMALIZATION, N, N * FLOAT),)
    assert loss.backward == (Kernel(Work.NORMALIZATION, N, 2 * N * FLOAT),)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gpt2", None)])
def test_a_compiled_step_is_never_slower(name, dtype, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(TINY[name]().SerializeToString())
    model = load(path, ReadOptions(batch=2, dimensions={"seq": 80}))
    eager, made = computed(model, model_path=None, kind=A100, dtype=dtype), compiled(model, dtype)
    pairs = list(zip(made.profile.operators, eager.profile.operators, strict=True))
    assert all(one.forward_s <= own.forward_s for one, own in pairs)
    assert sum(one.backward_s for one, _ in pairs) < sum(own.backward_s for _, own in pairs)
    multiply = (Work.PRODUCT, Work.CAUSAL_ATTENTION, Work.CAUSAL_ATTENTION_BACKWARD)
    kept, all_ = (
        [
            kernel
            for one in of.operators
            for kernel in (*one.forward, *one.backward)
            if kernel.work in multiply
        ]
        for of in (made, eager)
    )
    assert kept == all_


def test_launches_take_no_time(tmp_path):
    made = compiled(chain(tmp_path))
    rates = rates_of(A100, "float32", compiled=True)
    assert (rates.launch_s, rates.host_forward_s, rates.host_backward_s) == (0.0, 0.0, 0.0)
    flops = 2 * 64 * N
    least_s = max(
        flops / rates.flops_per_s[Work.PRODUCT], 3 * N * FLOAT / rates.bytes_per_s[Work.PRODUCT]
    )
    assert made.profile.operators[0].forward_s == pytest.approx(least_s, abs=1e-9)


def test_a_profile_says_that_its_step_is_compiled_also_on_another_device(tmp_path):
    (tmp_path / "model.onnx").write_bytes(TINY["llama"]().SerializeToString())
    model = load(tmp_path / "model.onnx", ReadOptions(batch=2, dimensions={"seq": 80}))
    how = Measuring(device=A100.name, dtype="bfloat16", compiled=True)
    profile = profile_with(ProfileEngine.ANALYTIC, model, "model.onnx", how)
    assert profile.engine == COMPILED
    assert is_computed(profile)
    assert profile.growth is not None
    there = rescale(profile, shipped_device_type("H100-SXM"), A100)
    assert there.engine == COMPILED
    due = compiled(model, "bfloat16", shipped_device_type("H100-SXM")).profile
    assert [(one.forward_s, one.backward_s) for one in there.operators] == [
        (one.forward_s, one.backward_s) for one in due.operators
    ]


@pytest.mark.parametrize("name", ["compiled", "fused_loss", "launch_blocking"])
def test_only_computed_profiles_can_say_how_a_step_runs(tmp_path, name):
    flag = name.replace("_", "-")
    with pytest.raises(OptionError, match=f"--{flag} is for computed profiles"):
        profile_with(ProfileEngine.TORCH, chain(tmp_path), "model.onnx", Measuring(**{name: True}))
    assert profile_file("net", "T4", None, None, **{name: True}) == f"net-T4-{flag}.json"


def test_a_fused_loss_reads_its_output_once_and_writes_its_gradient_once(tmp_path):
    (tmp_path / "model.onnx").write_bytes(TINY["llama"]().SerializeToString())
    model = load(tmp_path / "model.onnx", ReadOptions(batch=2, dimensions={"seq": 80}))
    eager, own = (
        computed(model, model_path="m", kind=A100, dtype="bfloat16", fused_loss=fused)
        for fused in (False, True)
    )
    assert own.operators == eager.operators
    ((name, kernels),) = own.losses.items()
    (output,) = (one for one in own.profile.graph.tensors if one.name == name)
    assert output.dtype == "bfloat16"
    assert [one.bytes for one in kernels.forward] == [output.bytes]
    assert [one.bytes for one in kernels.backward] == [2 * output.bytes]
    assert own.profile.loss_costs[0].forward_s < eager.profile.loss_costs[0].forward_s
    assert (own.profile.fused_loss, eager.profile.fused_loss) == (True, False)


def test_how_a_step_runs_stays_in_the_file_and_on_another_device(tmp_path):
    (tmp_path / "model.onnx").write_bytes(TINY["llama"]().SerializeToString())
    model = load(tmp_path / "model.onnx", ReadOptions(batch=2, dimensions={"seq": 80}))
    how = Measuring(device=A100.name, dtype="bfloat16", fused_loss=True, launch_blocking=True)
    profile = profile_with(ProfileEngine.ANALYTIC, model, "model.onnx", how)
    assert profile.engine == "roofline, fused loss, launch blocking"
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    on_cpu = computed(chain(tmp_path), model_path="m", kind=shipped_device_type("cpu"),
                      fused_loss=True).profile  # fmt: skip
    write_profile(on_cpu, tmp_path / "cpu.json")
    assert "planner-profile/3" in (tmp_path / "cpu.json").read_text()
    there = rescale(profile, shipped_device_type("H100-SXM"), A100)
    assert is_computed(there) and there.fused_loss and there.launch_blocking
    assert there.operators[0].host_forward_s > 0  # it is not compiled
