"""Values and gradients at special points are PyTorch's, or the table says that they are not."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

import planner
from planner.artefacts.operator_types import OPERATOR_TYPES, OperatorType
from planner.model.load import load
from planner.operators import elementwise
from planner.support.errors import OperatorError
from tests.bench import points
from tests.support.special_points import NODES, POINTS, REFUSED

SOME = [*POINTS[::16], *(one for one in POINTS if one.differs)]
"""Points that `make test` runs; all take two minutes."""


def misjudged(chosen, way, dtype=torch.float64):
    """Points whose gradients are others than they are said to be."""
    found = points.differences(chosen, way, dtype)
    return {
        (point.operator, point.at): one
        for point, one in zip(chosen, found, strict=True)
        if bool(one) != bool(point.differs)
    }


def test_some_operators_of_torch_have_its_gradients():
    assert misjudged(SOME, points.by_module) == {}


def test_operators_of_onnx_have_the_gradients_of_torch_functions():
    assert misjudged(NODES, points.by_node) == {}


@pytest.mark.slow
def test_the_table_is_that_of_these_points():
    found = points.differences(POINTS, points.by_module), points.differences(NODES, points.by_node)
    made = points.text(*found, list(map(points.refusal, REFUSED)))
    assert made in points.FILE.read_text()


@pytest.mark.slow
def test_float32_has_the_same_gradients():
    rounded = {("instance_norm", "equals"), ("logaddexp", "large")}
    zero_there = {("binary_cross_entropy", "near its ends")}  # 1e-60
    assert misjudged(POINTS, points.by_module, torch.float32).keys() <= rounded | zero_there


def closed_relu(x: torch.Tensor) -> torch.Tensor:
    """A Relu whose gradient at zero is one."""
    return x.clamp(min=0)


def test_a_wrong_gradient_is_seen(monkeypatch):
    (point,) = (one for one in NODES if one.operator == "Relu")
    monkeypatch.setitem(OPERATOR_TYPES, "Relu", OperatorType(closed_relu))
    assert "gradient" in misjudged([point], points.by_node)["Relu", "zero"]


def test_every_point_stands_in_the_table():
    text = points.FILE.read_text()
    for point in (*POINTS, *NODES):
        assert f"| {point.operator} | " in text
        assert point.at in text
    assert len(POINTS) >= 200
    assert len({one.operator for one in POINTS}) >= 100


class Each(nn.Module):
    """A function of an input plus a parameter."""

    def __init__(self, function, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x):
        return self.function(x + self.shift)


INDEX = torch.tensor([[0, 0, 1, 3], [3, 1, 1, 1]])
SEEN = torch.tensor([[True, False, True], [False, False, False]])[:, None, None]  # of two samples
GOALS, WEIGHTS = torch.linspace(0, 1, 24).view(2, 3, 4), torch.tensor([0.5, 1.0, 2.0, 1.0])
ELSEWHERE = {
    "max, negative dimension kept": lambda x: torch.stack(x.max(-2, keepdim=True)[:1]),
    "min, and its index": lambda x: x.min(0).values + x.min(0).indices,
    "pooling of an image": lambda x: functional.adaptive_max_pool2d(x, (1, 2)),
    "pooling, and its places": lambda x: functional.adaptive_max_pool2d(
        x, (3, 2), return_indices=True)[1] + x.mean(),
    "deviation of two dimensions": lambda x: x.std((0, -1), keepdim=True),
    "deviation and mean of all": lambda x: torch.stack(torch.std_mean(x)),
    "norm of order 0.5": lambda x: x.norm(p=0.5, dim=(0, 1)),
    "norm of all": lambda x: torch.linalg.vector_norm(x, 3),
    "norm in float64": lambda x: torch.linalg.vector_norm(x, 2, -1, dtype=torch.float64),
    "distances of few rows": lambda x: torch.cdist(x, x[:1, :2]),
    "distances of many rows": lambda x: torch.cdist(
        x[0], torch.cat([x[0] + k for k in range(1, 10)])),
    "running product": lambda x: x.cumprod(1),
    "running product of one": lambda x: x[:1].cumprod(0),
    "running logarithms": lambda x: x.logcumsumexp(-1),
    "sum of exponentials, broadcast": lambda x: torch.logaddexp(x, x[0, 0]),
    "binary scores": lambda x: functional.binary_cross_entropy_with_logits(
        x, GOALS, WEIGHTS, reduction="sum", pos_weight=WEIGHTS),
    "binary probabilities": lambda x: functional.binary_cross_entropy(
        x.sigmoid(), GOALS, WEIGHTS, reduction="sum"),
    "probabilities of learnt targets": lambda x: functional.binary_cross_entropy(
        torch.full_like(x, 0.25), x.sigmoid(), reduction="none"),
    "margins": lambda x: functional.multi_margin_loss(
        x[0], torch.tensor([1, 0, 3]), p=2, weight=WEIGHTS),
    "clipped between learnt numbers": lambda x: x.clamp(x[0, 0], x[1, 1] + 1),
    "clipped integers": lambda x: x[torch.arange(5).clamp(0, 1)],
    "rectified": lambda x: functional.hardtanh(x, -0.5, 0.25) + functional.relu6(8 * x),
    "angles": lambda x: torch.atan2(x, x.roll(1, 0)),
    "mean of scattered": lambda x: x[0, :2].scatter_reduce(1, INDEX, x[1, :2], "mean"),
    "mean of scattered alone": lambda x: x[0, :2].scatter_reduce(
        1, INDEX, x[1, :2], "mean", include_self=False),
    "attention with padding": lambda x: functional.scaled_dot_product_attention(
        x.view(2, 1, 3, 4), x.view(2, 1, 3, 4), x.view(2, 1, 3, 4), attn_mask=SEEN),
    "attention of shared keys": lambda x: functional.scaled_dot_product_attention(
        x.view(1, 2, 3, 4), x[:1, None], x[1:, None], attn_mask=SEEN, enable_gqa=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_they_are_torch_s_too(name, tmp_path):
    """The comparison of the export refuses other outputs and gradients."""
    torch.manual_seed(0)
    module = Each(ELSEWHERE[name], 2, 3, 4)
    made = planner.export(module, (torch.randn(2, 3, 4),), tmp_path / "net.onnx")
    assert made.check.difference is not None, made.check.reason
    assert made.gradients.difference is not None, made.gradients.reason


def test_a_mask_that_is_known_to_hide_no_row_costs_nothing(tmp_path):
    def operators(diagonal):
        def attend(x):
            heads, seen = x.view(2, 1, 3, 4), torch.ones(3, 3).tril(diagonal) > 0
            made = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
            return made.flatten(1)

        module = Each(attend, 2, 3, 4)
        return planner.export(module, (torch.randn(2, 3, 4),), tmp_path / "net.onnx").operators

    assert "Where" not in operators(0)
    assert operators(-1)["Where"] == 1  # the first query sees nothing


def test_an_image_without_samples_is_pooled(tmp_path):
    module = Each(lambda x: functional.adaptive_max_pool2d(x, 2), 1, 4, 4)
    assert (
        planner.export(module, (torch.randn(1, 4, 4),), tmp_path / "net.onnx").check.difference == 0
    )


def bounded(tmp_path, function):
    path = tmp_path / f"{function.__name__}.onnx"
    planner.export(Each(function, 3), (torch.tensor([6.0, 0.0, 1.0]),), path)
    return load(path)


def test_bounds_that_are_open_are_marked_and_another_model(tmp_path):
    made, plain = (
        bounded(tmp_path, functional.relu6),
        bounded(tmp_path, lambda x: x.clamp(0.0, 6.0)),
    )
    (clip,), (other,) = (
        [node for node in model.nodes if node.type == "Clip"] for model in (made, plain)
    )
    assert clip.attributes == {"open_bounds": 1}
    assert not other.attributes
    proto = onnx.load(made.path)
    assert made.hash != plain.hash
    for node in proto.graph.node:
        del node.metadata_props[:]
    onnx.save(proto, tmp_path / "unmarked.onnx")
    assert load(tmp_path / "unmarked.onnx").hash != made.hash


def test_open_bounds_have_no_gradient():
    x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    elementwise.clip(x, -1.0, 1.0, open_bounds=1).sum().backward()
    assert x.grad.tolist() == [0, 1, 0]
    with pytest.raises(OperatorError, match="min, max: expected numbers"):
        elementwise.clip(x, torch.tensor(-1.0), 1.0, open_bounds=1)


def test_numbers_as_text():
    assert (
        points.numbers(torch.tensor([[1.0, 0.25], [float("nan"), 1e12]])) == "[1, 0.25, nan, 1e+12]"
    )
    assert points.numbers(None) == "none"
