"""One search by OR-Tools CP-SAT in several calls: what they share, and a call.

Limits are of deterministic work, in seconds of the time limit that the user gave, each worth
`DETERMINISTIC_PER_S`; the clock cuts only where the machine is slower than that.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.solvers.engines.watch import Watch
from planner.solvers.netsplit.cpsat_model import Model

DETERMINISTIC_PER_S = 0.11
"""Units of deterministic work per second of the limit. On two cores at 2.9 GHz that other processes
used as well, a second of one core did 0.1 to 0.2, mostly 0.1 to 0.15."""

CROWDED_PER_S = 0.3
"""The same where the work decides about the length: there it did 0.3 to 0.9."""

FEW_PER_S = 0.6
"""The same with few groups: there it did 0.6 to 0.9."""

LEAST_S = 0.01
"""No call gets less."""


@dataclass(slots=True)
class Run:
    """What is left to search with.

    Attributes:
        watch: of the whole search.
        seed: of the engine.
        whole_s: the limit; left_s: what of it was not worked off, in s of work.
        until: the clock's end; compiling_s: what was spent compiling, which does not count.
        per_s: units of deterministic work per second of the limit.
        in_time: whether the clock did not cut anything so far.
    """

    watch: Watch
    seed: int
    whole_s: float
    left_s: float
    until: float
    compiling_s: Callable[[], float]
    per_s: float = DETERMINISTIC_PER_S
    in_time: bool = True

    @classmethod
    def begun(
        cls, watch: Watch, time_limit_s: float, seed: int, compiling_s: Callable[[], float]
    ) -> "Run":
        """From now on."""
        until = time.monotonic() + time_limit_s
        return cls(watch, seed, time_limit_s, time_limit_s, until, compiling_s)

    def seconds(self) -> float:
        """Left by the clock."""
        return self.until + self.compiling_s() - time.monotonic()

    def draw(self, share: float) -> float:
        """Takes a share of the whole limit, in s of work, as far as it is left."""
        taken = min(share * self.whole_s, self.left_s)
        self.left_s -= taken
        return taken

    def over(self) -> bool:
        """Whether nothing shall be searched any more, because the clock has run out or the watch
        says so.
        """
        if self.seconds() < 0:
            self.in_time = False
        return not self.in_time or self.watch.done


@dataclass(frozen=True, slots=True)
class Found:
    """What one call says.

    Attributes:
        status: CP-SAT's name of it; device_of: None without a placement.
        value: of the objective; bound: no solution is below it; in ticks.
        starts, ends: values of what was asked for.
    """

    status: str
    device_of: tuple[int, ...] | None
    value: int
    bound: int
    starts: tuple[tuple[int, ...], ...] = ()
    ends: tuple[int, ...] = ()


def worker(seed: int, work: float) -> Any:
    """An engine with one worker and without linear relaxations.

    Args:
        work: units of deterministic work, at most.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers, parameters.linearization_level = 1, 0
    parameters.random_seed, parameters.max_deterministic_time = seed, work
    parameters.catch_sigint_signal = False
    return solver


def least_of(solver: Any) -> int:
    """What no solution of an objective in integers is below, once it was solved."""
    bound: float = solver.best_objective_bound
    return math.ceil(bound - 1e-6)


def call(
    model: Model,
    run: Run,
    share: float,
    *,
    besides: int | None = None,
    starts: Sequence[Sequence[Any]] = (),
    ends: Sequence[Any] = (),
    whole: bool = False,
    hinted: bool = True,
) -> Found:
    """Solves what is built.

    Args:
        share: of what is left, the most that this takes.
        besides: ticks by which the bound of the whole is above that of this model; None if this
            one's says nothing of the whole.
        starts, ends: variables whose values are asked for.
        whole: whether this is no relaxation, so that what it finds is an incumbent.
        hinted: whether it starts from the known schedule.
    """
    model.cp.clear_hints()
    for variable, value in model.hints if hinted else ():
        model.cp.add_hint(variable, value)
    solver = worker(run.seed, max(share * run.left_s, LEAST_S) * run.per_s)
    if whole:
        solver.parameters.relative_gap_limit = run.watch.enough / (1 + run.watch.enough)
    seconds = max(share * run.seconds(), LEAST_S)
    solver.parameters.max_time_in_seconds = seconds
    if besides is not None:
        above = besides
        solver.best_bound_callback = lambda bound: run.watch.see(bound=bound + above)
    solved = run.watch.run(
        lambda: solver.solve(model.cp, _incumbents(run.watch) if whole else None),
        solver.stop_search,
    )
    status = solver.status_name(solved)
    if status == "MODEL_INVALID":
        raise ValueError(f"CP-SAT refuses the model: {model.cp.validate()}")
    worked_s = solver.response_proto.deterministic_time / run.per_s
    run.left_s = max(0.0, run.left_s - worked_s)
    run.in_time = run.in_time and solver.wall_time < seconds
    if status not in ("OPTIMAL", "FEASIBLE"):
        return Found(status, None, 0, 0 if status == "INFEASIBLE" else least_of(solver))
    where = [next(p for p, one in enumerate(row) if solver.boolean_value(one)) for row in model.x]
    return Found(
        status,
        tuple(where[g] for g in model.instance.group_of),
        round(solver.objective_value),
        least_of(solver),
        tuple(tuple(solver.value(one) for one in some) for some in starts),
        tuple(solver.value(one) for one in ends),
    )


def _incumbents(watch: Watch) -> Any:
    """Tells the watch of every solution."""
    from ortools.sat.python import cp_model

    class Incumbents(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            watch.see(self.objective_value)

    return Incumbents()
