import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.artefacts.plan import (
    Certificate,
    DevicePrediction,
    MemoryParts,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import Crossing, ScheduleName, Stage, Strategy, crossings
from planner.model import weights
from planner.model.annotated import check_agreement, refers_to, write_partition
from planner.model.annotated import weights as carried
from planner.model.annotated.shards import shards_of
from planner.model.load import ReadOptions, content_hash, hash_of, load, read_proto
from planner.model.weights import is_inline, place_of
from planner.support.errors import FileError, ModelError

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def weight(name, *shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def small_model(path, *, opset=18, ir_version=8, external=False):
    """Two products with shape arithmetic between them:

    x -> first -> flat (its shape by Shape, Gather, Unsqueeze, Concat) -> relu -> last -> y
    """
    node = helper.make_node
    zero = numpy_helper.from_array(np.array(0, dtype=np.int64), "zero")
    rest = numpy_helper.from_array(np.array([-1], dtype=np.int64), "rest")
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], name="first"),
        node("Shape", ["a"], ["s"], name="shape"),
        node("Gather", ["s", "zero"], ["batch"]),
        node("Unsqueeze", ["batch", "axes"], ["batch1"]),
        node("Concat", ["batch1", "rest"], ["both"], axis=0),
        node("Reshape", ["a", "both"], ["f"], name="flat"),
        node("Relu", ["f"], ["r"], name="relu"),
        node("MatMul", ["r", "w2"], ["y"], name="last"),
    ]
    axes = numpy_helper.from_array(np.array([0], dtype=np.int64), "axes")
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [weight("w1", 4, 6), weight("w2", 6, 3), zero, rest, axes],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    proto.ir_version = ir_version
    onnx.save(
        proto, path, save_as_external_data=external, location="weights.bin", size_threshold=64
    )
    return path


def plan_for(model, num_stages=2):
    """The operators in equal runs, one stage per device, ranks from the last device down."""
    names = [o.name for o in model.graph.operators]
    ends = [len(names) * s // num_stages for s in range(num_stages + 1)]
    stages = tuple(
        Stage.whole(tuple(names[ends[s] : ends[s + 1]]), (s,), num_stages - s, False)
        for s in range(num_stages)
    )
    devices = tuple(
        DevicePrediction(d, f"gpu{d}", "any", 1.0, 0.0, 0.0, MemoryParts())
        for d in range(num_stages)
    )
    times = (StagePrediction(0.1, 0.2),) * num_stages
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, 4)
    return Plan(
        strategy=strategy,
        prediction=Prediction(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, times, devices),
        certificate=Certificate("iteration", 1.0, 0.0, None, ""),
        solver="manual",
        status="feasible",
        reproducible=True,
        ranks=tuple(reversed(range(num_stages))),
        crossings=crossings(strategy, model.graph),
        model_path=model.path.name,
        model_hash=model.hash,
        train=(),
        profile_hash="",
        topology="test",
        topology_hash="",
        dimensions=model.dimensions,
        microbatch_size=model.batch,
        dtype="float32",
        optimizer="sgd",
        threads=None,
        seed=0,
        notes=(),
        versions={},
    )


def partitioned(path, num_stages=2, batch=2):
    """A model, its plan, and the annotated file beside it."""
    model = load(path, ReadOptions(batch=batch))
    plan = plan_for(model, num_stages)
    target = path.with_name("strategy.onnx")
    write_partition(model, plan, target)
    return model, plan, target


def stages_of(graph):
    """The pipeline stage of every node, those of subgraphs included."""
    for node in graph.node:
        (one,) = node.device_configurations
        assert one.HasField("pipeline_stage")
        yield node.name or node.op_type, one.pipeline_stage
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from stages_of(attribute.g)


def outputs(path, feed):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: feed})


@pytest.mark.parametrize("external", [False, True])
def test_the_file_is_checked_and_run_by_others_and_computes_the_same(tmp_path, external):
    path = small_model(tmp_path / "model.onnx", external=external)
    _, _, target = partitioned(path)
    onnx.checker.check_model(target, full_check=True)
    feed = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    for before, after in zip(outputs(path, feed), outputs(target, feed), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_a_network_of_the_onnx_package_computes_the_same_in_4_stages(tmp_path, name):
    path = tmp_path / "model.onnx"
    path.write_bytes((LIGHT / f"light_{name}.onnx").read_bytes())
    _, plan, target = partitioned(path, num_stages=4, batch=1)
    onnx.checker.check_model(target)
    check_agreement(plan, target)
    found = dict(stages_of(onnx.load(target).graph))
    assert sorted(set(found.values())) == [0, 1, 2, 3]
    feed = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)
    for before, after in zip(outputs(path, feed), outputs(target, feed), strict=True):
        np.testing.assert_array_equal(before, after)


def test_every_node_has_a_stage_folded_ones_their_first_consumers(tmp_path):
    path = small_model(tmp_path / "model.onnx")
    model, plan, target = partitioned(path, num_stages=3)
    names = [o.name for o in model.graph.operators]
    assert names[0] == "first"
    assert names[-1] == "last"
    found = dict(stages_of(onnx.load(target).graph))
    for s, stage in enumerate(plan.strategy.stages):
        assert {found[name] for name in stage.operators} == {s}
    assert found["shape"] == found["Concat_4"] == found["flat"]
    assert len(found) == len(model.proto.graph.node)


def test_nodes_of_subgraphs_have_the_stage_of_the_node_around_them(tmp_path):
    model = load(small_model(tmp_path / "model.onnx"), ReadOptions(batch=2))
    made = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Neg", ["y"], ["inner"])], "body", [], [made])
    branch = {"then_branch": body, "else_branch": body}
    last = model.proto.graph.node[-1]
    last.CopyFrom(helper.make_node("If", ["flag"], ["out"], name="last", **branch))
    model = replace(model, hash=content_hash(model.proto))
    write_partition(model, plan_for(model), tmp_path / "strategy.onnx")
    found = dict(stages_of(onnx.load(tmp_path / "strategy.onnx").graph))
    assert found["Neg"] == found["last"] == 1


def test_one_configuration_names_the_devices_in_the_order_of_the_ranks(tmp_path):
    _, _, target = partitioned(small_model(tmp_path / "model.onnx"))
    (configuration,) = onnx.load(target).configuration
    assert list(configuration.device) == ["gpu1", "gpu0"]
    assert configuration.num_devices == 2


def test_annotations_that_were_there_are_replaced(tmp_path):
    _, _, target = partitioned(small_model(tmp_path / "model.onnx"), num_stages=3)
    _, plan, again = partitioned(target.rename(tmp_path / "annotated.onnx"))
    check_agreement(plan, again)
    assert {stage for _, stage in stages_of(onnx.load(again).graph)} == {0, 1}
    assert len(onnx.load(again).configuration) == 1


def test_the_model_stays_the_same_by_its_hash_and_says_whose_plan_it_carries(tmp_path):
    model, plan, target = partitioned(small_model(tmp_path / "model.onnx"))
    found = onnx.load(target)
    assert content_hash(found) == model.hash
    properties = {one.key: one.value for one in found.metadata_props}
    assert properties["planner.model_hash"] == model.hash
    other = replace(plan.strategy, num_microbatches=8)
    write_partition(model, replace(plan, strategy=other), target)
    changed = {one.key: one.value for one in onnx.load(target).metadata_props}
    assert changed["planner.strategy_hash"] != properties["planner.strategy_hash"]


@pytest.mark.parametrize(("before", "after"), [(3, 11), (8, 11), (12, 12), (14, 13)])
def test_the_ir_version_is_one_with_annotations_that_onnx_runtime_takes(tmp_path, before, after):
    path = small_model(tmp_path / "model.onnx", ir_version=before)
    _, _, target = partitioned(path)
    assert onnx.load(target).ir_version == after


def test_the_same_plan_gives_the_same_bytes_and_leaves_nothing_else(tmp_path):
    path = small_model(tmp_path / "model.onnx")
    content = [partitioned(path)[2].read_bytes() for _ in range(2)]
    assert content[0] == content[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "strategy.onnx"]


def test_weights_go_along_to_another_folder(tmp_path):
    (tmp_path / "there").mkdir()
    inline = load(small_model(tmp_path / "inline.onnx"), ReadOptions(batch=2))
    write_partition(inline, plan_for(inline), tmp_path / "there/strategy.onnx")
    check_agreement(plan_for(inline), tmp_path / "there/strategy.onnx")
    external = load(small_model(tmp_path / "external.onnx", external=True), ReadOptions(batch=2))
    write_partition(external, plan_for(external), tmp_path / "there/other.onnx")
    check_agreement(plan_for(external), tmp_path / "there/other.onnx")
    copied = tmp_path / "there/weights.bin"
    assert copied.read_bytes() == (tmp_path / "weights.bin").read_bytes()


def test_an_opset_that_onnx_runtime_does_not_take_is_an_error(tmp_path):
    model = load(
        small_model(tmp_path / "model.onnx", opset=27, ir_version=13), ReadOptions(batch=2)
    )
    with pytest.raises(ModelError, match=r"opset 26 or older, because ONNX Runtime.*got 27"):
        write_partition(model, plan_for(model), tmp_path / "strategy.onnx")


def test_a_plan_for_another_model_is_an_error(tmp_path):
    model = load(small_model(tmp_path / "model.onnx"), ReadOptions(batch=2))
    plan = replace(plan_for(model), model_hash="f" * 64)
    with pytest.raises(FileError, match=r"made for model ffffff.*run: planner profile model\.onnx"):
        write_partition(model, plan, tmp_path / "strategy.onnx")


def tampered(path, change):
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    onnx.save(proto, path)


def test_a_stage_that_was_changed_is_found(tmp_path):
    model, plan, target = partitioned(small_model(tmp_path / "model.onnx"))
    check_agreement(plan, target)
    last = len(model.proto.graph.node) - 1

    def change(proto):
        proto.graph.node[last].device_configurations[0].pipeline_stage = 0

    tampered(target, change)
    with pytest.raises(FileError, match="puts last in stage 0, the strategy in stage 1") as error:
        check_agreement(plan, target)
    assert "run: planner solve" in str(error.value)


def test_lost_annotations_other_devices_and_other_weights_are_found(tmp_path):
    model, plan, target = partitioned(small_model(tmp_path / "model.onnx"))
    onnx.save(model.proto, target)
    with pytest.raises(FileError, match=r"not named.*gpu1, gpu0\n.*puts first in no stage"):
        check_agreement(plan, target)
    write_partition(model, plan, target)
    with pytest.raises(FileError, match="its devices are gpu1, gpu0, the strategy's gpu0, gpu1"):
        check_agreement(replace(plan, ranks=(0, 1)), target)

    def change(proto):
        proto.graph.initializer[0].CopyFrom(weight("w1", 4, 7))

    tampered(target, change)
    with pytest.raises(FileError, match=f"the strategy is for {model.hash[:6]}"):
        check_agreement(plan, target)


def test_a_missing_file_and_one_that_is_no_onnx_are_errors(tmp_path):
    model = load(small_model(tmp_path / "model.onnx"), ReadOptions(batch=2))
    with pytest.raises(FileError, match="no such file; run: planner solve"):
        check_agreement(plan_for(model), tmp_path / "strategy.onnx")
    (tmp_path / "strategy.onnx").write_text("no model")
    with pytest.raises(FileError, match="expected a partitioned ONNX model"):
        check_agreement(plan_for(model), tmp_path / "strategy.onnx")


# --------------------------------------------------------------------------------- transfers


def notes_of(graph, key):
    """The JSON under a key in the metadata of each node that has one."""
    return {
        node.name: json.loads(entry.value)
        for node in graph.node
        for entry in node.metadata_props
        if entry.key == key
    }


def test_nodes_at_a_cut_say_what_they_send_and_receive(tmp_path):
    """x -> first -> flat -> relu -> last -> y, in three stages: | first | flat | relu, last |"""
    _, plan, target = partitioned(small_model(tmp_path / "model.onnx"), num_stages=3)
    assert [stage.operators for stage in plan.strategy.stages] == [
        ("first",), ("flat",), ("relu", "last"),
    ]  # fmt: skip
    found = onnx.load(target)
    size = {"dtype": "float32", "bytes": 2 * 6 * 4, "gradient": True}
    ends = [{"stage": s, "devices": [f"gpu{s}"]} for s in range(3)]
    assert notes_of(found.graph, "planner.sends") == {
        "first": [{"tensor": "a", "from": ends[0], "to": [ends[1]], **size}],
        "flat": [{"tensor": "f", "from": ends[1], "to": [ends[2]], **size}],
    }
    assert notes_of(found.graph, "planner.receives") == {"flat": ["a"], "relu": ["f"]}
    properties = {one.key: one.value for one in found.metadata_props}
    assert json.loads(properties["planner.stage_devices"]) == [["gpu0"], ["gpu1"], ["gpu2"]]


def test_transfers_of_an_unrolled_loop_stand_at_the_loop(tmp_path):
    path = tmp_path / "model.onnx"
    value, node = helper.make_tensor_value_info, helper.make_node
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("MatMul", ["h", "w"], ["next"], name="product")],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []),
         value("h", TensorProto.FLOAT, [2, 4])],
        [value("on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, [2, 4])],
    )  # fmt: skip
    times = numpy_helper.from_array(np.array(4, np.int64), "times")
    graph = helper.make_graph(
        [node("Loop", ["times", "", "x"], ["y"], name="loop", body=body)],
        "net",
        [value("x", TensorProto.FLOAT, [2, 4])],
        [value("y", TensorProto.FLOAT, [2, 4])],
        [weight("w", 4, 4), times],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    model = load(path)
    plan = plan_for(model)
    write_partition(model, plan, tmp_path / "strategy.onnx")
    check_agreement(plan, tmp_path / "strategy.onnx")
    ((name, sent),) = notes_of(onnx.load(tmp_path / "strategy.onnx").graph, "planner.sends").items()
    assert (name, len(sent)) == ("loop", 1)
    assert (sent[0]["from"]["stage"], sent[0]["to"][0]["stage"]) == (0, 1)


def changed(key, change):
    """A function that changes the JSON under a key in the metadata of the nodes."""

    def apply(proto):
        for node in proto.graph.node:
            for entry in node.metadata_props:
                if entry.key == key:
                    entry.value = json.dumps(change(json.loads(entry.value)))

    return apply


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sent: [{**one, "bytes": 7} for one in sent],
         "sends f from stage 0 to 1 and back: 7 bytes of float32, the strategy from stage 0 to 1"
         " and back: 48 bytes of float32"),
        (lambda sent: [], "sends f nowhere, the strategy from stage 0 to 1 and back"),
        (lambda sent: [*sent, {"tensor": "z"}],
         "sends z in an entry that is damaged, the strategy nowhere"),
        (lambda sent: [[1]], "in an entry that is damaged, the strategy nowhere"),
    ],
)  # fmt: skip
def test_other_transfers_are_found(tmp_path, change, said):
    _, plan, target = partitioned(small_model(tmp_path / "model.onnx"))
    tampered(target, changed("planner.sends", change))
    with pytest.raises(FileError) as error:
        check_agreement(plan, target)
    assert said in str(error.value)
    assert "run: planner solve" in str(error.value)


def test_stages_on_other_devices_are_found(tmp_path):
    model, plan, target = partitioned(small_model(tmp_path / "model.onnx"))
    one, other = plan.strategy.stages
    swapped = (replace(one, groups=other.groups), replace(other, groups=one.groups))
    write_partition(model, replace(plan, strategy=replace(plan.strategy, stages=swapped)), target)
    with pytest.raises(
        FileError, match=r"its stages are on \[\[\"gpu1\"\], \[\"gpu0\"\]\], the str"
    ):
        check_agreement(plan, target)


def test_an_annotated_file_from_before_there_were_transfers_agrees(tmp_path):
    _, plan, target = partitioned(small_model(tmp_path / "model.onnx"))

    def older(proto):
        for node in proto.graph.node:
            kept = [p for p in node.metadata_props if p.key not in NEW]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
        kept = [p for p in proto.metadata_props if p.key not in NEW]
        del proto.metadata_props[:]
        proto.metadata_props.extend(kept)

    tampered(target, older)
    check_agreement(plan, target)


NEW = ("planner.sends", "planner.receives", "planner.stage_devices")


def test_crossings_of_stages_that_are_not_there_are_no_plan(tmp_path):
    plan = plan_for(load(small_model(tmp_path / "model.onnx"), ReadOptions(batch=2)))
    wrong = Crossing("f", 0, (2,), 48, True, "float32")
    with pytest.raises(
        ValueError, match=r"crossings\[0\]: expected stages from 0 to 1, got \(0, 2\)"
    ):
        replace(plan, crossings=(wrong,))


# ------------------------------------------------------------------------------ large weights


@pytest.fixture
def small_is_large(monkeypatch):
    """Weights stay in the model's file, and are referred to there, from sizes that tests have."""
    monkeypatch.setattr(weights, "MIN_WALKED_BYTES", 64)
    monkeypatch.setattr(weights, "MIN_LEFT_BYTES", 64)
    monkeypatch.setattr(carried, "MAX_INLINE_BYTES", 0)


def places(path):
    """The files in which the weights of an annotated model are."""
    return {place_of(t).location for t in read_proto(path).graph.initializer if is_inline(t)}


def assert_same_outputs(path, target):
    onnx.checker.check_model(target, full_check=True)
    feed = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    for before, after in zip(outputs(path, feed), outputs(target, feed), strict=True):
        np.testing.assert_array_equal(before, after)


def test_large_weights_stay_in_the_model_beside(tmp_path, small_is_large):
    path = small_model(tmp_path / "model.onnx")
    model, plan, target = partitioned(path)
    assert places(target) == {"model.onnx"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.onnx", "strategy.onnx"]
    assert weight("w1", 4, 6).raw_data not in target.read_bytes()
    assert load(target, ReadOptions(batch=2)).hash == hash_of(target) == model.hash
    check_agreement(plan, target)
    assert_same_outputs(path, target)


def test_small_weights_are_in_the_annotated_file_as_before(tmp_path, monkeypatch):
    path = small_model(tmp_path / "model.onnx")
    expected = partitioned(path)[2].read_bytes()
    monkeypatch.setattr(weights, "MIN_WALKED_BYTES", 64)
    monkeypatch.setattr(weights, "MIN_LEFT_BYTES", 64)
    assert is_inline(load(path, ReadOptions(batch=2)).proto.graph.initializer[0])
    assert partitioned(path)[2].read_bytes() == expected


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder"])
def test_a_model_that_cannot_be_referred_to_is_copied_once(tmp_path, small_is_large, kind):
    (tmp_path / "there").mkdir()
    path = small_model(tmp_path / "there/model.onnx")
    if kind == "symbolic":
        path = tmp_path / "model.onnx"
        path.symlink_to("there/model.onnx")
    elif kind == "hard":
        os.link(path, tmp_path / "model.onnx")
        path = tmp_path / "model.onnx"
    model = load(path, ReadOptions(batch=2))
    plan, target = plan_for(model), tmp_path / "strategy.onnx"
    write_partition(model, plan, target)
    copy = tmp_path / "strategy.onnx.data"
    assert places(target) == {copy.name}
    check_agreement(plan, target)
    assert_same_outputs(path, target)
    number = copy.stat().st_ino
    write_partition(model, plan, target)
    assert copy.stat().st_ino == number


def test_a_copy_that_the_planner_made_is_replaced_and_another_file_is_not(tmp_path, small_is_large):
    (tmp_path / "there").mkdir()
    path, target = tmp_path / "model.onnx", tmp_path / "there/strategy.onnx"
    for opset in (18, 19):
        model = load(small_model(path, opset=opset), ReadOptions(batch=2))
        write_partition(model, plan_for(model), target)
        check_agreement(plan_for(model), target)
    target.unlink()
    target.with_name("strategy.onnx.data").write_text("mine")
    with pytest.raises(FileError, match=r"strategy\.onnx\.data: is not the data of .*model\.onnx"):
        write_partition(model, plan_for(model), target)


def test_an_annotated_file_of_an_annotated_file_refers_to_the_same_weights(
    tmp_path, small_is_large
):
    _, _, target = partitioned(small_model(tmp_path / "model.onnx"))
    renamed = target.rename(tmp_path / "annotated.onnx")
    _, plan, again = partitioned(renamed)
    assert places(again) == {"model.onnx"}
    check_agreement(plan, again)


def test_weights_that_change_are_found_and_only_if_they_are_hashed(tmp_path, small_is_large):
    path = small_model(tmp_path / "model.onnx")
    model, plan, target = partitioned(path)
    place = place_of(model.proto.graph.initializer[0])
    content = bytearray(path.read_bytes())
    content[place.offset] ^= 1
    path.write_bytes(content)
    check_agreement(plan, target, weights=False)
    with pytest.raises(FileError, match=f"it is model .*, the strategy is for {model.hash[:6]}"):
        check_agreement(plan, target)
    path.unlink()
    with pytest.raises(FileError, match=r"model\.onnx: expected the values of 'w1'.*data file"):
        check_agreement(plan, target)


def test_a_file_without_weights_to_hash_is_another_model_by_the_hash_it_names(tmp_path):
    _, plan, target = partitioned(small_model(tmp_path / "model.onnx"))

    def other(proto):
        for one in proto.metadata_props:
            if one.key == "planner.model_hash":
                one.value = "f" * 64

    tampered(target, other)
    check_agreement(plan, target)
    with pytest.raises(FileError, match="it is model ffffff, the strategy is for"):
        check_agreement(plan, target, weights=False)


def test_whether_a_file_refers_to_a_model_is_seen_without_its_weights(tmp_path, small_is_large):
    path = small_model(tmp_path / "model.onnx")
    target = partitioned(path)[2]
    assert refers_to(target, path)
    (tmp_path / "there").mkdir()
    assert not refers_to(target, small_model(tmp_path / "there/model.onnx"))
    small_model(path, opset=19)
    assert not refers_to(target, path)


SPLIT = {"first": ["R,S1->S1"], "flat": ["S1->S1"], "relu": ["S1->S1"], "last": ["S1,S0->P"]}


def split_plan(path):
    """All operators on a mesh of 2 devices, twice: column, then row (Megatron's pair)."""
    model = load(path, ReadOptions(batch=2))
    rules = {o.name: rule_of(SPLIT[o.name]) for o in model.graph.operators}
    return on_meshes(model, Sharding((2,), rules, {"w1": ("S1",), "w2": ("S0",)}, {}, {}))


def on_meshes(model, sharding):
    """The whole model in a stage of two replicas of two devices."""
    plan = plan_for(model, num_stages=4)
    names = tuple(operator.name for operator in model.graph.operators)
    stage = Stage(names, ((0, 1), (2, 3)), 1, False, sharding)
    strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, 4)
    times = plan.prediction.stages[:1]
    prediction = replace(plan.prediction, stages=times)
    return model, replace(plan, strategy=strategy, prediction=prediction, crossings=())


def lying(path, name):
    """Per tensor of a node, its cuts and devices, read without the code that writes them."""
    node = next(one for one in onnx.load(path).graph.node if one.name == name)
    found = {}
    for spec in node.device_configurations[0].sharding_spec:
        groups = {one.key: list(one.value) for one in spec.index_to_device_group_map}
        cuts = {d.axis: (d.simple_sharding[0].dim_value, d.simple_sharding[0].num_shards)
                for d in spec.sharded_dim}  # fmt: skip
        found[spec.tensor_name] = cuts, [groups.get(d, [d]) for d in spec.device]
    return found


def test_tensors_of_split_operators_lie_as_onnx_says_it(tmp_path):
    model, plan = split_plan(small_model(tmp_path / "model.onnx"))
    target = tmp_path / "strategy.onnx"
    write_partition(model, plan, target)
    onnx.checker.check_model(str(target), full_check=True)
    # Ranks run from the last device down: device 0 is number 3.
    columns = [[1, 3], [0, 2]]
    assert lying(target, "first") == {
        "x": ({}, [[0, 1, 2, 3]]), "w1": ({1: (6, 2)}, columns), "a": ({1: (6, 2)}, columns),
    }  # fmt: skip
    assert lying(target, "relu") == {n: ({1: (6, 2)}, columns) for n in "fr"}
    # y is a summand, which ONNX cannot say.
    assert lying(target, "last") == {"r": ({1: (6, 2)}, columns), "w2": ({0: (6, 2)}, columns)}
    check_agreement(plan, target)
    feed = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    assert np.array_equal(outputs(target, feed)[0], outputs(tmp_path / "model.onnx", feed)[0])


def test_an_operator_of_several_nodes_is_cut(tmp_path):
    """A SplitToSequence makes a sequence; its operator makes what is taken out of that."""
    path = tmp_path / "model.onnx"
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        sequences (float[2, 6] x, float[6] w) => (float[2, 2] y) {
            a = Mul(x, w)  s = SplitToSequence <axis = 1> (a, two)
            p = SequenceAt(s, zero)  q = SequenceAt(s, one)  y = Add(p, q) }""")
    del proto.graph.input[1]
    values = {"w": np.ones(6, np.float32), "two": 2, "zero": 0, "one": 1}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()
    )
    onnx.save(proto, path)
    model = load(path, ReadOptions(batch=2))
    rules = {o.name: rule_of([line]) for o, line in zip(
        model.graph.operators, ["S0,R->S0", "S0->S0,S0", "S0,S0->S0"], strict=True
    )}  # fmt: skip
    model, plan = on_meshes(model, Sharding((2,), rules, {}, {"x": ("S0",)}, {"y": ("S0",)}))
    target = tmp_path / "strategy.onnx"
    write_partition(model, plan, target)
    check_agreement(plan, target)
    split = model.graph.operators[1].name
    shards = lying(target, split)
    assert shards["a"] == ({0: (2, 2)}, [[1, 3], [0, 2]])

    def elsewhere(proto):
        node = next(one for one in proto.graph.node if one.name == split)
        spec = node.device_configurations[0].sharding_spec[0]
        spec.sharded_dim[0].axis = 1

    tampered(target, elsewhere)
    with pytest.raises(FileError, match=f"{split} cuts . in 2 along dimension 1"):
        check_agreement(plan, target)


def test_two_axes_on_one_dimension_are_one_cut_in_the_order_of_the_parts():
    sharding = Sharding((2, 2), {}, {}, {}, {})
    shards = shards_of("x", ("S0", "S0"), sharding, [(4, 5, 6, 7)])
    assert (shards.cuts, shards.devices) == (((0, 4),), ((4,), (5,), (6,), (7,)))
    shards = shards_of("x", ("S1", "S0"), sharding, [(0, 1, 2, 3), (4, 5, 6, 7)])
    assert shards.cuts == ((0, 2), (1, 2))
    assert shards.devices == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert shards_of("x", ("S0/3", "R"), sharding, [(0, 1, 2, 3)]) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.sharded_dim[0].simple_sharding[0].__setattr__("num_shards", 4),
         r"relu cuts r in 4 along dimension 1 for devices \[\[1, 3\], \[0, 2\]\], the strategy"
         r" in 2 along dimension 1"),
        (lambda spec: spec.index_to_device_group_map[0].value.__setitem__(0, 0),
         r"relu cuts r in 2 along dimension 1 for devices \[\[0, 3\]"),
        (lambda spec: spec.__setattr__("tensor_name", "f"),
         "relu cuts r in no way that ONNX can say, the strategy in 2"),
    ],
)  # fmt: skip
def test_tensors_that_lie_otherwise_are_found(tmp_path, change, said):
    model, plan = split_plan(small_model(tmp_path / "model.onnx"))
    target = tmp_path / "strategy.onnx"
    write_partition(model, plan, target)

    def changed(proto):
        node = next(one for one in proto.graph.node if one.name == "relu")
        change(node.device_configurations[0].sharding_spec[1])

    tampered(target, changed)
    with pytest.raises(FileError, match=said):
        check_agreement(plan, target)


def test_cuts_of_an_operator_that_the_strategy_runs_whole_are_found(tmp_path):
    model, plan = split_plan(small_model(tmp_path / "model.onnx"))
    target = tmp_path / "strategy.onnx"
    write_partition(model, plan, target)
    stage = plan.strategy.stages[0]
    rules = {name: rule for name, rule in stage.sharding.rules.items() if name != "relu"}
    other = replace(stage, sharding=replace(stage.sharding, rules=rules))
    strategy = replace(plan.strategy, stages=(other,))
    with pytest.raises(FileError, match=r"relu cuts [fr], the strategy does not"):
        check_agreement(replace(plan, strategy=strategy), target)
