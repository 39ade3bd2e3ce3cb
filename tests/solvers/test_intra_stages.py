"""Stages of pipelines as problems of their own, and the pipelines of `inter-op`."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.artefacts.options import Recompute
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import Link
from planner.costs.stage_pass import stage_pass
from planner.resharding.checks import all_violations
from planner.simulator.estimate import estimate_s
from planner.solvers.intra.answer import sharding_of
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Parts
from planner.solvers.intra.pipelines import points
from planner.solvers.intra.space import View
from planner.solvers.intra.stage_programs import Stage as Asked
from planner.solvers.intra.stage_programs import StagePrograms
from planner.solvers.intra.stages import as_in, part_of, unblocked
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.options import Megatron
from tests.solvers.test_intra import counted, drawn
from tests.support.builders import cluster, problem_of
from tests.support.split_models import gpt, loaded
from tests.support.split_profiles import FAST, problem, profiled

MESH = (2,)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    return {
        "tied": loaded(gpt(folder / "tied.onnx", blocks=4)),
        "untied": loaded(gpt(folder / "untied.onnx", blocks=4, tied=False)),
    }


def layers(graph, count):
    """The operators in as many equal runs as there are layers, with what is before and behind."""
    firsts = [v for v, one in enumerate(graph.operators) if one.type == "LayerNormalization"]
    starts = firsts[: 2 * count : 2]
    period = starts[1] - starts[0]
    assert [b - a for a, b in pairwise(starts)] == [period] * (count - 1)
    end = starts[-1] + period
    inner = [tuple(range(a, a + period)) for a in starts]
    return [tuple(range(starts[0])), *inner, tuple(range(end, len(graph.operators)))]


def two_hosts(count, inside, between):
    """Hosts of as many devices, with links of as many bytes/s."""
    one = cluster([FAST] * 2 * count, inside, 1e-7)
    devices = tuple(replace(d, host="host" if i < count else "other")
                    for i, d in enumerate(one.devices))  # fmt: skip
    links = tuple(
        replace(link, **{
            end: "other" for end in ("source", "target")
            if getattr(link, end) == "host"
            and {link.source, link.target}.intersection(d.name for d in devices[count:])
        })
        for link in one.links
    )  # fmt: skip
    joins = (Link("host", "other", between, 1e-7), Link("other", "host", between, 1e-7))
    hosts = (*one.hosts, replace(one.hosts[0], name="other"))
    return replace(one, hosts=hosts, devices=devices, links=(*links, *joins))


def test_the_program_of_a_stage_costs_what_its_pass_takes_in_the_pipeline(models):
    """Computations, and collectives inside passes, with those at the edges of the stage."""
    given = problem(profiled(models["untied"]), 4, 2, recompute=Recompute.NONE)
    graph, size = given.profile.graph, len(given.profile.operators)
    inside = tuple(range(size // 3, 2 * size // 3))
    part, view, chance, compared = (
        part_of(given, inside),
        View(MESH, 1, (2, 3)),
        random.Random(3),
        0,
    )
    made = built(part.problem, view)
    others = [tuple(range(size // 3)), tuple(range(2 * size // 3, size))]
    for _ in range(60):
        picks = drawn(made, chance)
        sharding = sharding_of(part.problem, made, picks)[0]
        if unblocked(sharding, graph) != sharding:
            continue  # nothing crosses stages in blocks
        names = [tuple(graph.operators[v].name for v in some) for some in (*others, inside)]
        stage = Stage(names[2], ((2, 3),), 1, False, sharding)
        strategy = Strategy(
            (Stage(names[0], ((0,),), 2, False), stage, Stage(names[1], ((1,),), 1, False)),
            ScheduleName.ONE_F_ONE_B, 2,
        )  # fmt: skip
        if all_violations(strategy, graph, 4):
            continue
        compared += 1
        own, found = stage_pass(given, stage, 2), counted(made, picks)
        steps = sum(made.node_s[node].compute[picks[node]] for node, _ in made.lies.values())
        assert found.compute - steps == pytest.approx(2 * own.compute_s.sum())
        collectives_s = 2 * own.collective_s.sum()
        assert 0.999999 * collectives_s < found.inside < 1.02 * collectives_s
    assert compared > 10


def test_equal_stages_share_a_program_and_others_do_not(models):
    given = problem(profiled(models["untied"]), 12, 4)
    first, *inner, last = (part_of(given, some) for some in layers(given.profile.graph, 4))
    assert len({one.key for one in inner}) == 1
    assert len({first.key, inner[0].key, last.key}) == 3
    programs = StagePrograms(given)
    asked = [Asked(one, View(MESH, 1, (2 * s, 2 * s + 1)), 2**40, 1, 4.0)
             for s, one in enumerate((first, *inner, last))]  # fmt: skip
    splits = programs.splits(asked, Parts(1, 1, 1, 1))
    assert programs.num_programs == 3
    # A shared answer is that of the stage's own program.
    for stage, split in zip(asked, splits, strict=True):
        alone = StagePrograms(given).splits([stage], Parts(1, 1, 1, 1))[0]
        assert (split.sharding, split.levels) == (alone.sharding, alone.levels)
        names = {one.name for one in stage.part.problem.profile.graph.operators}
        assert names.issuperset(split.sharding.rules)


def test_stages_whose_constants_or_edges_differ_have_other_programs(models):
    given = problem(profiled(models["untied"]), 4, 2)
    _, one, other, *_ = layers(given.profile.graph, 4)
    assert part_of(given, one).key == part_of(given, other).key
    assert part_of(given, one[:-1]).key != part_of(given, other).key
    assert part_of(given, (*one, *other)).key != part_of(given, one).key


def test_a_sharding_is_renamed_for_an_equal_stage(models):
    given = problem(profiled(models["untied"]), 4, 2)
    _, one, other, *_ = (part_of(given, some) for some in layers(given.profile.graph, 4))
    made = built(one.problem, View(MESH, 1, (0, 1)))
    sharding = sharding_of(one.problem, made, drawn(made, random.Random(1)))[0]
    assert sharding.rules
    there = as_in(sharding, one, other)
    assert sorted(map(str, there.rules.values())) == sorted(map(str, sharding.rules.values()))
    assert there.rules.keys().isdisjoint(sharding.rules)
    assert as_in(there, other, one) == sharding


def test_of_stages_that_make_no_gradient_there_is_no_program(models):
    given = problem(profiled(models["untied"]), 4, 2)
    graph = given.profile.graph
    tensors = {one.name: one for one in graph.tensors}
    without = [v for v, one in enumerate(graph.operators)
               if not any(tensors[name].gradient for name in one.outputs)]  # fmt: skip
    assert all(part_of(given, (v,)) is None for v in without)
    assert part_of(given, (len(graph.operators) // 2,)) is not None


@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_stages_of_programs_are_no_slower_than_megatrons(models, name, bandwidth):
    """Two stages of two devices, whose collectives wait, so that an iteration is nearly what the
    programs add up.
    """
    given = problem(
        profiled(models[name]), 4, 8, bandwidth, recompute=Recompute.NONE, overlap=False,
        switches=(Megatron(pipeline_degree=2),),
    )  # fmt: skip
    megatron = SOLVERS["megatron"](given, 30.0).strategy
    result = SOLVERS["inter-op"](given, 30.0)
    assert len(megatron.stages) == len(result.strategy.stages) == 2
    assert all_violations(result.strategy, given.profile.graph, 4) == ()
    assert estimate_s(given, result.strategy) <= 1.01 * estimate_s(given, megatron)


def test_a_parameter_of_two_stages_lies_alike_in_both(models):
    given = problem(profiled(models["tied"]), 8, 4)
    result, cut = SOLVERS["inter-op"](given, 30.0), 0
    holders = {}
    for operator in given.profile.graph.operators:
        for name in operator.parameters:
            holders.setdefault(name, []).append(operator.name)
    for strategy in (result.strategy, *result.others):
        assert all_violations(strategy, given.profile.graph, 8) == ()
        for name, some in holders.items():
            held = [one for one in strategy.stages if {*some}.intersection(one.operators)]
            if len(held) > 1:
                cut += 1
                whole = ("R",) * len(held[0].mesh)
                lies = {one.sharding and one.sharding.parameters.get(name, whole) for one in held}
                assert len(lies) == len({one.zero_of.get(name, 0) for one in held}) == 1
    assert cut > 0


def test_where_links_between_hosts_are_slow_a_host_is_enough(models):
    """Sums of gradients over 1 kB/s would take longer than half of the work."""
    topology = two_hosts(2, 1e11, 1e3)
    given = problem_of(profiled(models["untied"]), topology, 2, measured_on=FAST,
                       recompute=Recompute.NONE)  # fmt: skip
    assert {one.stages for one in points(given)} == {1, 2}
    result = SOLVERS["inter-op"](given, 30.0)
    (stage,) = result.strategy.stages
    hosts = {topology.devices[d].host for d in stage.devices}
    assert len(stage.devices) == 2 and len(hosts) == 1
