"""What torch refuses is one message that names the operator, whoever runs it."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from planner.clusters.yaml.read import device_table
from planner.model.load import load
from planner.operators import check, synthetic, to_torch
from planner.operators.running import failing_operator, naming_failed_operator
from planner.profilers.analytic import analytic
from planner.profilers.measured import measure
from planner.support.errors import ModelError, OperatorError, words_of

IMAGE = "(float[2, 3, 8, 8] x) => (float y) {{ z = Mul(x, w) y = {} }}"


def loaded(folder, node, **values):
    """A model of two nodes, the first one sound."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> model {IMAGE.format(node)}'
    )
    arrays = {"w": np.ones(8, np.float32), **values}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return load(folder / "m.onnx")


def measured(model):
    return measure(model, model_path=None, repetitions=1, budget_s=0.0, cached=False)


def computed(model):
    kind = next(iter(device_table().values()))
    return analytic(model, model_path=None, kind=kind, dtype=None)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("LRN<size = 0>(z)", "LRN 'LRN_1' (version 18): torch refuses it: float division by zero"),
        ("LpPool<kernel_shape = [2, 2], p = 0>(z)",
         "LpPool 'LpPool_1' (version 18): torch refuses it: division by zero"),
        ("CumSum(z, k)",
         "CumSum 'CumSum_1' (version 18): torch refuses it: Dimension out of range (expected to be"
         " in range of [-4, 3], but got 99)"),
    ],
)  # fmt: skip
def test_attributes_that_make_no_sense_name_the_operator(tmp_path, node, said):
    model = loaded(tmp_path, node, k=np.array(99))
    for run in (check, to_torch, computed, measured):
        with pytest.raises(OperatorError) as caught:
            run(model)
        assert str(caught.value) == f"{model.path}: {said}"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            "Gather<axis = 1>(z, k)",
            "Gather 'Gather_1' (version 18): torch does not run it: INDI",
        ),
        ("GatherND(z, n)", "GatherND 'GatherND_1' (version 18): torch does not run it: index 99"),
    ],
)
def test_numbers_that_make_no_sense_name_the_operator(tmp_path, node, said):
    """They are known to torch only where there are numbers."""
    model = loaded(tmp_path, node, k=np.array([99]), n=np.array([[99, 99]]))
    with pytest.raises(OperatorError) as caught:
        measured(model)
    assert str(caught.value).startswith(f"{model.path}: {said}")
    assert "\n" not in str(caught.value)


def test_the_operator_at_which_a_whole_model_fails_is_found(tmp_path):
    import torch

    model = loaded(tmp_path, "Relu(z)")
    module = to_torch(model)
    with (
        pytest.raises(OperatorError, match=r"Mul 'Mul_0' \(version 18\): torch does not run it"),
        naming_failed_operator(model, module),
    ):
        module.forward(torch.ones(2, 3, 8, 7))
    assert failing_operator(module, ValueError()) is None
    with (
        pytest.raises(OperatorError, match="the whole model: torch does not run it: MemoryError"),
        naming_failed_operator(model, module),
    ):
        raise MemoryError


def test_an_error_without_words_is_named_by_its_type():
    assert words_of(AssertionError()) == "AssertionError"
    assert words_of(RuntimeError("first\nsecond")) == "first"


def test_inputs_that_do_not_fit_into_memory_are_named(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "randn", full)
    said = (
        r"m.onnx: input 'x': expected dimensions that fit into memory, got \[2, 3, 8, 8\], 1.5 KiB"
    )
    with pytest.raises(ModelError, match=said):
        synthetic.inputs(loaded(tmp_path, "Relu(z)"), seed=0, microbatch=0)
