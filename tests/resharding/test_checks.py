"""One message for each mistake in how stages are split."""

from dataclasses import replace

import pytest

from planner.artefacts.sharding import rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.resharding.checks import all_violations, sharding_violations
from tests.support.blocks import block, megatron


def strategy(stage, schedule=ScheduleName.GPIPE):
    return Strategy((stage,), schedule, 2)


def changed(stage=None, rules=None, **how):
    stage = stage or megatron(2)
    lies = stage.sharding
    if rules:
        how["rules"] = {**lies.rules, **{n: rule_of([line]) for n, line in rules.items()}}
    for kind in ("parameters", "inputs", "outputs"):
        if kind in how:
            how[kind] = {**getattr(lies, kind), **how[kind]}
    return replace(stage, sharding=replace(lies, **how))


def test_megatrons_plans_are_sound():
    for stage in (megatron(2), megatron(2, sequence=True)):
        assert all_violations(strategy(stage), block(), 2) == ()


@pytest.mark.parametrize("how, message", [
    (
        {"parameters": {"wq": ("S2",)}},
        "stage 0: parameters.wq: S2: expected one of the 2 dimensions",
    ),
    (
        {"inputs": {"add2": ("S0",)}}, "stage 0: inputs.add2: expected a tensor of the stage",
    ),
    (
        {"parameters": {"other": ("R",)}},
        "stage 0: parameters.other: expected a parameter of the stage",
    ),
    (
        {"rules": {"other": "R->R"}}, "stage 0: rules.other: expected an operator of the stage",
    ),
    (
        {"rules": {"gelu": "S2,R->S2"}},
        "stage 0: rules.gelu: expected specs of 1 inputs (up) and 1 outputs, got 2 and 1",
    ),
    (
        {"states": {"wq": ("R",)}},
        "stage 0: states.wq: expected S1, cut further only where that is R, got R",
    ),
    (
        {"gradients": {"g1": ("S0",)}, "states": {"g1": ("R",)}},
        "stage 0: states.g1: expected S0, cut further only where that is R, got R",
    ),
])  # fmt: skip
def test_a_mistake_is_one_message(how, message):
    assert message in sharding_violations(strategy(changed(**how)), block())


def test_a_dimension_that_does_not_divide():
    stage = megatron(4)  # two heads cannot be cut into four parts
    found = sharding_violations(strategy(stage), block())
    assert found[0] == (
        "stage 0: rules.qh: qh: S1: 2 cannot be cut into 4 equal parts"
    )  # fmt: skip
    assert all("2 cannot be cut into 4 equal parts" in one for one in found)


def test_a_mesh_that_does_not_match_the_devices():
    stage = replace(megatron(2), groups=((0, 1, 2),))
    (found,) = all_violations(strategy(stage), block(), 3)
    assert found == (
        "stage 0 has a mesh of 2 devices, and its replicas have 3 devices; expected 2 each"
    )


def test_the_asynchronous_schedule_is_refused():
    found = sharding_violations(strategy(megatron(2), ScheduleName.PIPEDREAM), block())
    assert found == ("a stage is split, which the schedule pipedream cannot run",)


def test_a_tied_parameter_with_two_specs():
    from tests.resharding.test_sums import BATCH, graph, stage
    from tests.resharding.test_sums import strategy as of

    cut = stage(("one",), ((0, 1),), (2,), ["R,S1->S1"], parameters={"w": ("S1",)})
    whole = stage(("two", "three"), ((2, 3),), (2,), BATCH)
    assert all_violations(of(cut, whole), graph(), 4) == (
        "parameter w is used in stages 0, 1 and does not lie in the same way there: R,R and S1,S1",
    )


def test_a_tensor_that_crosses_lies_in_no_blocks():
    names = [operator.name for operator in block().operators]
    stage = megatron(2)
    first = Stage(("norm1", "q"), ((0, 1),), 1, False, replace(
        stage.sharding, rules={"q": stage.sharding.rules["q"]},
        parameters={"wq": ("S1",)}, outputs={"q": ("S2/2",)},
    ))  # fmt: skip
    second = Stage(tuple(n for n in names if n not in first.operators), ((2,),), 1, False)
    one = Strategy((first, second), ScheduleName.GPIPE, 1)
    assert sharding_violations(one, block()) == (
        "stage 0: q: S2/2: expected a spec without blocks of a tensor that crosses stages",
    )
