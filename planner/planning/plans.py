"""What a search for plans and a simulation answer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.artefacts.problem import Problem, Result
    from planner.planning.portfolio import SolverComparison, SolverRow
    from planner.planning.refine import Refinement
    from planner.simulator.account import Account


# Iterations with more actions are not described action by action.
MAX_ACTIONS = 300_000


@dataclass(frozen=True, slots=True)
class Plans:
    """The answer to `solve` or `compare`: every solver's plan, judged by one simulator.

    Attributes:
        comparison: a row for each solver and size of the microbatch.
        problems: that were solved, ascending by the size of the microbatch.
        cost_model: by which plans are compared.
        changes: of the topology, in words.
        before: the same without the changes; None without any, and from `compare`.
        refinement: what came of measuring parts; None where that was not asked for.
    """

    comparison: "SolverComparison"
    problems: "tuple[Problem, ...]"
    cost_model: str = "planner"
    changes: tuple[str, ...] = ()
    before: "Plans | None" = None
    refinement: "Refinement | None" = None

    def __repr__(self) -> str:
        """One line: the fields hold the profiles and every plan."""
        rows = len(self.comparison.rows)
        asked = f"of {rows} row{'s' * (rows != 1)}, {self.num_devices} devices"
        if self.plan is None:
            return f"<Plans {asked}: no strategy fits>"
        return f"<Plans {asked}: {self.plan.solver}, {_iteration(self.plan)}>"

    @property
    def best(self) -> "SolverRow | None":
        """The row with the best plan; None if no strategy fits."""
        return self.comparison.best

    @property
    def plan(self) -> "Plan | None":
        """The best plan; None if no strategy fits."""
        return None if self.best is None else self.best.plan

    @property
    def num_devices(self) -> int:
        """Devices of the topology."""
        return len(self.problems[-1].topology.devices)


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated iteration.

    Attributes:
        problem: the profile, the topology and the options that were simulated with.
        plan: the strategy with its prediction; None if the stages given do not fit.
        account: timeline, waits and critical path; None without a plan, and where an iteration has
            more than `MAX_ACTIONS` actions.
        num_actions: of the iteration.
        reason: why there is no plan; None if there is one.
    """

    problem: "Problem"
    plan: "Plan | None"
    account: "Account | None" = None
    num_actions: int = 0
    reason: str | None = None

    def __repr__(self) -> str:
        """One line: the fields hold the profile and every action."""
        if self.plan is None:
            return f"<Simulation: {self.reason}>"
        return f"<Simulation of {self.num_actions} actions: {_iteration(self.plan)}>"

    @property
    def names(self) -> dict[int, str]:
        """The names of the devices used, by index."""
        return {} if self.plan is None else {d.device: d.name for d in self.plan.prediction.devices}

    def described(self) -> "Account":
        """The account.

        Raises:
            OptionError: if there is none.
        """
        if self.account is None:
            raise OptionError(
                self.reason
                or f"an iteration has {self.num_actions} actions, too many for a picture or a"
                " trace; take fewer --microbatches"
            )
        return self.account


def simulated(problem: "Problem", solver: str, result: "Result") -> Simulation:
    """The strategy of a result, simulated as it is."""
    from planner.costs.bounds import lower_bound_s
    from planner.planning.judge import as_plan, judge_unchanged
    from planner.simulator.account import account

    if result.strategy is None:
        return Simulation(problem, None, reason=result.reason)
    verdict, num_actions = judge_unchanged(problem, result.strategy)
    plan = as_plan(problem, solver, result, verdict, lower_bound_s(problem))
    described = account(problem, result.strategy) if num_actions <= MAX_ACTIONS else None
    return Simulation(problem, plan, described, num_actions)


def _iteration(plan: "Plan") -> str:
    """The time of a plan's iteration, for people."""
    from planner.support.units import format_seconds

    return f"{format_seconds(plan.prediction.iteration_s)} per iteration"
