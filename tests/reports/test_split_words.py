"""What rules split, in words."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.profile import OperatorCost, SplitRule
from planner.artefacts.sharding import AxisRule
from planner.reports.split_words import word_of
from tests.support.split import mlp
from tests.support.split_models import MODELS, loaded
from tests.support.split_profiles import profiled


def words(profile, name):
    """By line of the rules of an operator, its word."""
    (v,) = (v for v, one in enumerate(profile.graph.operators) if one.name == name)
    return {rule.line: word_of(profile, v, rule.rule) for rule in profile.operators[v].rules}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    return {name: profiled(loaded(make(folder / f"{name}.onnx"))) for name, make in MODELS.items()}


def by_type(profile, *types):
    """Names of the operators of some types, in their order."""
    return [one.name for one in profile.graph.operators if one.type in types]


def test_products_with_weights_have_columns_and_rows_and_attention_has_heads(models):
    gpt = models["gpt"]
    q, _, scores, _, mixed, out, up, down, head = by_type(gpt, "MatMul")
    assert words(gpt, q) == {
        "S0,R->S0": "samples", "S1,R->S1": "sequence", "R,S1->S2": "columns",
        "S2,S0->P": "rows", "P,R->P": "summands", "R,P->P": "summands",
    }  # fmt: skip
    for name in (scores, mixed):
        of_attention = words(gpt, name)
        assert of_attention["S0,S0->S0"] == "samples"
        assert of_attention["S1,S1->S1"] == "heads"
        assert of_attention["S2,R->S2"] == "sequence"
    for name in (out, up, down, head):
        assert words(gpt, name)["S2,S0->P"] == "rows"
    (softmax,), (gelu,) = by_type(gpt, "Softmax"), by_type(gpt, "Gelu")
    assert words(gpt, softmax) == {"S0->S0": "samples", "S1->S1": "heads", "S2->S2": "sequence"}
    assert words(gpt, gelu) == {"S0->S0": "samples", "S1->S1": "sequence", "S2->S2": "columns"}
    table, *_ = by_type(gpt, "Gather")
    assert set(words(gpt, table).values()) == {"samples", "sequence", "columns", "summands"}


def test_convolutions_have_channels(models):
    cnn = models["cnn"]
    for name in by_type(cnn, "Conv"):
        assert list(words(cnn, name).values()) == ["samples", "channels", "input channels"]
    (pool,) = by_type(cnn, "GlobalAveragePool")
    found = words(cnn, pool)
    assert (found["S0->S0"], found["S1->S1"], found["P->P"]) == ("samples", "channels", "summands")
    # No rule of a convolution says where height and width go on.
    assert (found["S2->A"], found["S3->A"]) == ("dimension 2", "dimension 3")


def test_experts_are_found_by_their_weights_before_and_behind_them():
    """GShard's: g groups of s tokens, e experts with c places each."""
    floats = {
        "tokens": (4, 8, 16), "mask": (4, 8, 2, 4), "inner": (2, 4, 4, 16), "up": (2, 4, 4, 32),
        "y": (4, 8, 32),
    }  # fmt: skip
    rules = {
        "route": ["S0->S0", "S1->S1"],
        "dispatch": ["S0,S0->S1", "S2,R->S0", "R,S2->S3", "S1,S1->P"],
        "experts": ["S1,R->S1", "S0,S0->S0", "R,S2->S3", "S3,S1->P", "P,R->P"],
        "collect": ["S0,S1->S0", "S1,R->S1", "S2,S0->P", "R,S3->S2"],
    }
    operators = (
        Operator("route", "Test", ("tokens",), ("mask",), ()),
        Operator("dispatch", "Einsum", ("mask", "tokens"), ("inner",), ()),
        Operator("experts", "Einsum", ("inner",), ("up",), ("w",)),
        Operator("collect", "Einsum", ("mask", "up"), ("y",), ()),
    )
    graph = Graph(
        operators=operators,
        tensors=tuple(Tensor(n, s, "float32", n != "tokens") for n, s in floats.items()),
        parameters=(Parameter("w", (2, 16, 32), "float32", True),),
        inputs=("tokens",),
        outputs=("y",),
    )
    costs = tuple(
        OperatorCost(one.name, 1.0, 2.0, 0, 0, 1, 1, one.outputs, 0,
                     rules=tuple(map(SplitRule, rules[one.name])))
        for one in operators
    )  # fmt: skip
    profile = replace(mlp(), graph=graph, operators=costs)
    assert words(profile, "dispatch")["S2,R->S0"] == "experts"
    assert words(profile, "experts") == {
        "S1,R->S1": "samples", "S0,S0->S0": "experts", "R,S2->S3": "columns", "S3,S1->P": "rows",
        "P,R->P": "summands",
    }  # fmt: skip
    found = words(profile, "collect")
    assert (found["S0,S1->S0"], found["S2,S0->P"]) == ("samples", "experts")
    assert (found["S1,R->S1"], found["R,S3->S2"]) == ("sequence", "columns")


def test_a_dimension_without_a_word_has_its_number():
    profile = mlp()
    assert word_of(profile, 0, AxisRule.parse("S1,S0->S1")) == "dimension 1"
    assert word_of(profile, 0, AxisRule.parse("R,R->R")) == "whole"
