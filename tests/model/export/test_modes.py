"""What a module computes in evaluation, and the state that it changes, as marks of its file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from torch import nn
from torch.nn import functional

import planner
from planner.model.canonical import content_hash
from planner.model.export.forms import to_evaluation
from planner.model.load import ReadOptions, load
from planner.model.scopes import EVALUATION_MARK, MODE_MARK, STATE_MARK, mark_of
from planner.support.errors import ModelError
from tests.support.gradient_kinds import states


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Around(nn.Module):
    """A layer, and something behind it."""

    def __init__(self, behind):
        super().__init__()
        self.layer, self.behind = nn.Linear(8, 8), behind

    def forward(self, x):
        return self.behind(self.layer(x))


def exported(module, inputs=None, **how):
    """The report, and the file."""
    torch.manual_seed(0)
    given = torch.randn(6, 8) if inputs is None else inputs
    return planner.export(module, given, "net.onnx", **how), onnx.load("net.onnx")


def marks(proto: ModelProto, key: str) -> dict[str, str]:
    """The values of a mark by the type of the node, or by name where it is an Identity."""
    return {node.op_type: mark_of(node, key) for node in proto.graph.node if mark_of(node, key)}


class Chosen(nn.Module):
    """Another function in evaluation, twice, with a layer between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.tanh(x) if self.training else torch.sigmoid(x) * x.mean()
        return x


def test_only_what_differs_in_evaluation_is_there_twice():
    _, proto = exported(Chosen().train())
    kinds = [node.op_type for node in proto.graph.node]
    assert [kinds.count(one) for one in ("Gemm", "Tanh", "Sigmoid")] == [2, 2, 2]
    assert len([1 for node in proto.graph.node if mark_of(node, EVALUATION_MARK)]) == 2


@pytest.mark.parametrize("behind", [
    nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2)),
])  # fmt: skip
def test_modes_that_every_reader_knows_need_no_mark(behind):
    done, proto = exported(Around(behind).train())
    assert not any(marks(proto, key) for key in (EVALUATION_MARK, MODE_MARK, STATE_MARK))
    assert not done.notes


class Dropped(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.3, training=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("behind", "kind"), [
    (Dropped(), "Dropout"), (nn.BatchNorm1d(8, track_running_stats=False), "BatchNormalization"),
])  # fmt: skip
def test_what_has_one_mode_is_marked_in_both_modes_of_the_module(behind, kind, training):
    _, proto = exported(Around(behind).train(training))
    assert marks(proto, MODE_MARK) == {kind: "always"}
    to_evaluation(proto)
    left = {node.op_type for node in proto.graph.node}
    assert ("Dropout" in left) == (kind == "Dropout")
    assert "BatchNormalization" not in left  # no program has a training form of it


def evaluated(module, x):
    with torch.no_grad():
        return module.eval()(x).numpy()


def in_evaluation_form(proto, x):
    import onnxruntime

    to_evaluation(proto)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), None, ["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("behind", [
    states.Normalized(), states.Average(), nn.AlphaDropout(0.4), nn.BatchNorm1d(8, momentum=None),
    states.Shaped(nn.InstanceNorm1d(2, track_running_stats=True)), states.Shaped(nn.Dropout1d(0.4)),
    nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
])  # fmt: skip
def test_the_evaluation_form_is_the_modules(behind):
    module = Around(behind).train()
    for _ in range(3):  # statistics that differ from those of a batch
        module(torch.randn(6, 8) + 1)
    _, proto = exported(module)
    x = torch.randn(6, 8)
    np.testing.assert_allclose(in_evaluation_form(proto, x), evaluated(module, x), atol=1e-5)
    assert not {one.name for one in proto.graph.initializer} - {
        name for node in proto.graph.node for name in node.input
    }


def test_the_module_keeps_its_modes_state_and_forward():
    module = Around(nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Dropout()))
    module.behind[1].eval()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    exported(Around(states.Shaped(module.behind)))
    assert [one.training for one in module.behind] == [True, False]
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert not any("forward" in vars(one) for one in module.modules())


class Wide(nn.Module):
    def forward(self, x):
        return x if self.training else x[:, :2]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


@pytest.mark.parametrize(("behind", "why"), [
    (Wide(), "has another shape or type in evaluation"),
    (Counting(), "forward changes behind.count in evaluation, too"),
])  # fmt: skip
def test_a_module_that_the_file_cannot_evaluate_is_noted_and_recorded(behind, why):
    done, _ = exported(Around(behind).train())
    assert any("cannot be evaluated as the module" in one and why in one for one in done.notes)
    assert why in done.record.unlike


class Doubled(nn.Module):
    def forward(self, x):
        return x if self.training else x * 2


def test_a_wrong_evaluation_is_seen_by_the_comparison(monkeypatch):
    monkeypatch.setattr("planner.model.export.export.mark_modes", lambda *_: "")
    done, _ = exported(Around(Doubled()).train())
    assert "differs by" in done.record.unlike


def test_another_value_of_state_is_seen_by_the_comparison(monkeypatch):
    from planner.model.export import state

    follow = state._follow
    monkeypatch.setattr(
        state, "_follow", lambda norm, mean, variance, share: follow(norm, mean, mean, share)
    )
    norm = states.Shaped(nn.InstanceNorm1d(2, track_running_stats=True))
    with pytest.raises(planner.PlannerError, match=r"computes another 'behind.layer.running_var'"):
        exported(Around(norm).train())


def test_sync_batch_norm_is_noted():
    done, _ = exported(Around(nn.SyncBatchNorm(8)).train())
    assert any("replicas do not synchronize" in one for one in done.notes)


def test_a_count_of_batches_is_carried_only_where_something_reads_it():
    _, proto = exported(Around(nn.BatchNorm1d(8)).train())
    assert not marks(proto, STATE_MARK)
    _, proto = exported(Around(nn.BatchNorm1d(8, momentum=None)).train())
    changed = {mark_of(node, STATE_MARK) for node in proto.graph.node} - {""}
    names = ("num_batches_tracked", "running_mean", "running_var")
    assert changed == {f"behind.{one}" for one in names}


@pytest.mark.parametrize("key", [STATE_MARK, EVALUATION_MARK, MODE_MARK])
def test_marks_are_part_of_the_hash(key):
    _, proto = exported(Around(nn.Sequential(states.Normalized(), Dropped())).train())
    before = content_hash(proto)
    node = next(one for one in proto.graph.node if mark_of(one, key))
    del node.metadata_props[:]
    assert content_hash(proto) != before


def test_state_is_neither_trained_nor_a_constant():
    exported(Around(states.Counter()).train())
    model = load(Path("net.onnx"))
    held = {one.name: one for one in model.graph.parameters if one.state}
    assert held.keys() == {"behind.count", "behind.largest"}
    assert not any(one.trainable for one in held.values())
    with pytest.raises(ModelError, match=r"--train behind\.largest: forward changes it"):
        load(Path("net.onnx"), ReadOptions(train=["behind.largest"]))


def test_a_mark_of_another_tools_file_that_names_no_initializer_is_an_error(tmp_path):
    _, proto = exported(Around(states.Average()).train())
    for node in proto.graph.node:
        for entry in node.metadata_props:
            if entry.key == STATE_MARK:
                entry.value = "nobody"
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match="expected an initializer, got 'nobody'"):
        load(tmp_path / "other.onnx")
