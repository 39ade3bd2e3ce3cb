"""A file trains as its module does, or the export says where and why not."""

import random
import re

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

import planner
from planner.model.record import Checked, read_record
from planner.operators import randomness
from planner.operators.gradients import check as checking
from planner.operators.gradients.distance import TOLERANCE, apart
from planner.support.errors import ExportError, ModelError
from tests.support.commands import run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


class Net(nn.Module):
    """Two layers; `between` is what happens between them."""

    def __init__(self, between=lambda y: y):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.between = between

    def forward(self, x):
        return self.second(self.between(torch.tanh(self.first(x))))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Reversed(Squared):
    @staticmethod
    def backward(ctx, gradient):
        return -2 * ctx.saved_tensors[0] * gradient


def export(module, inputs=None, **options):
    inputs = (torch.randn(5, 4),) if inputs is None else inputs
    return planner.export(module, inputs, "model.onnx", **options)


def halved(y):
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


DIFFERENT = {
    "a function": (Reversed.apply, "Reversed, a torch.autograd.Function"),
    "a hook": (halved, "register_hook()"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_gradients_are_refused_with_their_cause(kind):
    between, cause = DIFFERENT[kind]
    with pytest.raises(ExportError) as refused:
        export(Net(between))
    text = str(refused.value)
    assert "first.weight by " in text
    assert "first.bias by " in text
    assert "second" not in text.splitlines()[0]
    assert f"cause: {cause}" in text
    assert "test_check.py:" in text


def test_the_place_of_a_difference_is_between_two_calls():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
            y = Reversed.apply(x)
            return self.layers[3](torch.tanh(self.layers[2](y)))

    with pytest.raises(ExportError, match=r"layers\.0\.weight") as refused:
        export(Deep())
    lines = [line.strip() for line in str(refused.value).splitlines()]
    between, behind = (line for line in lines if line.startswith(("between ", "and ")))
    assert "return x * x (in Deep)" in between
    assert "in layers.2, Linear" in behind


@pytest.mark.parametrize("hook", ["parameter", "accumulated", "module"])
def test_hooks_that_stand_before_the_run_are_the_cause(hook):
    module = Net()
    if hook == "parameter":
        module.first.weight.register_hook(lambda gradient: 2 * gradient)
    elif hook == "accumulated":
        module.first.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])
    else:
        module.second.register_full_backward_hook(lambda _, given, __: (2 * given[0],))
    with pytest.raises(ExportError, match=r"cause: a .*hook.* of "):
        export(module)


def test_max_norm_of_an_embedding_is_refused_even_where_the_example_does_not_show_it():
    module = nn.Sequential(nn.Embedding(9, 4, max_norm=100.0), nn.Linear(4, 2))
    with pytest.raises(ExportError, match="max_norm"):
        export(module, (torch.arange(6).reshape(2, 3),))


@pytest.mark.parametrize("row", [0, -1])
def test_padding_of_an_embedding_gets_no_gradient_in_the_file(row):
    module = nn.Sequential(nn.Embedding(9, 4, padding_idx=row), nn.Linear(4, 2))
    done = export(module, (torch.arange(8).reshape(2, 4) + (row < 0),))
    assert done.gradients.difference < 1e-7
    with_padding = planner.read_model("model.onnx").hash
    torch.manual_seed(0)
    other = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    other.load_state_dict(module.state_dict())
    export(other, (torch.arange(8).reshape(2, 4) + (row < 0),))
    assert planner.read_model("model.onnx").hash != with_padding


AGREEING = {
    "a function that agrees": (Squared.apply, "Squared, a torch.autograd.Function"),
    "a hook that looks on": (
        lambda y: (y.requires_grad and y.register_hook(lambda gradient: None), y)[1],
        "register_hook()",
    ),
    "a checkpoint": (
        lambda y: checkpoint.checkpoint(torch.sin, y, use_reentrant=True), "CheckpointFunction",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", AGREEING)
def test_what_makes_no_difference_is_a_note(kind):
    between, what = AGREEING[kind]
    done = export(Net(between))
    assert done.gradients.difference < 1e-7
    assert any(what in note and "agree" in note for note in done.notes)


def draws(y):
    noise = torch.randn_like(y) + torch.rand(y.shape) + torch.normal(0.0, 2.0, y.shape)
    kept = torch.bernoulli(torch.full_like(y, 0.4))
    y = functional.dropout(y + noise * kept, 0.3) + functional.gumbel_softmax(y)
    return y * functional.dropout(torch.ones_like(y), 0.5)


def test_models_that_draw_numbers_are_compared():
    module = Net(draws).train()
    done = export(module)
    assert done.gradients.difference < 1e-7
    assert done.gradients.num_parameters == 4


def test_a_graph_that_draws_otherwise_is_refused(monkeypatch):
    def all_kept(node, shape, ratio, device, seed):
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)

    monkeypatch.setattr(randomness, "dropout_mask", all_kept)
    with pytest.raises(
        ExportError, match="run by the launcher, the exported file computes another"
    ):
        export(Net(lambda y: functional.dropout(y, 0.5)).train())


def test_the_module_is_left_as_it_was():
    class Keeping(Net):
        def forward(self, x):
            self.last = torch.tanh(self.first(x))
            return self.norm(self.second(self.last))

    module = Keeping().train()
    module.norm = nn.BatchNorm1d(3)
    module.first.weight.grad = torch.ones(4, 4)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    export(module)
    after = module.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert {one.dtype for one in after.values()} == {torch.float32, torch.int64}
    assert torch.equal(module.first.weight.grad, torch.ones(4, 4))
    assert module.second.weight.grad is None
    assert not module.second.weight._backward_hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_type_of_module_is_compared_in_float64(dtype):
    done = export(Net(lambda y: y * 0.1).to(dtype), (torch.randn(5, 4, dtype=dtype),))
    assert done.gradients.dtype == "float64"
    assert done.gradients.difference < (2**-9 if dtype is torch.bfloat16 else 1e-6)


def test_scalars_have_the_type_of_their_tensor():
    module = Net(lambda y: torch.clamp(y * 0.1, min=-0.07) + 0.3).double()
    done = export(module, (torch.randn(5, 4, dtype=torch.float64),))
    assert done.check.difference < 1e-14
    assert done.gradients.difference < 1e-12


def test_attributes_are_float32_which_is_no_difference():
    class Attributes(Net):
        def forward(self, x):
            y = functional.layer_norm(self.first(x), (4,), eps=1e-5)
            return self.second(functional.leaky_relu(y, 0.1))

    done = export(Attributes().double(), (torch.randn(5, 4, dtype=torch.float64),))
    assert 0 < done.gradients.difference < 1e-6


def test_a_module_that_has_to_be_float32_is_compared_in_it():
    def picky(y):
        assert y.dtype == torch.float32
        return y

    done = export(Net(picky))
    assert done.gradients.dtype == "the types of the module"
    assert done.gradients.difference < 1e-5


def test_a_loss_of_its_own_is_what_is_differentiated():
    class Own(Net):
        def forward(self, x, target):
            scores = super().forward(x)
            return functional.cross_entropy(scores, target), scores.detach()

    done = export(Own(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
    assert done.gradients.difference < 1e-7


def test_outputs_without_a_gradient_and_inputs_are_notes():
    class Two(Net):
        def forward(self, x):
            y = super().forward(x - x.mean().detach())
            return y, y.detach() * 2

    notes = " ".join(export(Two()).notes)
    assert "no gradient flows through mul" in notes
    with pytest.raises(ModelError, match="--output mul: the module lets no gradient flow"):
        planner.read_model("model.onnx", output="mul")
    assert "no gradient flows back to x as it does in the file" in notes


def test_a_module_whose_outputs_have_no_gradient_is_not_compared():
    done = export(nn.Sequential(Net(), Stop()))
    assert "expected a trainable parameter" in done.gradients.reason
    with pytest.raises(ModelError, match="expected a trainable parameter"):
        planner.read_model("model.onnx")


class Stop(nn.Module):
    def forward(self, x):
        return x.detach() * 1.0


def test_frozen_and_unused_parameters_are_no_difference():
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.first.requires_grad_(False)

    assert export(Partly()).gradients.num_parameters == 4


def test_numbers_drawn_outside_of_torch_are_a_note():
    class Skipping(Net):
        def forward(self, x):
            y = self.first(x)
            return self.second(y if random.random() < 2 else torch.relu(y))

    assert any("Python's or numpy's" in note for note in export(Skipping()).notes)
    assert not any("Python's or numpy's" in note for note in export(Net()).notes)


def test_a_gradient_of_zeros_that_the_file_does_not_have_is_a_note():
    class Rounded(Net):
        def forward(self, x):
            return self.second(torch.round(self.first(x)) + x)

    notes = " ".join(export(Rounded()).notes)
    assert "gives first.weight, first.bias a gradient of zeros" in notes


class Nothing(Squared):
    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_function_without_a_gradient_is_refused():
    with pytest.raises(ExportError, match=r"cause: Nothing, a torch\.autograd\.Function"):
        export(Net(Nothing.apply))


def test_zero_gradients_are_compared_with_the_floor():
    # A softmax over one class: all gradients before it are zero but for rounding.
    class Flat(Net):
        def forward(self, x):
            y = self.first(x)
            return self.second(torch.softmax(y.sum(-1, keepdim=True), -1) * torch.ones(4))

    assert export(Flat()).gradients.difference < 1e-6
    one, noise = torch.tensor([1.0]), torch.tensor([1e-13])
    assert apart(noise, 2 * noise, 1e-6) < TOLERANCE
    assert apart(one, one + 1e-5, 1e-6) > TOLERANCE
    assert apart(None, one, 1e-6) == 1.0
    assert apart(one, None, 1e-6) == 1.0
    assert apart(None, noise, 1e-6) == 0.0


def test_a_model_that_is_too_large_is_said(monkeypatch):
    monkeypatch.setattr(checking, "MAX_BYTES", 100)
    done = export(Net(lambda y: y.detach()))
    assert done.gradients.difference is None
    assert done.gradients.reason == "the module holds 140 B"


def checked():
    return read_record(onnx.load("model.onnx")).checked


def test_the_file_records_what_was_compared(monkeypatch):
    export(Net())
    assert checked() is Checked.GRADIENTS
    monkeypatch.setattr(checking, "MAX_BYTES", 100)
    export(Net())
    assert checked() is Checked.OUTPUTS
    export(Net(lambda y: y.detach()), check=False)
    assert checked() is Checked.NOTHING
    assert any("--no-check" in one for one in planner.read_model("model.onnx").warnings)


def test_no_file_is_written_where_gradients_differ(folder):
    (folder / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Stopped(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)\n\n"
        "    def forward(self, x):\n        y = self.first(x)\n"
        "        if y.requires_grad:\n            y.register_hook(lambda gradient: 2 * gradient)\n"
        "        return self.second(y)\n\n\n"
        "def net():\n    return Stopped(), torch.randn(5, 4)\n"
    )
    refused = run("export", "nets:net", code=1)
    assert "cause: register_hook(): nets.py:13" in refused.output
    assert not (folder / "model.onnx").exists()
    written = run("export", "nets:net", "--no-check")
    assert "not compared with the module (--no-check), which the file records" in written.output


@torch.library.custom_op("planner_tests::flipped", mutates_args=())
def flipped(x: Tensor, factor: float) -> Tensor:
    return x.clone()


@flipped.register_fake
def _(x, factor):
    return torch.empty_like(x)


flipped.register_autograd(
    lambda ctx, gradient: (-ctx.factor * gradient, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def flipped_by_the_launcher(x: Tensor, *, factor: float = 1.0) -> Tensor:
    return flipped(x, factor)


def test_an_operator_of_ones_own_keeps_its_backward_pass(unregistered):
    module = Net(lambda y: flipped(y, 0.5))
    alone = export(module)
    assert "planner.operators.register" in alone.gradients.reason
    node = next(one for one in onnx.load("model.onnx").graph.node if one.domain)
    assert (node.domain, node.op_type) == ("planner_tests", "flipped")
    assert [(one.name, one.f) for one in node.attribute] == [("factor", 0.5)]
    planner.operators.register("flipped", flipped_by_the_launcher, domain="planner_tests")
    assert export(module).gradients.difference < 1e-7


class Chosen(nn.Module):
    """The first of two branches, by a buffer; `between` is what happens in it."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("on", torch.tensor(True))
        self.between = between

    def forward(self, x):
        return torch.cond(
            self.on,
            lambda x: self.second(self.between(self.first(x))),
            lambda x: self.second(x),
            (x,),
        )


def test_gradients_within_a_branch_are_compared_with_its_random_numbers():
    done = export(Chosen(nn.Dropout(0.5)))
    assert (done.gradients.num_parameters, done.gradients.dtype) == (4, "float64")
    assert done.gradients.difference < 1e-12


def test_messages_speak_of_no_file_of_this_machine():
    with pytest.raises(ExportError) as refused:
        export(Net(Reversed.apply))
    assert not re.search(r"[ (]/\w+/", str(refused.value))
