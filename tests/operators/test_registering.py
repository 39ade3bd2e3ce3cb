"""Operators that the user adds, and what is said of those that nobody knows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

import planner
from planner.model.load import load
from planner.operators import register, to_torch
from planner.profilers.cache import cache_for
from planner.support.errors import OperatorError, OptionError
from tests.support.commands import run

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("unregistered")


def scaled(x: Tensor, bias: Tensor | None, times: int, *, beta: float = 2.0) -> Tensor:
    x = x if bias is None else x + bias
    return beta * times * torch.tanh(x)


def saved(folder, kind="Scaled", inputs=("h", "b", "n"), outputs=("y",), **attributes):
    """y = my.domain.Scaled(x w, b, n), as a file."""
    node = helper.make_node(kind, inputs, outputs, "it", domain="my.domain", **attributes)
    for key, value in {
        "name_scopes": "['', 'layers.0.act', 'scaled']",
        "class_hierarchy": "['m.Net', 'm.layers.Act', 'my.scaled']",
    }.items():
        node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "product"), node],
        "graph",
        [helper.make_tensor_value_info("x", 1, [4, 3])],
        [helper.make_tensor_value_info("y", 1, None)],
        [
            numpy_helper.from_array(np.ones((3, 2), np.float32) / 3, "w"),
            numpy_helper.from_array(np.array([0.5, -1], np.float32), "b"),
            numpy_helper.from_array(np.array(3), "n"),
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 2)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def test_a_registered_function_computes_the_operator(tmp_path):
    planner.operators.register("Scaled", scaled, domain="my.domain")
    module = to_torch(load(saved(tmp_path, beta=0.5)))
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    weights = dict(module.named_parameters())
    torch.testing.assert_close(module(x)[0], 1.5 * torch.tanh(x @ weights["w"] + weights["b"]))
    module(x)[0].sum().backward()
    assert all(one.grad.abs().sum() > 0 for one in weights.values())


def test_defaults_of_attributes_are_those_of_python(tmp_path):
    register("Scaled", scaled, domain="my.domain")
    module = to_torch(load(saved(tmp_path, inputs=("h", "", "n"))))
    x = torch.ones(4, 3)
    torch.testing.assert_close(module(x)[0], 6 * torch.tanh(torch.ones(4, 2)))


def test_several_outputs_have_the_shapes_that_the_function_makes(tmp_path):
    def halves(x: Tensor, *, num_outputs: int) -> tuple[Tensor, ...]:
        return x[:, :1], x[:, 1:].double()

    register("Halves", halves, domain="my.domain")
    model = load(saved(tmp_path, "Halves", ("h",), ("y", "z")))
    tensors = {one.name: (one.shape, one.dtype) for one in model.graph.tensors}
    assert tensors["y"] == ((4, 1), "float32")
    assert to_torch(model)(torch.ones(4, 3))[0].shape == (4, 1)


def test_shapes_may_be_given_where_the_function_needs_numbers(tmp_path):
    def numbers(x: Tensor) -> Tensor:
        return x if x.is_meta else x * float(x.sum() > 0)

    def refused(x: Tensor) -> Tensor:
        return x * float(x.sum() > 0)

    register("Refused", refused, domain="my.domain")
    with pytest.raises(OperatorError, match=r"(?s)it: my.domain.Refused .* meta tensors.*shapes="):
        load(saved(tmp_path, "Refused", ("h",)))
    register("Numbers", numbers, domain="my.domain", shapes=lambda node: [node.inputs[0]])
    model = load(saved(tmp_path, "Numbers", ("h",)))
    assert to_torch(model)(torch.ones(4, 3))[0].tolist() == [[1.0, 1.0]] * 4


def test_no_gradient_flows_over_inputs_without_one(tmp_path):
    register("Scaled", scaled, domain="my.domain", without_gradient=(1,))
    trained = {p.name for p in load(saved(tmp_path)).graph.parameters if p.trainable}
    assert trained == {"w"}


def test_a_wrong_output_shape_is_refused(tmp_path):
    register("Scaled", scaled, domain="my.domain", shapes=lambda node: [("float32", (4, 3))])
    with pytest.raises(OperatorError, match=r"the model says float32\[4, 3\], torch makes"):
        to_torch(load(saved(tmp_path)))


def test_a_function_of_torch_without_a_signature_gets_the_inputs(tmp_path):
    register("Inverse", torch.erf, domain="my.domain")
    module = to_torch(load(saved(tmp_path, "Inverse", ("h",))))
    torch.testing.assert_close(module(torch.ones(4, 3))[0], torch.erf(torch.ones(4, 2)))


def test_one_operator_has_one_function():
    register("Scaled", scaled, domain="my.domain")
    register("Scaled", scaled, domain="my.domain")
    with pytest.raises(ValueError, match="it has one already"):
        register("Scaled", torch.abs, domain="my.domain")
    with pytest.raises(ValueError, match="Relu: expected an operator without a function"):
        register("Relu", scaled, domain="")
    with pytest.raises(ValueError, match="expected parameters in lower case, got X"):
        register("Other", lambda X: X, domain="my.domain")  # noqa: N803


def test_too_many_inputs_are_an_error(tmp_path):
    register("Scaled", lambda x: x, domain="my.domain")
    with pytest.raises(OperatorError, match="at most 1 inputs, got input 1, input 2 besides"):
        load(saved(tmp_path))


def test_measurements_of_another_function_are_not_taken(tmp_path):
    before = cache_for("cpu", 1, "float32", "2").folder
    register("Scaled", scaled, domain="my.domain")
    assert cache_for("cpu", 1, "float32", "2").folder != before


def test_an_unknown_operator_names_version_nodes_module_and_the_way_out(tmp_path):
    with pytest.raises(OperatorError) as error:
        load(saved(tmp_path))
    (line,) = str(error.value).splitlines()
    assert "my.domain.Scaled version 2 is no operator that ONNX" in line
    assert "used by it (in layers.0.act (Act));" in line
    assert "planner.operators.register" in line


@pytest.mark.parametrize(
    ("domain", "reason"),
    [("com.microsoft.nchwc", "at level basic or extended"), ("ai.onnx.ml", "no gradient flows")],
)
def test_operators_of_domains_without_training_are_refused_with_the_reason(
    domain, reason, tmp_path
):
    proto = onnx.load(saved(tmp_path))
    proto.graph.node[1].domain = proto.opset_import[1].domain = domain
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(OperatorError, match=reason):
        load(tmp_path / "model.onnx")


# ---- the command line

MODULE = """
import torch
import planner

def scaled(x: torch.Tensor, bias: torch.Tensor, times: int, *, beta: float = 2.0):
    return beta * times * torch.tanh(x + bias)

planner.operators.register("Scaled", scaled, domain="my.domain")
"""


@pytest.mark.slow
def test_a_module_of_operators_serves_profile_solve_and_launch(tmp_path):
    saved(tmp_path)
    (tmp_path / "mine").with_suffix(".py").write_text(MODULE)
    module = ["--operators", "mine"]
    for arguments in (
        ["profile", "model.onnx", "--no-cache", *module],
        ["solve", "--gpus", "2", "--topology", "local", "--microbatches", "2", *module],
        ["launch", "strategy.json", "--nproc", "2", "--steps", "2", *module],
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), *arguments],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(OptionError, match="--operators no_such_module: ModuleNotFoundError"):
        planner.load_operators(["no_such_module"])
    assert "--operators" in run("profile", "--help").output
