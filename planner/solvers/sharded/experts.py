"""Rules of thumb: what experts write down before there is a search.

`expert`     Convolutions and pooling split samples, because their weights are small and their
             tensors large; products with weights split these (Krizhevsky 2014, section 3). A model
             with recurrent operators is copied to every host, and within a host its layers are
             dealt to the devices by depth (Wu et al. 2016, section 4.4).
`heuristic`  Every input and parameter is cut along its longest dimension, and operators take the
             rules that are fastest with that: what users of GSPMD do (Xu et al. 2021).
"""

from collections.abc import Callable

from planner.artefacts.graph import Graph
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.sharding import AxisRule
from planner.solvers.intra.lines import Axis, lines_of
from planner.solvers.intra.policy import Policy
from planner.solvers.sharded.best import best_of
from planner.solvers.sharded.complete import shardings
from planner.solvers.sharded.layout import (
    NOTHING_TO_SPLIT,
    Layout,
    groups_of,
    host_by_host,
    not_split,
    smallest_host,
    stage_cuts,
)
from planner.solvers.sharded.rules import divides, share_work, weight_parts

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_DENSE = frozenset({"MatMul", "Gemm"})
_OF_SAMPLES = frozenset(
    {
        "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool",
        "LpPool", "BatchNormalization",
    }
)  # fmt: skip


def expert(problem: Problem, time_limit_s: float) -> Result:
    """Krizhevsky's plan on all devices, or Wu's where the model is recurrent.

    Args:
        time_limit_s: not needed.
    """
    if any(operator.type in _RECURRENT for operator in problem.profile.graph.operators):
        return _by_depth(problem)
    space = "Krizhevsky's rules: convolutions split samples, products split weights"
    return _on_one_mesh(problem, space, _krizhevsky(problem))


def heuristic(problem: Problem, time_limit_s: float) -> Result:
    """Longest dimensions and propagation, on all devices.

    Args:
        time_limit_s: not needed.
    """
    space = "the longest dimension of every input is cut, and operators follow"
    return _on_one_mesh(problem, space, None)


def _by_depth(problem: Problem) -> Result:
    """Copies on all hosts, each a pipeline over the devices of its host."""
    space = "Wu's rules: copies on all hosts, layers by depth on their devices"
    smallest = smallest_host(problem)
    depth = min(smallest, len(problem.profile.operators))
    devices = host_by_host(problem, smallest)
    copies = min(len(devices) // smallest, problem.num_microbatches)
    stages = stage_cuts(problem, depth)
    of_host = [devices[c * smallest :][:depth] for c in range(copies)]
    groups = [tuple((host[s],) for host in of_host) for s in range(depth)]
    return best_of(problem, [Layout(stages, groups, [None] * depth)], space)


def _on_one_mesh(
    problem: Problem, space: str, allowed: Callable[[int, AxisRule], bool] | None
) -> Result:
    """One stage on a mesh of one axis over all devices, by the rules that are fastest, or by those
    that would be if an iteration had one microbatch, which need less memory.

    Args:
        allowed: which rules are; None for all, with inputs and parameters cut.
    """
    if (unsplit := not_split(problem, space)) is not None:
        return unsplit
    graph, devices = problem.profile.graph, host_by_host(problem)
    everything = (tuple(range(len(graph.operators))),)
    size, lies = len(devices), dict[str, str]()
    if allowed is None:
        lies = _longest(graph, size)
        policy = Policy(lies=lies, further=False)
    else:
        ruled = _OF_SAMPLES | _DENSE
        policy = Policy(
            rule=allowed, must=lambda v: graph.operators[v].type in ruled, further=False
        )
    axis, specs = Axis(size, policy), {name: (part,) for name, part in lies.items()}
    groups = groups_of(devices, (size,), 1, 1)
    layouts: list[Layout] = []
    for rounds in (problem.num_microbatches, 1.0):
        lines = lines_of(problem, [devices], [axis], rounds)
        made = shardings(graph, everything, (size,), lines, specs)
        if share_work(*lines) and made not in [one.shardings for one in layouts]:
            layouts.append(Layout(everything, groups, made, number=len(layouts)))
    if not layouts:
        return Result(Status.INFEASIBLE, None, space=space, reason=NOTHING_TO_SPLIT)
    return best_of(problem, layouts, space)


def _krizhevsky(problem: Problem) -> Callable[[int, AxisRule], bool]:
    """Convolutions keep their parameters whole; products with weights cut these."""
    graph = problem.profile.graph

    def allowed(v: int, rule: AxisRule) -> bool:
        operator, weights = graph.operators[v], weight_parts(graph, v, rule)
        if operator.type in _OF_SAMPLES:
            return rule.inputs[0] == "S0" and all(part == "R" for part in weights)
        if operator.type in _DENSE and weights:
            return any(part.startswith("S") for part in weights)
        return True

    return allowed


def _longest(graph: Graph, size: int) -> dict[str, str]:
    """The longest dimension that can be cut of every input and parameter; of equals the first."""
    found = {}
    inputs = set(graph.inputs)
    shapes = {one.name: one.shape for one in graph.tensors if one.name in inputs}
    shapes |= {one.name: one.shape for one in graph.parameters}
    for name, shape in shapes.items():
        dims = sorted(range(len(shape)), key=lambda dim: (-shape[dim], dim))
        cut = next((f"S{dim}" for dim in dims if divides(shape, f"S{dim}", size)), None)
        if cut is not None:
            found[name] = cut
    return found
