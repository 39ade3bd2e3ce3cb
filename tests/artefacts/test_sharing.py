"""Stages whose replicas keep parts, in files; and those that are refused."""

import json

import pytest

from planner.artefacts.files import plan_bytes, read_plan, write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.resharding.checks import all_violations
from tests.support.counted_runs import model_of
from tests.support.split_plans import plan_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("sharing"), 3)[0]


def strategy_of(model, count=4, schedule=ScheduleName.ONE_F_ONE_B, **how):
    names = tuple(one.name for one in model.graph.operators)
    stage = Stage(names, ((0,), (1,)), 1, recompute=False, **how)
    return Strategy((stage,), schedule, count)


def test_a_file_says_what_replicas_share_and_is_of_format_3(model, tmp_path):
    path = tmp_path / "strategy.json"
    shared = strategy_of(model, over=2, zero=3, zero_of={"g": 0}, gathered_ahead=8)
    write_plan(plan_of(model, shared), path)
    plain = json.loads(path.read_text())
    assert plain["format"] == "planner-strategy/3"
    (stage,) = plain["strategy"]["stages"]
    assert (stage["over"], stage["zero"], stage["zero_of"]) == (2, 3, {"g": 0})
    assert stage["gathered_ahead"] == 8
    assert read_plan(path).strategy == shared


def test_a_file_of_whole_replicas_is_of_format_2(model):
    plain = json.loads(plan_bytes(plan_of(model, strategy_of(model))))
    assert plain["format"] == "planner-strategy/2"
    assert not {"over", "zero", "zero_of"}.intersection(plain["strategy"]["stages"][0])


@pytest.mark.parametrize(("how", "message"), [
    ({"over": 3, "zero": 1}, "over: expected a divisor of its 2 replicas, got 3"),
    ({"over": 2, "zero": 4}, "zero: expected a level from 0 to 3, got 4"),
    ({"zero": 2}, "zero: expected 0 where nothing lies over replicas (over is 1), got 2"),
    ({"over": 2, "zero_of": {"w1": -1}}, "zero_of.w1: expected a level from 0 to 3, got -1"),
    ({"over": 2, "zero_of": {"w": 1}}, "zero_of.w: expected a parameter of the stage"),
    ({"gathered_ahead": -1}, "gathered_ahead: expected bytes of at least 0, got -1"),
    ({"over": 2, "zero": 2, "count": 3}, "its 2 replicas exchange gradients in every backward, and"
     " 3 microbatches cannot be dealt to them evenly"),
])  # fmt: skip
def test_what_cannot_be_shared_is_said(model, how, message):
    assert all_violations(strategy_of(model, **how), model.graph, 2) == (f"stage 0: {message}",)


def test_level_1_needs_no_even_dealing(model):
    assert all_violations(strategy_of(model, 3, over=2, zero=1), model.graph, 2) == ()


def test_the_asynchronous_schedule_shares_nothing(model):
    how = {"schedule": ScheduleName.PIPEDREAM, "over": 2, "zero": 1}
    assert all_violations(strategy_of(model, **how), model.graph, 2) == (
        "something lies in parts over replicas, which the schedule pipedream cannot run",
    )
