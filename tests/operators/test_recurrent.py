"""LSTM, GRU and RNN, against ONNX Runtime and torch's modules."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

from planner.model.load import load
from planner.operators import recurrent, to_torch
from planner.profilers.facts import facts
from planner.support.errors import OperatorError

T, B, H = 4, 3, 3
IN = 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def floats(*shape):
    return np.random.default_rng(shape).uniform(-1, 1, shape).astype(np.float32)


def saved(folder, kind, present, attributes, outputs, samples_first=False):
    """The operator with weights as initializers; `present` are its optional inputs by name."""
    d = 2 if attributes.get("direction") == "bidirectional" else 1
    state = (B, d, H) if samples_first else (d, B, H)
    optional = {
        "b": floats(d, 2 * GATES[kind] * H),
        "l": np.array([4, 1, 3], np.int32),
        "h": floats(*state),
        "c": floats(*state) / 2,
        "p": floats(d, 3 * H),
    }
    names = ["b", "l", "h", *(("c", "p") if kind == "LSTM" else ())]
    inputs = ["x", "w", "r", *(n if n in present else "" for n in names)]
    values = {"w": floats(d, GATES[kind] * H, IN), "r": floats(d, GATES[kind] * H, H)}
    values |= {name: optional[name] for name in present}
    shape = (B, T, IN) if samples_first else (T, B, IN)
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, outputs, "it", hidden_size=H, **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs if name],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    path = folder / "model.onnx"
    opset = [helper.make_opsetid("", 14)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path, torch.from_numpy(floats(*shape) * 2)


BOTH = {"direction": "bidirectional"}
CASES = {
    "lstm": ("LSTM", "b h c", {}, ["y", "h", "c"]),
    "lstm in reverse": ("LSTM", "b", {"direction": "reverse"}, ["y", "h", "c"]),
    "lstm both ways": ("LSTM", "b h c", BOTH, ["y", "h", "c"]),
    "lstm without bias, its last memory alone": ("LSTM", "", {}, ["", "", "c"]),
    "lstm with peepholes": ("LSTM", "b p c", {}, ["y", "h", "c"]),
    "lstm with lengths, both ways": ("LSTM", "b l h c", BOTH, ["y", "h", "c"]),
    "lstm with coupled gates": ("LSTM", "b c", {"input_forget": 1}, ["y"]),
    "lstm clipped": ("LSTM", "b c", {"clip": 0.4}, ["y", "", "c"]),
    "lstm of other functions": (
        "LSTM", "b", {"activations": ["HardSigmoid", "Softsign", "LeakyRelu"],
                      "activation_alpha": [0.3, 0.2], "activation_beta": [0.4]}, ["y"],
    ),
    "gru": ("GRU", "b h", {}, ["y", "h"]),
    "gru as torch has it": ("GRU", "b h", {"linear_before_reset": 1, **BOTH}, ["y", "h"]),
    "gru with lengths in reverse": ("GRU", "b l", {"direction": "reverse"}, ["y", "h"]),
    "gru of two pairs of functions": (
        "GRU", "b", {**BOTH, "activations": ["Sigmoid", "Elu", "Sigmoid", "Affine"],
                     "activation_alpha": [0.5, 0.6], "activation_beta": [0.1]}, ["y"],
    ),
    "rnn": ("RNN", "b h", {"direction": "reverse"}, ["y", "h"]),
    "rnn of relu": ("RNN", "b", {"activations": ["Relu", "Relu"], **BOTH}, ["y", "h"]),
    "rnn with lengths": ("RNN", "b l h", {"activations": ["ScaledTanh"],
                                          "activation_alpha": [0.7], "activation_beta": [0.4]},
                         ["y", "h"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_computes_what_onnx_runtime_does(name, tmp_path):
    kind, present, attributes, outputs = CASES[name]
    outputs = [f"out {one}" if one else "" for one in outputs]
    path, x = saved(tmp_path, kind, present.split(), attributes, outputs)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x.numpy()})
    module = to_torch(load(path))
    made = dict(zip(module.output_names, module(x), strict=True))
    for output, one in zip(filter(None, outputs), expected, strict=True):
        np.testing.assert_allclose(made[output].detach().numpy(), one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_finite_differences(name, tmp_path):
    kind, present, attributes, outputs = CASES[name]
    outputs = [f"out {one}" if one else "" for one in outputs]
    path, x = saved(tmp_path, kind, present.split(), attributes, outputs)
    module = to_torch(load(path)).double()
    parameters = dict(module.named_parameters())
    values = [one.detach().requires_grad_() for one in (x.double(), *parameters.values())]

    def run(first, *others):
        own = dict(zip(parameters, others, strict=True))
        return torch.func.functional_call(module, own, (first,))

    assert torch.autograd.gradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize("kind", GATES)
def test_samples_first_is_the_same_but_for_the_order(kind, tmp_path):
    outputs = ["y", "out h"]
    path, x = saved(tmp_path, kind, ["b"], BOTH, outputs)
    plain = to_torch(load(path))(x)
    path, _ = saved(tmp_path, kind, ["b"], {**BOTH, "layout": 1}, outputs, samples_first=True)
    y, h = to_torch(load(path))(x.transpose(0, 1))
    assert torch.equal(y, plain[0].permute(2, 0, 1, 3))
    assert torch.equal(h, plain[1].transpose(0, 1))


ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}  # torch's gate at each of ONNX's


@pytest.mark.parametrize("kind", GATES)
def test_weights_and_gradients_are_those_of_torchs_module(kind, tmp_path):
    attributes = {**BOTH, **({"linear_before_reset": 1} if kind == "GRU" else {})}
    path, x = saved(tmp_path, kind, ["b"], attributes, ["y"])
    module = to_torch(load(path))
    own = getattr(torch.nn, kind)(IN, H, bidirectional=True)
    theirs = dict(own.named_parameters())

    def gates(one):
        parts = one.chunk(GATES[kind])
        return torch.cat([parts[i] for i in ORDER[kind]])

    ours = dict(module.named_parameters())
    with torch.no_grad():
        for d, end in enumerate(("l0", "l0_reverse")):
            ours["w"][d] = gates(theirs[f"weight_ih_{end}"])
            ours["r"][d] = gates(theirs[f"weight_hh_{end}"])
            both = [gates(theirs[f"bias_{one}_{end}"]) for one in ("ih", "hh")]
            ours["b"][d] = torch.cat(both)
    expected, _ = own(x)
    (y,) = module(x)
    torch.testing.assert_close(y.transpose(1, 2).flatten(2), expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    for d, end in enumerate(("l0", "l0_reverse")):
        torch.testing.assert_close(ours["w"].grad[d], gates(theirs[f"weight_ih_{end}"].grad))
        torch.testing.assert_close(ours["r"].grad[d], gates(theirs[f"weight_hh_{end}"].grad))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["lstm both ways", "gru", "gru as torch has it", "rnn"])
def test_facts_are_known_without_a_run(name, dtype, tmp_path):
    kind, present, attributes, _ = CASES[name]
    path, _ = saved(tmp_path, kind, present.split(), attributes, ["y"])
    (one,) = facts(load(path), dtype)
    d = 2 if attributes.get("direction") == "bidirectional" else 1
    products = 2 * T * B * d * GATES[kind] * H * (IN + H)
    assert products <= one.flops <= 2 * products
    assert one.backward_flops > one.flops


def test_a_length_of_its_own_keeps_a_layer_off_torchs_function(tmp_path, monkeypatch):
    path, x = saved(tmp_path, "LSTM", ["b", "l"], {}, ["y"])
    monkeypatch.setattr(recurrent, "_by_torch", None)
    assert to_torch(load(path))(x)[0].shape == (T, 1, B, H)


def test_what_a_layer_cannot_be_is_an_error(tmp_path):
    path, _ = saved(tmp_path, "LSTM", ["b"], {"activations": ["Sigmoid", "Cosine", "Tanh"]}, ["y"])
    with pytest.raises(OperatorError, match="activations: expected a multiple of 1 among affine"):
        to_torch(load(path))
    x, w, r = torch.zeros(T, B, IN), torch.zeros(1, H, IN), torch.zeros(1, H, H)
    with pytest.raises(OperatorError, match="direction: expected forward, reverse or bidirect"):
        recurrent.rnn(x, w, r, direction="backward", num_outputs=1)
    with pytest.raises(OperatorError, match="layout: expected 0 or 1, got 2"):
        recurrent.rnn(x, w, r, layout=2, num_outputs=1)
    with pytest.raises(OperatorError, match="hidden_size: expected at least 1, got 0"):
        recurrent.rnn(x, w[:, :0], r[:, :0, :0], num_outputs=1)


# ---- shapes


def arguments(kind, direction, layout, dtype):
    """Arguments of an operator that fit each other, all that it may have."""
    d, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    state = (B, d, H) if layout else (d, B, H)
    shapes = {
        "x": (B, T, IN) if layout else (T, B, IN), "w": (d, gates * H, IN),
        "r": (d, gates * H, H), "b": (d, 2 * gates * H), "initial_h": state,
    }  # fmt: skip
    shapes |= {"initial_c": state} if kind == "LSTM" else {}
    tensors = {name: torch.from_numpy(floats(*shape)).to(dtype) for name, shape in shapes.items()}
    more = {"linear_before_reset": 1} if kind == "GRU" else {}  # as torch's own function has it
    return {**tensors, "direction": direction, "layout": layout, "hidden_size": H, **more}


ONNX_NAMES = {"w": "W", "r": "R", "b": "B", "p": "P"}


def damaged(tensor, dim):
    """A tensor that is one smaller along a dimension."""
    return tensor.narrow(dim, 0, tensor.shape[dim] - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_no_shape_that_does_not_fit_reaches_torch(kind, direction, layout, dtype, monkeypatch):
    """Torch would read what is not its own: of most of these cases, the whole process ends."""
    given = arguments(kind, direction, layout, dtype)
    function = getattr(recurrent, kind.lower())
    function(**given, num_outputs=1)
    given["sequence_lens"] = torch.full((B,), T, dtype=torch.int32)
    if kind == "LSTM":
        given["p"] = given["b"][:, : 3 * H]
    function(**given, num_outputs=1)
    monkeypatch.setattr(recurrent, "_layer", None)  # nothing runs
    for name, value in given.items():
        if name == "x" or not isinstance(value, torch.Tensor):
            continue
        for dim in range(value.dim()):
            wrong = damaged(value, dim)
            expected = f"{ONNX_NAMES.get(name, name)}: expected shape {tuple(value.shape)}, got "
            with pytest.raises(OperatorError) as error:
                function(**{**given, name: wrong}, num_outputs=1)
            assert str(error.value).startswith(f"{expected}{tuple(wrong.shape)} (X has shape ")
    for name in ("x", "r"):
        with pytest.raises(OperatorError, match=f"{name.upper()}: expected 3 dimensions, got "):
            function(**{**given, name: given[name][0]}, num_outputs=1)
    with pytest.raises(OperatorError, match=r"W: .*; R: .*; B: .*hidden_size 4, layout"):
        function(**{**given, "hidden_size": H + 1}, num_outputs=1)


@pytest.mark.parametrize(("state", "absent"), [
    ("initial_h", "initial_c"), ("initial_c", "initial_h"),
])  # fmt: skip
def test_a_state_is_checked_where_the_other_one_is_absent(state, absent):
    given = {**arguments("LSTM", "bidirectional", 0, torch.float64), absent: None}
    with pytest.raises(
        OperatorError, match=rf"^{state}: expected shape \(2, 3, 3\), got \(1, 3, 3"
    ):
        recurrent.lstm(**{**given, state: given[state][:1]}, num_outputs=1)


def test_a_damaged_file_is_an_error_that_names_the_operator(tmp_path):
    path, _ = saved(tmp_path, "LSTM", ["b", "h", "c"], BOTH, ["y"])
    proto = onnx.load(path)
    (state,) = (one for one in proto.graph.initializer if one.name == "c")
    state.CopyFrom(numpy_helper.from_array(floats(1, B, H), "c"))
    onnx.save(proto, path)
    expected = (
        f"{path}: LSTM 'it' (version 14): initial_c: expected shape (2, 3, 3), got (1, 3, 3) (X has"
        " shape (4, 3, 2); direction bidirectional, hidden_size 3, layout 0)"
    )
    with pytest.raises(OperatorError) as error:
        to_torch(load(path))
    assert str(error.value) == expected
