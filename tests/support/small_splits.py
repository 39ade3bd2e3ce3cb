"""Random graphs that are small enough to try all their splits, and prices of these by the judge.

Nothing runs beside computations: devices have no core to spare, and links no latency. So the
simulated iteration is the sum of its parts, however gradients lie in buckets.
"""

import random
from dataclasses import replace
from itertools import product

import numpy as np

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor, differentiated
from planner.artefacts.options import Optimizer
from planner.artefacts.profile import OperatorCost, SplitRule
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.costs.local_stage import local_stage
from planner.costs.stage_memory import stage_memory
from planner.costs.update import state_copies
from planner.resharding.checks import all_violations
from planner.simulator.estimate import estimate_s
from planner.solvers.intra.answer import segments_of, sharding_of
from planner.solvers.intra.blocks import Block
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import mlp

ROWS, WIDTHS = 8, (8, 16, 32)
KIND = unit_type(bandwidth=1e9)
# Rules for one axis by type; products and scalings have a parameter.
RULES = {
    "MatMul": ("S0,R->S0", "R,S1->S1", "S1,S0->P", "P,R->P"),
    "Mul": ("S0,R->S0", "S1,S0->S1", "P,R->P"),
    "Add": ("S0,S0->S0", "S1,S1->S1", "P,P->P"),
    "Gelu": ("S0->S0", "S1->S1"),
    "Softmax": ("S0->S0",),
}


def small(seed, size, split, most, *, tied=False):
    """A profile of operators in a row, with shortcuts.

    Args:
        size: number of operators.
        split: number of operators with rules besides running whole.
        most: number of these rules of each at most.
        tied: whether operators take a parameter that another one has, where there is one.
    """
    chance = random.Random(seed)
    ruled = chance.sample(range(size), split)
    tensors, parameters, operators, costs = [], [], [], []
    tensors.append(Tensor("x", (ROWS, chance.choice(WIDTHS)), "float32", False))
    for v in range(size):
        last = tensors[-1]
        alike = [one.name for one in tensors[:-1] if one.shape == last.shape]
        kind = chance.choice([one for one in RULES if alike or one != "Add"])
        inputs = (last.name, chance.choice(alike)) if kind == "Add" else (last.name,)
        width = chance.choice(WIDTHS) if kind == "MatMul" else last.shape[1]
        held, name = {"MatMul": (last.shape[1], width), "Mul": (width,)}.get(kind), f"w{v}"
        known = [one.name for one in parameters if tied and one.shape == held]
        if known:
            name = known[0]
        elif held:
            parameters.append(Parameter(name, held, "float32", tied or chance.random() < 0.6))
        flows = any(one.trainable for one in parameters)
        tensors.append(Tensor(f"t{v}", (ROWS, width), "float32", flows))
        operators.append(Operator(f"o{v}", kind, inputs, (f"t{v}",), (name,) if held else ()))
        count = chance.randint(1, min(most, len(RULES[kind]))) if v in ruled else 0
        rules = chance.sample(RULES[kind], count)
        forward_s = chance.uniform(1, 20) * 1e-6
        stash = chance.sample([*inputs, f"t{v}"], chance.randint(0, 1 + len(inputs)))
        costs.append(
            OperatorCost(f"o{v}", forward_s, chance.uniform(1, 3) * forward_s, 0, 0, 10**9, 10**6,
                         tuple(stash), chance.choice((0, 64)),
                         rules=tuple(SplitRule(one) for one in sorted(rules)))
        )  # fmt: skip
    graph = Graph(tuple(operators), tuple(tensors), tuple(parameters), ("x",), (tensors[-1].name,))
    return replace(mlp(), graph=graph, operators=tuple(costs))


def given(profile, count, bandwidth=1e9, **options):
    """A problem of 4 microbatches on one host."""
    topology = cluster([KIND] * count, bandwidth, cores=count)
    options = {"optimizer": Optimizer.ADAM, "overlap": False, **options}
    return problem_of(profile, topology, 4, measured_on=KIND, **options)


def strategy_of(problem, made, picks):
    """The strategy of an answer of a program."""
    sharding, levels = sharding_of(problem, made, picks)
    names = tuple(one.name for one in problem.profile.graph.operators)
    again = segments_of(made, picks)
    stage = Stage(
        names, made.view.groups, 1, bool(again), sharding, over=made.view.replicas, zero_of=levels,
        recomputed=again,
    )  # fmt: skip
    return Strategy((stage,), ScheduleName.ONE_F_ONE_B, problem.num_microbatches)


def ways(made):
    """The strategies of each node that is free: operators, parameters, inputs. A tied parameter
    that lies in one way has several; the first stands for them. So does an operator's first one
    with a rule, but for that of the first operator of a block, which says what becomes of it.
    """
    found = {v: firsts(rules) for v, rules in enumerate(made.rules)}
    found |= {one.first: range(len(made.rules[one.first])) for one in made.blocks}
    for node, some in made.lies.values():
        found[node] = firsts(some)
    return found | {node: range(len(some)) for node, some in made.inputs.values()}


def firsts(some):
    """The first place of each."""
    return [i for i, one in enumerate(some) if one not in some[:i]]


def settled(made, picks):
    """The same with shared copies as they are needed, with gradients of tied parameters summed as
    their readers make them, and with what blocks need that run again.
    """
    picks, count, barred = list(picks), len(made.rules), {}
    lies = dict(made.lies.values())
    for (u, v), seconds in zip(made.edges, made.edge_s, strict=True):
        bars = np.isinf(seconds.compute)
        if bars.any() and u >= count:
            barred[u] = barred.get(u, False) | bars[:, picks[v]]
        elif bars.any() and v >= count:
            barred[v] = barred.get(v, False) | bars[picks[u]]
    for u, bars in barred.items():
        same = [i for i, one in enumerate(lies.get(u, ())) if one == lies[u][picks[u]]]
        picks[u] = next(i for i in same or range(len(bars)) if not bars[i])
    return picks


def every_answer(problem, made):
    """All answers of a program that are strategies, with their simulated seconds, and bytes."""
    free, devices = ways(made), len(problem.topology.devices)
    for chosen in product(*free.values()):
        picks = [0] * len(made.node_s)
        for node, pick in zip(free, chosen, strict=True):
            picks[node] = pick
        strategy = strategy_of(problem, made, picks)
        if not all_violations(strategy, problem.profile.graph, devices):
            yield estimate_s(problem, strategy), held_bytes(problem, strategy)


def held_bytes(problem, strategy):
    """The judge's bytes on each device of parameters, gradients and state, and the most of what
    operators make and keep until their backward, or until that of what runs again and reads it.
    """
    profile, (stage,) = problem.profile, strategy.stages
    static, local = stage_memory(profile, stage).static, local_stage(profile, stage)
    size = {one.name: one.bytes for one in local.profile.graph.tensors}
    private = [local.profile.operators[i].stash_private_bytes for i in local.operator_rows]
    total = static.parameter + static.gradient
    total += state_copies(profile.parameter_dtype, problem.training.optimizer) * static.state
    return total + most_kept(profile, stage.recomputed, size, private)


def most_kept(profile, segments, size, private):
    """The most bytes of what operators make and keep: at the end of a forward, or when a segment
    has run again.

    Args:
        segments: names of the operators of those that run again.
        size: of a tensor, by name.
        private: that each operator keeps for itself.
    """
    operators = profile.graph.operators
    made = {name for one in operators for name in one.outputs}
    stash = [made.intersection(one.stash_tensors) for one in profile.operators]
    index = {one.name: v for v, one in enumerate(operators)}
    blocks = [range(index[some[0]], index[some[-1]] + 1) for some in segments]
    until, own = {}, {}  # of tensors and operators, the backward that frees what is held

    def hold(name, users):
        until[name] = min([until.get(name, len(operators)), *users])

    for v in set(range(len(operators))).difference(*blocks):
        own[v] = private[v]
        for name in stash[v]:
            hold(name, [v])
    again = {}  # by the last operator of a block, the bytes that it makes again
    for some, block in zip(segments, blocks, strict=True):
        kept = [v for v in block if operators[v].name not in some]
        inside = {name for v in block for name in operators[v].outputs}
        there = {name for v in block for name in operators[v].inputs} & made - inside
        there |= {name for v in kept for name in operators[v].outputs}
        for name in there:
            hold(name, [v for v in block if name in stash[v]] or [max(block)])
        for v in kept:
            own[v] = 0 if operators[v].type == "MatMul" else private[v]
        remade = inside.intersection(set().union(*(stash[v] for v in block))) - there
        again[max(block)] = sum(size[name] for name in remade) + sum(
            private[v] - own.get(v, 0) for v in block
        )
    return max(
        sum(size[name] for name, last in until.items() if last <= v)
        + sum(bytes_ for w, bytes_ in own.items() if w <= v)
        + more
        for v, more in [(len(operators), 0), *again.items()]
    )


def blocks_in(profile, bounds, *, selected=False):
    """Blocks that may be kept or run again, of those with a backward.

    Args:
        bounds: of each, its first operator and the one behind its last.
        selected: whether they may also run again without the products inside.
    """
    names = [one.name for one in profile.graph.operators]
    types, found = {one.name: one.type for one in profile.graph.operators}, []
    backward = differentiated(profile.graph)
    for first, end in (one for one in bounds if not backward.isdisjoint(range(*one))):
        inside = {n for n in names[first + 1 : end - 1] if selected and types[n] == "MatMul"}
        some = tuple(name for name in names[first:end] if name not in inside)
        states = dict.fromkeys([(), tuple(names[first:end]), some])
        found.append(Block(first, end, tuple(states)))
    return found
