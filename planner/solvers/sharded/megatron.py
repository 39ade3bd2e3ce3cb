"""Megatron-LM's plans: operators split in pairs inside a host, copies of the model, and stages.

A product whose weights are cut by columns makes parts of its outputs, what follows runs on these
parts, and a product whose weights are cut by rows makes summands, which are added up: two
all-reduces in the forward and two in the backward of a block of a transformer (Shoeybi et al. 2019,
section 3). Which operators these are is not read off names: of the rules of the profile, those are
allowed that cut weights, and those that go on with parts; nothing is cut that is whole, no sum is
scattered, and what products make is not gathered. With sequence parallelism sums may be scattered
along another dimension than the first, and norms run on parts (Korthikanti et al. 2022, section
4.2).

    t   devices of a mesh, inside a host       d   replicas, or an axis of the mesh along the first
    p   stages of about the same time              dimension where there are too few microbatches

Stages may be given the same number of layers, too, as Megatron-LM's are (`--even-layers`).

All t d p that make up the number of devices are tried (Narayanan et al. 2021, section 3), as far as
the limit of work allows, the most promising first (`promise.py`); each in
two ways: with the weights cut for which that is fastest, and with those for which it would be if an
iteration had one microbatch. These are more, because steps and sums of gradients weigh more; so
less memory is needed, as with a table of embeddings that is cut by the vocabulary: with it whole, a
Llama on 32 devices of p4d has to recompute, and takes 3.44 instead of 3.17 s. An iteration of one
microbatch is tried as if it had half of one, too: passes hide some of what the program of the rules
adds up, but the last sums are waited for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

from planner.artefacts.problem import Problem, Result, Status, switches_of
from planner.artefacts.profile import has_rules
from planner.artefacts.sharding import AxisRule, Sharding, dim_of
from planner.artefacts.strategy import Stage, Strategy
from planner.costs.operators import operator_times
from planner.costs.stage_pass import stage_pass
from planner.resharding.checks import all_violations
from planner.solvers.intra.lines import Axis, Lines, lines_of
from planner.solvers.intra.policy import Policy
from planner.solvers.sharded.best import best_of
from planner.solvers.sharded.complete import shardings
from planner.solvers.sharded.cuts import balanced_cuts, even_cuts
from planner.solvers.sharded.degrees import grid
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_TO_SPLIT,
    WHOLE,
    Layout,
    crossing_s,
    divisors,
    groups_of,
    host_by_host,
)
from planner.solvers.sharded.options import Megatron
from planner.solvers.sharded.promise import promises
from planner.solvers.sharded.rules import share_work, weight_parts
from planner.solvers.sharded.zero import data_policy
from planner.support.arrays import Floats
from planner.support.errors import OptionError
from planner.support.memo import remembered

# Work per second of an ordinary core: operators whose rules are searched for along the axes of a
# mesh, and operators whose times are made and which are cut into stages. Measured on a core at 2.9
# GHz shared with others, on Llama 6.7B.
_LINES_PER_S, _CUT_PER_S = 4_000, 4_000
# Layouts of a point, at most.
_VARIANTS = 8

Axes = tuple[tuple[int, bool], ...]
"""Of a mesh, the size of each axis, and whether it splits samples."""
Groups = tuple[tuple[tuple[int, ...], ...], ...]
"""Per stage, its groups."""


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best of the grid.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core. A few points are tried whatever
            they take.

    Raises:
        OptionError: if the degrees that are given do not fit the devices.
    """
    space = "Megatron-LM's grid of tensor, data and pipeline degrees"
    points = _points(problem)
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    layouts = _layouts(problem, points)
    first = next(layouts, None)
    if first is None:
        return Result(Status.INFEASIBLE, None, space=space, reason=NOTHING_TO_SPLIT)
    return best_of(problem, chain([first], layouts), space, time_limit_s)


def _points(problem: Problem) -> Sequence[tuple[int, int, int]]:
    """The points of the grid; with even layers, those of one stage or no more stages than layers.

    Raises:
        OptionError: if there is none.
    """
    given = switches_of(problem.search, Megatron)
    points = grid(problem, given)
    if not given.even_layers:
        return points
    modules = problem.profile.modules
    able = [point for point in points if point[2] == 1 or even_cuts(modules, point[2]) is not None]
    if not able:
        raise OptionError(
            f"--even-layers: expected a layer, that is a numbered module such as h.0, for each of"
            f" {min(p for _, _, p in points)} stages; export the model from PyTorch, or give a"
            " smaller --pipeline-degree"
        )
    return able


def _layouts(problem: Problem, points: Sequence[tuple[int, int, int]]) -> Iterator[Layout]:
    """The layouts of the points, with sequence parallelism and without, unless that is given; the
    points in the order of promise.
    """
    given = switches_of(problem.search, Megatron)
    sequences = (False, True) if given.sequence_parallel is None else (given.sequence_parallel,)
    forced = all(t > 1 for t, *_ in points)
    known: dict[tuple[Axes, float, bool], Lines | None] = {}
    times: list[_Times] = []
    size = len(problem.profile.operators)
    order = [(one, i) for i, one in enumerate(promises(problem, host_by_host(problem), points))]
    for _, number in sorted(order):
        t, _, p = points[number]
        axes, groups, rounds = _meshes(problem, points[number])
        made: list[Lines] = []
        work_s = 0.0
        both = (rounds, 1.0) if rounds > 1.0 else (0.5, 1.0)
        for key in product([axes], both, sequences if t > 1 else [False]):
            if key not in known:
                known[key] = _lines(problem, (*chain(*groups),), *key, forced=forced)
                work_s += size / _LINES_PER_S
            own = known[key]
            if own is None or own in made:
                continue
            made.append(own)
            cut = _Cut(problem, axes, own, groups, times)
            yield replace(
                cut.layout([False] * p),
                number=_VARIANTS * number + len(made),
                work_s=work_s + size / _CUT_PER_S,
                sharing=_sharing(groups, given.over_replicas),
            )
            work_s = 0.0


def _sharing(groups: Groups, level: int | None) -> tuple[int, int] | None:
    """`Layout.sharing` where all replicas of a stage keep parts of a level; None where no level is
    given.
    """
    if level is None:
        return None
    replicas = len(groups[0])
    return (replicas, level) if level and replicas > 1 else WHOLE


def _meshes(problem: Problem, point: tuple[int, int, int]) -> tuple[Axes, Groups, float]:
    """The axes of a point's meshes, its groups, and the microbatches that each replica runs."""
    t, d, p = point
    replicas = max(n for n in divisors(d) if n <= problem.num_microbatches)
    axes = tuple(one for one in ((d // replicas, True), (t, False)) if one[0] > 1)
    groups = groups_of(host_by_host(problem, t), [size for size, _ in axes], replicas, p)
    return axes, groups, max(1.0, problem.num_microbatches / replicas)


class _Times(NamedTuple):
    """Times of the operators with the rules `lines` on the devices `group`, as if all were one
    stage.

    Attributes:
        forward_s: (N,) of each operator.
        backward_s: (N,) of its backward.
    """

    group: tuple[int, ...]
    lines: Lines
    forward_s: Floats
    backward_s: Floats


class _Cut:
    """A point of the grid, which is cut into stages by the times of operators on its meshes."""

    def __init__(
        self, problem: Problem, axes: Axes, lines: Lines, groups: Groups, known: list[_Times]
    ) -> None:
        self.problem, self.lines, self.groups = problem, lines, groups
        self.mesh = tuple(size for size, _ in axes)
        group = groups[0][0]
        times = next((one for one in known if (one.group, one.lines) == (group, lines)), None)
        if times is None:
            times = _Times(group, lines, *self._times())
            known.append(times)
        self.forward_s, self.backward_s = times.forward_s, times.backward_s
        self.rounds = problem.num_microbatches / len(groups[0])

    def layout(self, recompute: Sequence[bool]) -> Layout:
        """The layout for stages of which some recompute."""
        if len(recompute) > 1 and switches_of(self.problem.search, Megatron).even_layers:
            stages = even_cuts(self.problem.profile.modules, len(recompute))
            assert stages is not None, "there are as many layers as stages"
        else:
            sent_s = crossing_s(self.problem, self.groups)
            stages = balanced_cuts(self.forward_s, self.backward_s, sent_s, recompute, self.rounds)
        made: Sequence[Sharding | None] = [None] * len(stages)
        if self.mesh:
            made = shardings(self.problem.profile.graph, stages, self.mesh, self.lines)
        return Layout(stages, self.groups, made, self.layout)

    def _times(self) -> tuple[Floats, Floats]:
        """(N,) times of the operators, as if all were one stage."""
        problem, group = self.problem, self.groups[0][0]
        graph, whole = problem.profile.graph, operator_times(problem, group[0])
        if not self.mesh:
            return whole.forward_s, whole.backward_s
        everything = (range(len(graph.operators)),)
        (split,) = shardings(graph, everything, self.mesh, self.lines)
        names = tuple(operator.name for operator in graph.operators)
        stage = Stage(names, (tuple(range(len(group))),), 1, False, split)
        strategy = Strategy((stage,), problem.training.schedule, 1)
        if all_violations(strategy, graph, len(group)):
            return whole.forward_s, whole.backward_s  # it is refused when it is a strategy
        there = replace(stage, groups=(group,))
        forward_s, backward_s = stage_pass(problem, there, group[0]).by_operator_s()
        return forward_s, backward_s


def _lines(
    problem: Problem,
    groups: tuple[tuple[int, ...], ...],
    axes: Axes,
    rounds: float,
    sequence: bool,
    *,
    forced: bool,
) -> Lines | None:
    """The rules of all operators, along each axis; None where an axis would cut nothing.

    Args:
        groups: the devices of each mesh.
        rounds: microbatches over which the time of steps and sums of gradients is spread.
        sequence: whether sums may be scattered along the sequence.
        forced: whether a tensor axis cuts something though that does not pay. Copies always do.
    """
    wanted = [
        Axis(
            size,
            data_policy(problem) if is_data else _tensor_policy(problem, sequence=sequence),
            sure=forced or is_data,
        )
        for size, is_data in axes
    ]
    lines = lines_of(problem, groups, wanted, rounds)
    return lines if all(map(share_work, lines)) else None


@remembered
def _tensor_policy(problem: Problem, *, sequence: bool) -> Policy:
    """Weights are cut; tensors only by operators that make them so."""
    graph = problem.profile.graph
    ranks = {one.name: len(one.shape) for one in graph.tensors}
    of_samples = set(graph.inputs)  # and all that follows from them
    for operator in graph.operators:
        if of_samples.intersection(operator.inputs):
            of_samples.update(operator.outputs)

    def cuts_weights(v: int, rule: AxisRule) -> bool:
        weights = weight_parts(graph, v, rule)
        return not weights or any(part.startswith("S") for part in weights)

    def converts(name: str, old: str, new: str) -> bool:
        if name not in of_samples:
            return True
        if not new.startswith("S"):
            return not old.startswith("S") or dim_of(old) != ranks[name] - 1
        # The first dimension of all but matrices is that of samples.
        along = dim_of(new) or 0
        return sequence and old in ("R", "P") and (along > 0 or ranks[name] < 3)

    return Policy(
        rule=cuts_weights,
        conversion=converts,
        comes=lambda name, part: part == "R" or (sequence and dim_of(part) != 0),
        further=False,
    )
