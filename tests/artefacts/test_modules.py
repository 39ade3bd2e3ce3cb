"""Stages told by the modules of the network: in tables, strategies and annotated files."""

import json
from dataclasses import replace

import onnx
import pytest

import planner
from planner.artefacts.files import (
    artefact_hash,
    read_plan,
    read_profile,
    write_plan,
    write_profile,
)
from planner.model.annotated import STAGE_MODULES, check_agreement, write_partition
from planner.model.load import ReadOptions, load
from planner.reports.plans import plan_json, stage_table
from tests.model.annotated.test_annotated import plan_for, small_model
from tests.support.builders import cluster, graph_of, profile_of, unit_type

PATHS = ("wte", "h.0.ln", "h.0.mlp", "h.1.mlp")


@pytest.fixture
def plain():
    """A profile of a chain of four operators."""
    feeds = [[i - 1] if i else [] for i in range(4)]
    graph = graph_of(feeds, [1000] * 4, [10**6] * 4)
    return replace(profile_of(graph, [0.01] * 4), device_type="unit")


def solved(profile):
    plans = planner.solve(profile, topology=cluster([unit_type()] * 2), solvers=["even"])
    return plans.plan


def test_a_profile_without_modules_is_the_file_that_it_was(plain, tmp_path):
    write_profile(plain, tmp_path / "plain.json")
    write_profile(replace(plain, modules=PATHS), tmp_path / "told.json")
    assert "modules" not in json.loads((tmp_path / "plain.json").read_text())
    assert read_profile(tmp_path / "told.json").modules == PATHS
    assert artefact_hash(read_profile(tmp_path / "plain.json")) == artefact_hash(plain)


def test_a_profile_has_a_module_for_every_operator_or_none(plain):
    with pytest.raises(ValueError, match=r"modules: expected one per operator \(4\), got 1"):
        replace(plain, modules=("h",))


def test_tables_and_strategies_tell_stages_by_modules(plain, tmp_path):
    plan = solved(replace(plain, modules=PATHS))
    assert plan.modules == (("wte", "h.0"), ("h.0", "h.1"))
    assert [row[-1] for row in stage_table(plan).rows] == ["wte .. h.0", "h.0 .. h.1"]
    assert plan_json(plan, 2)["stages"][1]["modules"] == ["h.0", "h.1"]
    write_plan(plan, tmp_path / "strategy.json")
    assert read_plan(tmp_path / "strategy.json").modules == plan.modules


def test_without_modules_stages_are_told_by_operators(plain, tmp_path):
    plan = solved(plain)
    assert [row[-1] for row in stage_table(plan).rows] == ["op0 .. op1", "op2 .. op3"]
    write_plan(plan, tmp_path / "strategy.json")
    assert "modules" not in json.loads((tmp_path / "strategy.json").read_text())


def test_annotated_files_name_the_modules_of_every_stage(tmp_path):
    model = load(small_model(tmp_path / "small.onnx"), ReadOptions(batch=2))
    plan = replace(plan_for(model), modules=(("wte", "h.0"), ("h.1",)))
    write_partition(model, plan, tmp_path / "strategy.onnx")
    check_agreement(plan, tmp_path / "strategy.onnx")
    notes = {p.key: p.value for p in onnx.load(tmp_path / "strategy.onnx").metadata_props}
    assert json.loads(notes[STAGE_MODULES]) == ["wte .. h.0", "h.1"]
