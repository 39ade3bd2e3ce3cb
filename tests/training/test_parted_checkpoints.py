"""Checkpoints whose tensors are in parts: who writes and reads them, in how much memory; and
folders of the format before.
"""

import json
import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import ScheduleName, Strategy
from planner.support.errors import FileError
from planner.training.checkpoints.files import whole_tensors
from planner.training.checkpoints.folder import find
from tests.support.accuracy_plans import planned
from tests.support.checkpoint_runs import tensors_of
from tests.support.mode_runs import profile_of, write_strategy
from tests.support.ranks import forked
from tests.support.split_models import loaded
from tests.support.split_plans import stage_of
from tests.support.split_profiles import problem, profiled
from tests.support.zero_runs import RANKS, ROOT, wide

OLD = ROOT / "tests/golden/checkpoint-format-1"


def by_torch(start):
    """All tensors by the index of torch.distributed.checkpoint, which is a pickle."""
    tensors = {name: saved.empty() for name, saved in start.record.tensors.items()}
    with pytest.warns(UserWarning, match="to load in a single process"):
        load(tensors, storage_reader=FileSystemReader(start.path), no_dist=True)
    return tensors


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ------------------------------------------------------------------------------ ZeRO-3


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """The folder with a ZeRO-3 plan and its checkpoint, the plan, and what each rank wrote."""
    folder = tmp_path_factory.mktemp("zero")
    model = loaded(wide(folder / "net.onnx"))
    rows, (output,) = ("S0",), model.graph.outputs
    product = rule_of(["S0,R->S0"])
    lies = Sharding(
        (RANKS,),
        dict.fromkeys((one.name for one in model.graph.operators), product),
        parameters=dict.fromkeys((one.name for one in model.graph.parameters), rows),
        inputs={"x": rows},
        outputs={output: rows},
    )
    stage = stage_of(model, lies)
    given = problem(profiled(model), RANKS, num_microbatches=2)
    plan = planned(given, Strategy((stage,), ScheduleName.ONE_F_ONE_B, 2))
    write_plan(plan, folder / "zero.json")
    forked(ROOT / "tests/support/zero_runs.py", RANKS, folder)
    return folder, plan, [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_a_plan_is_gone_on_from_within_its_planned_memory(zero):
    folder, plan, ranks = zero
    planned_bytes = min(one.memory.total_bytes for one in plan.prediction.devices)
    tensors = find(folder / "kept").record.tensors
    trained = [t for name, t in tensors.items() if not name.startswith("random/")]
    assert sum(t.empty().nbytes for t in trained) > planned_bytes, "all of it would not fit"
    for peak, _, _ in ranks:
        assert peak <= planned_bytes


def test_each_rank_writes_its_parts_and_torch_reads_them_whole(zero):
    folder, _, _ = zero
    start = find(folder / "kept")
    for name in ("parameters/w3", "optimizer/w3/exp_avg"):
        saved = start.record.tensors[name]
        assert saved.shape == (64, 64)
        assert sorted(part.file for part in saved.parts) == [f"__{r}_0.distcp" for r in range(4)]
        assert {part.shape for part in saved.parts} == {(16, 64)}
    (count,) = start.record.tensors["optimizer/w3/step"].parts
    assert count.shape == ()
    assert_same(by_torch(start), whole_tensors(start, start.record.tensors))


def test_a_state_dict_is_whole_on_every_rank(zero):
    folder, _, ranks = zero
    learned = {
        name.removeprefix("parameters/"): tensor
        for name, tensor in tensors_of(folder / "kept").items()
        if name.startswith("parameters/")
    }
    for _, before, after in ranks:
        assert_same(before, learned)
        assert_same(after, learned)


# ------------------------------------------------------------------------------ format 1


@pytest.fixture
def old(tmp_path):
    """A checkpoint of format 1, made by the last version that wrote it, with its model."""
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def test_a_checkpoint_of_format_1_has_each_tensor_in_one_part(old):
    record = json.loads((old / "step-00000002" / "checkpoint.json").read_text())
    assert record["format"] == "planner-checkpoint/1"
    start = find(old)
    saved = start.record.tensors["parameters/conv1.weight"]
    (part,) = saved.parts
    assert (saved.shape, part.start, part.shape) == ((6, 3, 3, 3), (0, 0, 0, 0), (6, 3, 3, 3))
    assert_same(by_torch(start), whole_tensors(start, start.record.tensors))


def test_a_training_goes_on_from_a_checkpoint_of_format_1(old):
    (old / "step-00000002" / ".metadata").write_bytes(b"x" * 5861)  # it is not unpickled
    path = write_strategy(
        old / "one.json", profile_of(old / "net.onnx"), (1,), optimizer="momentum"
    )
    expected = tensors_of(old)
    with planner.trainer(path, resume=old, checkpoint=old / "new") as trainer:
        assert trainer.steps_done == 2
        trainer.save(old / "same")
    assert_same(tensors_of(old / "same"), expected)


def test_a_malformed_record_of_format_1_is_told(old):
    path = old / "step-00000002" / "checkpoint.json"
    plain = json.loads(path.read_text())
    plain["tensors"]["parameters/fc.bias"]["offset"] = "here"
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError, match=r"tensors\.parameters/fc\.bias\.parts\[0\]\.offset"):
        find(old / "step-00000002")
    path.write_text(json.dumps(plain | {"tensors": 3}))
    with pytest.raises(FileError, match="tensors: expected a mapping"):
        find(old / "step-00000002")
