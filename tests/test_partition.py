from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.errors import FileError, ModelError
from planner.model import content_hash, load
from planner.partition import check_agreement, write_partition
from planner.plan import (
    Certificate,
    DevicePrediction,
    MemoryParts,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.strategy import ScheduleName, Stage, Strategy

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
    return Plan(
        strategy=Strategy(stages, ScheduleName.ONE_F_ONE_B, 4),
        prediction=Prediction(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, times, devices),
        certificate=Certificate("iteration", 1.0, 0.0, None, ""),
        solver="manual",
        status="feasible",
        reproducible=True,
        ranks=tuple(reversed(range(num_stages))),
        crossings=(),
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
    model = load(path, batch=batch)
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
    model = load(small_model(tmp_path / "model.onnx"), batch=2)
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
    inline = load(small_model(tmp_path / "inline.onnx"), batch=2)
    write_partition(inline, plan_for(inline), tmp_path / "there/strategy.onnx")
    check_agreement(plan_for(inline), tmp_path / "there/strategy.onnx")
    external = load(small_model(tmp_path / "external.onnx", external=True), batch=2)
    write_partition(external, plan_for(external), tmp_path / "there/other.onnx")
    check_agreement(plan_for(external), tmp_path / "there/other.onnx")
    copied = tmp_path / "there/weights.bin"
    assert copied.read_bytes() == (tmp_path / "weights.bin").read_bytes()


def test_an_opset_that_onnx_runtime_does_not_take_is_an_error(tmp_path):
    model = load(small_model(tmp_path / "model.onnx", opset=27, ir_version=13), batch=2)
    with pytest.raises(ModelError, match=r"opset 26 or older, because ONNX Runtime.*got 27"):
        write_partition(model, plan_for(model), tmp_path / "strategy.onnx")


def test_a_plan_for_another_model_is_an_error(tmp_path):
    model = load(small_model(tmp_path / "model.onnx"), batch=2)
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
    model = load(small_model(tmp_path / "model.onnx"), batch=2)
    with pytest.raises(FileError, match="no such file; run: planner solve"):
        check_agreement(plan_for(model), tmp_path / "strategy.onnx")
    (tmp_path / "strategy.onnx").write_text("no model")
    with pytest.raises(FileError, match="expected a partitioned ONNX model"):
        check_agreement(plan_for(model), tmp_path / "strategy.onnx")
