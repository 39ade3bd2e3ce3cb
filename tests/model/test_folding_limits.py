"""Constants are computed only as far as memory and time allow, and refused in words beyond that."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import (
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
)
from onnx.reference import ReferenceEvaluator

from planner.model import folding
from planner.model.folding import MAX_FOLDED_BYTES
from planner.model.load import load
from planner.support.errors import ModelError

LARGE = 30_000_000


def saved(folder, nodes, **initializers):
    """A model that multiplies its input by a weight, and adds `y` of the nodes."""
    last = [make_node("Mul", ["x", "w"], ["xw"]), make_node("Add", ["xw", "y"], ["z"])]
    graph = make_graph(
        [*nodes, *last],
        "g",
        [make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in {"w": np.ones((2, 2), np.float32), **initializers}.items()
        ],
    )
    model = make_model(graph, opset_imports=[make_opsetid("", 21)], ir_version=9)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def whole(*numbers):
    """Whole numbers as shapes and pads have them."""
    return np.array(numbers, dtype=np.int64)


def largest(name):
    """Nodes that make `y` of a tensor of whole numbers."""
    return [
        make_node("ReduceMax", [name], ["most"], keepdims=0),
        make_node("Cast", ["most"], ["y"], to=1),
    ]


@pytest.fixture
def computed(monkeypatch):
    """The bytes of every tensor that onnx.reference computes; its own sizes are small here."""
    sizes = []
    run = ReferenceEvaluator.run

    def recording(self, *arguments, **more):
        results = run(self, *arguments, **more)
        sizes.extend(np.asarray(one).nbytes for one in results)
        return results

    monkeypatch.setattr(ReferenceEvaluator, "run", recording)
    return sizes


# Computed of floats, so that the number is known only when it is asked for.
COMPUTED = [make_node("Mul", ["f", "f"], ["g"]), make_node("Cast", ["g"], ["n"], to=7)]
ROOT = np.array([LARGE**0.5], np.float32)
ONE_NUMBER = [*COMPUTED, make_node("Squeeze", ["n"], ["n0"])]

CASES = {
    "ConstantOfShape": ([make_node("ConstantOfShape", ["n"], ["c"])], {"n": whole(LARGE)}),
    "ConstantOfShape of a computed size": (
        [*COMPUTED, make_node("ConstantOfShape", ["n"], ["c"])], {"f": ROOT},
    ),
    "Pad": ([make_node("Pad", ["i", "n"], ["c"])], {"i": whole(1, 2), "n": whole(0, LARGE)}),
    "Pad by a computed size": (
        [*COMPUTED, make_node("Concat", ["o", "n"], ["p"], axis=0),
         make_node("Pad", ["i", "p"], ["c"])],
        {"f": ROOT, "i": whole(1, 2), "o": whole(0)},
    ),
    "Range": (
        [make_node("Range", ["a", "n", "d"], ["c"])],
        {"a": np.array(0), "n": np.array(LARGE), "d": np.array(1)},
    ),
    "Range up to a computed number": (
        [*ONE_NUMBER, make_node("Range", ["a", "n0", "d"], ["c"])],
        {"f": ROOT, "a": np.array(0), "d": np.array(1)},
    ),
    "Expand": ([make_node("Expand", ["i", "n"], ["c"])], {"i": whole(1), "n": whole(LARGE)}),
    "Tile": ([make_node("Tile", ["i", "n"], ["c"])], {"i": whole(1, 2), "n": whole(LARGE)}),
    "OneHot": (
        [make_node("OneHot", ["i", "n", "v"], ["c"])],
        {"i": whole(1, 2), "n": np.array(LARGE), "v": whole(0, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
def test_large_constants_are_not_computed(tmp_path, computed, case):
    nodes, initializers = CASES[case]
    path = saved(tmp_path, [*nodes, *largest("c")], **initializers)
    load(path)
    assert max(computed, default=0) <= MAX_FOLDED_BYTES


@pytest.mark.parametrize("size", [10**9, 10**10, 10**12])
@pytest.mark.parametrize("operator", ["ConstantOfShape", "Pad", "Expand"])
def test_constants_that_no_step_could_make_are_refused(tmp_path, operator, size):
    inputs = {
        "ConstantOfShape": {"n": whole(size)},
        "Pad": {"i": whole(1, 2), "n": whole(0, size)},
        "Expand": {"i": whole(1), "n": whole(size)},
    }[operator]
    nodes = [make_node(operator, [*inputs], ["c"], name="large"), *largest("c")]
    message = rf"large: expected constants of at most 2 GiB, got .* from {operator}; the model may"
    with pytest.raises(ModelError, match=message):
        load(saved(tmp_path, nodes, **inputs))


def test_the_transpose_of_a_large_weight_is_no_large_constant(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "MAX_INDEPENDENT_BYTES", 8)
    path = saved(tmp_path, [make_node("Transpose", ["v"], ["y"])], v=np.ones((2, 2), np.float32))
    assert "Transpose" in {one.type for one in load(path).graph.operators}


def test_the_size_of_what_cannot_be_is_refused(tmp_path):
    nodes = [
        make_node("Expand", ["x", "n"], ["c"]),
        make_node("Size", ["c"], ["s"]),
        make_node("Cast", ["s"], ["y"], to=1),
    ]
    with pytest.raises(ModelError, match=r"Size_\d: expected a tensor that can be, got \[10000000"):
        load(saved(tmp_path, nodes, n=whole(10**12, 10**12, 2, 2)))


def test_products_of_large_whole_numbers_are_not_computed(tmp_path, computed):
    nodes = [
        make_node("Expand", ["i", "n"], ["a"]),
        make_node("Transpose", ["a"], ["b"]),
        make_node("MatMul", ["a", "b"], ["c"]),
        *largest("c"),
    ]
    load(saved(tmp_path, nodes, i=whole(1), n=whole(1200, 1200)))
    assert len(computed) == 2


def test_many_constants_are_limited_together(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "MAX_COMPUTED_BYTES", 10_000)
    nodes = [make_node("ConstantOfShape", ["n"], [f"c{i}"]) for i in range(30)]
    nodes += [make_node("ReduceMax", [f"c{i}"], [f"m{i}"], keepdims=0) for i in range(30)]
    nodes += [make_node("Sum", [f"m{i}" for i in range(30)], ["y"])]
    with pytest.raises(
        ModelError, match=r"expected constants of at most 9\.77 KiB in all, got more"
    ):
        load(saved(tmp_path, nodes, n=whole(100)))


@pytest.mark.parametrize("sizes", [None, whole(1), np.array(1), np.ones(20_000, np.int64)])
def test_a_sequence_has_as_many_tensors_as_there_may_be_nodes(tmp_path, sizes):
    more = {} if sizes is None else {"sizes": sizes}
    nodes = [
        make_node("Expand", ["i", "n"], ["a"]),
        make_node("SplitToSequence", ["a", *more], ["q"], name="split"),
        make_node("SequenceLength", ["q"], ["l"]),
        make_node("Cast", ["l"], ["y"], to=1),
    ]
    message = "split: expected a sequence of at most 10000 tensors, got 20000"
    if sizes is not None and sizes.shape == (1,):
        message = "split: expected sizes that add up to 20000"
    with pytest.raises(ModelError, match=message):
        load(saved(tmp_path, nodes, i=whole(1), n=whole(20_000), **more))
