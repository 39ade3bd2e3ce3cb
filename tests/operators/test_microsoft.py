"""The operators of ONNX Runtime's optimisers, against ONNX Runtime itself."""

import inspect

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.capi import _pybind_state as runtime

from planner.artefacts.growth import Work
from planner.artefacts.operator_types import OPERATOR_TYPES, function_of
from planner.model.flops import flops_of
from planner.model.load import load
from planner.operators import to_torch
from planner.profilers.facts import facts
from planner.support.errors import OperatorError

MICROSOFT = "com.microsoft"
IN_ONNX = ("SimplifiedLayerNormalization", "LayerNormalization")


def floats(*shape):
    """Normal numbers that depend on the shape only."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def ints(*shape, high=5):
    return np.random.default_rng(shape).integers(0, high, shape)


def proto_of(kind, inputs, outputs, attributes, dtype=np.float32):
    """The node behind a product with a weight "w", so that there is something to train.

    The node reads x0, x1, ..., absent ones left out. All but x0 are initializers.
    """
    names = [f"x{i}" if one is not None else "" for i, one in enumerate(inputs)]
    given = {
        name: one.astype(dtype) if one.dtype == np.float32 else one
        for name, one in zip(names, inputs, strict=True)
        if name
    }
    domain = "" if kind in IN_ONNX else MICROSOFT
    nodes = [helper.make_node(kind, names, outputs, "node", domain=domain, **attributes)]
    first = given.pop("x0")
    if first.dtype == dtype:
        nodes.insert(0, helper.make_node("Mul", ["x", "w"], ["x0"]))
        given["w"] = np.full(1, 1.5, dtype)
    else:
        nodes[0].input[0] = "x"
    graph = helper.make_graph(
        nodes,
        "one",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(first.dtype),
                                       first.shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs if name],
        [numpy_helper.from_array(a, n) for n, a in given.items()],
    )  # fmt: skip
    version = 13 if kind == "LayerNormalization" else 20
    opsets = [helper.make_opsetid("", version), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), first


def saved(proto, folder):
    path = folder / "one.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
QKV = (floats(2, 5, 8), floats(2, 6, 8) + 1, floats(2, 6, 8))
ROTARY = (np.cos(floats(9, 2)), np.sin(floats(9, 2)))
WIDE_ROTARY = (np.cos(floats(9, 8)), np.sin(floats(9, 8)))
GQA = (floats(2, 5, 32), floats(2, 5, 16), floats(2, 5, 16) + 1, None, None,
       np.array([4, 4], np.int32), np.array([5], np.int32))  # fmt: skip

CASES = {
    "Attention": ("Attention", (floats(2, 5, 8), floats(8, 24), floats(24)), {"num_heads": 2}),
    "Attention with a mask": (
        "Attention", (floats(2, 5, 8), floats(8, 24), floats(24), MASK), {"num_heads": 2}
    ),
    "Attention with lengths": (
        "Attention",
        (floats(2, 5, 8), floats(8, 24), floats(24), np.array([3, 5], np.int32)),
        {"num_heads": 2},
    ),
    "Attention with ends and starts": (
        "Attention",
        (floats(2, 5, 8), floats(8, 24), floats(24), np.array([4, 5, 1, 0], np.int32)),
        {"num_heads": 2},
    ),
    "causal Attention with a past": (
        "Attention",
        (floats(2, 5, 8), floats(8, 24), floats(24), None, floats(2, 2, 2, 3, 4)),
        {"num_heads": 2, "unidirectional": 1},
        2,
    ),
    "causal Attention": (
        "Attention",
        (floats(2, 5, 8), floats(8, 24), floats(24)),
        {"num_heads": 2, "unidirectional": 1, "scale": 0.3},
    ),
    "Attention with a bias and sizes": (
        "Attention",
        (floats(2, 5, 8), floats(8, 20), floats(20), None, None, floats(1, 2, 5, 5)),
        {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]},
    ),
    "BiasGelu": ("BiasGelu", (floats(2, 3, 4), floats(4)), {}),
    "EmbedLayerNormalization": (
        "EmbedLayerNormalization",
        (ints(2, 3).astype(np.int32), ints(2, 3, high=2).astype(np.int32), floats(7, 4),
         floats(6, 4), floats(2, 4), floats(4), floats(4, 1)[:, 0],
         np.array([[1, 1, 0], [1, 1, 1]], np.int32)),
        {"epsilon": 1e-5},
        3,
    ),
    "EmbedLayerNormalization without segments": (
        "EmbedLayerNormalization",
        (ints(2, 3).astype(np.int32), None, floats(7, 4), floats(6, 4), None, floats(4), floats(4)),
        {},
        2,
    ),
    "FastGelu": ("FastGelu", (floats(2, 3, 4),), {}),
    "FastGelu with a bias": ("FastGelu", (floats(2, 3, 4), floats(4)), {}),
    "FusedConv": (
        "FusedConv",
        (floats(1, 2, 5, 5), floats(3, 2, 3, 3), floats(3)),
        {"activation": "LeakyRelu", "activation_params": [0.3], "pads": [1, 1, 1, 1]},
    ),
    "FusedConv with a sum": (
        "FusedConv",
        (floats(1, 2, 5, 5), floats(3, 2, 3, 3), None, floats(1, 3, 3, 3)),
        {"activation": "Relu", "kernel_shape": [3, 3]},
    ),
    "FusedConv between bounds": (
        "FusedConv",
        (floats(1, 2, 5, 5), floats(3, 2, 3, 3)),
        {"activation": "Clip", "activation_params": [0.0, 1.5]},
    ),
    "FusedGemm": (
        "FusedGemm",
        (floats(2, 3), floats(4, 3), floats(4)),
        {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4,
         "transB": 1, "alpha": 0.5},
    ),
    "FusedMatMul": (
        "FusedMatMul", (floats(2, 4, 3), floats(2, 5, 4)), {"transA": 1, "transB": 1, "alpha": 0.5}
    ),
    "FusedMatMul of batches": (
        "FusedMatMul",
        (floats(5, 2, 3, 4), floats(2, 3, 4, 6)),
        {"transBatchA": 1},
    ),
    "Gelu": ("Gelu", (floats(2, 3),), {}),
    "GroupQueryAttention": (
        "GroupQueryAttention", GQA, {"num_heads": 4, "kv_num_heads": 2}, 3
    ),
    "GroupQueryAttention with rotation": (
        "GroupQueryAttention",
        (floats(2, 5, 64), floats(2, 5, 32), floats(2, 5, 32), *GQA[3:], *WIDE_ROTARY),
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        3,
    ),
    "GroupQueryAttention with a window and a cap": (
        "GroupQueryAttention",
        GQA,
        {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2, "softcap": 1.5, "scale": 0.7},
    ),
    "GroupQueryAttention with a smooth softmax": (
        "GroupQueryAttention", GQA, {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1}
    ),
    "GroupQueryAttention of one tensor": (
        "GroupQueryAttention",
        (floats(2, 5, 64), None, None, *GQA[3:]),
        {"num_heads": 4, "kv_num_heads": 2},
    ),
    "LayerNormalization of the days before version 17": (
        "LayerNormalization", (floats(2, 3, 4), floats(4), floats(4)), {"axis": -1}
    ),
    "MultiHeadAttention": ("MultiHeadAttention", QKV, {"num_heads": 2}, 3),
    "MultiHeadAttention with a bias and a mask": (
        "MultiHeadAttention",
        (*QKV, floats(24), np.array([[1, 1, 1, 0, 0, 1]] * 2, np.int32), floats(1, 2, 5, 6)),
        {"num_heads": 2, "mask_filter_value": -1000.0},
    ),
    "causal MultiHeadAttention with a past": (
        "MultiHeadAttention",
        (floats(2, 5, 8), floats(2, 5, 8), floats(2, 5, 8), None, None, None,
         floats(2, 2, 3, 4), floats(2, 2, 3, 4)),
        {"num_heads": 2, "unidirectional": 1},
        3,
    ),
    "MultiHeadAttention of keys in heads": (
        "MultiHeadAttention", (floats(2, 5, 8), floats(2, 2, 6, 4), floats(2, 2, 6, 4)),
        {"num_heads": 2},
    ),
    "QuickGelu": ("QuickGelu", (floats(2, 3),), {"alpha": 1.5}),
    "RotaryEmbedding": (
        "RotaryEmbedding", (floats(2, 5, 8), np.array([2]), *ROTARY), {}
    ),
    "RotaryEmbedding in heads": (
        "RotaryEmbedding", (floats(2, 3, 5, 4), ints(2, 5, high=9), *ROTARY), {"interleaved": 1}
    ),
    "RotaryEmbedding of a part": (
        "RotaryEmbedding",
        (floats(2, 5, 12), ints(2, 5, high=9), *ROTARY),
        {"num_heads": 2, "rotary_embedding_dim": 4},
    ),
    "SimplifiedLayerNormalization": (
        "SimplifiedLayerNormalization", (floats(2, 3, 4), floats(4)), {"epsilon": 1e-4, "axis": -1}
    ),
    "SkipLayerNormalization": (
        "SkipLayerNormalization",
        (floats(2, 3, 4), floats(2, 3, 4) + 1, floats(4), floats(4), floats(4)),
        {"epsilon": 1e-5},
        4,
    ),
    "SkipLayerNormalization that broadcasts": (
        "SkipLayerNormalization", (floats(2, 3, 4), floats(1, 3, 4), floats(4)), {}
    ),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization",
        (floats(2, 3, 4), floats(2, 3, 4) + 1, floats(4), floats(4)),
        {},
        4,
    ),
    "TransposeMatMul": ("TransposeMatMul", (floats(4, 3), floats(4, 5)), {"transA": 1}),
}  # fmt: skip

UNREAD = {"SkipLayerNormalization": (1, 2), "SkipSimplifiedLayerNormalization": (1, 2)}


def outputs_of(kind, count):
    return ["" if i in UNREAD.get(kind, ()) else f"y{i}" for i in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_computes_what_onnx_runtime_does(name, tmp_path):
    kind, inputs, attributes, *count = CASES[name]
    outputs = outputs_of(kind, *count or [1])
    proto, x = proto_of(kind, inputs, outputs, attributes)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    module = to_torch(load(saved(proto, tmp_path)))
    made = dict(zip(module.output_names, module(torch.from_numpy(x)), strict=True))
    for output, one in zip(filter(None, outputs), session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(made[output].detach().numpy(), one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_finite_differences(name, tmp_path):
    kind, inputs, attributes, *_ = CASES[name]
    proto, x = proto_of(kind, inputs, ["y0"], attributes, np.float64)
    module = to_torch(load(saved(proto, tmp_path)))
    parameters = dict(module.named_parameters())
    x = torch.from_numpy(x)

    def run(*values):
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))

    values = [one.detach().requires_grad_() for one in parameters.values()]
    assert torch.autograd.gradcheck(lambda *v: run(*v)[0], values, fast_mode=True)


# ---- without a kernel on CPUs


def test_operators_of_cuda_compute_what_they_say():
    x, bias, skip = (torch.from_numpy(floats(*s)) for s in ((2, 4, 6), (6,), (2, 4, 6)))
    left, right = (x + bias).chunk(2, -1)
    split = function_of("com.microsoft.BiasSplitGelu")(x, bias)
    assert torch.equal(split, left * torch.nn.functional.gelu(right))
    assert torch.equal(function_of("com.microsoft.BiasAdd")(x, bias, skip), x + bias + skip)
    matrix = torch.from_numpy(floats(6, 6))
    inverse = function_of("com.microsoft.Inverse")(matrix)
    torch.testing.assert_close(inverse @ matrix, torch.eye(6), rtol=1e-4, atol=1e-4)
    product = function_of("com.microsoft.GemmFastGelu")(x, matrix, bias)
    gelu = torch.nn.functional.gelu(x @ matrix + bias, approximate="tanh")
    torch.testing.assert_close(product, gelu)


def test_group_norm_is_that_of_torch_with_channels_last():
    x, skip = torch.from_numpy(floats(2, 3, 5, 6)), torch.from_numpy(floats(2, 6))
    norm = torch.nn.GroupNorm(2, 6, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    total = x + skip[:, None, None]
    expected = torch.nn.functional.silu(norm(total.movedim(-1, 1))).movedim(1, -1)
    y, made = function_of("com.microsoft.SkipGroupNorm")(
        x, norm.weight, norm.bias, skip, groups=2, activation=1, epsilon=1e-3, num_outputs=2
    )
    torch.testing.assert_close(y, expected)
    assert torch.equal(made, total)


# ---- the products that inspect counts

PRODUCTS = {
    Work.PRODUCT, Work.BATCHED_PRODUCT, Work.UNALIGNED_PRODUCT, Work.CONVOLUTION,
    Work.SMALL_WINDOW, Work.FEW_CHANNELS, Work.ATTENTION, Work.CAUSAL_ATTENTION,
}  # fmt: skip
MULTIPLYING = {
    "Attention", "FusedConv", "FusedGemm", "FusedMatMul", "GroupQueryAttention",
    "MultiHeadAttention", "TransposeMatMul",
}  # fmt: skip
UNPACKED = {
    "GemmFastGelu": ("GemmFastGelu", (floats(2, 5, 8), floats(8, 6)), {}),
    "FusedMatMul of a column": ("FusedMatMul", (floats(100, 8), floats(100, 4)), {"transA": 1}),
    "FusedMatMul of batches, turned": (
        "FusedMatMul", (floats(5, 2, 3, 4), floats(2, 3, 5, 6)), {"transBatchA": 1, "transA": 1}
    ),
    "MultiHeadAttention of one tensor": (
        "MultiHeadAttention", (floats(2, 5, 2, 3, 4),), {"num_heads": 2}
    ),
    "MultiHeadAttention of two": (
        "MultiHeadAttention", (floats(2, 5, 8), floats(2, 6, 2, 2, 4)), {"num_heads": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *UNPACKED])
def test_the_products_counted_are_those_that_torch_runs(case, tmp_path):
    kind, inputs, attributes, *count = {**CASES, **UNPACKED}[case]
    model = load(saved(proto_of(kind, inputs, outputs_of(kind, *count or [1]), attributes)[0],
                       tmp_path))  # fmt: skip
    shapes = {one.name: one.shape for one in (*model.graph.tensors, *model.graph.parameters)}
    counted = sum(flops_of(node, shapes) for node in model.nodes)
    kernels = [kernel for one in facts(model) for kernel in one.kernels]
    assert counted == sum(one.flops for one in kernels if one.work in PRODUCTS)
    assert (counted > 0) == (kind in MULTIPLYING or case in UNPACKED)


# ---- the table


def schema(kind):
    domain, _, name = kind.rpartition(".")
    known = [s for s in runtime.get_all_operator_schema() if (s.domain, s.name) == (domain, name)]
    return max(known, key=lambda one: one.since_version)


OWN = [kind for kind in OPERATOR_TYPES if kind.startswith(MICROSOFT)]


@pytest.mark.parametrize("kind", [*OWN, "SimplifiedLayerNormalization"])
def test_parameters_are_the_inputs_and_attributes_of_onnx_runtime(kind):
    one = schema(kind)
    if OPERATOR_TYPES[kind].onnx or OPERATOR_TYPES[kind].function.startswith("torch."):
        return
    parameters = inspect.signature(function_of(kind)).parameters.values()
    inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    theirs = [formal.name.lower() for formal in one.inputs]
    assert inputs == theirs[: len(inputs)]
    attributes = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"num_outputs"}
    shared = {"transbatcha", "transbatchb"} if kind.endswith("TransposeMatMul") else set()
    assert attributes - shared <= {name.lower() for name in one.attributes}


@pytest.mark.parametrize("kind", [*OWN, "SimplifiedLayerNormalization"])
def test_every_operator_has_types_for_its_outputs(kind):
    row = OPERATOR_TYPES[kind]
    assert sum(one is not None for one in (row.shapes, row.fused, row.onnx)) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "outputs", "message"),
    [
        ("SkipLayerNormalization", (floats(2, 3), floats(2, 3), floats(3)), {}, ["y", "mean"],
         "output 1 is not supported"),
        ("FusedGemm", (floats(2, 3), floats(3, 4)), {"activation": "Cosine"}, ["y"],
         "activation: expected one of Clip"),
        ("GroupQueryAttention", (*GQA[:3], floats(2, 2, 1, 8), floats(2, 2, 1, 8), *GQA[5:]),
         {"num_heads": 4, "kv_num_heads": 2}, ["y"], "a step of training has no past"),
        ("FusedMatMul", (floats(2, 3), floats(2, 3)), {}, ["y"], "expected matrices that fit"),
        ("Attention", (floats(2, 5, 8), floats(8, 24)), {"num_heads": 2, "do_rotary": 1}, ["y"],
         "do_rotary, past_present_share_buffer: expected 0"),
        ("Attention", (floats(2, 5, 8), floats(8, 24)), {}, ["y"],
         "num_heads: expected an integer, got None"),
    ],
)  # fmt: skip
def test_what_an_operator_cannot_do_is_an_error_that_names_the_node(
    kind, inputs, attributes, outputs, message, tmp_path
):
    with pytest.raises(OperatorError, match=f"node.*{message}"):
        to_torch(load(saved(proto_of(kind, inputs, outputs, attributes)[0], tmp_path)))


# ---- whole models


def exported(name, folder):
    """A small GPT-2 or BERT as ONNX Runtime's optimisers expect it: TorchScript's export."""
    import transformers

    sizes = {"vocab_size": 50, "attn_implementation": "eager"}
    if name == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        config = transformers.GPT2Config(
            n_positions=16, n_embd=32, n_layer=2, n_head=2, **sizes, **ends
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=16, **sizes,
        )  # fmt: skip
        model = transformers.BertModel(config)

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask)[0]

    path, ids = folder / f"{name}.onnx", torch.from_numpy(ints(2, 8, high=50))
    arguments = (ids, torch.ones_like(ids))
    torch.onnx.export(
        First().eval(), arguments, path, dynamo=False, opset_version=14, input_names=["ids", "mask"]
    )
    return path


def optimised(name, path, how):
    """The file after ONNX Runtime's own optimisation, or that of its tool for transformers."""
    made = path.with_suffix(f".{how}.onnx")
    if how == "transformers":
        from onnxruntime.transformers.optimizer import optimize_model

        model = optimize_model(str(path), model_type=name, num_heads=2, hidden_size=32, opt_level=0)
        model.save_model_to_file(str(made))
        return made
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(made)
    ort.InferenceSession(path, options, ["CPUExecutionProvider"])
    return made


WRITTEN = {
    ("gpt2", "extended"): {"FusedMatMul", "FastGelu", "SkipLayerNormalization"},
    ("gpt2", "transformers"): {"FastGelu", "SkipLayerNormalization"},
    ("bert", "extended"): {"FusedMatMul", "Gelu", "SkipLayerNormalization"},
    ("bert", "transformers"): {"Attention", "BiasGelu", "SkipLayerNormalization"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TorchScript's export is old, and says so
@pytest.mark.parametrize(("name", "how"), WRITTEN)
def test_an_optimised_model_computes_what_it_did_before(name, how, tmp_path):
    path = exported(name, tmp_path)
    made = optimised(name, path, how)
    kinds = {node.op_type for node in onnx.load(made).graph.node if node.domain == MICROSOFT}
    assert kinds >= WRITTEN[name, how]
    feeds = {"ids": ints(2, 8, high=50), "mask": np.ones((2, 8), np.int64)}
    (expected,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    model = load(made)
    module = to_torch(model)
    (y,) = module(*(torch.from_numpy(feeds[name]) for name in module.input_names))
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    assert all(one.grad.isfinite().all() and one.grad.any() for one in module.parameters())
    assert all(one.flops >= 0 for one in facts(model))
