"""The solvers: `Problem`, time limit in s -> `Result`. What they find is judged by `judge.py`.

A new one is one file with `solve` and one line here. Modules are imported when they are used,
because engines and compilers take long to load.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

from planner.problem import Problem, Result

Solver = Callable[[Problem, float], Result]


def _from(module: str, function: str = "solve") -> Solver:
    """A solver of a module of this folder."""

    def solve(problem: Problem, time_limit_s: float) -> Result:
        solver: Solver = getattr(import_module(f"planner.solvers.{module}"), function)
        return solver(problem, time_limit_s)

    return solve


SOLVERS: Mapping[str, Solver] = {
    "single": _from("single"),
    "data-parallel": _from("data_parallel"),
    "antichain": _from("antichain.solve"),
    "even": _from("even"),
    "pipedream": _from("pipedream.solve"),
    "heft": _from("placement.heft"),
    "m-topo": _from("placement.baechi", "solve_m_topo"),
    "m-etf": _from("placement.baechi", "solve_m_etf"),
    "m-sct": _from("placement.baechi", "solve_m_sct"),
    "pesto": _from("netsplit.pesto"),
    "netsplit": _from("netsplit.solve"),
    "manual": _from("manual"),
}

PORTFOLIO: tuple[str, ...] = (
    "single",
    "data-parallel",
    "antichain",
    "even",
    "pipedream",
    "netsplit",
)
"""Those that are asked where none is named; the others are there to compare with."""

AUTOMATIC: tuple[str, ...] = tuple(name for name in SOLVERS if name != "manual")
"""Those that need no stages from the user."""
