"""Exported files hold their module: its parameters by name, its ties, its mode, its numbers."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional

import planner
from planner.model.export import translations, write
from planner.model.export.export import export_module
from planner.model.load import ReadOptions, load
from planner.model.record import read_record
from planner.operators.convert import to_torch
from planner.support.errors import ExportError
from tests.support.commands import run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


class Net(nn.Module):
    """Equal normalizations, a weight of two layers, a frozen layer and one that is not used."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        for norm in self.norms:
            x = norm(x) + x
        return self.frozen(self.two(self.one(x).relu())) * self.scale


class Norms(nn.Module):
    """Normalizations of batches with and without running statistics, and dropout."""

    def __init__(self, p=0.5):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.tracked, self.plain = nn.BatchNorm2d(4), nn.BatchNorm1d(4, track_running_stats=False)
        self.bare = nn.BatchNorm1d(4, affine=False, momentum=0.3)
        self.dropout, self.keep = nn.Dropout(p), nn.Dropout(0.0)

    def forward(self, x):
        x = self.tracked(self.conv(x)).mean((2, 3)) ** 3
        return self.dropout(self.keep(self.bare(self.plain(x) + x)))


def initializers(path):
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def in_onnx_runtime(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))


def nodes(path, kind):
    return [node for node in onnx.load(path).graph.node if node.op_type == kind]


# --------------------------------------------------------------------------------- parameters


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    torch.manual_seed(0)
    module, x = Net().eval(), torch.randn(3, 4)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    return module, x, export_module(module, x, path, {"x": {0: "batch"}})


def test_every_parameter_is_an_initializer_of_its_own_under_its_name(net):
    module, _, done = net
    held = initializers(done.path)
    for name, parameter in module.named_parameters():
        if not name.startswith("unused"):
            np.testing.assert_array_equal(held[name], parameter.detach())
    assert np.array_equal(held["norms.0.weight"], held["norms.2.weight"])
    assert not {"unused.weight", "two.weight"} & set(held)


def test_a_weight_of_two_layers_is_one_initializer(net):
    _, _, done = net
    uses = [node for node in onnx.load(done.path).graph.node if "one.weight" in node.input]
    assert len(uses) == 2
    tied = next(one for one in done.record.parameters if one.name == "one.weight")
    assert (tied.initializer, tied.aliases) == ("one.weight", ("two.weight",))


def test_the_record_in_the_file_lists_parameters_and_buffers(net):
    module, _, done = net
    record = read_record(onnx.load(done.path))
    assert record == done.record
    assert [one.name for one in record.parameters] == [n for n, _ in module.named_parameters()]
    by_name = {one.name: one for one in (*record.parameters, *record.buffers)}
    assert not by_name["frozen.weight"].requires_grad
    assert by_name["unused.weight"].initializer is None
    assert by_name["scale"].initializer == "scale"
    assert "frozen.weight" not in {one.name for one in record.trained}
    assert record.module.endswith("test_export.Net")
    assert not record.training


def test_a_symbolic_dimension_takes_any_size(net):
    module, _, done = net
    assert [one.shape for one in (*done.inputs, *done.outputs)] == [("batch", 4), ("batch", 4)]
    x = torch.randn(7, 4)
    (made,) = in_onnx_runtime(done.path, x)
    np.testing.assert_allclose(made, module(x).detach(), rtol=1e-5, atol=1e-6)


def test_the_planner_reads_and_runs_the_file(net):
    module, x, done = net
    (made,) = to_torch(load(done.path, ReadOptions(batch=3)))(x)
    torch.testing.assert_close(made, module(x))


def test_nodes_name_their_modules_and_no_file_of_this_machine(net):
    _, _, done = net
    props = {
        prop.key: prop.value for prop in nodes(done.path, "LayerNormalization")[1].metadata_props
    }
    assert "norms.1" in props["pkg.torch.onnx.name_scopes"]
    content = done.path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert Path(torch.__file__).parent.as_posix().encode() not in content


@pytest.mark.slow
def test_the_same_module_gives_the_same_bytes(net):
    module, x, done = net
    export_module(module, x, Path("again.onnx"), {"x": {0: "batch"}})
    assert Path("again.onnx").read_bytes() == done.path.read_bytes()


def test_all_parameters_of_a_fresh_gpt2_are_trained_and_its_tie_is_kept():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=1, loss_type="ForCausalLM",
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 64, (2, 8))
    done = planner.export(module, {"input_ids": tokens, "labels": tokens}, "gpt2.onnx")
    names = [name for name, _ in module.named_parameters()]
    assert len(names) == 28
    assert set(names) <= set(initializers("gpt2.onnx"))
    assert done.record.parameters[0].aliases == ("lm_head.weight",)
    assert done.settings == ("use_cache=False",)
    assert module.config.use_cache
    assert [one.name for one in done.inputs] == ["input_ids", "labels"]
    assert [one.name for one in done.outputs] == ["loss", "logits"]
    assert done.check.difference < 1e-5
    assert len(nodes("gpt2.onnx", "Dropout")) == 7  # two of them inside of the attention
    assert all(len(node.input) == 3 for node in nodes("gpt2.onnx", "Dropout"))


# ----------------------------------------------------------------------------------- the mode


def test_training_mode_is_in_training_form_and_the_module_is_left_alone():
    module, x = Norms().train(), torch.randn(4, 3, 6, 6)
    module.plain.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    draws = torch.get_rng_state()
    done = planner.export(module, x, "norms.onnx")
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.training
    assert module.dropout.training
    assert torch.equal(torch.get_rng_state(), draws)
    assert done.record.training
    assert done.check.difference < 1e-5

    tracked, *others = nodes("norms.onnx", "BatchNormalization")
    assert len(others) == 2
    for node in (tracked, *others):
        assert {a.name: a.i for a in node.attribute}["training_mode"] == 1
        assert len(node.output) == 3
    assert tracked.input[3:] == ["tracked.running_mean", "tracked.running_var"]
    (dropout,) = nodes("norms.onnx", "Dropout")
    constants = {node.output[0]: node.attribute[0].t for node in nodes("norms.onnx", "Constant")}
    ratio, mode = (numpy_helper.to_array(constants[name]) for name in dropout.input[1:])
    assert (ratio, mode) == (0.5, True)


def test_batch_normalization_in_training_form_agrees_with_the_reference_of_onnx():
    module, x = Norms(p=0.0).train(), torch.randn(4, 3, 6, 6)
    planner.export(module, x, "norms.onnx")
    proto = onnx.load("norms.onnx")
    tracked = nodes("norms.onnx", "BatchNormalization")[0]
    proto.graph.output.add().CopyFrom(
        helper.make_tensor_value_info(tracked.output[1], onnx.TensorProto.FLOAT, [4])
    )
    made, running_mean = ReferenceEvaluator(proto).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(made, module(x).detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(running_mean, module.tracked.running_mean, rtol=1e-4, atol=1e-6)


def test_evaluation_mode_has_frozen_statistics_and_no_dropout():
    module, x = Norms().eval(), torch.randn(4, 3, 6, 6)
    planner.export(module, x, "norms.onnx")
    assert not nodes("norms.onnx", "Dropout")
    tracked, plain, bare = nodes("norms.onnx", "BatchNormalization")
    modes = [
        {a.name: a.i for a in n.attribute}.get("training_mode") for n in (tracked, plain, bare)
    ]
    assert modes == [None, 1, None]  # without running statistics it is always the batch's


def test_buffers_that_forward_changes_are_named():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).train()
    done = planner.export(layer, torch.randn(2, 3), "spectral.onnx")
    assert "forward changes parametrizations.weight.0._u" in done.notes[0]


# -------------------------------------------------------------------------------- translations


class Bags(nn.Module):
    """The three modes of an EmbeddingBag, one with weights, on bags of which one is empty."""

    def __init__(self):
        super().__init__()
        self.sum = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)
        self.mean = nn.EmbeddingBag(10, 4, mode="mean", padding_idx=2)
        self.max = nn.EmbeddingBag(10, 4, mode="max", padding_idx=2)

    def forward(self, rows, offsets, weights):
        last = functional.pad(offsets, (0, 1), value=rows.numel())
        return self.sum(rows, last, weights), self.mean(rows, offsets), self.max(rows, offsets)


@pytest.mark.slow
def test_bags_of_embeddings_have_no_loop():
    rows, offsets = torch.tensor([1, 2, 3, 4, 2, 5, 2]), torch.tensor([0, 0, 3, 6])
    module, inputs = Bags(), (rows, offsets, torch.randn(7))
    done = planner.export(module, inputs, "bags.onnx")
    assert not {"Loop", "If"} & set(done.operators)
    for made, expected in zip(in_onnx_runtime("bags.onnx", *inputs), module(*inputs), strict=True):
        np.testing.assert_allclose(made, expected.detach(), rtol=1e-5, atol=1e-6)


class Grouped(nn.Module):
    """Rows of five groups, two of them empty, each with a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, 4))

    def forward(self, x, ends):
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight, ends)


@pytest.mark.slow
def test_rows_in_groups_are_one_multiplication():
    pytest.importorskip("transformers.integrations.moe")
    module, x = Grouped(), torch.randn(7, 8)
    ends = torch.tensor([2, 2, 5, 7, 7], dtype=torch.int32)
    done = planner.export(module, (x, ends), "grouped.onnx")
    assert done.operators["MatMul"] == 1
    (made,) = in_onnx_runtime("grouped.onnx", x, ends)
    groups = [0, 0, 2, 2, 2, 3, 3]
    expected = torch.stack([x[i] @ module.weight[group] for i, group in enumerate(groups)])
    np.testing.assert_allclose(made, expected.detach(), rtol=1e-5, atol=1e-6)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(400, 400)

    def forward(self, x):
        return self.layer(x) * 0 + torch.normal(3.0, x), torch.normal(self.layer(x))


@pytest.mark.slow
def test_normal_draws_have_one_number_for_each_element():
    x = torch.full((1, 400), 2.0)
    with pytest.raises(ExportError, match="layer"):  # torch gives the means no gradient
        planner.export(Draws(), x, "draws.onnx")
    planner.export(Draws(), x, "draws.onnx", check=False)
    wide, _ = in_onnx_runtime("draws.onnx", x)
    assert abs(wide.mean() - 3) < 0.5
    assert 1.6 < wide.std() < 2.4


class Entropies(nn.Module):
    """Cross-entropies of classes and of probabilities."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 0.5, 2.0, 1.5]))

    def forward(self, scores, classes, chances):
        made = [
            functional.cross_entropy(
                scores, goal, weight, reduction=kind, label_smoothing=smoothing
            )
            for goal in (classes, chances)
            for weight in (None, self.weight)
            for kind in ("none", "mean", "sum")
            for smoothing in (0.0, 0.1)
        ]
        known = classes.clamp_min(0)
        own = functional.cross_entropy(scores, known, ignore_index=1, label_smoothing=0.2)
        return (*made, own)


@pytest.mark.slow
def test_cross_entropies_with_smoothed_labels_and_with_probabilities():
    classes = torch.tensor([[0, 1, 3], [2, -100, 1]])
    inputs = torch.randn(2, 4, 3), classes, torch.rand(2, 4, 3)
    planner.export(Entropies(), inputs, "losses.onnx")
    found = in_onnx_runtime("losses.onnx", *inputs)
    for made, expected in zip(found, Entropies()(*inputs), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------- the check


def test_a_wrong_translation_is_found_before_the_file_is_written(monkeypatch):
    def wrong(input, weight, bias, mean, var, training, momentum, eps):
        return translations.batch_norm_with_statistics(
            input, weight, bias, mean, var, training, momentum, eps=0.5
        )

    key = torch.ops.aten._native_batch_norm_legit_functional.default
    monkeypatch.setitem(translations.TRANSLATIONS, key, wrong)
    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(), torch.randn(4, 3)
    with pytest.raises(ExportError, match=r"computes another .* differ by"):
        planner.export(module, x, "wrong.onnx")
    assert not Path("wrong.onnx").exists()
    assert planner.export(module, x, "wrong.onnx", check=False).check is None


class DrawsByPython(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()


def test_a_module_that_draws_by_python_is_told_so():
    with pytest.raises(ExportError, match="draws random numbers of Python's or numpy's") as failed:
        planner.export(DrawsByPython(3, 3), torch.rand(4, 3), "drawn.onnx")
    assert "report it" not in str(failed.value)


class Gate(nn.Module):
    """One of two branches, by the data; the first one draws, and reads what stands around it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        y = self.b(x)
        return torch.cond(
            x.sum() > 0, lambda x: self.dropout(self.a(x)) + y, lambda x: x * y.relu(), (x,)
        )


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_are_compared_without_their_dropout(sign):
    done = planner.export(Gate(), (sign * torch.rand(8, 4),), "gate.onnx")
    assert done.check.difference < 1e-6
    assert done.gradients.difference is None
    assert "expected a constant condition for If" in done.gradients.reason


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        start = torch.zeros((), dtype=torch.int64)
        step = lambda i, x: (i + 1, self.dropout(self.layer(x)))  # noqa: E731
        return torch.while_loop(lambda i, x: i < 3, step, (start, x))[1]


def test_loops_are_compared_without_their_dropout_and_their_gradients_with_it():
    done = planner.export(Repeated(), (torch.rand(8, 4),), "repeated.onnx")
    assert done.check.difference < 1e-6
    assert done.gradients.difference < 1e-12


class Scanned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        step = lambda sum, row: (sum + row, self.dropout(self.layer(row)))  # noqa: E731
        return scan(step, torch.zeros(4), x)[1]


def test_operators_whose_inside_is_not_seen_are_not_compared():
    done = planner.export(Scanned(), (torch.rand(8, 4),), "scanned.onnx")
    reason = "the operators that scan runs are not seen one by one"
    assert (done.check.difference, done.check.reason) == (None, reason)
    assert (done.gradients.difference, done.gradients.reason) == (None, reason)


class Masked(nn.Module):
    """What is dropped counts, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        kept, mask = torch.native_dropout(self.layer(x), 0.5, True)
        return kept * torch.where(mask, 2.0, 3.0), mask


def test_the_mask_of_a_dropout_is_compared_without_the_dropout():
    done = planner.export(Masked().train(), torch.rand(8, 4), "masked.onnx")
    assert done.check.difference < 1e-6
    assert done.gradients.difference < 1e-12


class Traceable(nn.Module):
    def forward(self, x):
        if not torch.compiler.is_exporting():
            raise LookupError("nothing to run")
        return x * 2


def test_a_module_that_cannot_be_run_is_an_error_that_names_it():
    with pytest.raises(ExportError, match=r"^Traceable: .* fails: LookupError: nothing to run; "):
        planner.export(Traceable(), torch.ones(2), "model.onnx")
    assert planner.export(Traceable(), torch.ones(2), "model.onnx", check=False).check is None


# ------------------------------------------------------------------------------------- inputs


class Two(nn.Module):
    def forward(self, a, b, scale=1, *, shift=None):
        return a * scale - 2 * b if shift is None else a


def test_inputs_by_argument_that_are_one_tensor_stay_two():
    x = torch.ones(2, 3)
    done = planner.export(Two(), {"b": x, "a": x, "scale": 3}, "two.onnx")
    feeds = {"a": np.full((2, 3), 5, np.float32), "b": np.ones((2, 3), np.float32)}
    (made,) = onnxruntime.InferenceSession("two.onnx").run(None, feeds)
    assert {one.name for one in done.inputs} == {"a", "b"}
    assert (made == 13).all()


@pytest.mark.parametrize(("inputs", "message"), [
    (3, "inputs: expected a tensor, a tuple of tensors, or a dict .* got int"),
    ((1, 2), "inputs: expected a tensor, .* got none"),
    ((torch.ones(1), [torch.ones(1)]), r"inputs\[1\]: expected a tensor or a constant, got list"),
    (dict.fromkeys("abc", torch.ones(1)), "Two.forward: .*'c'; change the inputs"),
    ((torch.ones(1),), "Two.forward: missing a required argument: 'b'; change the inputs"),
])  # fmt: skip
def test_inputs_that_do_not_fit_are_errors(inputs, message):
    with pytest.raises(ExportError, match=message):
        planner.export(Two(), inputs, "two.onnx")


@pytest.mark.parametrize(("shapes", "message"), [
    ({"c": {0: "batch"}}, "dynamic shape of 'c': no such input; expected one of a, b"),
    ({"a": {2: "batch"}}, "dynamic dimension a.2: expected a dimension from 0 to 1"),
    ({"a": {0: "batch"}}, "dynamic dimension a.0: .* size 1"),
    ({"a": {1: "width"}}, "Two: forward fixes a dimension .*'a'.*constant \\(4\\)"),
])  # fmt: skip
def test_dynamic_shapes_that_cannot_be_are_errors(shapes, message):
    with pytest.raises(ExportError, match=message):
        planner.export(Two(), (torch.ones(1, 4), torch.ones(1, 4)), "two.onnx", shapes)


# ------------------------------------------------------------------------------------ failures


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Rare(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x)


@pytest.mark.parametrize(("module", "message"), [
    (Branch(), r"Branch: cannot be traced: a branch .*test_export.py:\d+: .*x.sum\(\) > 0"),
    (Rare(), r"Rare: torch has no ONNX translation of aten._linalg_eigh.default; write"),
    (nn.Linear(3, 3, dtype=torch.complex64), "weight is complex64; expected one of"),
])  # fmt: skip
def test_modules_that_cannot_be_exported_are_errors_in_one_line(module, message, capfd):
    with pytest.raises(ExportError, match=message) as caught:
        planner.export(module, torch.eye(3), "model.onnx")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not Path("model.onnx").exists()


class Clamped(nn.Module):
    def forward(self, x):
        x = x * 2
        return x if torch.isfinite(x).all() else x.clamp(-1, 1)


def test_a_branch_on_finite_values_is_assumed_and_said():
    done = planner.export(Clamped(), torch.ones(2, 3), "model.onnx")
    assert "assumed that all values are finite" in done.notes[0]


# --------------------------------------------------------------------------------- large files


def test_weights_of_large_models_stand_beside_the_file(monkeypatch):
    monkeypatch.setattr(write, "MAX_FILE_BYTES", 100)
    module, x = nn.Linear(40, 40), torch.randn(2, 40)
    done = planner.export(module, x, "sub/large.onnx")
    assert done.files == (Path("sub/large.onnx"), Path("sub/large.onnx.data"))
    assert sorted(path.name for path in Path("sub").iterdir()) == ["large.onnx", "large.onnx.data"]
    (made,) = in_onnx_runtime("sub/large.onnx", x)
    np.testing.assert_allclose(made, module(x).detach(), rtol=1e-5, atol=1e-6)
    assert load(Path("sub/large.onnx")).hash


# --------------------------------------------------------------------------------- the command


FACTORIES = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(3, 4)

def needing(size):
    return nn.Linear(size, size), torch.randn(3, size)

def failing():
    raise OSError("no such data")

def single():
    return nn.Linear(4, 4)

def other():
    return "nn.Linear", torch.randn(3)

number = 3
"""


@pytest.fixture
def factories(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    Path("factories_of_tests.py").write_text(FACTORIES)
    yield "factories_of_tests"
    sys.modules.pop("factories_of_tests", None)


def test_the_command_writes_a_file_that_the_planner_reads(factories):
    text = run("export", f"{factories}:good", "-o", "net.onnx", "--dynamic", "input.0=batch").output
    assert "Sequential in training mode: 3 operators of 3 types" in text
    assert "4 parameters of 28 elements, 112 B: 4 trained, 0 frozen, 0 unused" in text
    assert "input input: FLOAT [batch, 4]" in text
    assert text.endswith("wrote net.onnx\nnext: planner profile net.onnx\n")
    assert len(onnx.load("net.onnx").graph.node) >= 3


def test_the_next_command_can_be_pasted_into_a_shell(factories):
    text = run("export", f"{factories}.py:good", "-o", "my net.onnx").output
    assert text.endswith("wrote my net.onnx\nnext: planner profile 'my net.onnx'\n")


def test_the_command_as_json(factories):
    done = json.loads(run("export", f"{factories}:good", "-o", "net.onnx", "--json").output)
    assert done["files"] == ["net.onnx"]
    assert done["operators"] == {"BatchNormalization": 1, "Dropout": 1, "Gemm": 1}
    assert done["parameters"]["trained"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert done["check"]["difference"] < 1e-5


@pytest.mark.parametrize(("name", "message"), [
    ("good", "expected module:function, got 'good'"),
    ("nowhere:good", "nowhere:good: ModuleNotFoundError: No module named 'nowhere'"),
    ("M:missing", "AttributeError: module 'M' has no attribute 'missing'"),
    ("M:number", "expected a function, got int"),
    ("M:needing", "expected a function without required arguments, it needs size;"),
    ("M:failing", "factory M:failing: OSError: no such data"),
    ("M:single", r"expected (module, example inputs), got Linear"),
    ("M:other", "expected (module, example inputs), the first is str and no torch.nn.Module"),
])  # fmt: skip
def test_factories_that_make_no_module_are_errors(factories, name, message):
    result = run("export", name.replace("M:", f"{factories}:"), code=1)
    assert message.replace("M:", f"{factories}:").replace("'M'", f"'{factories}'") in result.output


def test_a_dynamic_dimension_is_written_as_input_dim_name(factories):
    result = run("export", f"{factories}:good", "--dynamic", "input=batch", code=2)
    assert "expected INPUT.DIM=NAME such as x.0=batch" in result.output


@pytest.mark.slow
def test_a_plain_call_of_torch_prints_nothing_through_the_command(factories):
    done = subprocess.run(
        [sys.executable, "-m", "cli", "export", f"{factories}:good", "--json"],
        capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
    )  # fmt: skip
    assert json.loads(done.stdout)["files"] == ["model.onnx"]
    assert done.stderr == ""
