"""Stopped gradients in a file: marked Identities where the module has them, and nowhere else."""

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

import planner
from planner.model.canonical import content_hash
from planner.model.export.composed import Composed
from planner.model.export.forms import remove_annotations, to_evaluation
from planner.model.scopes import STOP_MARK, stops_gradient
from planner.operators import to_torch
from planner.support.errors import ExportError
from tests.operators.gradients.test_check import Net, export


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def marked(path="model.onnx"):
    return [node for node in onnx.load(path).graph.node if stops_gradient(node)]


def no_grad(y):
    with torch.no_grad():
        return torch.relu(y)


def enabled_within(y):
    with torch.no_grad():
        stopped = y * 2
        with torch.enable_grad():
            return stopped + y


def inference(y):
    with torch.inference_mode():
        made = y * 2
    return y + made.clone()


STOPS = {
    "detach": lambda y: y.detach(),
    "detach in place": lambda y: (y * 1).detach_() + y,
    "no_grad": no_grad,
    "enable_grad in it": enabled_within,
    "inference_mode": inference,
    "straight through": lambda y: y + (torch.round(y) - y).detach(),
    "in two uses": lambda y: y * y.detach(),
}


@pytest.mark.parametrize("kind", STOPS)
def test_a_stop_is_one_marked_identity(kind):
    done = export(Net(STOPS[kind]))
    assert done.gradients.difference < 1e-7
    assert done.gradients.num_parameters == 4
    (node,) = marked()
    assert (node.op_type, node.domain) == ("Identity", "")
    assert {one.domain for one in onnx.load("model.onnx").opset_import} == {""}
    graph = planner.read_model("model.onnx").graph
    tensors = {one.name: one for one in graph.tensors}
    assert not tensors[node.output[0]].gradient


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y.detach().argmax(-1).to(y.dtype).unsqueeze(-1) + y,
        lambda y: y * (torch.ones(4) * 2).detach(),
        lambda y: y.masked_fill((y > 0).detach(), 0.0),
    ],
)
def test_what_has_no_gradient_anyway_has_no_mark_in_the_graph_that_is_trained(between):
    export(Net(between))
    graph = planner.read_model("model.onnx").graph
    assert export(Net(between)).gradients.difference < 1e-7
    made = {name for node in marked() for name in node.output}
    readers = [one.type for one in graph.operators if made.intersection(one.inputs)]
    assert set(readers) <= {"ArgMax"}


def test_inputs_buffers_and_frozen_parameters_have_no_mark():
    class Held(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(4))
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.frozen(x) * self.scale
            return super().forward(x.detach() * self.scale.detach() + wanted)

    export(Held())
    assert marked() == []


def test_a_mark_is_a_part_of_the_hash_and_of_the_evaluation_form():
    export(Net(lambda y: y * y.detach()))
    proto = onnx.load("model.onnx")
    before = content_hash(proto)
    to_evaluation(proto)
    remove_annotations(proto)
    assert len([node for node in proto.graph.node if stops_gradient(node)]) == 1
    for node in proto.graph.node:
        del node.metadata_props[:]
    assert content_hash(proto) != before


def test_metadata_that_is_no_mark_is_no_part_of_the_hash():
    export(Net())
    proto = onnx.load("model.onnx")
    before = content_hash(proto)
    proto.graph.node[0].metadata_props.add(key="planner.note", value="1")
    assert content_hash(proto) == before


def test_a_stopped_parameter_is_trained_by_its_other_use():
    class Twice(Net):
        def forward(self, x):
            y = functional.linear(x, self.first.weight.detach(), self.first.bias)
            return self.second(y + self.first(x))

    assert export(Twice()).gradients.difference < 1e-7
    parameters = {one.name: one for one in planner.read_model("model.onnx").graph.parameters}
    assert parameters["first.weight"].trainable


def test_a_parameter_that_only_a_stop_reads_is_not_trained():
    class Once(Net):
        def forward(self, x):
            return self.second(functional.linear(x, self.first.weight.detach(), self.first.bias))

    assert export(Once()).gradients.difference < 1e-7
    parameters = {one.name: one for one in planner.read_model("model.onnx").graph.parameters}
    assert not parameters["first.weight"].trainable
    assert parameters["first.bias"].trainable


def test_a_stop_within_a_branch_is_kept():
    class Chosen(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("on", torch.tensor(True))

        def forward(self, x):
            y = self.first(x)
            return torch.cond(
                self.on, lambda y: self.second(y + torch.sin(y).detach()), self.second, (y,)
            )

    assert export(Chosen()).gradients.difference < 1e-7
    nodes = planner.read_model("model.onnx").nodes
    assert sum(node.attributes.get("stop_gradient", 0) for node in nodes) == 1


def test_checkpointing_stops_nothing():
    checkpoint = torch.utils.checkpoint.checkpoint
    export(Net(lambda y: checkpoint(torch.sin, y, use_reentrant=True)))
    assert marked() == []


def test_modes_are_what_they_were_after_a_trace():
    before = [
        vars(kind)[name]
        for kind, name in (
            (torch.inference_mode, "__enter__"),
            (torch.inference_mode, "__exit__"),
            (torch.set_grad_enabled, "__init__"),
            (torch.autograd.Function, "apply"),
        )
    ]
    export(Net(inference))
    assert before == [
        vars(torch.inference_mode)["__enter__"],
        vars(torch.inference_mode)["__exit__"],
        vars(torch.set_grad_enabled)["__init__"],
        vars(torch.autograd.Function)["apply"],
    ]


def written_behind(y):
    stopped = y.detach()
    stopped[:, 0] = 0.0
    return y * stopped


def written_before(y):
    own = y * 2
    own.add_(1)
    return y * own.detach()


def written_without_gradients(y):
    own = y * 2
    with torch.no_grad():
        own.mul_(3)
    return own


def test_writes_into_the_memory_of_a_stopped_tensor_are_refused():
    for between, word in (
        (written_behind, "behind detach"),
        (written_without_gradients, "under torch.no_grad"),
    ):
        with pytest.raises(ExportError, match=word):
            export(Net(between), check=False)
    assert export(Net(written_before)).gradients.difference < 1e-7
    assert len(marked()) == 1


def test_a_bag_by_frequency_is_refused():
    module = nn.Sequential(nn.EmbeddingBag(9, 4, scale_grad_by_freq=True), nn.Linear(4, 2))
    with pytest.raises(ExportError, match="scale_grad_by_freq"):
        export(module, (torch.arange(6).reshape(2, 3),))


def test_a_change_of_a_parameters_flag_is_refused_by_name():
    class Freezing(Net):
        def forward(self, x):
            self.second.weight.requires_grad_(False)
            self.first.bias.requires_grad = False
            return super().forward(x)

    module = Freezing()
    with pytest.raises(
        ExportError, match=r"changes requires_grad of second\.weight, first\.bias, but"
    ):
        export(module, check=False)
    assert all(one.requires_grad for one in module.parameters())


def test_a_gradient_that_forward_computes_is_refused():
    class Penalty(Net):
        def forward(self, x):
            x = x.detach().requires_grad_()
            y = super().forward(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return {"loss": y.square().mean() + gradient.square().mean()}

    with pytest.raises(ExportError, match="Penalty"):
        export(Penalty())


# ---- operators with a backward of their own


def both(function, *leaves):
    """Value and gradients of an operator of torch, and of what stands for it in a trace."""
    made = []
    for mode in (torch.no_grad, Composed):
        own = [one.clone().requires_grad_(one.is_floating_point()) for one in leaves]
        if mode is Composed:
            with Composed():
                value = function(*own)
        else:
            value = function(*own)
        factors = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        (value * factors).sum().backward()
        made.append((value.detach(), [one.grad for one in own]))
    return made


INTEGERS = torch.tensor([[1, 3, 3], [3, 0, 9]])
QUANTIZED = {
    "per tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -10, 10),
    "a third": lambda x: torch.fake_quantize_per_tensor_affine(x, 1 / 3, 0, -128, 127),
    "by tensors": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor([0.07]), torch.tensor([2], dtype=torch.int32), 0, 127
    ),
    "per channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.linspace(0.01, 1, 6), torch.arange(6, dtype=torch.int32), 1, 0, 31
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_fake_quantization_is_composed_to_the_bit(kind, dtype):
    x = (torch.randn(50, 6) * 3).to(dtype)
    x[0, 0], x[0, 1], x[0, 2] = 1e6, -1e6, 0.0
    (value, (gradient,)), (made, (own,)) = both(QUANTIZED[kind], x)
    assert torch.equal(made, value)
    assert torch.equal(own, gradient)
    assert 0 < (gradient == 0).sum() < gradient.numel()


def test_learned_steps_are_composed():
    def quantized(x, scale, zero):
        made = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -8, 7, 0.3)
        scales, zeros = scale * torch.ones(6), zero + torch.arange(6.0)
        return made + torch._fake_quantize_learnable_per_channel_affine(
            x, scales, zeros, 1, -8, 7, 0.3
        )

    x = torch.randn(50, 6) * 3
    (value, wanted), (made, own) = both(quantized, x, torch.tensor([0.31]), torch.tensor([1.2]))
    assert torch.equal(made, value)
    for one, other in zip(own, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("function", [functional.embedding, torch.embedding])
def test_embeddings_by_frequency_are_composed(function, padding):
    def looked_up(weight):
        if function is torch.embedding:
            row = -1 if padding is None else padding % 10
            return torch.embedding(weight, INTEGERS, row, scale_grad_by_freq=True)
        return function(INTEGERS, weight, padding, scale_grad_by_freq=True)

    (value, (gradient,)), (made, (own,)) = both(looked_up, torch.randn(10, 6))
    assert torch.equal(made, value)
    assert torch.allclose(own, gradient)
    if padding is not None:
        assert not own[padding].any()


@pytest.mark.parametrize("padding", [0, -2])
def test_values_in_the_file_are_those_of_the_module(padding):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4, padding_idx=padding, scale_grad_by_freq=True)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens):
            y = torch.fake_quantize_per_tensor_affine(self.table(tokens), 0.05, 0, -20, 20)
            return self.head(y + (torch.sin(y) - y).detach())

    module, tokens = Quantized(), torch.tensor([[0, 7, 7], [7, 1, 0]])
    done = export(module, (tokens,))
    assert done.gradients.difference < 1e-7
    (made,) = to_torch(planner.read_model("model.onnx"))(tokens)
    assert torch.equal(made, module(tokens))


def test_a_file_with_an_older_mark_is_read():
    export(nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 2)),
           (torch.arange(6).reshape(2, 3),))  # fmt: skip
    proto = onnx.load("model.onnx")
    (node,) = (one for one in proto.graph.node if one.op_type == "Gather")
    assert [(one.key, one.value) for one in node.metadata_props if "planner" in one.key] == [
        ("planner.padding_idx", "2")
    ]
    assert STOP_MARK not in {one.key for n in proto.graph.node for one in n.metadata_props}
    assert numpy_helper.to_array(proto.graph.initializer[0]).shape == (9, 4)
    (gather,) = (one for one in planner.read_model("model.onnx").nodes if one.type == "Gather")
    assert gather.attributes["padding_idx"] == 2
