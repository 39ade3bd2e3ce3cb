"""The programs of the stages of pipelines, and their answers, which stages with equal programs
share.

A stage holds what its microbatches in flight keep. A program is solved without memory first: where
that answer fits it is the best one, too, and stages that hold different amounts share it.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.artefacts.graph import Graph, parameters_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Sharding, Spec
from planner.solvers.intra.answer import sharding_of
from planner.solvers.intra.blocks import blocks_of
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.policy import Policy
from planner.solvers.intra.solve import LEAST_WORK_S, NODES_PER_S, answered
from planner.solvers.intra.space import View
from planner.solvers.intra.stages import Part, as_in, renamed, unblocked
from planner.solvers.program.problem import peak_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage on its devices.

    Attributes:
        part: its operators.
        view: its devices.
        limit_bytes: of each of these, the least.
        in_flight: microbatches; 0 where what they keep does not count.
        rounds: microbatches that an iteration is as long as.
    """

    part: Part
    view: View
    limit_bytes: int
    in_flight: int
    rounds: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal of stages on equal devices with the same program but for its memory."""
        types = self.part.problem.topology.devices
        kinds = tuple(types[d].type for d in self.view.devices)
        return self.part.key, self.view.mesh, self.view.replica_axes, kinds, self.rounds


class Split(NamedTuple):
    """How a stage is split.

    Attributes:
        sharding: None of a mesh of one device.
        levels: of parameters over replicas.
        dearer: by what factor memory makes it dearer; inf where it does not fit.
    """

    sharding: Sharding | None
    levels: Mapping[str, int]
    dearer: float


class _Solved(NamedTuple):
    """An answer of a program.

    Attributes:
        picks: None without one.
        cost: inf without one.
    """

    picks: tuple[int, ...] | None
    cost: float


class StagePrograms:
    """The programs so far.

    Attributes:
        work_s: in seconds of an ordinary core.
        in_time: whether all ended with their work.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.work_s, self.in_time = 0.0, True
        self._runs_again = problem.training.recompute.is_everywhere
        self._built: dict[object, tuple[Part, Built]] = {}
        self._solved: dict[object, _Solved] = {}

    @property
    def num_programs(self) -> int:
        """The number of programs that were built."""
        return len(self._built)

    def splits(self, stages: Sequence[Stage], weights: Parts) -> list[Split]:
        """How all stages of a pipeline are split. Parameters of several stages lie as in the last
        of these, where they are in most work, such as a table of words that also tells them, and
        constants whole: parts of them cost nothing. Where anything lies in parts over replicas, so
        does the state of what they share.
        """
        held = [parameters_by_name(stage.part.problem.profile.graph) for stage in stages]
        number = Counter(name for some in held for name in some)
        tied = {name for name, count in number.items() if count > 1}
        whole, found = ("R",) * len(stages[0].view.mesh), list[Split]()
        lies = {name: whole for some in held for name, one in some.items() if not one.trainable}
        for stage, some in zip(reversed(stages), reversed(held), strict=True):
            found.append(one := self._split(stage, weights, tied.intersection(some), lies))
            own = {} if one.sharding is None else one.sharding.parameters
            lies |= {name: own.get(name, whole) for name in some if name in tied}
        if not any(one.levels for one in found):
            return found[::-1]
        return [
            one._replace(levels={**one.levels, **{name: 1 for name, parameter in some.items()
                                                  if name in tied and parameter.trainable}})
            for one, some in zip(reversed(found), held, strict=True)
        ]  # fmt: skip

    def _split(
        self, stage: Stage, weights: Parts, tied: Collection[str], lies: Mapping[str, Spec]
    ) -> Split:
        """How a stage is split.

        Args:
            tied: its parameters that other stages have, too.
            lies: how some of them lie.
        """
        given = {name: spec for name, spec in lies.items() if name in tied}
        key, part, made = self._program(stage, given)
        least = self._answer(key, made, weights, None)
        assert least.picks is not None, "without a limit of memory all operators may run whole"
        picks, dearer = least.picks, 1.0
        held = made.program(weights, stage.limit_bytes, flying=stage.in_flight)
        if stage.in_flight and peak_bytes(held, picks) > stage.limit_bytes:
            fitting = self._answer(key, made, weights, (stage.in_flight, stage.limit_bytes))
            picks, dearer = fitting.picks or picks, fitting.cost / least.cost
        sharding, levels = sharding_of(part.problem, made, picks)
        levels = renamed(levels, dict(zip(part.names, stage.part.names, strict=True)))
        levels = {name: level for name, level in levels.items() if name not in tied}
        if math.prod(stage.view.mesh) == 1:
            return Split(None, levels, dearer)
        own = _at_edges(as_in(sharding, part, stage.part), tied, self._problem.profile.graph)
        return Split(own, levels, dearer)

    def _program(
        self, stage: Stage, given: Mapping[str, Spec]
    ) -> tuple[object, Part, Built]:  # fmt: skip
        """The key of a stage's program, the first stage that has it, and the program.

        Args:
            given: how some parameters lie.
        """
        numbers = {name: i for i, name in enumerate(stage.part.names)}
        key = stage.key, tuple((numbers[name], one) for name, one in given.items())
        if key not in self._built:
            view = stage.view
            if given:
                masks = (
                    Policy(lies={name: spec[axis] for name, spec in given.items()})
                    for axis in range(len(view.mesh))
                )
                view = replace(view, masks=tuple(masks))
            every = blocks_of(stage.part.problem) if self._runs_again else ()
            blocks = every[0] if every else ()
            made = built(stage.part.problem, view, blocks, rounds=stage.rounds)
            self.work_s += len(made.node_s) / NODES_PER_S
            self._built[key] = stage.part, made
        return key, *self._built[key]

    def _answer(
        self, key: object, made: Built, weights: Parts, memory: tuple[int, int] | None
    ) -> _Solved:
        """The answer of a program.

        Args:
            memory: the microbatches in flight and the limit in bytes; None for no limit.
        """
        which = key, weights, memory
        if which not in self._solved:
            flying, limit = memory or (0, None)
            program = made.program(weights, limit, flying=flying)
            answer, taken_s = answered(self._problem, program, LEAST_WORK_S)
            self.work_s += taken_s
            self.in_time = self.in_time and answer.reproducible
            cost = math.inf if answer.picks is None else answer.cost
            self._solved[which] = _Solved(answer.picks, cost)
        return self._solved[which]


def _at_edges(sharding: Sharding, tied: Collection[str], graph: Graph) -> Sharding:
    """A sharding as it goes with those of other stages: nothing is in blocks between them, and
    gradients and state of what they share lie as the parameter.
    """
    unshared = (
        {name: spec for name, spec in some.items() if name not in tied}
        for some in (sharding.gradients, sharding.states)
    )
    gradients, states = unshared
    return replace(unblocked(sharding, graph), gradients=gradients, states=states)
