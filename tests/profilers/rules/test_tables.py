"""Published tables of ways to split operators, made of the rules that discovery finds."""

from math import prod

import pytest

from planner.artefacts.sharding import AxisRule, dim_of, rule_of
from planner.profilers.rules import split_rules
from planner.profilers.summary import SplitKind, split_kind
from tests.support.one_operator import model_of


def found(kind, *inputs, **how):
    """The graph's operator and its rules."""
    model = model_of(kind, *inputs, **how)
    place = [operator.name for operator in model.graph.operators].index("it")
    return model.graph.operators[place], split_rules(model, cached=False)[place]


# ---- Alpa (Zheng et al. 2022), table 3: C[b,i,j] = sum over k of A[b,i,k] B[b,k,j]

MESH = (2, 4)
SIZES = {"b": 8, "i": 16, "j": 24, "k": 32}
# The loops on the axes of a mesh; specs of C, A and B; the all-reduce: its share of C, its axes.
TABLE_3 = {
    ("i", "j"): ("R S0 S1", "R S0 R", "R R S1", None),
    ("i", "k"): ("R S0 R", "R S0 S1", "R S1 R", ((0,), (1,))),
    ("j", "k"): ("R R S0", "R R S1", "R S1 S0", ((0,), (1,))),
    ("b", "i"): ("S0 S1 R", "S0 S1 R", "S0 R R", None),
    ("b", "k"): ("S0 R R", "S0 R S1", "S0 S1 R", ((0,), (1,))),
    ("i", "i"): ("R S01 R", "R S01 R", "R R R", None),
    ("k", "k"): ("R R R", "R R S01", "R S01 R", ((), (0, 1))),
}


def loop_of(line):
    """The loop of the product that a rule cuts; None of one that cuts none."""
    a, b = AxisRule.parse(line).inputs
    cut = {("S0", "S0"): "b", ("S1", "R"): "i", ("R", "S2"): "j", ("S2", "S1"): "k"}
    return cut.get((a, b))


def in_alpas_words(spec):
    """A spec by dimension, each with the axes that cut it."""
    axes = [[a for a, part in enumerate(spec) if dim_of(part) == d] for d in range(3)]
    return " ".join("S" + "".join(map(str, cut)) if cut else "R" for cut in axes)


def test_the_product_in_batches_is_that_of_alpas_table_3():
    _, rules = found(
        "MatMul",
        (SIZES["b"], SIZES["i"], SIZES["k"]),
        (SIZES["b"], SIZES["k"], SIZES["j"]),
    )
    by_loop = {loop_of(one.line): one for one in rules}
    assert set(by_loop) == {"b", "i", "j", "k", None}
    assert all(by_loop[loop].sizes is None for loop in "bijk")
    made = {}
    for loops in TABLE_3:
        rule = rule_of([by_loop[loop].line for loop in loops])
        (c,), (a, b) = rule.outputs, rule.inputs
        summed = tuple(axis for axis, part in enumerate(c) if part == "P")
        cut = tuple(axis for axis, part in enumerate(c) if dim_of(part) is not None)
        made[loops] = (
            *map(in_alpas_words, (c, a, b)), (cut, summed) if summed else None,
        )  # fmt: skip
    assert made == TABLE_3


def test_the_sums_of_table_3_are_the_collectives_that_are_priced():
    """Row 2: an all-reduce of M / n0 over axis 1."""
    from planner.resharding import Collective, conversion

    m = prod(SIZES[loop] for loop in "bij") * 4
    (step,) = conversion(
        (SIZES["b"], SIZES["i"], SIZES["j"]), 4, MESH, ("S1", "P"), ("S1", "R")
    )  # fmt: skip
    assert (step.kind, step.axis, step.bytes) == (Collective.ALL_REDUCE, 1, m / MESH[0])


# ---- FlexFlow (Jia et al. 2019), table 2: sample, attribute and parameter dimensions

WIDE = {"pads": [1, 1, 1, 1]}
TABLE_2 = {
    "1-D pooling": (
        ("AveragePool", (8, 6, 16)), {"kernel_shape": [3], "pads": [1, 1]},
        ("sample", "channel", "length"), ({"sample"}, {"length", "channel"}, set()),
    ),
    "1-D convolution": (
        ("Conv", (8, 6, 16), (10, 6, 3)), {"pads": [1, 1], "held": (1,)},
        ("sample", "channel", "length"), ({"sample"}, {"length"}, {"channel"}),
    ),
    "2-D convolution": (
        ("Conv", (8, 6, 16, 12), (10, 6, 3, 3)), {**WIDE, "held": (1,)},
        ("sample", "channel", "height", "width"),
        ({"sample"}, {"height", "width"}, {"channel"}),
    ),
    "matrix multiplication": (
        ("MatMul", (8, 6), (6, 10)), {"held": (1,)},
        ("sample", "channel"), ({"sample"}, set(), {"channel"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_2)
def test_the_dimensions_of_flexflows_table_2(name):
    how, options, dims, expected = TABLE_2[name]
    operator, rules = found(*how, **options)
    made = {kind: set() for kind in SplitKind}
    for rule in rules:
        kind = split_kind(rule, operator)
        (part,) = rule.rule.outputs
        if kind not in (None, SplitKind.REDUCTION):
            made[kind].add(dims[dim_of(part)])
    kinds = (SplitKind.SAMPLE, SplitKind.ATTRIBUTE, SplitKind.PARAMETER)
    assert tuple(made[kind] for kind in kinds) == expected
