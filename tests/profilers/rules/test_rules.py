"""Rules that discovery finds, beside lists that were written by hand and read one by one."""

import numpy as np
import onnx
import pytest

from planner.model.load import load
from planner.profilers.rules.discover import split_rules
from tests.support.one_operator import rules_of


def ints(*numbers):
    return np.array(numbers)


CASES = {
    "a product of matrices": (
        ("MatMul", (8, 10, 12), (12, 6)),
        {},
        "S0,R->S0 S1,R->S1 R,S1->S2 S2,S0->P P,R->P R,P->P",
    ),
    "a product in batches": (
        ("MatMul", (8, 10, 12), (8, 12, 6)),
        {},
        "S0,S0->S0 S1,R->S1 R,S2->S2 S2,S1->P P,R->P R,P->P",
    ),
    "Gemm has its bias once": (
        ("Gemm", (8, 12), (6, 12), (6,)),
        {"transB": 1, "held": (1, 2)},
        "S0,R,R->S0 R,S0,S0->S1 S1,S1,P->P P,R,P->P R,P,P->P",
    ),
    "a sum": (("Add", (8, 6), (6,)), {}, "S0,R->S0 S1,S0->S1 P,P->P"),
    "a product of numbers": (("Mul", (8, 6), (8, 1)), {}, "S0,S0->S0 S1,R->S1 P,R->P R,P->P"),
    "an activation": (("Gelu", (8, 6)), {}, "S0->S0 S1->S1"),
    "limits that no number reaches": (
        ("Clip", (8, 6), np.array(-1e6, np.float32), np.array(1e6, np.float32)),
        {},
        "S0->S0 S1->S1",
    ),
    "a choice": (
        ("Where", ("b", (8, 6)), (8, 6), (8, 6)),
        {},
        "S0,S0,S0->S0 S1,S1,S1->S1 R,P,P->P",
    ),
    "a mask that fills with minus infinity": (
        ("Where", ("b", (10, 10)), np.array(-np.inf, np.float32), (4, 8, 10, 10)),
        {},
        "R,S0->S0 R,S1->S1 S0,S2->S2 S1,S3->S3",
    ),
    "a margin of minus infinity": (
        ("Pad", (4, 8, 10), ints(0, 0, 1, 0, 0, 1), np.array(-np.inf, np.float32)),
        {},
        "S0->S0 S1->S1",
    ),
    "softmax": (("Softmax", (8, 6, 10)), {"axis": 1}, "S0->S0|S2->S2|S1->S1 @moments"),
    "softmax of an old version": (
        ("Softmax", (8, 6, 10)),
        {"axis": 1, "version": 11},
        "S0->S0",
    ),
    "LayerNormalization": (
        ("LayerNormalization", (8, 10, 6), (6,), (6,)),
        {"outputs": 2},
        "S0,R,R->S0,S0 S1,R,R->S1,S1 R,P,P->P,R",
    ),
    "LayerNormalization of which nothing else is read": (
        ("LayerNormalization", (8, 10, 6), (10, 6)),
        {"axis": 1},
        "S0,R->S0|R,P->P|S1,S0->S1 @moments|S2,S1->S2 @moments",
    ),
    "BatchNormalization by running statistics": (
        ("BatchNormalization", (8, 6, 10), (6,), (6,), (6,), (6,)),
        {},
        "S0,R,R,R,R->S0 S1,S0,S0,S0,S0->S1 S2,R,R,R,R->S2 R,P,P,R,R->P P,R,P,P,R->P",
    ),
    "BatchNormalization by those of the batch": (
        ("BatchNormalization", (8, 6, 10), (6,), (6,), (6,), (6,)),
        {"training_mode": 1, "outputs": 3},
        "S1,S0,S0,S0,S0->S1,S0,S0 R,P,P,R,R->P,R,R",
    ),
    "groups of channels": (
        ("GroupNormalization", (8, 12, 10), (12,), (12,)),
        {"num_groups": 4, "version": 21},
        "S0,R,R->S0|S1,S0,S0->S1 num_groups at 2,4|R,P,P->P|S2,R,R->S2 @moments",
    ),
    "a table": (
        ("Gather", (100, 12), ("i", (8, 10))),
        {"axis": 0, "held": (0,)},
        "S0,R->S0|S1,R->S1|R,S1->S2|R,P->P|R,S0->P @rows",
    ),
    "single numbers": (
        ("GatherElements", (8, 10), ("i", (8, 10))),
        {"axis": 1},
        "S0,S0->S0 R,S1->S1 P,R->P",
    ),
    "a convolution": (
        ("Conv", (8, 12, 16), (20, 12, 3), (20,)),
        {"pads": [1, 1]},
        "S0,R,R->S0|R,S0,S0->S1|S1,S1,P->P|P,R,P->P|R,P,P->P|S2,R,R->S2 @halo at 2,4,8,16",
    ),
    "a convolution of single pixels": (
        ("Conv", (8, 12, 16), (20, 12, 1)),
        {},
        "S0,R->S0 R,S0->S1 S2,R->S2 S1,S1->P P,R->P R,P->P",
    ),
    "a convolution in groups": (
        ("Conv", (8, 12, 16), (12, 1, 3)),
        {"group": 12},
        "S0,R->S0|S1,S0->S1 group at 2,3,4,6,12|P,R->P|R,P->P",
    ),
    "windows side by side": (
        ("MaxPool", (8, 6, 16)),
        {"kernel_shape": [2], "strides": [2]},
        "S0->S0|S1->S1|S2->S2 at 2,4,8",
    ),
    "the mean of planes": (
        ("GlobalAveragePool", (8, 6, 10, 12)),
        {},
        "S0->S0 S1->S1 S2->A S3->A P->P",
    ),
    "a sum over a dimension": (
        ("ReduceSum", (8, 10, 6), ints(1)),
        {"keepdims": 0},
        "S0->S0 S2->S1 S1->P P->P",
    ),
    "the largest of a dimension": (
        ("ReduceMax", (8, 10, 6), ints(1)),
        {"keepdims": 1},
        "S0->S0 S2->S2",
    ),
    "heads out of a width": (
        ("Reshape", (8, 10, 24), ints(0, 10, 6, 4)),
        {},
        "S0->S0|S1->S1 shape[1]|S2->S2 shape[2]|P->P",
    ),
    "tokens of samples in a row": (
        ("Reshape", (4, 10, 24), ints(-1, 24)),
        {},
        "S0->S0|S2->S1 shape[1]|P->P|S1->S0/4",
    ),
    "sizes that hang together": (("Reshape", (6, 4), ints(4, 6)), {}, "S0->S0 shape[0] at 2|P->P"),
    "a turn": (("Transpose", (8, 10, 6)), {"perm": [2, 0, 1]}, "S2->S0 S0->S1 S1->S2 P->P"),
    "one number for many": (
        ("Expand", (8, 1, 6), ints(1, 10, 1)),
        {},
        "S0->S0|R->S1 shape[1]|S2->S2|P->P",
    ),
    "one after the other": (
        ("Concat", (8, 10), (8, 4), (8, 2)),
        {"axis": 1},
        "S0,S0,S0->S0 P,P,P->P",
    ),
    "every second": (
        ("Slice", (8, 10), ints(0), ints(10), ints(1), ints(2)),
        {},
        "S0->S0 P->P",
    ),
    "as much as the smallest trial has": (
        ("Slice", (4, 8), ints(0), ints(4), ints(1), ints(1)),
        {},
        "S0->S0 P->P",
    ),
    "queries, keys and values": (
        ("Split", (8, 10, 36), ints(12, 12, 12)),
        {"axis": 2, "outputs": 3},
        "S0->S0,S0,S0|S1->S1,S1,S1|P->P,P,P|S2/3->S2,S2,S2 split",
    ),
    "attention by heads": (
        ("Attention", (4, 8, 10, 16), (4, 2, 12, 16), (4, 2, 12, 6)),
        {"version": 24},
        "S0,S0,S0->S0 S1,S1,S1->S1 S2,R,R->S2 R,R,S3->S3 R,R,P->P",
    ),
    "attention with a mask as long as the heads are many": (
        ("Attention", (4, 8, 64), (4, 8, 64), (4, 8, 64), (8, 8)),
        {"version": 24, "q_num_heads": 8, "kv_num_heads": 8},
        "S0,S0,S0,R->S0|S2,S2,S2,R->S2 q_num_heads kv_num_heads at 2,4,8|S1,R,R,S0->S1|R,R,P,R->P",
    ),
    "attention that looks back": (
        ("Attention", (4, 10, 64), (4, 10, 16), (4, 10, 16)),
        {"version": 24, "is_causal": 1, "q_num_heads": 8, "kv_num_heads": 2},
        "S0,S0,S0->S0|S2,S2,S2->S2 q_num_heads kv_num_heads at 2|R,R,P->P",
    ),
    "attention with a short look back": (
        ("Attention", (4, 8, 600, 16), (4, 8, 600, 16), (4, 8, 600, 16)),
        {"version": 27, "left_window_size": 512},
        "S0,S0,S0->S0 S1,S1,S1->S1 R,R,S3->S3 R,R,P->P",
    ),
    "positions in the width": (
        ("RotaryEmbedding", (4, 16, 64), (24, 4), (24, 4), ("i", (4, 16))),
        {"version": 23, "num_heads": 8},
        "S0,R,R,S0->S0|S1,R,R,S1->S1|S2,R,R,R->S2 num_heads at 2,4,8|P,R,R,R->P|R,P,P,R->P",
    ),
    "Einstein's sum": (
        ("Einsum", (8, 10, 12), (8, 6, 12)),
        {"equation": "bik,bjk->bij"},
        "S0,S0->S0 S1,R->S1 R,S1->S2 S2,S2->P P,R->P R,P->P",
    ),
    "the five largest": (
        ("TopK", (8, 100), ints(5)),
        {"axis": 1, "outputs": 2},
        "S0->S0,S0",
    ),
    "a running sum": (("CumSum", (8, 10), np.array(1)), {}, "S0->S0 P->P"),
    "a triangle": (("Trilu", (8, 10, 10)), {}, "S0->S0 P->P"),
    "twice as many pixels": (
        ("Resize", (8, 6, 16), None, None, ints(8, 6, 32)),
        {
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
            "mode": "nearest",
        },
        "S0->S0 sizes[0]|S1->S1 sizes[1]|S2->S2 sizes[2] at 2,4,8|P->P",
    ),
    "a loss over classes": (("SoftmaxCrossEntropyLoss", (8, 10), ("i", (8,))), {}, "S0,S0->A"),
    "a loss that leaves some out": (
        ("SoftmaxCrossEntropyLoss", (8, 10), ("i", (8,))),
        {"ignore_index": 3, "reduction": "sum"},
        "S0,S0->P",
    ),
    "a recurrent network by samples": (
        ("LSTM", (6, 8, 10), (1, 24, 10), (1, 24, 6), (1, 48)),
        {"hidden_size": 6, "outputs": 3},
        "S1,R,R,R->S2,S1,S1",
    ),
    "regions of images": (
        ("RoiAlign", (2, 8, 10, 10), (6, 4), ("i", (6,))),
        {"output_height": 5, "output_width": 5},
        "R,S0,S0->S0 S1,R,R->S1 P,R,R->P",
    ),
    "the shape of a tensor": (("Dropout", (8, 10)), {}, "S0->S0 S1->S1 P->P"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_of(name):
    how, options, expected = CASES[name]
    due = expected.split("|") if "|" in expected else expected.split()
    assert rules_of(*how, **options) == set(due)


def test_rules_are_in_the_order_of_tensors_and_then_parameters():
    """ONNX has a table before its indices; the graph has tensors first."""
    free = rules_of("Gather", (100, 12), ("i", (8, 10)), axis=0)
    held = rules_of("Gather", (100, 12), ("i", (8, 10)), axis=0, held=(0,))
    assert "S1,R->S2" in free
    assert "R,S1->S2" in held


def test_dimensions_of_one_are_never_cut():
    assert rules_of("Add", (1, 6), (8, 6)) == {"R,S0->S0", "S1,S1->S1", "P,P->P"}


def test_running_statistics_are_cut_as_the_channels_also_where_nobody_reads_new_ones(tmp_path):
    """As exporters write it: y alone is read, and the new statistics stay in the operator."""
    described = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        "BatchNormalization", ["x", "scale", "b", "mean", "var"], ["y", "mean1", "var1"],
        training_mode=1,
    )  # fmt: skip
    held = [onnx.numpy_helper.from_array(np.ones(6, np.float32), name) for name in node.input[1:]]
    graph = onnx.helper.make_graph(
        [node], "one",
        [described("x", onnx.TensorProto.FLOAT, [8, 6, 10])],
        [described("y", onnx.TensorProto.FLOAT, [8, 6, 10])],
        held,
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph), tmp_path / "one.onnx")
    (rules,) = split_rules(load(tmp_path / "one.onnx"), cached=False)
    assert {rule.line for rule in rules} == {
        "S1,S0,S0,S0,S0->S1", "R,P,P,R,R->P", "S0,R,R,R,R->S0 @moments", "S2,R,R,R,R->S2 @moments"
    }  # fmt: skip
