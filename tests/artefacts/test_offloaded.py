"""Stages whose activations wait in the host's memory, in files; and those that are refused."""

import json
from dataclasses import replace

import pytest

from planner.artefacts.files import plan_bytes, read_plan, write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.support.errors import FileError
from tests.support.counted_runs import model_of
from tests.support.split_plans import plan_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("offloaded"), 3)[0]


def names(model):
    return tuple(one.name for one in model.graph.operators)


def strategy_of(model, offloaded, recomputed=(), schedule=ScheduleName.ONE_F_ONE_B, again=None):
    """Segments are given by places."""
    every = names(model)
    some = [tuple(tuple(every[i] for i in one) for one in all_) for all_ in (offloaded, recomputed)]
    stage = Stage(
        every, ((0,),), 1, bool(recomputed) if again is None else again,
        offloaded=some[0], recomputed=some[1],
    )  # fmt: skip
    return Strategy((stage,), schedule, 4)


def test_a_file_lists_the_segments_and_is_of_format_3(model, tmp_path):
    path, strategy = tmp_path / "strategy.json", strategy_of(model, ((0, 1), (2, 3)))
    write_plan(plan_of(model, strategy), path)
    plain = json.loads(path.read_text())
    assert plain["format"] == "planner-strategy/3"
    (stage,) = plain["strategy"]["stages"]
    assert stage["offloaded"] == [list(names(model)[:2]), list(names(model)[2:4])]
    assert read_plan(path).strategy == strategy


def test_a_file_without_them_is_of_format_2(model):
    plain = json.loads(plan_bytes(plan_of(model, strategy_of(model, ()))))
    assert plain["format"] == "planner-strategy/2"
    assert "offloaded" not in plain["strategy"]["stages"][0]
    assert "host_bytes" not in plain["prediction"]["devices"][0]["memory"]


def test_what_is_no_list_of_segments_is_told(model, tmp_path):
    path = tmp_path / "strategy.json"
    write_plan(plan_of(model, strategy_of(model, ((0, 1),))), path)
    plain = json.loads(path.read_text())
    plain["strategy"]["stages"][0]["offloaded"] = ["op0"]
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError, match=r"strategy.stages\[0\].offloaded\[0\]"):
        read_plan(path)


@pytest.mark.parametrize(("how", "words"), [
    ({"offloaded": ((0, 2),)}, "segment 0: operator n_layernormalization1 (LayerNorm"),
    ({"offloaded": ((2, 3), (0, 1))}, "segment 1: expected operators behind those"),
    ({"offloaded": ((0, 1, 2),), "recomputed": ((1, 2),)},
     "segment 0: expected a recomputed segment, or a run of operators of none"),
    ({"offloaded": ((0, 1, 2),), "recomputed": ((0, 2),)},
     "segment 0: expected a recomputed segment, or a run of operators of none"),
    ({"offloaded": ((0, 1),), "again": True},
     "expected none where the whole stage is recomputed"),
])  # fmt: skip
def test_what_cannot_wait_is_told(model, how, words):
    wrong = violations(strategy_of(model, **how), model.graph, 1)
    assert any(f"stage 0: offloaded: {words}" in one for one in wrong), wrong


def test_a_recomputed_segment_may_wait_and_others_beside_it(model):
    strategy = strategy_of(model, ((0, 1), (2, 3)), recomputed=((2, 3),))
    assert violations(strategy, model.graph, 1) == ()


def test_flows_and_devices_with_several_stages_keep_all(model):
    flow = strategy_of(model, ((0, 1),), schedule=ScheduleName.PIPEDREAM)
    assert any("wait in host memory" in one for one in violations(flow, model.graph, 1))
    (stage,) = strategy_of(model, ((0, 1),)).stages
    parts = stage.operators[:2], stage.operators[2:]
    two = (
        replace(stage, operators=parts[0]),
        replace(stage, operators=parts[1], offloaded=()),
    )
    wrong = violations(Strategy(two, ScheduleName.ONE_F_ONE_B, 4), model.graph, 1)
    assert any("expected none where its device 0 runs other stages" in one for one in wrong)
