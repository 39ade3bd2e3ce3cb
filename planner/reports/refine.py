"""What came of measuring parts of operators, as lines of text and as JSON."""

from typing import Any

from planner.artefacts.options import Objective
from planner.planning.judge import objective_s
from planner.planning.refine import Refinement
from planner.support.units import format_seconds

_FIGURE = {
    Objective.ITERATION: "per iteration",
    Objective.BOTTLENECK: "at the bottleneck",
    Objective.LATENCY: "of latency",
}


def refinement_lines(refinement: Refinement) -> tuple[str, ...]:
    """What was measured and what changed, then notes."""
    notes = tuple(f"note: {note}" for note in refinement.notes)
    before, after = refinement.before, refinement.after
    if before is None or after is None:
        return tuple(refinement.notes)
    unit = _FIGURE[Objective(before.certificate.objective)]
    old_s, same_s, new_s = objective_s(before), refinement.same_s, objective_s(after)
    lines = [
        f"refined: parts of {_count(refinement.num_operators, 'operator')} of the best plan have"
        f" measured times; {_count(refinement.num_timed, 'class', 'classes')} timed,"
        f" {refinement.num_cached} from the cache",
        f"the {before.solver} plan: {format_seconds(old_s)} {unit} by shares of whole operators,"
        f" {format_seconds(same_s)} by measured parts ({100 * (same_s / old_s - 1):+.1f} %)",
    ]
    if after.strategy != before.strategy:
        lines.append(
            f"the {after.solver} plan is better by measured parts: {format_seconds(new_s)} {unit};"
            f" {_count(refinement.rounds, 'plan')} refined"
        )
    return (*lines, *notes)


def _count(number: int, noun: str, plural: str = "") -> str:
    """A number of things.

    >>> _count(1, "class", "classes"), _count(2, "plan")
    ('1 class', '2 plans')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def refinement_json(refinement: Refinement) -> dict[str, Any]:
    """The same figures for machines."""
    before, after = refinement.before, refinement.after
    return {
        "rounds": refinement.rounds,
        "operators": refinement.num_operators,
        "timed": refinement.num_timed,
        "cached": refinement.num_cached,
        "solver_before": None if before is None else before.solver,
        "solver": None if after is None else after.solver,
        "before_s": None if before is None else objective_s(before),
        "before_refined_s": None if before is None else refinement.same_s,
        "after_s": None if after is None else objective_s(after),
        "notes": list(refinement.notes),
    }
