"""What is trained and why: by the record, by the notes of torch's exporter, by use and content."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import planner
from planner.model.load import ReadOptions, load, load_trained, modules_of
from planner.model.record import ModuleRecord, TensorRecord, write_record
from planner.model.repair import Ties, repaired
from planner.model.source import open_source
from planner.operators import to_torch
from planner.support.errors import ModelError
from tests.support import exports

X = np.random.default_rng(0)


def node(kind, inputs, outputs, scope="", call="", arguments="", **attributes):
    """A node with the notes of torch's exporter."""
    made = helper.make_node(kind, inputs, outputs, name=f"node_{outputs[0]}", **attributes)
    if call:
        path = ["", scope] if scope else [""]
        text = f"%{outputs[0]} : [] = call_function[target=torch.ops.aten.{call}.default](args ="
        made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str([*path, outputs[0]]))
        made.metadata_props.add(
            key="pkg.torch.onnx.fx_node", value=f"{text} ({arguments}), kwargs = {{}})"
        )
    return made


def saved(folder, nodes, shape, weights, result, batch=2, dtype=TensorProto.FLOAT):
    given = helper.make_tensor_value_info("x", dtype, [batch, *shape])
    graph = helper.make_graph(
        nodes, "model", [given],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def floats(*shape):
    return X.standard_normal(shape).astype(np.float32)


def trained(model):
    return {p.name for p in model.graph.parameters if p.trainable}


ONES, ZEROS = np.ones(4, np.float32), np.zeros(4, np.float32)


def two_norms(folder, **more):
    """Two layer normalizations that the exporter gave one weight and one bias."""
    notes = "[4], %p_a_ln_weight, %p_a_ln_bias", "[4], %p_b_ln_weight, %p_b_ln_bias"
    nodes = [
        node("LayerNormalization", ["x", "a.ln.weight", "a.ln.bias"], ["u"], "a.ln", "layer_norm",
             f"%x, {notes[0]}"),
        node("LayerNormalization", ["u", "a.ln.weight", "a.ln.bias"], ["v"], "b.ln", "layer_norm",
             f"%u, {notes[1]}"),
    ]  # fmt: skip
    weights = {"a.ln.weight": ONES, "a.ln.bias": ZEROS}
    return saved(folder, nodes, (4,), weights, "v"), more


def test_merged_initializers_are_parted_with_a_warning_that_names_nodes_and_the_remedy(tmp_path):
    path, _ = two_norms(tmp_path)
    model = load(path)
    assert trained(model) == {"a.ln.weight", "a.ln.bias", "b.ln.weight", "b.ln.bias"}
    assert model.sources == {"b.ln.weight": "a.ln.weight", "b.ln.bias": "a.ln.bias"}
    assert np.array_equal(model.values["b.ln.weight"], ONES)
    (warning,) = model.warnings
    assert "node_u, node_v" in warning
    assert "planner export" in warning
    tied = load(path, ReadOptions(tie=["a.ln.bias"]))
    assert tied.graph.parameters[2].name == "b.ln.weight"
    assert trained(tied) == {"a.ln.weight", "a.ln.bias", "b.ln.weight"}
    assert model.hash == tied.hash


def test_a_source_is_read_again_with_other_choices(tmp_path):
    """Each pass gives a new source, and leaves the file's as it is."""
    source = open_source(two_norms(tmp_path)[0])
    values, nodes = set(source.values), [*source.proto.graph.node]
    parted = repaired(source, Ties())
    assert set(parted.values) == {*values, "b.ln.weight", "b.ln.bias"}
    everything = ["a.ln.weight", "a.ln.bias", "b.ln.weight", "b.ln.bias"]
    assert trained(load_trained(source, ReadOptions(), everything, known_hash="")) == {*everything}
    model = load_trained(source, ReadOptions(), ["b.ln.weight"], known_hash="")
    assert trained(model) == {"b.ln.weight"}
    assert (set(source.values), [*source.proto.graph.node]) == (values, nodes)


def test_operators_know_their_modules(tmp_path):
    path, _ = two_norms(tmp_path)
    assert modules_of(load(path)) == ("a.ln", "b.ln")


def test_a_tie_of_unknown_or_unequal_initializers_is_refused(tmp_path):
    path, _ = two_norms(tmp_path)
    with pytest.raises(ModelError, match="--untie none: expected the name of a float initializer"):
        load(path, ReadOptions(untie=["none"]))
    with pytest.raises(ModelError, match=r"--tie a\.ln\.weight=a\.ln\.bias: expected initializers"):
        load(path, ReadOptions(tie=["a.ln.weight=a.ln.bias"]))


def test_a_bias_that_equals_a_running_mean_is_parted_from_it(tmp_path):
    norm = helper.make_node("BatchNormalization", ["x", "w", "b", "b", "w"], ["y"], name="bn")
    model = load(saved(tmp_path, [norm], (4, 2, 2), {"w": ONES, "b": ZEROS}, "y"))
    assert trained(model) == {"w", "b"}
    assert model.nodes[0].inputs == ("x", "w", "b", "bn.running_mean", "bn.running_var")
    assert model.choices["bn.running_mean"].reason.startswith("a buffer")


def linear(weight, name, tokens="h"):
    return node("MatMul", [tokens, weight], ["y"], "head", "linear", f"%{tokens}, %p_{name}_weight")


def test_a_transposed_copy_of_an_embedding_is_tied_to_it_again(tmp_path):
    table = floats(7, 4)
    nodes = [
        node("Gather", ["emb.weight", "x"], ["h"], "emb", "embedding", "%p_emb_weight, %x"),
        linear("val_9", "emb"),
    ]
    weights = {"emb.weight": table, "val_9": np.ascontiguousarray(table.T)}
    path = saved(tmp_path, nodes, (3,), weights, "y", dtype=TensorProto.INT64)
    model = load(path)
    assert trained(model) == {"emb.weight"}
    assert [o.type for o in model.graph.operators] == ["Gather", "Transpose", "MatMul"]
    assert "val_9 of emb.weight" in model.warnings[0]
    assert trained(load(path, ReadOptions(untie=["emb.weight"]))) == {"emb.weight", "val_9"}


def test_a_copy_of_other_values_is_not_tied_and_said(tmp_path):
    nodes = [
        node("Gather", ["emb.weight", "x"], ["h"], "emb", "embedding", "%p_emb_weight, %x"),
        linear("val_9", "emb"),
    ]
    weights = {"emb.weight": floats(7, 4), "val_9": floats(4, 7)}
    model = load(saved(tmp_path, nodes, (3,), weights, "y", dtype=TensorProto.INT64))
    assert trained(model) == {"emb.weight", "val_9"}
    assert "trained apart" in model.warnings[0]


def test_a_pair_is_tied_as_the_user_says(tmp_path):
    table = floats(7, 4)
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["h"], name="look"),
        helper.make_node("MatMul", ["h", "head"], ["y"], name="head_product"),
    ]
    weights = {"table": table, "head": np.ascontiguousarray(table.T)}
    path = saved(tmp_path, nodes, (3,), weights, "y", dtype=TensorProto.INT64)
    assert trained(load(path)) == {"table", "head"}
    assert trained(load(path, ReadOptions(tie=["table=head"]))) == {"table"}


def test_a_zero_bias_that_the_exporter_left_out_is_put_back(tmp_path):
    gemm = node("Gemm", ["x", "fc.weight"], ["y"], "fc", "linear",
                "%x, %p_fc_weight, %p_fc_bias", transB=1)  # fmt: skip
    model = load(saved(tmp_path, [gemm], (4,), {"fc.weight": floats(3, 4)}, "y"))
    assert trained(model) == {"fc.weight", "fc.bias"}
    assert np.array_equal(model.values["fc.bias"], np.zeros(3, np.float32))
    assert "biases that are zero" in model.warnings[0]


def test_a_row_repeated_for_every_sample_is_one_row(tmp_path):
    row = floats(1, 1, 4)
    join = node("Concat", ["expand", "x"], ["c"], "", "cat", "[%expand, %x], 1", axis=1)
    mean = helper.make_node("ReduceMean", ["c"], ["y"], name="mean")
    model = load(saved(tmp_path, [join, mean], (3, 4), {"expand": np.repeat(row, 2, 0)}, "y"))
    assert {p.name: p.shape for p in model.graph.parameters} == {"expand.row": (1, 1, 4)}


@pytest.mark.parametrize(
    ("row", "shape"),
    [(floats(1, 1, 4), (1, 1, 4)), (floats(1, 3, 4), (1, 3, 4)), (ZEROS[None, None], (1, 3, 4))],
)
def test_a_row_looked_up_for_every_position_is_one_row(tmp_path, row, shape):
    table = np.broadcast_to(row, (2, 3, 4)).copy()
    add = node("Add", ["x", "embedding_1"], ["y"], "", "add", "%x, %embedding_1")
    model = load(saved(tmp_path, [add], (3, 4), {"embedding_1": table}, "y"))
    assert {p.name: p.shape for p in model.graph.parameters} == {"embedding_1.row": shape}


def test_the_record_decides_before_everything_else(tmp_path):
    path = saved(
        tmp_path,
        [helper.make_node("Mul", ["x", "w"], ["a"], name="a"),
         helper.make_node("Mul", ["a", "s"], ["b"], name="b"),
         helper.make_node("Add", ["b", "inv_freq"], ["c"], name="c"),
         helper.make_node("Add", ["c", "other"], ["y"], name="y")],
        (4,), {"w": ONES, "s": np.float32(2), "inv_freq": floats(4), "other": floats(4)}, "y",
    )  # fmt: skip
    proto = onnx.load(path)
    parameters = (
        TensorRecord("w", "w", (4,), "float32", False),
        TensorRecord("s", "s", (), "float32", True),
        TensorRecord("f", "inv_freq", (4,), "float32", True),
        TensorRecord("gone", None, (4,), "float32", True),
    )
    write_record(proto, ModuleRecord("example.Net", True, parameters, (), {}))
    path.write_bytes(proto.SerializeToString())
    model = load(path)
    assert trained(model) == {"s", "inv_freq"}
    assert "requires_grad=False" in model.choices["w"].reason
    assert "names no such tensor" in model.choices["other"].reason
    assert model.warnings == ()


def angles(rows=16, width=8):
    return np.outer(np.arange(rows), 10_000.0 ** (-np.arange(width) / width)).astype(np.float32)


SINES = np.stack([np.sin(angles()), np.cos(angles())], -1).reshape(16, 16)
SLOPES = (2.0 ** (-8 * np.arange(1, 5) / 4)).astype(np.float32).reshape(4, 1, 1)


@pytest.mark.parametrize(
    ("operator", "value", "reason"),
    [
        ("Mul", np.cos(angles()), "cosines and sines"),
        ("Mul", np.sin(angles()), "cosines and sines"),
        ("Mul", np.concatenate([np.cos(angles())] * 2, -1), "cosines and sines"),
        ("Add", SINES, "cosines and sines"),
        ("Mul", SLOPES, "slopes"),
        ("Mul", 10_000.0 ** (-np.arange(8) / 8), "slopes"),
        ("Mul", floats(16, 8), None),
        ("Add", np.clip(floats(16, 16), -1, 1), None),
        ("Add", np.tile(np.clip(floats(1, 16), -1, 1), (16, 1)), None),
        ("Mul", np.ones(8), None),
        ("Mul", np.linspace(0.5, 1.5, 8), None),
    ],
)
def test_tables_are_told_by_their_content(tmp_path, operator, value, reason):
    value = value.astype(np.float32)
    shape = np.broadcast_shapes(value.shape, (1, 4, 16, value.shape[-1]))
    nodes = [
        helper.make_node(operator, ["x", "table"], ["a"], name="a"),
        helper.make_node("Mul", ["a", "w"], ["y"], name="y"),
    ]
    weights = {"table": value, "w": floats(shape[-1])}
    model = load(saved(tmp_path, nodes, shape[1:], weights, "y", batch=1))
    assert model.choices["table"].trained == (reason is None)
    assert reason is None or reason in model.choices["table"].reason


@pytest.mark.parametrize(
    ("value", "is_constant"),
    [
        (np.zeros((1, 1, 4, 4)), True),
        (np.zeros((4, 4)), True),
        (np.zeros((1, 2, 4, 4)), False),  # a bias of its own for every head
        (-SLOPES[:2] * np.arange(4), True),  # ALiBi
        (floats(1, 2, 4, 4), False),
    ],
)
def test_what_is_added_to_scores_is_a_mask_if_it_hides_nothing(tmp_path, value, is_constant):
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"], name="a"),
        helper.make_node("Add", ["a", "added"], ["b"], name="b"),
        helper.make_node("Softmax", ["b"], ["y"], name="y"),
    ]
    weights = {"added": value.astype(np.float32), "w": floats(4)}
    model = load(saved(tmp_path, nodes, (2, 4, 4), weights, "y"))
    assert model.choices["added"].trained != is_constant


@pytest.mark.parametrize(
    ("value", "bias", "notes"),
    [(ONES, False, True), (ONES, False, False), (ONES, True, True), (floats(4), False, True)],
)
def test_ones_of_a_normalization_without_weights_are_constant(tmp_path, value, bias, notes):
    norm = node(
        "LayerNormalization", ["x", "val_1", *(["b"] * bias)], ["n"], "ln", "layer_norm", "%x, [4]"
    )
    if notes:
        hierarchy = "['Net', 'torch.nn.LayerNorm', 'layer_norm']"
        norm.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=hierarchy)
    nodes = [norm, helper.make_node("Mul", ["n", "w"], ["y"], name="y")]
    weights = {"val_1": value, "w": floats(4)} | ({"b": floats(4)} if bias else {})
    model = load(saved(tmp_path, nodes, (4,), weights, "y"))
    assert model.choices["val_1"].trained != (notes and not bias and value is ONES)


@pytest.mark.parametrize(
    ("name", "value"), [("tmp", ONES), ("val_3", ONES), ("val_3", floats(4)), ("gain", ONES)]
)
def test_factors_of_one_that_the_exporter_made_are_constant(tmp_path, name, value):
    scaled = node("Mul", ["x", name], ["a"], "bag", "embedding_bag", "%x")
    hierarchy = "['Net', 'torch.nn.EmbeddingBag', 'embedding_bag']"
    scaled.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=hierarchy)
    nodes = [scaled, helper.make_node("Mul", ["a", "w"], ["y"], name="y")]
    model = load(saved(tmp_path, nodes, (4,), {name: value, "w": floats(4)}, "y"))
    assert model.choices[name].trained != (name != "gain" and value is ONES)


@pytest.mark.parametrize("both", [True, False])
def test_a_number_that_scales_queries_and_keys_is_constant_and_a_gain_is_not(tmp_path, both):
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"], name="a"),
        helper.make_node("Mul", ["a", "s"], ["q"], name="q"),
        helper.make_node("Mul", ["x", "s" if both else "w"], ["k"], name="k"),
        helper.make_node("Transpose", ["k"], ["t"], name="t", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["y"], name="y"),
    ]
    weights = {"s": np.array([0.5], np.float32), "w": floats(4)}
    model = load(saved(tmp_path, nodes, (2, 4), weights, "y"))
    assert model.choices["s"].trained != both


def test_frequencies_that_only_feed_sine_and_cosine_are_constant_and_weights_are_not(tmp_path):
    """A network may begin with the sine of a product, but then of its input."""
    nodes = [
        helper.make_node("Cast", ["i"], ["t"], name="t", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["t", "steps"], ["p"], name="p"),
        helper.make_node("Cos", ["p"], ["c"], name="c"),
        helper.make_node("Mul", ["x", "w"], ["m"], name="m"),
        helper.make_node("Sin", ["m"], ["s"], name="s"),
        helper.make_node("Add", ["s", "c"], ["y"], name="y"),
    ]
    path = saved(tmp_path, nodes, (4,), {"steps": floats(4), "w": floats(4)}, "y")
    proto = onnx.load(path)
    proto.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [2, 4]))
    path.write_bytes(proto.SerializeToString())
    model = load(path)
    assert trained(model) == {"w"}
    assert "Sin and Cos" in model.choices["steps"].reason


LONG = 3_000  # more than Python's stack has


def in_a_row(kind, name, inputs=(), **attributes):
    """LONG operators of one type, the first of which reads a tensor, and the last output."""
    names = [name, *(f"{name}_{i}" for i in range(LONG))]
    return [
        helper.make_node(kind, [before, *inputs], [after], after, **attributes)
        for before, after in pairwise(names)
    ], names[-1]


@pytest.mark.parametrize("kind", ["Identity", "Reshape", "Transpose"])
def test_weights_behind_thousands_of_views_are_trained(tmp_path, kind):
    inputs, attributes = {"Reshape": (["shape"], {}), "Transpose": ([], {"perm": [1, 0]})}.get(
        kind, ([], {})
    )
    views, last = in_a_row(kind, "w", inputs, **attributes)
    nodes = [*views, helper.make_node("MatMul", ["x", last], ["y"], "y")]
    weights = {"w": floats(4, 4), "shape": np.array([4, 4])}
    path = saved(tmp_path, nodes, (4,), weights, "y")
    assert trained(load(path)) == {"w"}
    [held] = planner.inspect(path).parameters
    assert (held.name, held.choice.trained) == ("w", True)


@pytest.mark.parametrize(("count", "times"), [(LONG, 1), (60, 2)])
def test_frequencies_before_many_concatenations_are_constant(tmp_path, count, times):
    """Where each reads its input twice, there are more ways than can be walked."""
    names = ["p", *(f"p{i}" for i in range(count))]
    joined = [
        one
        for before, after in pairwise(names)
        for one in (
            helper.make_node("Concat", [before] * times, [f"{after}_all"], f"{after}_all", axis=0),
            helper.make_node("Slice", [f"{after}_all", "zero", "one"], [after], after),
        )
    ]
    nodes = [
        helper.make_node("Cast", ["x"], ["t"], "t", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["t", "steps"], ["p"], "p"),
        *joined,
        helper.make_node("Cos", [names[-1]], ["c"], "c"),
        helper.make_node("Mul", ["c", "w"], ["y"], "y"),
    ]
    weights = {"steps": floats(1), "w": floats(1), "zero": np.array([0]), "one": np.array([1])}
    model = load(saved(tmp_path, nodes, (1,), weights, "y", batch=1, dtype=TensorProto.INT64))
    assert trained(model) == {"w"}
    assert "Sin and Cos" in model.choices["steps"].reason


FLAT = str.maketrans(".", "_")


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "mamba", "vit", "normalized", "detr"])
def test_exports_train_the_parameters_of_the_module(tmp_path, name, optimize):
    path = tmp_path / "model.onnx"
    module, _ = exports.exported(getattr(exports, name), path, optimize=optimize)
    model = load(path)
    found = {one.parameter for one in model.choices.values() if one.trained and one.parameter}
    names = {n.translate(FLAT).lower() for n, _ in module.named_parameters(remove_duplicate=False)}
    assert {n.translate(FLAT).lower() for n in found} <= names
    unnamed = {n for n, one in model.choices.items() if one.trained and not one.parameter}
    lost = {n for n in names if "bbox" not in n} - {n.translate(FLAT).lower() for n in found}
    if not optimize:
        # One of two tied names is the parameter's, and DETR's boxes are another output.
        assert unnamed == set()
        assert sum(one.trained for one in model.choices.values()) == sum(
            "bbox" not in n for n, _ in module.named_parameters()
        )
    elif name in ("gpt2", "llama", "bloom", "mamba", "vit", "normalized"):
        tensors = len([*module.parameters()])
        assert sum(one.trained for one in model.choices.values()) == tensors
    else:
        # Self-attention among constant queries is folded away, parameters and all.
        assert unnamed == {"add_24", "repeat"}
        assert all("decoder" in n or "query" in n for n in lost)


def test_the_padding_row_of_an_embedding_gets_no_gradient(tmp_path):
    nodes = [
        node("Gather", ["emb.weight", "x"], ["h"], "emb", "embedding", "%p_emb_weight, %x, 0"),
        helper.make_node("ReduceSum", ["h"], ["y"], name="y"),
    ]
    path = saved(tmp_path, nodes, (3,), {"emb.weight": floats(7, 4)}, "y", dtype=TensorProto.INT64)
    module = to_torch(load(path))
    (total,) = module(torch.tensor([[0, 1, 1], [0, 2, 0]]))
    total.backward()
    (gradient,) = [parameter.grad for parameter in module.parameters()]
    assert gradient[:, 0].tolist() == [0, 2, 1, 0, 0, 0, 0]


def test_an_initializer_that_a_branch_reads_stays(tmp_path):
    """The copy of the tied table is read in a branch too, so it cannot become a Transpose."""
    table = floats(7, 4)
    inside = helper.make_graph(
        [helper.make_node("Identity", ["val_9"], ["z"], name="inside")], "then", [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 7])],
    )  # fmt: skip
    nodes = [
        node("Gather", ["emb.weight", "x"], ["h"], "emb", "embedding", "%p_emb_weight, %x"),
        linear("val_9", "emb"),
        helper.make_node(
            "If", ["yes"], ["w"], name="choice", then_branch=inside, else_branch=inside
        ),
        helper.make_node("MatMul", ["h", "w"], ["v"], name="other"),
        helper.make_node("Add", ["y", "v"], ["sum"], name="sum"),
    ]
    weights = {
        "emb.weight": table, "val_9": np.ascontiguousarray(table.T), "yes": np.array(True)
    }  # fmt: skip
    model = load(saved(tmp_path, nodes, (3,), weights, "sum", dtype=TensorProto.INT64))
    assert trained(model) == {"emb.weight", "val_9"}
    assert "trained apart" in model.warnings[0]
