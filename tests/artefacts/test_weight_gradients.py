"""The share of a backward pass that is for weights, and how it goes through files."""

import json
from dataclasses import replace

import pytest

from planner.artefacts.files import (
    artefact_hash,
    read_profile,
    to_plain,
    write_profile,
    write_profiles,
)
from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.profile import OperatorCost, with_times
from planner.artefacts.weight_gradients import backward_weight_share, has_both_gradients
from planner.support.errors import FileError
from tests.support.builders import profile_of

SHARES = {
    "embed": 1.0,  # indices have no gradient
    "first": 1.0,  # nor have samples
    "norm": 0.0,  # no product
    "linear": 0.5,
    "relu": 0.0,
    "frozen": 0.0,  # its bias alone is trained
    "scores": 0.0,  # a product of two tensors
    "conv": 0.5,
    "lstm": 0.5,
    "head": 0.5,
}


def network():
    """ids -> embed, x -> first; both are added up by a chain of operators with a gradient."""

    def one(name, type_, inputs, parameters=()):
        return Operator(name, type_, inputs, (f"{name}.y",), parameters)

    operators = (
        one("embed", "Gather", ("ids",), ("table",)),
        one("first", "MatMul", ("x",), ("w0",)),
        one("norm", "LayerNormalization", ("first.y",), ("scale",)),
        one("linear", "Gemm", ("norm.y",), ("w1", "b1")),
        one("relu", "Relu", ("linear.y",)),
        one("frozen", "Gemm", ("relu.y",), ("w2", "b2")),
        one("scores", "MatMul", ("frozen.y", "embed.y")),
        one("conv", "Conv", ("scores.y",), ("w3",)),
        one("lstm", "LSTM", ("conv.y",), ("w4",)),
        one("head", "com.microsoft.FusedGemm", ("lstm.y",), ("w5",)),
    )
    shapes = {"table": (9, 4), "scale": (4,), "w3": (4, 4, 3), "w4": (1, 16, 4)}
    names = [name for operator in operators for name in operator.parameters]
    return Graph(
        operators=operators,
        tensors=(
            Tensor("ids", (4,), "int64", False),
            Tensor("x", (4, 4), "float32", False),
            *(Tensor(f"{operator.name}.y", (4, 4), "float32", True) for operator in operators),
        ),
        parameters=tuple(
            Parameter(n, shapes.get(n, (4,) if n[0] == "b" else (4, 4)), "float32", n != "w2")
            for n in names
        ),
        inputs=("ids", "x"),
        outputs=("head.y",),
    )


def profile(of_weight_s=None):
    """A profile whose backward passes take 2 s; measured times of weights by operator."""
    made = profile_of(network(), [1.0] * len(SHARES))
    known = of_weight_s or {}
    return replace(
        made,
        operators=tuple(
            replace(one, backward_weight_s=known.get(one.name)) for one in made.operators
        ),
    )


def test_by_default_products_compute_as_much_for_their_weight_as_for_their_input():
    graph = network()
    named = [operator.name for operator in graph.operators]
    assert dict(zip(named, backward_weight_share(profile()), strict=True)) == SHARES
    halves = {name for v, name in enumerate(named) if has_both_gradients(graph, v)}
    assert halves == {name for name, share in SHARES.items() if share == 0.5}


def test_what_was_measured_counts():
    found = backward_weight_share(profile({"linear": 0.5, "conv": 2.0, "head": 0.0}))
    expected = SHARES | {"linear": 0.25, "conv": 1.0, "head": 0.0}
    assert list(found) == list(expected.values())


def test_an_operator_without_a_backward_has_no_share_of_it():
    made = profile({"linear": 0.0})
    costs = (replace(one, backward_s=0.0) for one in made.operators)
    assert backward_weight_share(replace(made, operators=tuple(costs)))[3] == 0.0


def test_other_times_keep_the_share():
    cost = OperatorCost("a", 1.0, 2.0, 0, 0, 0, 0, (), 0, backward_weight_s=0.5)
    found = with_times(cost, 3.0, 8.0)
    assert (found.forward_s, found.backward_s, found.backward_weight_s) == (3.0, 8.0, 2.0)
    assert with_times(replace(cost, backward_weight_s=None), 3.0, 8.0).backward_weight_s is None
    # A share of all stays one, however its time is rounded.
    whole = with_times(replace(cost, backward_weight_s=2.0), 1.0, 1.23456789051e-3)
    assert whole.backward_weight_s == whole.backward_s
    nothing = with_times(replace(cost, backward_s=0.0, backward_weight_s=0.0), 1.0, 0.0)
    assert nothing.backward_weight_s == 0.0


def test_files_have_it_where_it_was_measured_and_the_hash_does_not(tmp_path):
    bare, measured = profile(), profile({"linear": 0.5})
    for name, one, form in (("bare", bare, 2), ("measured", measured, 3)):
        path = tmp_path / name
        write_profile(one, path)
        assert read_profile(path) == one
        plain = json.loads(path.read_text())
        assert plain["format"] == f"planner-profile/{form}"
        known = [cost.get("backward_weight_s") for cost in plain["operators"]]
        assert known == [one.backward_weight_s for one in one.operators]
        assert sum("backward_weight_s" in cost for cost in plain["operators"]) == form - 2
    assert artefact_hash(measured) == artefact_hash(bare)
    write_profiles([bare, replace(measured, microbatch_size=2)], tmp_path / "both")
    assert json.loads((tmp_path / "both").read_text())["format"] == "planner-profile-set/3"


@pytest.mark.parametrize("wrong_s", [-0.5, 2.5])
def test_the_weight_takes_no_more_than_the_whole_backward(wrong_s, tmp_path):
    plain = {"format": "planner-profile/3", **to_plain(profile())}
    plain["operators"][3]["backward_weight_s"] = wrong_s
    (tmp_path / "p.json").write_text(json.dumps(plain))
    said = rf"operators\[3\]\.backward_weight_s: expected .* backward_s \(2\.0\), got {wrong_s}"
    with pytest.raises(FileError, match=said):
        read_profile(tmp_path / "p.json")
