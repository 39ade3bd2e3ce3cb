"""Plans to run for the accuracy of the simulator: models, and strategies drawn by a seed, good and
bad ones, so that their times differ.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from onnx import ModelProto

from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import Topology, take
from planner.planning.judge import as_plan, judge_unchanged
from planner.schedules.orders import default_warmups
from tests.support.builders import asked
from tests.support.models import bert, gpt2, light, llama
from tests.support.split_kinds import KINDS, split_plan


@dataclass(frozen=True)
class Subject:
    """A model to plan for, with microbatches of some 50 to 150 ms on one core."""

    build: Callable[[], ModelProto]
    batch: int
    dims: tuple[str, ...] = ()


SUBJECTS: Mapping[str, Subject] = {
    "gpt2": Subject(partial(gpt2, layers=4, width=256, vocabulary=4000), 2, ("seq=128",)),
    "bert": Subject(partial(bert, layers=4, width=256, vocabulary=4000), 2, ("seq=96",)),
    "llama": Subject(
        partial(llama, layers=4, width=256, heads=4, inner=704, vocabulary=4000, seed=0),
        2,
        ("seq=96",),
    ),
    "squeezenet": Subject(partial(light, "squeezenet"), 2),
    "inception_v1": Subject(partial(light, "inception_v1"), 1),
}
# Replicas of the stages, by number of ranks; the first ones are rarer.
WIDTHS = {2: ((2,), (1, 1)), 4: ((2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 1))}
SCHEDULES = (ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE)


@dataclass(frozen=True)
class Drawn:
    """A plan and its problem.

    Attributes:
        name: name of the plan.
        model: name of the model.
        problem: the problem.
        plan: the plan.
        said: the strategy in a few words.
        rate_mbit: rate of the links between ranks; None goes over loopback.
        splits: whether operators are split.
    """

    name: str
    model: str
    problem: Problem
    plan: Plan
    said: str
    rate_mbit: int | None = None
    splits: bool = False

    @property
    def ranks(self) -> int:
        """The number of its ranks."""
        return len(self.plan.ranks)


def draw(
    model: str,
    profile: Profile,
    topologies: Mapping[int, Topology],
    seed: int,
    counts: Mapping[int, int],
    rate_mbit: int | None = None,
) -> list[Drawn]:
    """Different plans of one model.

    Args:
        topologies: topologies by number of ranks.
        counts: numbers of plans by number of ranks, 2 or 4.
        rate_mbit: as in `Drawn`.
    """
    title = model if rate_mbit is None else f"{model}-{rate_mbit}mbit"
    dice = random.Random(f"{title} {seed}")
    plans: list[Drawn] = []
    seen: set[Strategy] = set()
    for ranks, number in counts.items():
        least, widths = len(plans), WIDTHS[ranks]
        while len(plans) < least + number:
            # One in four is data parallel: there are only few of them.
            replicas = dice.choice(widths[1:] if dice.random() < 0.75 else widths[:1])
            plan = _drawn(
                dice, f"{title}-{len(plans)}", model, profile, topologies[ranks], replicas
            )
            plan = replace(plan, rate_mbit=rate_mbit)
            if plan.plan.strategy not in seen:
                seen.add(plan.plan.strategy)
                plans.append(plan)
    return plans


def draw_split(
    model: str, profile: Profile, topologies: Mapping[int, Topology], seed: int
) -> list[Drawn]:
    """Plans of one model whose operators are split: one of each kind that it has.

    Args:
        topologies: topologies by number of ranks, 2 or 4.
    """
    dice, plans = random.Random(f"{model} split {seed}"), []
    for ranks, topology in topologies.items():
        for kind in KINDS[ranks]:
            options = asked(dice.randint(2, 6), schedule=dice.choice(SCHEDULES))
            made = split_plan(profile, take(topology, ranks), kind, options)
            if made is not None:
                schedule, count = made[0].training.schedule, made[0].num_microbatches
                said = f"{kind} {schedule.value} M={count}"
                plan = planned(*made)
                plans.append(Drawn(f"{model}-{kind}", model, made[0], plan, said, splits=True))
    return plans


def _drawn(
    dice: random.Random,
    name: str,
    model: str,
    profile: Profile,
    topology: Topology,
    replicas: Sequence[int],
) -> Drawn:
    num_microbatches = dice.randint(max(2, *replicas), 8)
    schedule = dice.choice(SCHEDULES)
    recompute = dice.random() < 0.15
    cuts, shares = _cuts(dice, profile, len(replicas))
    names = [operator.name for operator in profile.graph.operators]
    bounds = [0, *cuts, len(names)]
    warmups = default_warmups(replicas, num_microbatches, dice.randint(0, 1), schedule)
    stages, first = [], 0
    for s, width in enumerate(replicas):
        devices = tuple(range(first, first + width))
        operators = tuple(names[bounds[s] : bounds[s + 1]])
        stages.append(Stage.whole(operators, devices, warmups[s], recompute))
        first += width
    strategy = Strategy(tuple(stages), schedule, num_microbatches)
    problem = Problem(profile, take(topology, first), **asked(num_microbatches, schedule=schedule))
    widths = "+".join(map(str, replicas))
    said = f"{widths} {schedule.value} M={num_microbatches}"
    if len(replicas) > 1:
        said += " " + "/".join(f"{100 * share:.0f}" for share in shares)
    said += " recompute" if recompute else ""
    return Drawn(name, model, problem, planned(problem, strategy), said)


def _cuts(dice: random.Random, profile: Profile, num_stages: int) -> tuple[list[int], list[float]]:
    """Where stages begin, in the order of the operators, and their shares of the time; a stage has
    at least a tenth of it.
    """
    times = np.array([o.forward_s + o.backward_s for o in profile.operators])
    done = np.cumsum(times) / times.sum()
    while True:
        goals = sorted(dice.uniform(0.1, 0.9) for _ in range(num_stages - 1))
        cuts = [int(np.searchsorted(done, goal)) + 1 for goal in goals]
        ends = [0.0, *(float(done[cut - 1]) for cut in cuts), 1.0]
        shares = np.diff(ends).tolist()
        if min(shares) >= 0.1 and all(cut < len(times) for cut in cuts):
            return cuts, shares


def planned(problem: Problem, strategy: Strategy) -> Plan:
    """The plan of a strategy, as predicted."""
    verdict, _ = judge_unchanged(problem, strategy)
    result = Result(Status.FEASIBLE, strategy)
    return as_plan(problem, "manual", result, verdict, 0.0)
