"""The portfolio: every solver is asked, every answer is priced by the one evaluator and run by
the one simulator, and the best that fits is the plan. So no plan is worse than plain data
parallelism or any other row of the table.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import planner
from planner.costs.bounds import lower_bound_s, memory_shortage
from planner.costs.closed_form import bottleneck_s, iteration_s, latency_s
from planner.costs.compute import rescaled, slowdown
from planner.costs.evaluate import Evaluation, evaluate
from planner.errors import OptionError
from planner.files import artefact_hash
from planner.prediction import (
    Certificate,
    DevicePrediction,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.problem import Objective, Problem, Result, Status
from planner.schedules import default_warmups
from planner.simulate.events import simulate
from planner.simulate.timeline import Timeline, communication_s, compute_s, idle_s
from planner.solvers import SOLVERS
from planner.strategy import ScheduleName, Strategy, crossings, used_devices
from planner.topology import host_order

# The search ends when a plan is this close to the lower bound.
GOOD_ENOUGH = 0.01
# Of a solver whose turn did not come.
OUT_OF_TIME = "not asked: the time limit was reached"


@dataclass(frozen=True, slots=True)
class Row:
    """What one solver came up with.

    Attributes:
        solver: its name.
        status: of its own space.
        plan: judged; None if it has none that fits.
        reason: why there is none.
        solve_s: how long it took.
    """

    solver: str
    status: Status
    plan: Plan | None
    reason: str | None
    solve_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all solvers that were asked.

    Attributes:
        rows: in the order of the asking.
        lower_bound_s: for the objective, over all strategies.
        proved_infeasible: whether no strategy can fit, whoever looks for it.
    """

    rows: tuple[Row, ...]
    lower_bound_s: float
    proved_infeasible: bool

    @property
    def best(self) -> Row | None:
        """The row with the best plan; of equals the one with the shorter iteration, then one that
        is optimal in its space, then the earlier one.
        """
        planned = [row for row in self.rows if row.plan is not None]
        return min(
            planned,
            key=_rank,
            default=None,
        )

    @property
    def status(self) -> Status:
        """Of the whole comparison: the best row's, or why there is none."""
        if self.best is not None:
            return self.best.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.UNKNOWN


def _rank(row: Row) -> tuple[float, float, bool]:
    if row.plan is None:
        raise ValueError(f"{row.solver} has no plan")
    optimal = row.status is Status.OPTIMAL
    return objective_s(row.plan), row.plan.prediction.iteration_s, not optimal


def objective_s(plan: Plan) -> float:
    """The figure of a plan that its objective minimises, in s."""
    return _objective_s(plan.prediction, Objective(plan.certificate.objective))


def _objective_s(prediction: Prediction, objective: Objective) -> float:
    match objective:
        case Objective.ITERATION:
            return prediction.iteration_s
        case Objective.BOTTLENECK:
            return prediction.bottleneck_s
    return prediction.latency_s


def compare(
    problem: Problem,
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> Comparison:
    """Asks the solvers, the portfolio of all unless named, and judges what they say.

    Args:
        names: keys of `SOLVERS`.
        time_limit_s: for all together; what is not begun by then is left out.
        progress: called with each solver's name before it starts.

    Raises:
        OptionError: if a name is unknown.
    """
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise OptionError(f"unknown solver {unknown[0]!r}; known: {', '.join(SOLVERS)}")
    begin = time.monotonic()
    bound = lower_bound_s(problem)
    shortage = memory_shortage(problem)
    rows: list[Row] = []
    for name in names or SOLVERS:
        left_s = time_limit_s - (time.monotonic() - begin)
        if shortage is not None:
            rows.append(Row(name, Status.INFEASIBLE, None, shortage, 0.0))
        elif any(row.plan and row.plan.certificate.gap <= GOOD_ENOUGH for row in rows):
            reason = f"not asked: a plan within {GOOD_ENOUGH:.0%} of the bound was found"
            rows.append(Row(name, Status.UNKNOWN, None, reason, 0.0))
        elif left_s <= 0 and rows:
            rows.append(Row(name, Status.UNKNOWN, None, OUT_OF_TIME, 0.0))
        else:
            progress(name)
            rows.append(_row(problem, name, left_s, bound))
    if any(row.reason == OUT_OF_TIME for row in rows):
        rows = [_not_reproducible(row) for row in rows]
    return Comparison(tuple(rows), bound, shortage is not None)


def _row(problem: Problem, name: str, time_limit_s: float, bound_s: float) -> Row:
    """One solver's answer, judged."""
    start = time.monotonic()
    result = SOLVERS[name](problem, time_limit_s)
    plan = None
    if result.strategy is not None:
        plan, reason = judge(problem, name, result, bound_s)
        result = result if plan else _without_plan(result, reason)
    return Row(name, result.status, plan, result.reason, time.monotonic() - start)


def _not_reproducible(row: Row) -> Row:
    return row if row.plan is None else replace(row, plan=replace(row.plan, reproducible=False))


def _without_plan(result: Result, reason: str | None) -> Result:
    return Result(Status.UNKNOWN, None, space=result.space, reason=reason)


def judge(
    problem: Problem, solver: str, result: Result, bound_s: float
) -> tuple[Plan | None, str | None]:
    """The plan for a solver's strategy, or None and why it does not fit. Where the simulator finds
    it faster, and it fits, every stage gets one more microbatch in flight than the default.

    Args:
        bound_s: the lower bound for the problem's objective.

    Raises:
        ValueError: if the strategy is wrong, which is the solver's mistake.
    """
    strategy = result.strategy
    if strategy is None:
        raise ValueError(f"{solver} has no strategy to judge")
    objective = problem.options.objective
    verdicts, shortage = [], None
    for candidate in dict.fromkeys((strategy, deeper(strategy))):
        evaluation = evaluate(problem, candidate)
        if evaluation.shortage is None:
            timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
            verdicts.append((candidate, predict(problem, candidate, evaluation, timeline)))
        else:
            shortage = shortage or evaluation.shortage
    if not verdicts:
        return None, shortage
    strategy, prediction = min(verdicts, key=lambda one: _objective_s(one[1], objective))
    value = _objective_s(prediction, objective)
    certificate = Certificate(
        objective=objective.value,
        lower_bound_s=bound_s,
        gap=(value - bound_s) / bound_s if bound_s > 0 else 0.0,
        space_bound_s=result.bound_s,
        space=result.space,
    )
    return _plan(problem, solver, result, strategy, prediction, certificate), None


def deeper(strategy: Strategy) -> Strategy:
    """The same stages, each with one more microbatch in flight than the default."""
    widths = [stage.num_replicas for stage in strategy.stages]
    depths = default_warmups(widths, strategy.num_microbatches, 1, strategy.schedule)
    stages = zip(strategy.stages, depths, strict=True)
    return replace(strategy, stages=tuple(replace(s, warmup=depth) for s, depth in stages))


def predict(
    problem: Problem, strategy: Strategy, evaluation: Evaluation, timeline: Timeline
) -> Prediction:
    """What the simulator says of a strategy."""
    used = used_devices(strategy)
    devices = problem.topology.devices
    num_microbatches = strategy.num_microbatches
    computing = sum(compute_s(timeline, d) for d in used)
    return Prediction(
        iteration_s=timeline.iteration_s,
        bottleneck_s=bottleneck_s(evaluation.stages),
        latency_s=latency_s(evaluation.stages),
        throughput=num_microbatches * problem.profile.microbatch_size / timeline.iteration_s,
        bubble_fraction=1.0 - computing / (len(used) * timeline.iteration_s),
        closed_form_s=iteration_s(
            evaluation.stages,
            num_microbatches,
            phases=strategy.schedule is ScheduleName.GPIPE,
        ),
        stages=tuple(StagePrediction(s.forward_s, s.backward_s) for s in evaluation.stages),
        devices=tuple(
            DevicePrediction(
                device=d,
                name=devices[d].name,
                type=devices[d].type,
                compute_s=compute_s(timeline, d),
                communication_s=communication_s(timeline, d),
                idle_s=idle_s(timeline, d),
                memory=evaluation.memory[d],
            )
            for d in used
        ),
    )


def _plan(
    problem: Problem,
    solver: str,
    result: Result,
    strategy: Strategy,
    prediction: Prediction,
    certificate: Certificate,
) -> Plan:
    profile, topology, options = problem.profile, problem.topology, problem.options
    return Plan(
        strategy=strategy,
        prediction=prediction,
        certificate=certificate,
        solver=solver,
        status=result.status.value,
        reproducible=result.reproducible,
        ranks=host_order(topology, used_devices(strategy)),
        crossings=crossings(strategy, profile.graph),
        model_path=profile.model_path,
        model_hash=profile.model_hash,
        train=tuple(sorted(p.name for p in profile.graph.parameters if p.trainable)),
        profile_hash=artefact_hash(profile),
        topology=topology.name,
        topology_hash=artefact_hash(topology),
        dimensions=profile.dimensions,
        microbatch_size=profile.microbatch_size,
        dtype=profile.dtype,
        optimizer=options.optimizer.value,
        threads=profile.threads,
        seed=options.seed,
        notes=_notes(problem, strategy),
        versions=versions(),
    )


def _notes(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """What was approximated, for the user to know."""
    profile, topology = problem.profile, problem.topology
    used = used_devices(strategy)
    notes = list(topology.notes)
    types = {topology.devices[d].type for d in used}
    scaled = [name for name in rescaled(profile, topology) if name in types]
    if scaled:
        notes.append(
            f"times were {profile.source.value} on {profile.device_type} and rescaled to"
            f" {', '.join(scaled)} by roofline"
        )
    slow = max(slowdown(topology, used, d) for d in used)
    if slow > 1:
        notes.append(f"{len(used)} processes share the cores: computation is {slow:.3g}x slower")
    spare = len(topology.devices) - len(used)
    if spare:
        notes.append(f"{len(used)} of {len(topology.devices)} devices are used")
    return tuple(notes)


def versions() -> dict[str, str]:
    """The software that a plan depends on."""
    return {
        "planner": planner.__version__,
        **{name: metadata.version(name) for name in ("networkx", "numba", "numpy")},
    }
