"""`--by-module`, of commands that show plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.commands.terminal import say, show
from planner.support.options import Options, option

if TYPE_CHECKING:
    from planner.api import Plan, Problem


@dataclass(frozen=True, slots=True)
class Explaining(Options):
    """Explanations of plans."""

    by_module: bool = option(
        "Show how the operators of each module are split, and what the module costs.", False
    )


def print_modules(plans: "Sequence[tuple[Problem, Plan]]") -> None:
    """The modules of plans beside each other, equal plans once, and what iterations are made of."""
    from planner.reports.by_module import LEGEND, iteration_line, modules_table
    from planner.reports.modules import module_costs

    first: list[tuple[Problem, Plan]] = []
    lines = []
    for problem, plan in plans:
        same = next((one.solver for _, one in first if one.strategy == plan.strategy), None)
        if same is None:
            first.append((problem, plan))
        else:
            lines.append(f"{plan.solver}: the plan of {same}")
    costs = {plan.solver: module_costs(problem, plan.strategy) for problem, plan in first}
    if costs:
        show(modules_table(costs))
        lines = [iteration_line(plan, costs[plan.solver]) for _, plan in first] + lines
    for line in (*LEGEND, *lines) if costs else ():
        say(line)
