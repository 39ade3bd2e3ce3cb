"""Split operators of the best plan are measured again, at their local shapes, and plans are judged
again with these times, until the best one has no part that was not measured.

    1. Take the parts of operators that the best plan runs, but those that were measured by now.
    2. Measure them. They are in the profile from now on, and so in the times of all plans.
    3. Judge all plans with split operators again. Another one may be the best now: begin again.

Each round measures at least one part more, and there are few parts; `MAX_ROUNDS` is only a guard.
Times that the profile has from earlier are measured again (or are in the cache), so that those of
a busy machine do not stay for good.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.artefacts.plan import Plan
from planner.artefacts.profile import Part, Profile
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import Topology
from planner.costs.bounds import lower_bound_s
from planner.costs.stage_pass import split_parts
from planner.planning.judge import judge, judge_unchanged, predicted_s
from planner.planning.portfolio import Answer, Answers, comparison

if TYPE_CHECKING:
    from planner.profilers.parts import MeasuredParts

MAX_ROUNDS = 20

Wanted = Mapping[int, tuple[Part, ...]]
"""Parts to measure, by index of the operator."""
Measure = Callable[[Profile, Wanted], "MeasuredParts"]


@dataclass(frozen=True, slots=True)
class Refinement:
    """What came of measuring parts.

    Attributes:
        rounds: number of plans that were refined.
        num_operators: of the best plan, operators whose parts have measured times.
        num_timed: number of classes of parts that were timed.
        num_cached: number of classes of parts that the cache had.
        before: the best plan as it was judged by shares of the times of whole operators; None
            where nothing was measured.
        same_s: the objective of its strategy by measured times, in s.
        after: the best plan by these.
        profiles: that have new times.
        notes: why nothing was measured, or not all; why times may be wrong.
    """

    rounds: int = 0
    num_operators: int = 0
    num_timed: int = 0
    num_cached: int = 0
    before: Plan | None = None
    same_s: float = 0.0
    after: Plan | None = None
    profiles: tuple[Profile, ...] = ()
    notes: tuple[str, ...] = ()

    def into(self, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
        """Profiles with the new times of parts in those of the same size of the microbatch."""
        new = {one.microbatch_size: one for one in self.profiles}
        return tuple(new.get(one.microbatch_size, one) for one in profiles)


def nothing(reason: str) -> Refinement:
    """A refinement that measured nothing.

    Args:
        reason: in words.
    """
    return Refinement(notes=(f"--refine: nothing to measure: {reason}",))


def _parts(profile: Profile, topology: Topology, strategy: Strategy) -> Mapping[int, set[Part]]:
    """The parts of a strategy on devices of the profile's type, by index of the operator."""
    parts: dict[int, set[Part]] = {}
    for stage in strategy.stages:
        if any(topology.devices[d].type == profile.device_type for d in stage.devices):
            for v, part in split_parts(profile, stage).items():
                parts.setdefault(v, set()).add(part)
    return parts


def refine(of_sizes: Sequence[Answers], measure: Measure) -> tuple[tuple[Answers, ...], Refinement]:
    """The answers again, the best of them with measured times of its parts.

    Args:
        of_sizes: by size of the microbatch.
        measure: gives a profile with times of some parts.
    """
    # Loads what measures, and with it onnx, for a step that few ask for.
    from planner.profilers.parts import obstacle

    made, first = list(of_sizes), _best(of_sizes)
    if first is None:
        return tuple(made), nothing("there is no plan")
    best, done = first, Refinement()
    refined: dict[int, Profile] = {}
    seen: dict[int, set[tuple[int, Part]]] = {}
    while True:
        plan, at = best
        problem = made[at].problem
        known = seen.setdefault(at, set())
        wanted = {
            v: missing
            for v, some in _parts(problem.profile, problem.topology, plan.strategy).items()
            if (missing := tuple(sorted(part for part in some if (v, part) not in known)))
        }
        why = obstacle(problem.profile) if wanted else None
        if done.rounds == MAX_ROUNDS:
            why = f"{MAX_ROUNDS} plans were refined, no more"
        if not wanted or why:
            break
        got = measure(problem.profile, wanted)
        known.update((v, part) for v, some in wanted.items() for part in some)
        refined[at] = got.profile
        made[at] = _again(made[at], got.profile)
        done = replace(
            done,
            rounds=done.rounds + 1,
            num_timed=done.num_timed + got.num_timed,
            num_cached=done.num_cached + got.num_cached,
            notes=tuple(dict.fromkeys((*done.notes, *got.warnings))),
        )
        best = _best(made) or best  # judging again changes times alone: what fitted still does
    if not done.rounds:
        none = "no operator of the best plan runs in parts"
        if any(split_parts(problem.profile, stage) for stage in plan.strategy.stages):
            none = (
                f"the profile was measured on {problem.profile.device_type}, and no device of the"
                " best plan that runs parts is of that type"
            )
        return tuple(made), nothing(why or none)
    first_plan, start = first
    verdict, _ = judge_unchanged(made[start].problem, first_plan.strategy)
    objective = problem.training.objective
    return tuple(made), replace(
        done,
        num_operators=len(_parts(problem.profile, problem.topology, plan.strategy)),
        before=first_plan,
        same_s=predicted_s(verdict.prediction, objective),
        after=plan,
        profiles=tuple(refined.values()),
        notes=(*done.notes, *([f"the best plan is not refined: {why}"] if why else [])),
    )


def _best(made: Sequence[Answers]) -> tuple[Plan, int] | None:
    """The best plan, and the index of the answers that it is among; None if no plan fits."""
    row = comparison(made).best
    if row is None or row.plan is None:
        return None
    sizes = [one.problem.profile.microbatch_size for one in made]
    return row.plan, sizes.index(row.microbatch_size)


def _again(answers: Answers, profile: Profile) -> Answers:
    """The answers to a problem, judged by another profile's times."""
    problem = replace(answers.problem, profile=profile)
    return replace(
        answers,
        problem=problem,
        lower_bound_s=lower_bound_s(problem),
        answers=tuple(_judged(answers, one, profile) for one in answers.answers),
    )


def _judged(answers: Answers, one: Answer, profile: Profile) -> Answer:
    """A solver's answer, judged again if it has a strategy with split operators."""
    result = one.result
    if result.strategy is None or one.verdict is None:
        return one
    candidates = (result.strategy, *result.others)
    if all(stage.sharding is None for some in candidates for stage in some.stages):
        return one
    problem = replace(answers.problem, profile=profile)
    verdict, _ = judge(problem, one.solver, result)
    if verdict is None:  # kept though it does not fit, as before
        verdict, _ = judge_unchanged(problem, result.strategy)
    return replace(one, verdict=verdict)
