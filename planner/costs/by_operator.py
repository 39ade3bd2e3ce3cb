"""What each operator of a strategy costs in an iteration: the judge's prices of passes, sums and
steps, dealt to the operators, so that all operators together cost what the stages do.

A collective belongs to the operator that makes it necessary: a sum to the one whose summands it
adds up, any other conversion to the first one that reads the copy. What is done with a parameter
and its gradient once per iteration belongs to the first operator that holds it; parameters of one
bucket share its time by their bytes.

All figures are means over the used devices, so that plans with other meshes and other numbers of
stages can be compared. A device is taken to compute alone, and every collective counts in full,
whether it runs beside computations or not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import Graph, holders, parameters_by_name, producers
from planner.artefacts.problem import Problem
from planner.artefacts.segments import segments_of
from planner.artefacts.strategy import (
    GradientSum,
    Stage,
    Strategy,
    in_parts,
    operator_indices,
    used_devices,
)
from planner.artefacts.topology import device_type
from planner.costs.evaluate import priced
from planner.costs.local_stage import LocalStage, local_stage
from planner.costs.mesh_memory import local_bytes, local_gradient_bytes
from planner.costs.stage_pass import StagePass, stage_pass, step_gathers, steps_by_row
from planner.costs.update import step_s
from planner.resharding.conversion import Step, received_bytes
from planner.resharding.over_replicas import over_replicas
from planner.resharding.reshardings import Resharding
from planner.resharding.sums import gradient_sums, parameter_specs, stages_of, state_steps
from planner.support.arrays import Floats

FORWARD, BACKWARD, ONCE = range(3)
"""When collectives run: in forwards; in backwards, with forwards that are run again there; for the
step, which is once per iteration, or under an asynchronous schedule once per microbatch of all
replicas."""


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """Costs of N operators, in the order of the graph.

    Attributes:
        compute_s: (N,) computation in passes, with what is run again.
        optimizer_s: (N,) the optimizer's step.
        collective_s: (3, N) collectives, by when they run.
        received_bytes: (3, N) bytes that these bring to a device, on rings.
        parameter_bytes: (N,) of the trained parameters that belong to the operator, whole.
        held_bytes: (3, N) those of them that a device of their stage holds, those whose gradients
            it adds up, and those that it steps.
    """

    compute_s: Floats
    optimizer_s: Floats
    collective_s: Floats
    received_bytes: Floats
    parameter_bytes: Floats
    held_bytes: Floats

    def over(self, operators: Sequence[int]) -> "OperatorCosts":
        """Those of some operators together: numbers in place of (N,), (3,) in place of (3, N)."""
        mine = list(operators)
        return OperatorCosts(*(getattr(self, one.name)[..., mine].sum(-1) for one in fields(self)))

    @property
    def total_s(self) -> float:
        """All times of all operators."""
        every = self.compute_s, self.optimizer_s, self.collective_s
        return float(sum(np.sum(times_s) for times_s in every))


def together(some: Iterable[OperatorCosts]) -> OperatorCosts:
    """The sum of costs of as many operators; of none, zeros."""
    every = list(some)
    if not every:
        return OperatorCosts(*(np.zeros(shape) for shape in ((), (), 3, 3, (), 3)))
    names = [one.name for one in fields(OperatorCosts)]
    return OperatorCosts(*(sum(getattr(one, name) for one in every) for name in names))


def operator_costs(problem: Problem, strategy: Strategy) -> OperatorCosts:
    """The costs of a sound strategy, operator by operator."""
    dealt = _Dealer(problem, strategy)
    for s, stage in enumerate(strategy.stages):
        dealt.passes(stage)
        dealt.gathers(stage)
        dealt.steps(s)
    dealt.sums()
    return dealt.costs


def first_holders(graph: Graph) -> Mapping[str, int]:
    """The operator that each parameter belongs to: the first one that reads it."""
    return {name: users[0] for name, users in holders(graph).items() if users}


@dataclass
class _Dealer:
    """Adds up the costs of the operators of a strategy."""

    problem: Problem
    strategy: Strategy
    costs: OperatorCosts = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.problem.profile.graph.operators)
        one, three = (n,), (3, n)
        shapes = (one, one, three, three, one, three)
        self.costs = OperatorCosts(*(np.zeros(shape) for shape in shapes))
        self._owners = first_holders(self._graph)
        self._devices = len(used_devices(self.strategy))
        self._stepped: set[tuple[tuple[int, ...], str]] = set()

    @property
    def _graph(self) -> Graph:
        return self.problem.profile.graph

    # ------------------------------------------------------------------------------- passes

    def passes(self, stage: Stage) -> None:
        """Adds the forwards and backwards of a stage."""
        rows = _Rows.of(self.problem, stage)
        for own, count in self._runs(stage):
            weight = count / self._devices
            for one in rows.parts:
                when, side = one.when, one.side
                self._add(
                    self.costs.compute_s, rows.owner, weight * own.compute_s[side] * one.computed
                )
                self._add(
                    self.costs.collective_s[when],
                    rows.owner,
                    weight * own.collective_s[side] * one.moved,
                )
                self._add(
                    self.costs.received_bytes[when],
                    rows.owner,
                    weight * rows.received[side] * one.moved,
                )

    def _runs(self, stage: Stage) -> Iterator[tuple[StagePass, int]]:
        """The different passes of the devices of a stage, each with the number of times that some
        device runs it in an iteration.
        """
        counts, known = Counter[int](), dict[int, StagePass]()
        microbatches, replicas = self.strategy.num_microbatches, stage.num_replicas
        for r, group in enumerate(stage.groups):
            for device in group:
                own = stage_pass(self.problem, stage, device)
                known[id(own)] = own
                counts[id(own)] += len(range(r, microbatches, replicas))
        for key, count in counts.items():
            yield known[key], count

    @staticmethod
    def _add(total: Floats, owner: Sequence[int], figures: Floats) -> None:
        np.add.at(total, owner, figures)

    # ----------------------------------------------------------------- once per iteration

    def _steps(self, s: int) -> int:
        """The number of steps of a stage in an iteration: under an asynchronous schedule, one after
        each microbatch of its replicas.
        """
        asynchronous = self.strategy.schedule.is_asynchronous
        replicas = self.strategy.stages[s].num_replicas
        return self.strategy.num_microbatches // replicas if asynchronous else 1

    def gathers(self, stage: Stage) -> None:
        """Adds what gathers parameters after a step on parts of them."""
        shared = over_replicas(stage, self._graph)
        if not shared.mesh:
            return
        steps = state_steps(stage, self._graph)
        for group in shared.groups:
            weight = len(group) / self._devices
            for names, time_s in step_gathers(self.problem, stage, group):
                sizes = [sum(step.bytes for step in steps[name].gather) for name in names]
                received = [_received(steps[name].gather, shared.mesh) for name in names]
                self._once(names, weight * time_s, sizes)
                self._add(
                    self.costs.received_bytes[ONCE],
                    [self._owners[name] for name in names],
                    weight * np.array(received),
                )

    def sums(self) -> None:
        """Adds the sums of gradients."""
        every, used_in = gradient_sums(self.strategy, self._graph), stages_of(
            self.strategy, self._graph
        )  # fmt: skip
        times_s = priced(self.problem, self.strategy).costs.sum_s
        for one, time_s in zip(every, times_s, strict=True):
            s = used_in[one.parameters[0]][0]
            weight = self._steps(s) * len(one.devices) / self._devices
            sizes = [self._gradient_bytes(name, s) for name in one.parameters]
            self._once(one.parameters, weight * time_s, sizes)
            share = weight * _received_in_sum(one) / max(one.bytes, 1)
            self._add(
                self.costs.received_bytes[ONCE],
                [self._owners[name] for name in one.parameters],
                share * np.array(sizes, dtype=float),
            )

    def _gradient_bytes(self, name: str, s: int) -> int:
        stage = self.strategy.stages[s]
        lies, mesh = (
            parameter_specs(stage, self._graph)[name],
            over_replicas(stage, self._graph).mesh,
        )
        return local_gradient_bytes(parameters_by_name(self._graph)[name], lies.gradient, mesh)

    def _once(self, names: Sequence[str], time_s: float, sizes: Sequence[int]) -> None:
        """Adds a collective of some parameters, each of a size."""
        share = np.array(sizes, dtype=float) / max(sum(sizes), 1)
        self._add(
            self.costs.collective_s[ONCE], [self._owners[name] for name in names], time_s * share
        )

    def steps(self, s: int) -> None:
        """Adds the optimizer's steps of a stage, and what is held for them. Parameters that another
        stage of the same device has, too, are stepped once.
        """
        stage = self.strategy.stages[s]
        known, mesh = parameters_by_name(self._graph), over_replicas(stage, self._graph).mesh
        per_byte_s = sum(
            step_s(self.problem, 1, device_type(self.problem.topology, device))
            for device in stage.devices
        )
        for name, lies in parameter_specs(stage, self._graph).items():
            one, v = known[name], self._owners[name]
            if not one.trainable or (stage.devices, name) in self._stepped:
                continue
            self._stepped.add((stage.devices, name))
            specs = lies.parameter, lies.gradient, lies.state
            held = [local_bytes(one, spec, mesh) for spec in specs]
            self.costs.optimizer_s[v] += self._steps(s) * per_byte_s * held[-1] / self._devices
            self.costs.parameter_bytes[v] += one.bytes
            self.costs.held_bytes[:, v] += held


class _Part(NamedTuple):
    """A forward, a backward, or a segment that a backward runs again, of n rows.

    Attributes:
        when: it runs, FORWARD or BACKWARD.
        side: whose times it takes, 0 of a forward and 1 of a backward.
        moved: (n,) 1 for each row whose collectives run.
        computed: (n,) 1 for each row that is computed.
    """

    when: int
    side: int
    moved: Floats
    computed: Floats


class _Rows(NamedTuple):
    """The rows of a pass of a stage: operators and, where it is in parts, reshardings.

    Attributes:
        owner: per row, the operator that it belongs to.
        received: (2, n) bytes that its collectives bring, forward and backward.
        parts: that a microbatch runs.
    """

    owner: list[int]
    received: Floats
    parts: list[_Part]

    @classmethod
    def of(cls, problem: Problem, stage: Stage) -> "_Rows":
        """The rows of `stage_pass`."""
        graph = problem.profile.graph
        if not in_parts(stage):
            index = operator_indices(graph)
            owner = [index[name] for name in stage.operators]
            again = segments_of(stage, graph)
            segments = [(list[int](), list(one.computed)) for one in again]
            return cls(owner, np.zeros((2, len(owner))), _parts(stage, len(owner), segments))
        local, mesh = local_stage(problem.profile, stage), over_replicas(stage, graph).mesh
        owner = list(local.graph_index)
        for row, one in local.conversions.items():
            owner[row] = _belongs_to(one, graph)
        # What reads for other stages costs nothing, so it may belong to any operator.
        owner = [max(v, 0) for v in owner]
        received = np.zeros((2, len(owner)))
        for side in (FORWARD, BACKWARD):
            for row, steps in steps_by_row(local, side).items():
                received[side, row] = _received(steps, mesh)
        return cls(owner, received, _parts(stage, len(owner), _segments(local)))


def _segments(local: LocalStage) -> list[tuple[list[int], list[int]]]:
    """Of each segment that is run again, the rows whose collectives run, and those that are
    computed.
    """
    found = []
    for one in local.order.reruns.values():
        rows = {place: local.operator_rows[place] for place in one.places}
        moved = [local.copy_rows[c] for c, _ in one.starts]
        computed = [row for place, row in rows.items() if place not in one.kept]
        found.append(([*moved, *rows.values()], computed))
    return found


def _parts(stage: Stage, n: int, segments: Iterable[tuple[list[int], list[int]]]) -> list[_Part]:
    every = np.ones(n)
    found = [_Part(FORWARD, 0, every, every), _Part(BACKWARD, 1, every, every)]
    if stage.reruns_whole:
        found.append(_Part(BACKWARD, 0, every, every))
    for moved, computed in segments:
        both = np.zeros((2, n))
        both[0, moved] = both[1, computed] = 1.0
        found.append(_Part(BACKWARD, 0, *both))
    return found


def _belongs_to(one: Resharding, graph: Graph) -> int:
    """The operator that makes a resharding necessary."""
    maker = producers(graph).get(one.tensor)
    if maker is not None and ("P" in one.old or not one.readers):
        return maker
    if one.readers:
        return operator_indices(graph)[one.readers[0]]
    return maker if maker is not None else first_holders(graph)[one.tensor]


def _received(steps: Iterable[Step], mesh: Sequence[int]) -> float:
    return sum(received_bytes(step, mesh[step.axis]) for step in steps)


def _received_in_sum(one: GradientSum) -> float:
    """Bytes that a sum of gradients brings to each device."""
    if not one.shards:
        return _ring(len(one.devices), 2) * one.bytes
    parts, keepers = len(one.shards), len(one.shards[0])
    return (_ring(parts, 1) + _ring(keepers, 2) / parts) * one.bytes


def _ring(n: int, rounds: int) -> float:
    """Bytes that each of n devices receives on a ring, over those of its buffer."""
    return rounds * (n - 1) / n
