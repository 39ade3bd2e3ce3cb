"""Random pipelines of shipped models on shipped clusters, with stages that are split over meshes,
or keep parts over their replicas.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import prod

import planner
from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, in_parts
from planner.clusters.yaml.read import device_table
from planner.costs.overlap import with_overlap
from planner.costs.transfers import lines
from planner.resharding.checks import all_violations
from planner.resharding.sums import gradient_sums
from planner.schedules.orders import default_warmups
from planner.solvers.intra.lines import Axis, lines_of
from planner.solvers.intra.policy import Policy
from planner.solvers.sharded.complete import shardings
from planner.solvers.sharded.layout import groups_of, host_by_host, stage_cuts
from planner.solvers.sharded.rules import holds, named, rules_of
from planner.solvers.sharded.zero import cut_further, data_policy
from planner.support.memo import remembered
from tests.support.builders import asked

MESHES, WIDTHS = [(), (), (2,), (4,), (8,), (2, 2)], [1, 1, 2, 4]
SHORT, LONG = (1, 2, 4, 5, 8, 12, 16), (257, 1000, 2000)
"""Numbers of microbatches."""
SCHEDULES = [ScheduleName.ONE_F_ONE_B, ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE]
CASES = (
    ("gpt2", "p3", 8),
    ("llama7b-a100", "p4d-x8", 16),
    ("resnet50", "p3-16xlarge-x2", 16),
    ("bert", "mixed-a100-t4", 16),
    ("gpt2-medium-a100", "dgx-a100-x4", 16),
    ("gpt2", "p3-16xlarge-x2", 16),
)
"""Profiles, topologies, and numbers of devices: links of one host, a card per device, cards that
devices share, devices of two types.
"""


@lru_cache(maxsize=len(CASES))
def shipped_problem(profile, topology, num_devices, **how):
    """The question of a shipped profile on the first devices of a shipped topology."""
    (one, *_) = read_any_profiles(shipped("profiles") / f"{profile}.json")
    devices, kinds = planner.read_topology(topology, num_devices, pruned=True), device_table()
    return Problem(one, devices, **asked(4, **how), measured_on=kinds.get(one.device_type))


def random_pipeline(base, rng, counts=SHORT, *, whole=False):
    """A problem with another number of microbatches and schedule, and a sound strategy of it, with
    its collectives beside computations or in line; memory is not looked at.

    Args:
        base: with another number and schedule.
        counts: numbers of microbatches.
        whole: whether no stage is in parts, instead of one at least.
    """
    while True:
        made = _drawn(base, rng, counts, whole)
        if made is not None and _is_sound(made[1], base) and _has_parts(made[1]) is not whole:
            problem, strategy = made
            return problem, with_overlap(*made) if rng.random() < 0.5 else strategy


def _has_parts(strategy):
    return any(map(in_parts, strategy.stages))


def _is_sound(strategy, problem):
    graph = problem.profile.graph
    if all_violations(strategy, graph, len(problem.topology.devices)):
        return False
    try:
        gradient_sums(strategy, graph)
    except ValueError:  # a parameter of several stages that lies differently in them
        return False
    return True


def _drawn(base, rng, counts, whole):
    """A problem and a strategy of it, which may be unsound; None where devices are short."""
    shapes = _shapes(rng, whole)
    sizes = [prod(mesh) * width for mesh, width in shapes]
    if sum(sizes) > len(base.topology.devices):
        return None
    widths, schedule = [width for _, width in shapes], rng.choice(SCHEDULES)
    count = max(*widths, rng.choice(counts))
    training = replace(base.training, schedule=schedule)
    problem = replace(base, num_microbatches=count, training=training)
    depths = default_warmups(widths, count, rng.choice([0, 0, 1]), schedule)
    level, recompute = 0 if whole else rng.randrange(4), rng.random() < 0.3
    names = [one.name for one in base.profile.graph.operators]
    devices, cuts = host_by_host(base), stage_cuts(base, len(shapes))
    stages = []
    for (mesh, width), inside, depth, end in zip(
        shapes, cuts, depths, accumulate(sizes), strict=True
    ):
        own = devices[end - prod(mesh) * width : end]
        over = rng.choice([n for n in (1, 2, 4) if width % n == 0]) if level else 1
        sharding = _sharding(base, mesh, inside, rng) if mesh else None
        stages.append(
            Stage(
                tuple(names[v] for v in inside),
                groups_of(own, mesh, width, 1)[0],
                depth,
                recompute,
                sharding,
                over=over,
                zero=level if over > 1 else 0,
            )
        )
    return problem, Strategy(tuple(stages), schedule, count)


def _shapes(rng, whole):
    """Per stage, its mesh and its number of replicas: the same for all, or not."""
    count, meshes = rng.choice([1, 1, 2, 2, 3, 4]), [()] if whole else MESHES
    shapes = [(rng.choice(meshes), rng.choice(WIDTHS)) for _ in range(count)]
    return [shapes[0]] * count if rng.random() < 0.5 else shapes


def _sharding(problem, mesh, inside, rng):
    """Rules that are fast, or any that hold, along each axis of a stage's mesh; data parallelism
    with parts of any level.
    """
    way = rng.choice(["data", "data", "free", "free", "any"])
    rules = [
        _any_lines(problem, size, rng)
        if way == "any"
        else _fast_lines(problem, mesh, axis, way == "data" and axis == 0)
        for axis, size in enumerate(mesh)
    ]
    (made,) = shardings(problem.profile.graph, [inside], mesh, _composing(problem, rules))
    if len(mesh) > 1 or way != "data":
        return made
    further = cut_further(problem, made, rng.randrange(4))
    held = {name for v in inside for name in problem.profile.graph.operators[v].parameters}

    def own(specs):
        return {name: spec for name, spec in specs.items() if name in held}

    return replace(
        further,
        parameters=own(further.parameters),
        gradients=own(further.gradients),
        states=own(further.states),
    )


@remembered(kept=64)
def _fast_lines(problem, mesh, axis, data):
    """As on the first devices of the cluster."""
    groups = lines(host_by_host(problem)[: prod(mesh)], mesh, axis)
    policy = data_policy(problem) if data else Policy(further=False)
    (rules,) = lines_of(problem, groups, [Axis(mesh[axis], policy, sure=True)], 4)
    return rules


def _any_lines(problem, size, rng):
    graph = problem.profile.graph
    about = dict(named(graph))
    return [
        rng.choice([one for one in some if holds(one, operator, about, size)][:4])
        for some, operator in zip(rules_of(problem.profile), graph.operators, strict=True)
    ]


def _composing(problem, lines):
    """The rules of both axes, and of the first alone where they do not go together."""
    if len(lines) == 1:
        return lines
    whole = [some[0] for some in rules_of(problem.profile)]
    pairs = zip(*lines, whole, strict=True)
    second = [two if _compose(one, two) else neither for one, two, neither in pairs]
    return [lines[0], second]


def _compose(one, two):
    try:
        rule_of([one.line, two.line])
    except ValueError:
        return False
    return True
