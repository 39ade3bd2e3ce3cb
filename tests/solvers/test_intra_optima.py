"""Splits that are known to be the best come out of the program of `intra-op`: on one axis of four
V100, with gradients and state that are not cut further than parameters, and these as they are read.
"""

import time
from collections import Counter
from dataclasses import replace

import pytest

import planner
from planner.artefacts.graph import consumers
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem, Status
from planner.artefacts.topology import device_type
from planner.costs.stage_pass import collective_steps
from planner.resharding import reshardings
from planner.resharding.conversion import LOCAL
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Parts
from planner.solvers.intra.policy import Policy
from planner.solvers.intra.space import View
from planner.solvers.program.solve import solve
from tests.bench.ablation import DEVICE, HOST
from tests.support.alpa import WIDE_RESNET
from tests.support.builders import asked
from tests.support.measured.networks import Kind, Network
from tests.support.measured.profiles import computed
from tests.support.small_splits import strategy_of

GPUS = 4
NOTHING = Counter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


def problem(profile, num_microbatches=1):
    topology = planner.read_topology(HOST, GPUS)
    training = asked(num_microbatches, optimizer="adam", recompute=Recompute.NONE)
    return Problem(profile, topology, **training, measured_on=device_type(topology, 0))


def gpt(folder, batch, num_microbatches=1, **sizes):
    network = Network(Kind.GPT, layers=2, heads=8, kv_heads=8, vocabulary=1024, **sizes)
    return problem(computed(network, batch, "float16", DEVICE, folder=folder), num_microbatches)


def best(given):
    """The best stage, and the rules of its operators by name."""
    view = View((GPUS,), 1, tuple(range(GPUS)), masks=(Policy(further=False),))
    made = built(given, view)
    program, until_s = made.program(Parts(1, 1, 1, 1), 10**15), time.monotonic() + 60
    answer = solve(program, 20.0, lambda: until_s - time.monotonic())
    assert answer.status is Status.OPTIMAL
    (stage,) = strategy_of(given, made, answer.picks).stages
    assert not stage.sharding.gradients and not stage.sharding.states
    operators = given.profile.graph.operators
    return stage, {one.name: made.rules[v][answer.picks[v]].lines[0]
                   for v, one in enumerate(operators)}  # fmt: skip


def sent(given, stage):
    """The collectives of a forward and of a backward by their kinds."""
    sides = collective_steps(given.profile, stage)
    return tuple(Counter(step.kind.value for step in some if step.kind not in LOCAL)
                 for some in sides)  # fmt: skip


def holding(given, *ends):
    """Names of the operators that hold a parameter whose name ends so, in their order."""
    return [
        one.name
        for one in given.profile.graph.operators
        if any(name.endswith(ends) for name in one.parameters)
    ]


def test_samples_are_split_where_activations_are_larger_than_weights(folder):
    given = gpt(folder, 16, 4, width=128, inner=512, sequence=512)
    stage, rules = best(given)
    tied = [name for name in rules if "Transpose" in name]
    assert {line.partition("->")[2] for name, line in rules.items() if name not in tied} == {"S0"}
    # The tied embedding reaches the head through a Transpose, which needs its whole gradient: one
    # all-reduce, or the two steps of which that consists.
    (once,) = tied
    in_two = Counter({"all-gather": 1}), Counter({"reduce-scatter": 1})
    assert sent(given, stage) in ((NOTHING, Counter({"all-reduce": 1})), in_two), rules[once]


def test_large_weights_are_split_as_megatron_does(folder):
    """What is between attention and feed-forward parts runs whole, as in Shoeybi et al. 2019."""
    given = gpt(folder, 4, width=1024, inner=4096, sequence=128)
    profile, between = given.profile, ("Add", "Gather", "LayerNormalization")
    costs = tuple(
        replace(cost, rules=()) if one.type in between else cost
        for one, cost in zip(profile.graph.operators, profile.operators, strict=True)
    )
    given = replace(given, profile=replace(profile, operators=costs))
    stage, rules = best(given)
    assert {rules[one] for one in holding(given, ".q", ".k", ".v", ".up")} == {"R,S1->S2"}
    assert {rules[one] for one in holding(given, ".o", ".down")} == {"S2,S0->P"}
    # One for the attention and one for the feed-forward part of each of two layers.
    assert sent(given, stage) == (Counter({"all-reduce": 4}), Counter({"all-reduce": 4}))


def test_experts_are_split_along_their_own_axis(folder):
    """Tokens are cut by groups, and go to the experts and back, as in GShard."""
    given = gpt(folder, 8, width=1024, inner=8192, sequence=1024, experts=16, group=1024)
    stage, rules = best(given)
    (up, dense), (down, _) = holding(given, ".up"), holding(given, ".down")
    assert (rules[up], rules[down], rules[dense]) == ("S0,S0->S0", "S0,S0->S1", "R,S1->S2")
    graph = given.profile.graph
    (made,) = next(one.outputs for one in graph.operators if one.name == down)
    after = tuple(graph.operators[v].name for v in consumers(graph)[made])
    moved = {
        one.readers: [step.kind.value for step in (*one.forward, *one.backward)]
        for one in reshardings(stage, graph)
    }
    assert moved[up,] == moved[after] == ["all-to-all", "all-to-all"]


def test_a_wide_resnet_is_split_along_samples_and_then_along_channels():
    """Alpa's case of four GPUs (Zheng et al., OSDI 2022)."""
    family = WIDE_RESNET
    profile = computed(family.ablation[GPUS], family.batch, family.dtype, DEVICE)
    _, rules = best(problem(profile))
    convolutions = {name: line for name, line in rules.items() if "Conv" in name}
    last = [name for name in convolutions if name.startswith("stage3")]
    first = [name for name in convolutions if not name.startswith(("stage2", "stage3"))]
    assert {convolutions[name] for name in first} == {"S0,R->S0"}
    assert {convolutions[name] for name in last} == {"R,S0->S1", "S1,S1->P"}
