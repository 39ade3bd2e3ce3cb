"""Random pipelines whose stages are split over meshes, or keep state in parts over replicas."""

from dataclasses import replace
from functools import lru_cache
from math import prod

import planner
from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.clusters.yaml.read import device_table
from planner.resharding.checks import all_violations
from planner.resharding.sums import gradient_sums
from planner.schedules.orders import default_warmups
from planner.solvers.sharded.along import Policy
from planner.solvers.sharded.complete import may_leave, shardings
from planner.solvers.sharded.layout import axis_of, chosen_for_sure, host_by_host, stage_cuts
from planner.solvers.sharded.rules import holds, named, rules_of
from planner.solvers.sharded.zero import cut_further, data_policy
from planner.support.memo import remembered
from tests.support.builders import asked

MESHES = [(), (), (2,), (4,), (8,), (2, 2)]
WIDTHS = [1, 1, 2, 4]


@lru_cache(maxsize=8)
def shipped_problem(profile, topology, num_devices, **how):
    """The question of a shipped profile on the first devices of a shipped topology."""
    (one, *_) = read_any_profiles(shipped("profiles") / f"{profile}.json")
    devices, kinds = planner.read_topology(topology, num_devices, pruned=True), device_table()
    return Problem(one, devices, **asked(4, **how), measured_on=kinds.get(one.device_type))


COUNTS = (1, 2, 4, 5, 8, 12, 16)


def random_pipeline(problem, rng, counts=COUNTS):
    """A problem with another number of microbatches and schedule, and a sound strategy of it with a
    stage that is split or shares state; memory is not looked at.
    """
    while True:
        made = _drawn(problem, rng, counts)
        if made is not None:
            return made


def _drawn(base, rng, counts):
    devices = host_by_host(base)
    num_stages = rng.choice([1, 1, 2, 2, 3, 4])
    same = rng.random() < 0.5
    shapes, left = [], len(devices)
    for _ in range(num_stages):
        mesh, width = shapes[0] if same and shapes else (rng.choice(MESHES), rng.choice(WIDTHS))
        if prod(mesh) * width > left:
            return None
        left -= prod(mesh) * width
        shapes.append((mesh, width))
    widths = [width for _, width in shapes]
    schedule = rng.choice([ScheduleName.ONE_F_ONE_B, ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE])
    count = max(*widths, rng.choice(counts))
    training = replace(base.training, schedule=schedule)
    problem = replace(base, num_microbatches=count, training=training)
    depths = default_warmups(widths, count, rng.choice([0, 0, 1]), schedule)
    cuts, recompute, level = stage_cuts(problem, num_stages), rng.random() < 0.3, rng.randrange(4)
    graph, stages, first = problem.profile.graph, [], 0
    for (mesh, width), inside, depth in zip(shapes, cuts, depths, strict=True):
        size = prod(mesh)
        groups = tuple(
            tuple(devices[first + r * size + i] for i in range(size)) for r in range(width)
        )
        first += size * width
        over = rng.choice([n for n in (1, 2, 4) if width % n == 0])
        zero = level if over > 1 else 0
        if zero >= 2 and count % width:
            return None
        sharding = None if not mesh else _sharding(base, mesh, inside, rng)
        names = tuple(graph.operators[v].name for v in inside)
        over = over if zero else 1
        stages.append(Stage(names, groups, depth, recompute, sharding, over=over, zero=zero))
    if all(stage.sharding is None and not stage.zero for stage in stages):
        return None
    strategy = Strategy(tuple(stages), schedule, count)
    if all_violations(strategy, graph, len(problem.topology.devices)):
        return None
    try:
        gradient_sums(strategy, graph)
    except ValueError:  # a parameter of several stages that lies differently in them
        return None
    return problem, strategy


def _sharding(problem, mesh, inside, rng):
    """Rules that are fast, or any that hold, along each axis of a stage's mesh."""
    graph, lines = problem.profile.graph, []
    way = rng.choice(["data", "data", "free", "free", "any"])
    for axis in range(len(mesh)):
        if way == "any":
            lines.append(_any_lines(problem, mesh[axis], rng))
        else:
            lines.append(_fast_lines(problem, mesh, axis, way == "data" and axis == 0))
    (made,) = shardings(graph, [inside], mesh, _compatible(problem, lines))
    level = rng.randrange(4)
    if len(mesh) == 1 and level and way == "data":
        whole = cut_further(problem, made, level)
        held = {name for v in inside for name in graph.operators[v].parameters}
        made = replace(
            whole,
            parameters={n: s for n, s in whole.parameters.items() if n in held},
            gradients={n: s for n, s in whole.gradients.items() if n in held},
            states={n: s for n, s in whole.states.items() if n in held},
        )
    return made


@remembered(kept=64)
def _fast_lines(problem, mesh, axis, data):
    """As on the first devices of the cluster."""
    graph = problem.profile.graph
    groups = (host_by_host(problem)[: prod(mesh)],)
    free = Policy(leaves=lambda name, part: may_leave(graph, name, part))
    policy = data_policy(problem) if data else free
    of_axis, about = axis_of(problem, groups, mesh, axis, 4), dict(named(graph))
    return chosen_for_sure(problem, about, of_axis, policy, groups[0][0])


def _any_lines(problem, size, rng):
    graph = problem.profile.graph
    about = dict(named(graph))
    every = zip(rules_of(problem.profile), graph.operators, strict=True)
    return [rng.choice([one for one in some if holds(one, operator, about, size)][:4])
            for some, operator in every]  # fmt: skip


def _compatible(problem, lines):
    """The rules of two axes, of the first alone where both do not go together."""
    whole = [some[0] for some in rules_of(problem.profile)]
    if len(lines) == 1:
        return lines
    pairs = zip(*lines, whole, strict=True)
    return [
        lines[0],
        [second if _composes(first, second) else none for first, second, none in pairs],
    ]


def _composes(first, second):
    try:
        rule_of([first.line, second.line])
    except ValueError:
        return False
    return True
