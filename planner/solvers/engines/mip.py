"""A mixed integer program as data, and the engines that solve it: HiGHS through OR-Tools' MathOpt,
and gurobi.

    minimise   sum of c_j x_j
    subject to low_i <= sum of a_ij x_j <= high_i,  low_j <= x_j <= high_j,  some x_j integer
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from planner.artefacts.problem import Status
from planner.solvers.engines.gurobi import gurobi_model
from planner.support.brake import Brake

GAP = 1e-6
"""Relative gap between value and bound up to which a value counts as optimal."""

ENDLESS_S = 1e9
"""Limit of the wall clock where there is no brake."""

Terms = Mapping[int, float]


@dataclass(slots=True)
class Mip:
    """The program while it is built.

    Attributes:
        low, high, integer: per variable.
        rows: per constraint, its terms and its limits.
        objective: the terms to minimise.
    """

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)
    objective: Terms = field(default_factory=dict)

    def variable(self, high: float = 1.0, *, integer: bool = False) -> int:
        """A new variable with 0 as its lower limit; its index."""
        self.low.append(0.0)
        self.high.append(high)
        self.integer.append(integer)
        return len(self.low) - 1

    def row(self, terms: Terms, low: float = -math.inf, high: float = math.inf) -> None:
        """A new constraint."""
        self.rows.append((terms, low, high))

    @property
    def size(self) -> int:
        """The number of coefficients in all rows."""
        return sum(len(terms) for terms, _, _ in self.rows)


@dataclass(frozen=True, slots=True)
class MipLimits:
    """When an engine stops.

    Attributes:
        nodes: limit of the search tree's nodes.
        seed: seed of the engine's own draws.
        gap: relative gap at which a value counts as optimal.
    """

    nodes: int
    seed: int = 0
    gap: float = GAP


@dataclass(frozen=True, slots=True)
class MipAnswer:
    """The answer of an engine.

    Attributes:
        status: optimal to the gap of the limits.
        values: values of the variables; None if the status is infeasible or unknown.
        bound: lower bound of the objective; -inf if there is none.
    """

    status: Status
    values: list[float] | None
    bound: float


def highs(mip: Mip, limits: MipLimits, hint: Terms, brake: Brake) -> MipAnswer:
    """HiGHS' answer, on one thread.

    Args:
        hint: values of some variables, to start from.
        brake: of the search. HiGHS has only a limit of the wall clock: where that comes first, it
            starts again with the processor time that is left.

    Source: https://developers.google.com/optimization/math_opt (TerminationReason).
    """
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    model = mathopt.Model()
    variables = [
        model.add_variable(lb=low, ub=high, is_integer=integer)
        for low, high, integer in zip(mip.low, mip.high, mip.integer, strict=True)
    ]
    for terms, low, high in mip.rows:
        row = model.add_linear_constraint(lb=low, ub=high)
        for j, a in terms.items():
            row.set_coefficient(variables[j], a)
    for j, c in mip.objective.items():
        model.objective.set_linear_coefficient(variables[j], c)
    starts = mathopt.ModelSolveParameters()
    if hint:
        known = {variables[j]: value for j, value in hint.items()}
        starts.solution_hints.append(mathopt.SolutionHint(variable_values=known))
    options = highs_pb2.HighsOptionsProto()
    options.string_options["parallel"] = "off"  # else the answer may depend on the number of cores
    while True:
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=min(brake.left_s(), ENDLESS_S)),
            node_limit=limits.nodes,
            relative_gap_tolerance=limits.gap,
            random_seed=limits.seed,
            highs=options,
        )
        with _library_on_standard_error():
            solution = mathopt.solve(
                model, mathopt.SolverType.HIGHS, params=parameters, model_params=starts
            )
        reason = solution.termination.reason
        if solution.termination.limit != mathopt.Limit.TIME or brake.over():
            break
    bound = solution.termination.objective_bounds.dual_bound
    if solution.has_primal_feasible_solution():
        optimal = reason == mathopt.TerminationReason.OPTIMAL
        values = solution.variable_values(variables)
        return MipAnswer(Status.OPTIMAL if optimal else Status.FEASIBLE, values, bound)
    infeasible = (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    )
    if reason in infeasible:
        return MipAnswer(Status.INFEASIBLE, None, math.inf)
    return MipAnswer(Status.UNKNOWN, None, bound)


@contextmanager
def _library_on_standard_error() -> Iterator[None]:
    """Sends what a library writes to standard output to standard error: HiGHS has lines that no
    option silences, and standard output may be somebody's JSON.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # C has a buffer of its own
        os.dup2(kept, 1)
        os.close(kept)


def gurobi(mip: Mip, limits: MipLimits, hint: Terms, brake: Brake) -> MipAnswer:
    """Gurobi's answer; arguments as `highs`.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a program.

    Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer (status codes).
    """
    with gurobi_model() as (grb, model):
        return _gurobi_solved(mip, limits, hint, brake, grb, model)


def _gurobi_solved(
    mip: Mip, limits: MipLimits, hint: Terms, brake: Brake, grb: Any, model: Any
) -> MipAnswer:
    model.Params.Seed, model.Params.MIPGap = limits.seed, limits.gap
    model.Params.NodeLimit = limits.nodes
    variables = [
        model.addVar(lb=low, ub=high, vtype=grb.GRB.INTEGER if integer else grb.GRB.CONTINUOUS)
        for low, high, integer in zip(mip.low, mip.high, mip.integer, strict=True)
    ]

    def total(terms: Terms) -> Any:
        return grb.LinExpr(list(terms.values()), [variables[j] for j in terms])

    for terms, low, high in mip.rows:
        if low > -math.inf:
            model.addConstr(total(terms) >= low)
        if high < math.inf:
            model.addConstr(total(terms) <= high)
    for j, value in hint.items():
        variables[j].Start = value
    model.setObjective(total(mip.objective), grb.GRB.MINIMIZE)
    model.optimize(lambda model, where: model.terminate() if brake.over() else None)
    if model.Status in (grb.GRB.INFEASIBLE, grb.GRB.INF_OR_UNBD):
        return MipAnswer(Status.INFEASIBLE, None, math.inf)
    if not model.SolCount:
        return MipAnswer(Status.UNKNOWN, None, model.ObjBound)
    status = Status.OPTIMAL if model.Status == grb.GRB.OPTIMAL else Status.FEASIBLE
    return MipAnswer(status, [x.X for x in variables], model.ObjBound)
