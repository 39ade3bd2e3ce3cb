"""One call of OR-Tools CP-SAT, and the limits that the calls of a search share.

Limits are of deterministic work, so that a search repeats itself. They count in seconds of the
user's time limit, each worth `DETERMINISTIC_PER_S`.
"""

import math
from dataclasses import dataclass
from typing import Any

from planner.artefacts.problem import Status
from planner.solvers.engines.mip import Answer
from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit.cpsat_model import CpSatModel

DETERMINISTIC_PER_S = 0.11
"""Units of deterministic work per second of the limit. Measured on two cores at 2.9 GHz shared with
other processes: one core did 0.1 to 0.2 per second, mostly 0.1 to 0.15."""

CROWDED_PER_S = 0.3
"""The same for crowded models (`PhaseBounds.crowded`), measured 0.3 to 0.9."""

CONSTRAINTS_PER_S = 150_000
"""Constraints of a model that are built per second of the limit, on a busy machine. A model whose
building alone would take the rest of its step's time is not built."""

FEW_PER_S = 0.6
"""The same for models of few groups, measured 0.6 to 0.9."""

MIN_CALL_S = 0.01
"""Seconds that every call gets at least."""


@dataclass(slots=True)
class SearchBudget:
    """The work left to a search.

    Attributes:
        watch: watches the whole search.
        seed: seed of the engine.
        whole_s: the limit; left_s: the part of it that has not been worked off.
        per_s: units of deterministic work per second of the limit.
    """

    watch: SearchWatch
    seed: int
    whole_s: float
    left_s: float
    per_s: float = DETERMINISTIC_PER_S

    @classmethod
    def begun(cls, watch: SearchWatch, time_limit_s: float, seed: int) -> "SearchBudget":
        """A budget of which nothing has been worked off."""
        return cls(watch, seed, time_limit_s, time_limit_s)

    def draw(self, share: float) -> float:
        """Takes a share of the whole limit, or all that is left; returns it in s."""
        taken = min(share * self.whole_s, self.left_s)
        self.left_s -= taken
        return taken

    def over(self) -> bool:
        """Whether the search must end: the watch is done, or the brake has cut it."""
        return self.watch.done


def worker(seed: int, work: float) -> Any:
    """An engine with one worker and without linear relaxations.

    Args:
        work: units of deterministic work, at most.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    # Tried and left: two seeds of a step at once, since a repeatable result has to wait for the
    # first seed, which the other one slows by a quarter; CP-SAT's own interleaving of two workers,
    # which is slower still; the cases of two groups together or apart, a core each, since each case
    # takes as long as both.
    parameters.num_workers, parameters.linearization_level = 1, 0
    parameters.random_seed, parameters.max_deterministic_time = seed, work
    parameters.catch_sigint_signal = False
    return solver


def answer_of(solver: Any, cp: Any, solved: Any) -> Answer:
    """The answer of an engine after solving a model of an integer objective.

    Args:
        solved: what `solve` returned.

    Source: https://developers.google.com/optimization/cp/cp_solver (CpSolverStatus).
    """
    name = solver.status_name(solved)
    if name == "MODEL_INVALID":
        raise ValueError(f"CP-SAT refuses the model: {cp.validate()}")
    status = Status(name.lower())
    if status is Status.INFEASIBLE:
        return Answer(status, None, math.inf)
    bound = math.ceil(solver.best_objective_bound - 1e-6)
    if status is Status.UNKNOWN:
        return Answer(status, None, bound)
    return Answer(
        status, list(solver.response_proto.solution), bound, round(solver.objective_value)
    )


def call(
    model: CpSatModel,
    budget: SearchBudget,
    share: float,
    *,
    besides: int | None = None,
    whole: bool = False,
    hinted: bool = True,
) -> Answer:
    """Solves a model.

    Args:
        share: largest share of the budget's rest.
        besides: ticks that the rest of the whole model adds to this model's bound; None if this
            model bounds nothing of the whole.
        whole: whether this is the whole model, so that its solutions are incumbents.
        hinted: whether to start from the known schedule.
    """
    model.cp.clear_hints()
    for variable, value in model.hints if hinted else ():
        model.cp.add_hint(variable, value)
    solver = worker(budget.seed, max(share * budget.left_s, MIN_CALL_S) * budget.per_s)
    if whole:
        solver.parameters.relative_gap_limit = budget.watch.enough / (1 + budget.watch.enough)
    if besides is not None:
        above = besides
        solver.best_bound_callback = lambda bound: budget.watch.see(bound=bound + above)
    solved = budget.watch.run(
        lambda: solver.solve(model.cp, _incumbents(budget.watch) if whole else None),
        solver.stop_search,
    )
    worked_s = solver.response_proto.deterministic_time / budget.per_s
    budget.left_s = max(0.0, budget.left_s - worked_s)
    return answer_of(solver, model.cp, solved)


def _incumbents(watch: SearchWatch) -> Any:
    """Tells the watch of every solution."""
    from ortools.sat.python import cp_model

    class Incumbents(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            watch.see(self.objective_value)

    return Incumbents()
