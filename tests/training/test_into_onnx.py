"""The trained file: weights, form, and everything else as the user's."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import planner
from planner.artefacts.files import read_plan
from planner.artefacts.profile import BatchNorm
from planner.model.annotated import write_partition
from planner.model.export.forms import remove_annotations, to_evaluation
from planner.model.load import ReadOptions, load
from planner.model.record import WEIGHTS_KEY, ModuleRecord, TensorRecord, evaluated
from planner.model.wire import metadata_of
from planner.operators import parameters, randomness, to_torch
from planner.support.errors import FileError, ModelError, OptionError
from planner.training.checkpoints import into_onnx as weights
from planner.training.checkpoints.folder import find
from tests.support import exports
from tests.support.checkpoint_runs import tensors_of
from tests.support.commands import run as run_command
from tests.support.mode_runs import BATCH, net, profile_of, write_strategy


def trained(folder, **options):
    """A folder with `net.onnx`, its module, and checkpoints of three steps in `kept`."""
    module = net(folder / "net.onnx", **{"dtype": "float32", "noise": False, **options})
    path = write_strategy(folder / "s.json", profile_of(folder / "net.onnx"), (1,))
    planner.launch(path, steps=3, learning_rate=0.1, checkpoint=folder / "kept")
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return folder, trained(folder)


def inferred(path, x):
    """The first output in ONNX Runtime, as the file stands: its warnings are errors."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(BATCH, 3, 6, 6)).astype(np.float32)


def test_the_trained_file_gives_the_launcher_s_evaluation_outputs(made, tmp_path, x):
    folder, _ = made
    done = planner.write_weights(folder / "kept", tmp_path / "trained.onnx")
    assert (done.step, done.num_parameters, done.num_statistics) == (3, 8, 4)
    assert (done.form, done.num_changed, done.files) == (
        "evaluation", 3, (tmp_path / "trained.onnx",),
    )  # fmt: skip
    onnx.checker.check_model(str(tmp_path / "trained.onnx"), full_check=True)
    # The launcher's own operators on the tensors of the checkpoint, frozen and without Dropout.
    model = load(folder / "net.onnx", ReadOptions(batch=BATCH, batch_norm=BatchNorm.FROZEN))
    values = parameters(model, [one.name for one in model.graph.parameters])
    for name, tensor in tensors_of(folder / "kept").items():
        kind, _, parameter = name.partition("/")
        if kind != "optimizer":
            values[parameter.removeprefix("0/")].data.copy_(tensor)
    nodes = tuple(
        replace(node, inputs=(*node.inputs[:2], "")) if node.type == "Dropout" else node
        for node in model.nodes
    )
    (logits,) = to_torch(replace(model, nodes=nodes), values=values)(torch.from_numpy(x))
    found = inferred(tmp_path / "trained.onnx", x)
    np.testing.assert_allclose(found, logits.detach(), rtol=1e-5, atol=1e-5)


def test_the_module_with_the_state_dict_gives_what_the_trained_file_gives(
    made, tmp_path, x, monkeypatch
):
    folder, module = made
    zeros = lambda name, shape, dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(randomness, "standard_normal", zeros)  # which the file leaves out
    planner.write_weights(folder / "kept", tmp_path / "trained.onnx", tmp_path / "trained.pt")
    state = torch.load(tmp_path / "trained.pt", weights_only=True)
    module.load_state_dict(state)
    with torch.no_grad():
        logits = module.eval()(torch.from_numpy(x))
    found = inferred(tmp_path / "trained.onnx", x)
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    assert not np.allclose(found, inferred(folder / "net.onnx", x), atol=1e-3)


def test_the_training_form_keeps_the_file_s_operators(made, tmp_path):
    folder, _ = made
    done = planner.write_weights(folder / "kept", tmp_path / "again.onnx", form="training")
    assert done.num_changed == 0
    before, after = onnx.load(folder / "net.onnx"), onnx.load(tmp_path / "again.onnx")
    assert list(after.graph.node) == list(before.graph.node)
    for tensor in after.graph.initializer:
        if tensor.name == "bn1.running_mean":
            held = numpy_helper.to_array(tensor)
    expected = tensors_of(folder / "kept")["statistics/0/bn1.running_mean"]
    assert np.array_equal(held, expected)


def test_the_trained_file_can_be_trained_on(made, tmp_path):
    folder, _ = made
    planner.write_weights(folder / "kept", tmp_path / "again.onnx", form="training")
    first = load(tmp_path / "again.onnx", ReadOptions(batch=BATCH))
    usual = load(folder / "net.onnx", ReadOptions(batch=BATCH))
    assert first.graph.parameters == usual.graph.parameters
    assert metadata_of(tmp_path / "again.onnx")[WEIGHTS_KEY].startswith("step 3 of model ")


def test_what_was_tied_is_written_as_one(tmp_path):
    matrix = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], "m1"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "second"], ["y"], "m2"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 6]) for n in ("x", "y")]
    held = [numpy_helper.from_array(matrix, "first"), numpy_helper.from_array(matrix.T, "second")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "net.onnx")
    profile = profile_of(tmp_path / "net.onnx", tie=["first=second"])
    path = write_strategy(tmp_path / "s.json", profile, (1,))
    planner.launch(path, steps=2, learning_rate=0.1, checkpoint=tmp_path / "kept")
    done = planner.write_weights(tmp_path / "kept", tmp_path / "t.onnx", tmp_path / "t.pt")
    assert done.num_parameters == 1
    weight = torch.load(tmp_path / "t.pt")["first"].numpy()
    assert not np.allclose(weight, matrix, atol=1e-3)
    x = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    expected = np.maximum(x @ weight, 0) @ weight.T
    np.testing.assert_allclose(inferred(tmp_path / "t.onnx", x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_was_merged_is_written_apart(tmp_path, monkeypatch):
    """The file has one initializer for the equal weights of fresh normalizations."""
    module, (example,) = exports.exported(exports.normalized, tmp_path / "net.onnx")
    model = load(tmp_path / "net.onnx")
    assert model.sources, "nothing was repaired"
    monkeypatch.setattr("tests.support.mode_runs.BATCH", None)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    planner.launch(path, steps=3, learning_rate=0.1, checkpoint=tmp_path / "kept")
    done = planner.write_weights(tmp_path / "kept", tmp_path / "t.onnx", tmp_path / "t.pt")
    assert any("merged" in note for note in done.notes)
    tensors = tensors_of(tmp_path / "kept")
    biases = [tensors["parameters/first.bias"], tensors["parameters/second.bias"]]
    assert not torch.equal(*biases), "training has not parted them"
    missing, _ = module.load_state_dict(torch.load(tmp_path / "t.pt"), strict=False)
    assert {name.rpartition(".")[2] for name in missing} <= {"num_batches_tracked"}
    with torch.no_grad():
        logits = module.eval()(example)
    found = inferred(tmp_path / "t.onnx", example.numpy())
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)


def test_many_weights_are_written_beside_the_file(made, tmp_path, x, monkeypatch):
    folder, _ = made
    planner.write_weights(folder / "kept", tmp_path / "one.onnx")
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(weights, "MIN_EXTERNAL_BYTES", 100)
    path, data = tmp_path / "t.onnx", tmp_path / "t.onnx.data"
    for _ in range(2):  # its own files are written again
        assert planner.write_weights(folder / "kept", path).files == (path, data)
    assert np.array_equal(inferred(path, x), inferred(tmp_path / "one.onnx", x))
    external = [t for t in onnx.load(path, load_external_data=False).graph.initializer
                if t.data_location == TensorProto.EXTERNAL]  # fmt: skip
    assert len(external) == 3  # convolutions and the head; the others are small
    path.unlink()
    with pytest.raises(FileError, match=r"t\.onnx\.data: is not the data of a trained model t"):
        planner.write_weights(folder / "kept", path)
    assert data.exists()


def test_weights_beside_the_model_are_read_from_there(tmp_path, x):
    net(tmp_path / "whole.onnx", dtype="float32", noise=False)
    proto = onnx.load(tmp_path / "whole.onnx")
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, size_threshold=0)
    profile = profile_of(tmp_path / "net.onnx", freeze=["conv1.weight"])
    path = write_strategy(tmp_path / "s.json", profile, (1,))
    planner.launch(path, steps=1, learning_rate=0.0, checkpoint=tmp_path / "kept")
    (tmp_path / "out").mkdir()
    planner.write_weights(tmp_path / "kept", tmp_path / "out" / "t.onnx", tmp_path / "out" / "t.pt")
    state = torch.load(tmp_path / "out" / "t.pt")
    whole = onnx.load(tmp_path / "whole.onnx").graph.initializer
    (held,) = (numpy_helper.to_array(one) for one in whole if one.name == "conv1.weight")
    assert np.array_equal(state["conv1.weight"], held)
    assert inferred(tmp_path / "out" / "t.onnx", x).shape == (BATCH, 5)


def test_statistics_that_are_constants_become_initializers(tmp_path, x):
    net(tmp_path / "net.onnx", dtype="float32", noise=False)
    proto = onnx.load(tmp_path / "net.onnx")
    (tensor,) = (one for one in proto.graph.initializer if one.name == "bn1.running_mean")
    constant = helper.make_node("Constant", [], [tensor.name], value=tensor)
    proto.graph.initializer.remove(tensor)
    proto.graph.node.insert(0, constant)
    onnx.save(proto, tmp_path / "net.onnx")
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    planner.launch(path, steps=2, learning_rate=0.1, checkpoint=tmp_path / "kept")
    planner.write_weights(tmp_path / "kept", tmp_path / "t.onnx")
    after = onnx.load(tmp_path / "t.onnx").graph
    assert "Constant" not in {node.op_type for node in after.node}
    (held,) = (t for t in after.initializer if t.name == "bn1.running_mean")
    expected = tensors_of(tmp_path / "kept")["statistics/0/bn1.running_mean"]
    assert np.array_equal(numpy_helper.to_array(held), expected)


# ------------------------------------------------------------------- what nobody reads


class Mixed(torch.nn.Module):
    """An embedding that the head shares, normalizations, dropouts, and parameters without use."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(20, 16, padding_idx=0)
        self.block = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.norm, self.drop = torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(16, 20)
        self.head.weight = self.words.weight
        self.unused = torch.nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x):
        return self.head(self.drop(self.norm(self.block(self.words(x)).mean(1))))


def said_by_onnx_runtime(path, capfd):
    """The warnings of ONNX Runtime about a file."""
    capfd.readouterr()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2  # warnings
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return capfd.readouterr().err


def test_onnx_runtime_warns_of_nothing_in_a_trained_export(tmp_path, capfd, monkeypatch):
    example = torch.zeros(4, 7, dtype=torch.long)
    planner.export(Mixed().train(), example, tmp_path / "net.onnx", check=False)
    monkeypatch.setattr("tests.support.mode_runs.BATCH", None)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    planner.launch(path, steps=1, checkpoint=tmp_path / "kept")
    for form in ("evaluation", "training"):
        planner.write_weights(tmp_path / "kept", tmp_path / "t.onnx", tmp_path / "t.pt", form=form)
        assert said_by_onnx_runtime(tmp_path / "t.onnx", capfd) == ""
        missing, unexpected = Mixed().load_state_dict(torch.load(tmp_path / "t.pt"), strict=False)
        assert unexpected == []
        assert {*missing} == {"unused.weight", "unused.bias", "table"}
        record = load(tmp_path / "t.onnx").record
        assert record.trained == load(tmp_path / "net.onnx").record.trained


def with_unread(path):
    """A file of another exporter with tensors that nobody reads, also behind a node and in a graph
    within one.
    """
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 6]) for n in ("x", "y")]
    inner = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    square = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    held = {
        "weight": square, "ratio": np.float32(0.5), "training": np.array(False),
        "extra": square + 1, "behind": square + 2, "which": np.array(True),
    }  # fmt: skip
    branch = helper.make_graph(
        [helper.make_node("Identity", ["d"], ["z"], "same")], "branch", [], [inner],
        [numpy_helper.from_array(square, "inner")],
    )  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], "product"),
        helper.make_node("Identity", ["training"], ["off"], "off"),
        helper.make_node("Not", ["off"], ["mode"], "on"),
        helper.make_node("Dropout", ["h", "ratio", "mode"], ["d"], "drop"),
        helper.make_node("Relu", ["behind"], ["dead"], "dead"),
        helper.make_node("If", ["which"], ["y"], "if", then_branch=branch, else_branch=branch),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return held


def test_what_no_node_reads_is_in_the_state_dict_alone(tmp_path, capfd):
    held = with_unread(tmp_path / "net.onnx")
    assert "'extra'" in said_by_onnx_runtime(tmp_path / "net.onnx", capfd)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    planner.launch(path, steps=1, checkpoint=tmp_path / "kept")
    planner.write_weights(tmp_path / "kept", tmp_path / "t.onnx", tmp_path / "t.pt")
    assert said_by_onnx_runtime(tmp_path / "t.onnx", capfd) == ""
    graph = onnx.load(tmp_path / "t.onnx").graph
    assert [node.name for node in graph.node] == ["product", "drop", "if"]
    assert {one.name for one in graph.initializer} == {"weight", "ratio", "which"}
    state = torch.load(tmp_path / "t.pt")
    assert state.keys() == {"weight", "extra", "behind"}
    assert np.array_equal(state["extra"].numpy(), held["extra"])
    # The training form is the file with other weights, and can be trained on without a loss.
    planner.write_weights(tmp_path / "kept", tmp_path / "again.onnx", form="training")
    names = {one.name for one in onnx.load(tmp_path / "again.onnx").graph.initializer}
    assert names == held.keys()


def test_the_record_says_which_parameters_are_no_initializers_any_more():
    of = partial(TensorRecord, shape=(1,), dtype="float32", requires_grad=True)
    record = ModuleRecord("m.Net", True, (of("a", "a"), of("b", "b")), (of("c", "c"),), {})
    found = evaluated(record, {"b", "c"})
    assert not found.training
    assert [one.initializer for one in (*found.parameters, *found.buffers)] == ["a", None, None]


# --------------------------------------------------------------------------- what is refused


def test_another_model_and_one_that_is_not_there_are_refused(made, tmp_path):
    folder, _ = made
    net(tmp_path / "other.onnx", dtype="float32")
    said = r"trained from model \w{12}, but .*other\.onnx is \w{12}; .* --model FILE"
    with pytest.raises(FileError, match=said):
        planner.write_weights(folder / "kept", tmp_path / "t.onnx", model=tmp_path / "other.onnx")
    (folder / "net.onnx").rename(folder / "moved.onnx")
    try:
        with pytest.raises(FileError, match=r"net\.onnx, which is not there; give --model FILE"):
            planner.write_weights(folder / "kept", tmp_path / "t.onnx")
        planner.write_weights(folder / "kept", tmp_path / "t.onnx", model=folder / "moved.onnx")
    finally:
        (folder / "moved.onnx").rename(folder / "net.onnx")


def test_arguments_that_make_no_sense_are_refused(made):
    with pytest.raises(
        OptionError, match="--form: expected one of evaluation, training, got 'eval'"
    ):
        planner.write_weights(made[0] / "kept", "t.onnx", form="eval")
    with pytest.raises(OptionError, match=r"expected a file to write, got none; give -o FILE"):
        planner.write_weights(made[0] / "kept", None)


def test_the_command_writes_both_and_says_what(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(made[0] / "kept")
    done = run_command("weights", folder, "-o", "t.onnx", "--state-dict", "t.pt")
    assert done.stdout.splitlines() == [
        "8 trained parameters and 4 running statistics after 3 steps",
        "in evaluation form: 3 operators changed",
        "wrote t.onnx and t.pt",
    ]
    found = json.loads(run_command("weights", folder, "--state-dict", "t.pt", "--json").stdout)
    assert found == {
        "step": 3, "parameters": 8, "statistics": 4, "form": None, "changed": 0,
        "files": ["t.pt"], "notes": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("-o", "mine.onnx", "expected a trained model of the planner to overwrite, got another"),
        ("--state-dict", "mine.pt", "expected a state dict of the planner to overwrite, got"),
        ("--state-dict", "mine.onnx", "expected a name for a state dict, got that of an ONNX"),
        ("-o", "net.onnx", "is the checkpoint's model itself, and would be overwritten"),
    ],
)
def test_nothing_foreign_is_overwritten(made, tmp_path, monkeypatch, option, name, said):
    path = made[0] / name if name == "net.onnx" else tmp_path / name
    if not path.exists():
        path.write_text("mine")
    before = path.read_bytes()
    done = run_command("weights", str(made[0] / "kept"), option, str(path), code=1)
    assert said in done.stderr
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------- the forms


def model_of(nodes, version, initializers=(), outputs=("y",)):
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", *outputs)]
    held = [numpy_helper.from_array(np.asarray(v), n) for n, v in initializers]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])


STATISTICS = ["x", "scale", "b", "mean", "var"]


@pytest.mark.parametrize(
    ("version", "outputs", "attributes", "after"),
    [
        (6, ["y", "m", "v", "sm", "sv"], {"is_test": 0}, {"is_test": 1}),
        (9, ["y", "m", "v", "sm", "sv"], {}, {}),
        (13, ["y", "m", "v"], {"momentum": 0.5}, {"momentum": 0.5}),
        (15, ["y", "m", "v"], {"training_mode": 1, "epsilon": 0.5}, {"epsilon": 0.5}),
    ],
)
def test_batch_normalization_in_evaluation_form(version, outputs, attributes, after):
    node = helper.make_node("BatchNormalization", STATISTICS, outputs, "bn", **attributes)
    proto = model_of([node], version)
    assert to_evaluation(proto) == 1
    (found,) = proto.graph.node
    assert list(found.output) == ["y"] and list(found.input) == STATISTICS
    assert {a.name: helper.get_attribute_value(a) for a in found.attribute} == after
    assert to_evaluation(proto) == 0


def test_running_statistics_that_are_read_are_those_that_it_has():
    node = helper.make_node(
        "BatchNormalization", STATISTICS, ["y", "m", "v"], "bn", training_mode=1
    )
    proto = model_of([node], 15, outputs=("y", "v"))
    to_evaluation(proto)
    norm, copy = proto.graph.node
    assert list(norm.output) == ["y"]
    assert (copy.op_type, list(copy.input), list(copy.output)) == ("Identity", ["var"], ["v"])


def test_statistics_of_a_batch_that_are_read_have_no_evaluation_form():
    outputs = ["y", "m", "v", "sm", "sv"]
    proto = model_of(
        [helper.make_node("BatchNormalization", STATISTICS, outputs, "bn")], 9, outputs=("y", "sm")
    )
    with pytest.raises(
        ModelError, match=r"bn: the statistics of a batch, 'sm', are read.*training"
    ):
        to_evaluation(proto)


@pytest.mark.parametrize(
    ("version", "inputs", "attributes", "after"),
    [
        (6, ["x"], {"ratio": 0.5}, {"ratio": 0.5, "is_test": 1}),
        (10, ["x"], {"ratio": 0.5}, {"ratio": 0.5}),
        (13, ["x", "ratio", "mode"], {"seed": 3}, {}),
    ],
)
def test_dropout_in_evaluation_form(version, inputs, attributes, after):
    held = [("ratio", np.float32(0.5)), ("mode", np.array(True))] if version == 13 else []
    proto = model_of([helper.make_node("Dropout", inputs, ["y"], "d", **attributes)], version, held)
    to_evaluation(proto)
    (found,) = proto.graph.node
    assert list(found.input) == inputs[:2]
    assert {a.name: pytest.approx(helper.get_attribute_value(a)) for a in found.attribute} == after
    assert [t.name for t in proto.graph.initializer] == ["ratio"] * bool(held)


def test_graphs_within_nodes_are_in_evaluation_form_too():
    drop = helper.make_node("Dropout", ["x", "ratio", "mode"], ["z"], "d")
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    body = helper.make_graph([drop], "then", [], [out])
    choice = helper.make_node("If", ["which"], ["y"], "if", then_branch=body, else_branch=body)
    proto = model_of([choice], 15, [("mode", np.array(True)), ("ratio", np.float32(0.5))])
    assert to_evaluation(proto) == 2
    for attribute in proto.graph.node[0].attribute:
        assert list(attribute.g.node[0].input) == ["x", "ratio"]
    assert [t.name for t in proto.graph.initializer] == ["ratio"]


def test_the_newest_whole_checkpoint_is_written(made, tmp_path):
    folder, _ = made
    later = Path(folder / "kept" / "step-00000009")
    later.mkdir()
    try:
        done = planner.write_weights(folder / "kept", tmp_path / "t.onnx")
        assert done.step == 3 == find(folder / "kept").record.step
        assert "step-00000009: cut off" in done.notes[0]
    finally:
        later.rmdir()


def test_a_strategy_s_annotations_are_removed_and_the_module_s_record_stays():
    node = helper.make_node("Relu", ["x"], ["y"], "r")
    node.device_configurations.add(configuration_id="planner", pipeline_stage=1)
    node.metadata_props.add(key="planner.sends", value="[]")
    node.metadata_props.add(key="mine", value="1")
    proto = model_of([node], 17)
    proto.configuration.add(name="planner", num_devices=1, device=["d0"])
    for key in ("planner.strategy_hash", "planner.weights", "planner.module", "mine"):
        proto.metadata_props.add(key=key, value="{}")
    remove_annotations(proto)
    assert [one.key for one in proto.metadata_props] == ["planner.module", "mine"]
    (found,) = proto.graph.node
    assert [one.key for one in found.metadata_props] == ["mine"]
    assert not found.device_configurations and not proto.configuration


def test_a_checkpoint_names_the_user_s_own_file_and_not_the_annotated_one(tmp_path):
    net(tmp_path / "net.onnx", dtype="float32")
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    write_partition(
        load(tmp_path / "net.onnx", ReadOptions(batch=BATCH)),
        read_plan(path),
        path.with_suffix(".onnx"),
    )
    planner.launch(path, steps=1, checkpoint=tmp_path / "kept")
    assert find(tmp_path / "kept").record.model_path == "../net.onnx"
