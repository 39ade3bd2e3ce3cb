"""Discovery of whole models: rules with blocks, the cache, and the files that hold rules."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner import api
from planner.artefacts.files import (
    read_profile,
    read_profile_set,
    shipped,
    to_plain,
    write_profile,
    write_profiles,
)
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import local_shape, reads, rule_of
from planner.model.load import ReadOptions, load
from planner.operators.parts.halo import fits
from planner.profilers.interpolate import interpolated
from planner.profilers.rules import discover, split_rules, with_rules
from planner.profilers.summary import SplitKind, split_counts
from planner.reports.profile import profile_lines
from planner.support.errors import FileError
from tests.support.builders import graph_of, profile_of
from tests.support.models import SYNTHETIC
from tests.support.one_operator import model_of, rules_of

WIDTH, HEADS, LENGTH, BATCH = 24, 4, 10, 5


def weight(name, *shape):
    values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def fused(path, blocks=3):
    """Queries, keys and values by one weight, as torch's exporter writes it: tokens of all samples
    in one dimension for the product, apart again for the heads.
    """
    shapes = {
        "flat": [-1, WIDTH], "apart": [BATCH, LENGTH, blocks * WIDTH],
        "heads": [0, 0, HEADS, WIDTH // HEADS],
    }  # fmt: skip
    names = [f"part{i}" for i in range(blocks)]
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["tokens"], name="flatten"),
        helper.make_node("Gemm", ["tokens", "w", "b"], ["products"], name="qkv"),
        helper.make_node("Reshape", ["products", "apart"], ["wide"], name="unflatten"),
        helper.make_node("Split", ["wide"], names, name="split", axis=2, num_outputs=blocks),
        helper.make_node("Reshape", ["part0", "heads"], ["y"], name="heads_of_queries"),
    ]
    graph = helper.make_graph(
        nodes, "fused",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (BATCH, LENGTH, WIDTH))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
         for name in ("y", *names[1:])],
        [weight("w", WIDTH, blocks * WIDTH), weight("b", blocks * WIDTH),
         *(numpy_helper.from_array(np.array(shape), name) for name, shape in shapes.items())],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return load(path)


def lines(model, **how):
    found = split_rules(model, **how)
    return {
        operator.name: {one.line for one in rules}
        for operator, rules in zip(model.graph.operators, found, strict=True)
    }


# ---- blocks


def test_a_fused_weight_is_cut_in_blocks_from_the_product_to_the_heads(tmp_path):
    found = lines(fused(tmp_path / "fused.onnx"), cached=False)
    assert "R,S1/3,S0/3->S1/3" in found["qkv"]
    assert "S1/3->S2/3 shape[2]" in found["unflatten"]
    assert "S2/3->S2,S2,S2" in found["split"]
    assert "S2->S2 shape[2]" in found["heads_of_queries"]


def test_tokens_of_all_samples_are_cut_along_the_sequence_in_blocks(tmp_path):
    found = lines(fused(tmp_path / "fused.onnx"), cached=False)
    assert "S1->S0/5" in found["flatten"]
    assert "S0/5,R,R->S0/5" in found["qkv"]
    assert "S0/5->S1 shape[1]" in found["unflatten"]


def test_two_blocks_are_not_three(tmp_path):
    found = lines(fused(tmp_path / "fused.onnx", blocks=2), cached=False)
    assert "R,S1/2,S0/2->S1/2" in found["qkv"]
    assert not any("/3" in line for rules in found.values() for line in rules)


def test_rows_of_all_samples_are_summed_up_from_blocks(tmp_path):
    flat = numpy_helper.from_array(np.array([20, WIDTH]), "flat")
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"], "flatten"),
        helper.make_node("MatMul", ["rows", "w"], ["h"], "product"),
        helper.make_node("ReduceSum", ["h"], ["loss"], "total", keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5, WIDTH])]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, [flat, weight("w", WIDTH, 3)])
    path = tmp_path / "sum.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10).SerializeToString())
    assert "S0/4->P" in lines(load(path), cached=False)["total"]


# ---- numbers of devices


def test_a_halo_is_listed_for_the_sizes_that_leave_enough_rows():
    rules = rules_of("Conv", (2, 4, 24), (4, 4, 7), pads=[3, 3])
    assert "S2,R->S2 @halo at 2,3,4,6,8" in rules  # parts of 3 rows at least
    assert fits(24, 24, 8, (7, 1, 3))
    assert not fits(24, 24, 12, (7, 1, 3))


def test_heads_limit_the_number_of_devices():
    """96 of the width can be cut into 8, its 12 heads cannot."""
    shape = (2, 10, 96)
    rules = rules_of("Attention", shape, shape, shape, version=24, q_num_heads=12, kv_num_heads=12)
    assert "S2,S2,S2->S2 q_num_heads kv_num_heads at 2,3,4,6,12" in rules


def test_a_wide_operator_is_tried_at_small_sizes():
    rules = rules_of("MatMul", (64, 4096, 12288), (12288, 49152))
    assert "S0,R->S0" in rules
    assert rules == rules_of("MatMul", (4, 6, 8), (8, 10))


# ---- the cache


def test_rules_come_from_the_cache_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = fused(tmp_path / "fused.onnx")
    first = split_rules(model)

    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    assert split_rules(model) == first
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        split_rules(model, cached=False)


@pytest.mark.parametrize(
    "file", ["profilers/rules/search.py", "operators/shape.py", "artefacts/sharding.py"]
)
def test_other_sources_are_another_cache(file, monkeypatch):
    before, read = discover._sources.__wrapped__(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: b"" if path.match(f"planner/{file}") else read(path)
    )
    assert discover._sources.__wrapped__() != before


def test_other_sizes_are_other_entries():
    """Rules depend on sizes: heads and windows."""
    for heads in (2, 4):
        shape = (2, 10, 8 * heads)
        rules = rules_of(
            "Attention", shape, shape, shape, version=24, q_num_heads=heads, kv_num_heads=heads
        )
        sizes = ",".join(str(n) for n in (2, 4) if heads % n == 0)
        assert f"S2,S2,S2->S2 q_num_heads kv_num_heads at {sizes}" in rules


# ---- profiles and their files

RULES = (SplitRule("S0->S0"), SplitRule("S2->S2 @halo", (2, 4)))


def split_profile():
    profile = profile_of(graph_of([[], [0], [1]]), [1.0, 2.0, 3.0])
    own = [RULES, (), RULES]
    costs = zip(profile.operators, own, strict=True)
    return replace(profile, operators=tuple(replace(c, rules=r) for c, r in costs))


def test_a_file_has_each_list_of_rules_once(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(split_profile(), path)
    plain = json.loads(path.read_text())
    assert plain["format"] == "planner-profile/2"
    assert plain["rules"] == [["S0->S0", "S2->S2 @halo at 2,4"]]
    assert [one.get("rules") for one in plain["operators"]] == [0, None, 0]
    assert read_profile(path) == split_profile()


def test_files_with_several_profiles_have_rules_for_each(tmp_path):
    path = tmp_path / "profiles.json"
    some = [replace(split_profile(), microbatch_size=size) for size in (1, 2)]
    write_profiles(some, path)
    assert read_profile_set(path).profiles == tuple(some)


def test_a_file_of_format_1_has_no_rules(tmp_path):
    path = tmp_path / "profile.json"
    plain = to_plain(profile_of(graph_of([[], [0]]), [1.0, 2.0]))
    path.write_text(json.dumps({"format": "planner-profile/1", **plain}))
    assert [one.rules for one in read_profile(path).operators] == [(), ()]


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: p["rules"][0].append("S0>S0"), "rules[0][2]: expected a rule such as 'S0,R->S0'"),
    (lambda p: p["rules"][0].append("S0->S0 at 1"), "rules[0][2]: S0->S0: expected sizes of at"),
    (lambda p: p["operators"][0].update(rules=7), "operators[0].rules: expected the index of one"),
    (lambda p: p.update(rules={}), "rules: expected a list, got a mapping"),
])  # fmt: skip
def test_bad_rules_are_said_by_their_place(tmp_path, change, message):
    path = tmp_path / "profile.json"
    write_profile(split_profile(), path)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError) as error:
        read_profile(path)
    assert f"{path}: {message}" in str(error.value)


def test_bad_rules_of_one_of_several_profiles_are_said_by_their_place(tmp_path):
    path = tmp_path / "profiles.json"
    write_profiles([replace(split_profile(), microbatch_size=size) for size in (1, 2)], path)
    plain = json.loads(path.read_text())
    first, second = plain["profiles"]
    first["rules"][0][0] = 3
    second["operators"][1]["rules"] = -1
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError) as error:
        read_profile_set(path)
    rule, index = str(error.value).splitlines()
    assert rule == f"{path}: profiles[0].rules[0][0]: expected a rule such as 'S0,R->S0', got 3"
    assert index.startswith(f"{path}: profiles[1].operators[1].rules: expected the index of one of")


def test_a_profile_of_another_model_gets_no_rules():
    with pytest.raises(ValueError, match="expected the model of the profile"):
        with_rules(split_profile(), model_of("Relu", (4, 6)), cached=False)


def test_kinds_of_splits_are_counted():
    counts = split_counts(split_profile())
    assert counts == {**dict.fromkeys(SplitKind, 0), SplitKind.SAMPLE: 2, SplitKind.ATTRIBUTE: 2}


def test_profiles_are_made_with_rules_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = fused(tmp_path / "fused.onnx")
    made = api.profile("fused.onnx", device="A100-SXM4-80GB")
    assert [one.rules for one in made.operators] == list(split_rules(model))
    assert (
        "splits of 5 operators: 5 by their first dimension, 4 by another one, 1 by a parameter,"
        " 1 by a sum; 0 cannot be split"
    ) in profile_lines(made)


def test_an_old_profile_gets_rules_where_its_model_is_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fused(tmp_path / "fused.onnx")
    made = api.profile("fused.onnx", device="A100-SXM4-80GB")
    bare = replace(made, operators=tuple(replace(one, rules=()) for one in made.operators))
    plain = {"format": "planner-profile/1", **to_plain(bare)}
    (tmp_path / "old.json").write_text(json.dumps(plain))
    api.convert("old.json", "new.json")
    assert read_profile(tmp_path / "new.json") == made
    fused(tmp_path / "fused.onnx", blocks=2)  # another model in its place
    api.convert("old.json", "bare.json")
    assert read_profile(tmp_path / "bare.json") == bare


def test_equal_operators_of_a_large_language_model_are_tried_once_and_then_never(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "llama.onnx"
    path.write_bytes(SYNTHETIC["llama7b"]().SerializeToString())
    model = load(path, ReadOptions(batch=1, dimensions={"seq": 2048}), known_hash="")
    tried, ask = [], discover._Trials._tried
    monkeypatch.setattr(
        discover._Trials, "_tried", lambda own, *given: tried.append(given) or ask(own, *given)
    )
    found = split_rules(model)
    assert len(model.graph.operators) > 500
    assert 10 < len(tried) < 50
    tried.clear()
    assert split_rules(model) == found
    assert tried == []


def test_shipped_profiles_have_rules_that_divide():
    (profile,) = read_any_profiles(shipped("profiles") / "llama7b-a100.json")
    sizes = {n: one.shape for n, one in tensors_by_name(profile.graph).items()}
    sizes |= {n: one.shape for n, one in parameters_by_name(profile.graph).items()}
    for operator, cost in zip(profile.graph.operators, profile.operators, strict=True):
        assert cost.rules, operator.name
        for one in cost.rules:
            rule = rule_of([one.line])
            assert len(rule.inputs) == len(reads(operator))
            names = (*reads(operator), *operator.outputs)
            for name, spec in zip(names, (*rule.inputs, *rule.outputs), strict=True):
                local_shape(sizes[name], spec, (2,))


def test_interpolated_profiles_keep_what_does_not_depend_on_the_size():
    low, high = (
        replace(split_profile(), microbatch_size=size) for size in (2, 8)
    )  # fmt: skip
    blocks = (*RULES, SplitRule("S1->S0/8"))
    high = replace(
        high, operators=tuple(replace(one, rules=blocks) for one in high.operators)
    )  # fmt: skip
    between = interpolated((low, high), 4)
    assert {one.rules for one in between.operators} == {RULES}
