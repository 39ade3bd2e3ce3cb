"""A mixed integer program as data, and the engines that solve it: HiGHS through OR-Tools' MathOpt,
and gurobi.

    minimise   sum of c_j x_j
    subject to low_i <= sum of a_ij x_j <= high_i,  low_j <= x_j <= high_j,  some x_j integer

Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer (error codes).
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from planner.artefacts.problem import Status
from planner.solvers.engines.watch import SearchWatch
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

    def variable(self, high: float = 1.0, *, low: float = 0.0, integer: bool = False) -> int:
        """A new variable; its index."""
        self.low.append(low)
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
        work: gurobi's limit of deterministic work, about one unit per second.
        integrality: how far gurobi's integers may be from whole numbers.
    """

    nodes: float
    seed: int = 0
    gap: float = GAP
    work: float = math.inf
    integrality: float = 1e-5


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an engine.

    Attributes:
        status: optimal to the gap of the limits.
        values: values of the variables; None if the status is infeasible or unknown.
        bound: lower bound of the objective; -inf if there is none.
        value: value of the objective; inf without values.
    """

    status: Status
    values: Sequence[float] | None
    bound: float
    value: float = math.inf


def highs(mip: Mip, limits: MipLimits, hint: Terms, brake: Brake) -> Answer:
    """HiGHS' answer, on one thread.

    Args:
        hint: values of some variables, to start from.
        brake: of the search. HiGHS has only a limit of the wall clock: where that comes first, it
            starts again with the processor time that is left.

    Source: https://developers.google.com/optimization/math_opt (TerminationReason).
    """
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    model, variables = _mathopt_model(mip)
    starts = mathopt.ModelSolveParameters()
    if hint:
        known = {variables[j]: value for j, value in hint.items()}
        starts.solution_hints.append(mathopt.SolutionHint(variable_values=known))
    options = highs_pb2.HighsOptionsProto()
    options.string_options["parallel"] = "off"  # else the answer may depend on the number of cores
    while True:
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=min(brake.left_s(), ENDLESS_S)),
            node_limit=None if math.isinf(limits.nodes) else int(limits.nodes),
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
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        return Answer(status, values, bound, solution.objective_value())
    infeasible = (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    )
    if reason in infeasible:
        return Answer(Status.INFEASIBLE, None, math.inf)
    return Answer(Status.UNKNOWN, None, bound)


def _mathopt_model(mip: Mip) -> tuple[Any, list[Any]]:
    """A program as MathOpt's, with its variables."""
    from ortools.math_opt.python import mathopt

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
    return model, variables


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


# ------------------------------------------------------------------------------------------ gurobi

TOO_LARGE, NO_LICENCE = 10010, 10009


class EngineUnavailableError(Exception):
    """The engine cannot solve this model here; another one can. The message says why."""


@contextmanager
def _gurobi_model() -> Iterator[tuple[Any, Any]]:
    """Gives the module and an empty model, on one thread.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a model; also
            while the model is solved.
    """
    import gurobipy

    try:
        # Empty and silent before it starts, or the licence's banner goes to standard output.
        with gurobipy.Env(empty=True) as env:
            env.setParam("OutputFlag", 0)
            env.start()
            with gurobipy.Model(env=env) as model:
                model.Params.Threads = 1
                yield gurobipy, model
    except gurobipy.GurobiError as error:
        if error.errno in (TOO_LARGE, NO_LICENCE):
            why = "model too large for its licence" if error.errno == TOO_LARGE else "no licence"
            raise EngineUnavailableError(f"gurobi: {why} (error {error.errno})") from error
        raise


def gurobi(
    mip: Mip,
    limits: MipLimits,
    hint: Terms,
    brake: Brake | None,
    watch: SearchWatch | None = None,
) -> Answer:
    """Gurobi's answer; arguments as `highs`.

    Args:
        watch: is told of better values and bounds, and ends the search; None for no one.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a program.

    Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer (status codes).
    """
    with _gurobi_model() as (grb, model):
        variables = _loaded(mip, limits, hint, grb, model)

        def called(model: Any, where: int) -> None:
            if brake is not None and brake.over():
                model.terminate()
            if watch is not None and where == grb.GRB.Callback.MIP:
                best = model.cbGet(grb.GRB.Callback.MIP_OBJBST)
                watch.see(
                    best if best < grb.GRB.INFINITY else math.inf,
                    model.cbGet(grb.GRB.Callback.MIP_OBJBND),
                )

        if watch is None:
            model.optimize(called)
        else:
            watch.run(lambda: model.optimize(called), model.terminate)
            watch.interrupted |= model.Status == grb.GRB.INTERRUPTED and not watch.cut
        if model.Status in (grb.GRB.INFEASIBLE, grb.GRB.INF_OR_UNBD):
            return Answer(Status.INFEASIBLE, None, math.inf)
        if not model.SolCount:
            return Answer(Status.UNKNOWN, None, model.ObjBound)
        status = Status.OPTIMAL if model.Status == grb.GRB.OPTIMAL else Status.FEASIBLE
        return Answer(status, [x.X for x in variables], model.ObjBound, model.ObjVal)


def _loaded(mip: Mip, limits: MipLimits, hint: Terms, grb: Any, model: Any) -> list[Any]:
    """Puts a program and its limits into an empty model; its variables."""
    model.Params.Seed, model.Params.MIPGap = limits.seed, limits.gap
    model.Params.NodeLimit, model.Params.WorkLimit = limits.nodes, limits.work
    model.Params.IntFeasTol = limits.integrality
    variables = [
        model.addVar(lb=low, ub=high, vtype=grb.GRB.INTEGER if integer else grb.GRB.CONTINUOUS)
        for low, high, integer in zip(mip.low, mip.high, mip.integer, strict=True)
    ]

    def total(terms: Terms) -> Any:
        return grb.LinExpr(list(terms.values()), [variables[j] for j in terms])

    for terms, low, high in mip.rows:
        if low == high:
            model.addConstr(total(terms) == low)
            continue
        if low > -math.inf:
            model.addConstr(total(terms) >= low)
        if high < math.inf:
            model.addConstr(total(terms) <= high)
    for j, value in hint.items():
        variables[j].Start = value
    model.setObjective(total(mip.objective), grb.GRB.MINIMIZE)
    return variables
