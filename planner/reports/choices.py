"""Answers to choice programs, as text and as JSON."""

import math
from typing import Any

from planner.artefacts.problem import Status
from planner.planning.choices import ContestAnswer

RUN, MOST_LINES = 40, 10
"""Strategies on a line, and lines of them; the rest is for programs."""


def choice_lines(answer: ContestAnswer) -> tuple[str, ...]:
    """An answer for people."""
    choice = answer.choice
    title = f"{answer.name or 'the problem'}: {choice.status.value}"
    if choice.picks is None:
        if choice.status is Status.INFEASIBLE:
            return (title, "no assignment keeps the limit of usage")
        return (
            title,
            "no assignment was found that keeps the limit of usage; none may exist",
            f"lower bound {_number(choice.bound)}",
        )
    lines = [
        title,
        f"cost {choice.cost}, lower bound {_number(choice.bound)}, gap {100 * choice.gap:.4f} %",
        "strategies of the nodes:",
    ]
    shown = choice.picks[: RUN * MOST_LINES]
    for first in range(0, len(shown), RUN):
        lines.append("  " + " ".join(map(str, shown[first : first + RUN])))
    if len(shown) < len(choice.picks):
        lines.append(f"  and of {len(choice.picks) - len(shown):,} more, which --json shows")
    if not choice.reproducible:
        lines.append("note: the time limit or Ctrl-C ended the search; another run may differ")
    return tuple(lines)


def choice_json(answer: ContestAnswer) -> dict[str, Any]:
    """The object that `solve --json` prints under the contest's cost model."""
    choice = answer.choice
    known = choice.picks is not None
    return {
        "cost_model": "iopddl",
        "name": answer.name,
        "status": choice.status.value,
        "cost": choice.cost if known else None,
        "lower_bound": choice.bound if math.isfinite(choice.bound) else None,
        "gap": choice.gap if math.isfinite(choice.gap) else None,
        "assignment": list(choice.picks) if choice.picks is not None else None,
        "reproducible": choice.reproducible,
    }


def _number(value: float) -> str:
    return str(value) if math.isfinite(value) else "unknown"
