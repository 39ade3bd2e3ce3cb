"""The user's own cuts: a pipeline whose stages end with the operators that are named.

A stage holds its last operator and all that this needs, as far as no stage before it has that; the
last stage holds the rest. So the operators up to a cut are a downset, and the graph of the stages
has no cycle. Devices are taken in the order of the topology.

The registry imports this file for its options, and the command line imports the registry for the
help texts. So the functions that solve import whatever needs numpy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from planner.artefacts.graph import Graph, predecessors
from planner.artefacts.strategy import Strategy, operator_indices
from planner.support.errors import OptionError
from planner.support.options import Options, option

if TYPE_CHECKING:
    from planner.artefacts.problem import Problem, Result

# Operators that a message names.
MAX_NAMES = 12
ALL_NAMES = "planner convert PROFILE.json graph.txt writes all names"


@dataclass(frozen=True, slots=True)
class Manual(Options):
    """The user's own stages."""

    cuts: tuple[str, ...] = option(
        "Your own stages: the last operator of each stage but the last. A name that is none is"
        " answered with names that are.", (),
        metavar="NAME,NAME", separator=",",
    )  # fmt: skip
    replicas: tuple[int, ...] = option(
        "Your own stages: the number of devices of each.", (),
        least=1, metavar="N,N", separator=",", shown="1 each",
    )  # fmt: skip


def solve(problem: "Problem", time_limit_s: float) -> "Result":
    """The stages that the options ask for; recomputed only if they do not fit otherwise.

    Args:
        time_limit_s: not needed.

    Raises:
        OptionError: if no cuts are given, an operator is unknown, a stage is empty, or there are
            not as many numbers of replicas as stages, or not enough devices.
    """
    from planner.artefacts.problem import switches_of
    from planner.solvers.fit import first_that_fits

    manual = switches_of(problem.search, Manual)
    if manual == Manual():
        raise OptionError(
            "the solver manual needs --cuts NAME,NAME with the last operators of all stages but"
            f" the last, or --replicas N for one stage; {known(problem.profile.graph)}"
        )
    stages = stages_of(problem.profile.graph, manual.cuts)
    replicas = manual.replicas or (1,) * len(stages)
    if len(replicas) != len(stages):
        raise OptionError(
            f"--replicas: expected {len(stages)} numbers, one per stage, got {len(replicas)}"
        )
    devices = len(problem.topology.devices)
    if sum(replicas) > devices:
        raise OptionError(f"--replicas: {sum(replicas)} devices are needed, there are {devices}")
    return first_that_fits(problem, _strategies(problem, stages, replicas), "the cuts given")


def stages_of(graph: Graph, cuts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The operators of each stage, ascending.

    Args:
        cuts: the last operators of all stages but the last.

    Raises:
        OptionError: if one is unknown or a stage has nothing.
    """
    indices, feeds = operator_indices(graph), predecessors(graph)
    done: set[int] = set()
    stages = []
    for name in cuts:
        if name not in indices:
            near = get_close_matches(name, indices, n=3)
            meant = f"did you mean {' or '.join(near)}? {ALL_NAMES}" if near else known(graph)
            raise OptionError(f"--cuts: there is no operator {name}; {meant}")
        inside, waiting = set[int](), [indices[name]]
        while waiting:
            v = waiting.pop()
            if v not in done and v not in inside:
                inside.add(v)
                waiting += feeds[v]
        if not inside:
            raise OptionError(f"--cuts: {name} is in a stage before; name cuts in their order")
        stages.append(tuple(sorted(inside)))
        done |= inside
    rest = tuple(v for v in range(len(graph.operators)) if v not in done)
    if not rest:
        raise OptionError(
            f"--cuts: nothing is left after {cuts[-1]}; leave the last stage's end out"
        )
    return (*stages, rest)


def known(graph: Graph) -> str:
    """The names of the operators, in their order; of many, some at equal distances, and the command
    that writes all.
    """
    names, count = [one.name for one in graph.operators], len(graph.operators)
    if count <= MAX_NAMES:
        return f"the operators: {', '.join(names)}"
    some = [names[count * i // MAX_NAMES] for i in range(MAX_NAMES)]
    return f"some of the {count} operators, in their order: {', '.join(some)}; {ALL_NAMES}"


def _strategies(
    problem: "Problem", stages: Sequence[Sequence[int]], replicas: Sequence[int]
) -> Iterator[Strategy]:
    """With one more microbatch in flight first, which hides transfers, then without."""
    from planner.solvers.fit import pipeline
    from planner.solvers.segments import recompute_choices

    first = [sum(replicas[:s]) for s in range(len(stages))]
    devices = [range(a, a + count) for a, count in zip(first, replicas, strict=True)]
    for recompute in recompute_choices(problem):
        for extra in (1, 0):
            yield pipeline(problem, stages, devices, recompute=recompute, extra=extra)
