"""The portfolio: its solvers are asked, every answer is priced by the one evaluator and run by
the one simulator, and the best that fits is the plan. So no plan is worse than plain data
parallelism or any other row of the table.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import planner
from planner.costs.bounds import lower_bound_s, memory_shortage
from planner.costs.closed_form import bottleneck_s, iteration_s, latency_s
from planner.costs.compute import fits_any_device, rescaled, slowdowns
from planner.costs.evaluate import Evaluation, evaluate
from planner.errors import OptionError
from planner.files import artefact_hash
from planner.interpolate import interpolated
from planner.jit import compile_clock
from planner.prediction import (
    Certificate,
    DevicePrediction,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.problem import Objective, Problem, Result, Status
from planner.profile import Profile, Source
from planner.schedules import default_warmups
from planner.simulate.events import run
from planner.simulate.timeline import Times, shares_s
from planner.solvers import PORTFOLIO, SOLVERS
from planner.strategy import ScheduleName, Strategy, crossings, used_devices
from planner.topology import host_order

# The search ends when a plan is this close to the lower bound.
GOOD_ENOUGH = 0.01
# Variants of a solver's strategy are simulated up to so many actions together: some seconds.
MOST_ACTIONS = 4_000_000
# Solvers that take next to no time, whatever the limit.
ALWAYS_ASKED = ("single", "data-parallel")
# Of microbatches between those profiled, so many sizes are planned for.
MOST_BETWEEN = 4
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
        microbatch_size: samples in a microbatch.
        source: how the profile of that size was obtained.
    """

    solver: str
    status: Status
    plan: Plan | None
    reason: str | None
    solve_s: float
    microbatch_size: int
    source: Source


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all solvers that were asked.

    Attributes:
        rows: in the order of the asking.
        lower_bound_s: for the objective, over all strategies.
        proved_infeasible: whether no strategy can fit, whoever looks for it.
        notes: what was not asked, and why.
    """

    rows: tuple[Row, ...]
    lower_bound_s: float
    proved_infeasible: bool
    notes: tuple[str, ...] = ()

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
    objective = objective_s(row.plan) / _samples(row.plan)
    return objective, row.plan.prediction.iteration_s, not optimal


def _samples(plan: Plan) -> int:
    """What an objective is divided by to compare microbatches of different sizes: a bottleneck is
    per microbatch, iterations have the same samples.
    """
    bottleneck = plan.certificate.objective == Objective.BOTTLENECK.value
    return plan.microbatch_size if bottleneck else 1


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
    """Asks the solvers, `PORTFOLIO` unless named, and judges what they say.

    Args:
        names: keys of `SOLVERS`.
        time_limit_s: for all together, compiling left out; what is not begun by then is left out.
        progress: called with each solver's name before it starts.

    Raises:
        OptionError: if a name is unknown.
    """
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise OptionError(f"unknown solver {unknown[0]!r}; known: {', '.join(SOLVERS)}")
    bound = lower_bound_s(problem)
    shortage, profile = memory_shortage(problem), problem.profile
    size, source = profile.microbatch_size, profile.source
    rows: list[Row] = []
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for name in names or PORTFOLIO:
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            reason = _not_asked(name, rows, left_s)
            if shortage is not None:
                rows.append(Row(name, Status.INFEASIBLE, None, shortage, 0.0, size, source))
            elif reason is not None:
                rows.append(Row(name, Status.UNKNOWN, None, reason, 0.0, size, source))
            else:
                progress(name)
                known = tuple(row.plan.strategy for row in rows if row.plan is not None)
                rows.append(_row(replace(problem, known=known), name, left_s, bound))
    if any(row.reason == OUT_OF_TIME for row in rows):
        rows = [_not_reproducible(row) for row in rows]
    return Comparison(tuple(rows), bound, shortage is not None)


def _not_asked(name: str, rows: Sequence[Row], left_s: float) -> str | None:
    """Why a solver is not asked, or None. Plans are never worse than data parallelism, so it always
    is, as long as nothing better is there.
    """
    if any(row.plan and row.plan.certificate.gap <= GOOD_ENOUGH for row in rows):
        return f"not asked: a plan within {GOOD_ENOUGH:.0%} of the bound was found"
    return OUT_OF_TIME if left_s <= 0 and rows and name not in ALWAYS_ASKED else None


def compare_sizes(
    problems: Sequence[Problem],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> Comparison:
    """The same for microbatches of several sizes, of which the best is taken. The lower bound and
    the gaps are over all of them.

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        time_limit_s: for all together.
    """
    return _joined(problems, _compare_each(problems, names, time_limit_s, progress))


def compare_between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> tuple[Comparison, tuple[Problem, ...]]:
    """`compare_sizes`, and then the same for sizes that were not profiled, interpolated: those next
    to the best one, because a microbatch that is too small pays overheads and one that is too large
    empties the pipeline or the memory, and the best is somewhere between. At most `MOST_BETWEEN`
    are asked, powers of two and the nearest first; none whose lower bound is above what is there.

    Args:
        problems: as `compare_sizes` takes them.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.

    Returns:
        The comparison, and all problems that were asked, ascending by size.
    """
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        between = _sizes_between(problems, profiles)
        share = len(problems) / (len(problems) + min(len(between), MOST_BETWEEN))
        found = _compare_each(problems, names, time_limit_s * share, progress)
        added, notes = _between(problems, profiles, between, _joined(problems, found))
        left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
        found += _compare_each(added, names, left_s, progress)
    pairs = sorted(
        zip((*problems, *added), found, strict=True),
        key=lambda pair: pair[0].profile.microbatch_size,
    )
    asked = tuple(problem for problem, _ in pairs)
    joined = _joined(asked, [comparison for _, comparison in pairs])
    return replace(joined, notes=notes), asked


def _sizes_between(problems: Sequence[Problem], profiles: Sequence[Profile]) -> tuple[int, ...]:
    """The sizes that divide the samples of an iteration and lie between those profiled."""
    samples = problems[0].profile.microbatch_size * problems[0].options.num_microbatches
    profiled = [profile.microbatch_size for profile in profiles]
    sizes = range(profiled[0] + 1, profiled[-1])
    return tuple(n for n in sizes if samples % n == 0 and n not in profiled)


def _between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    between: Sequence[int],
    found: Comparison,
) -> tuple[list[Problem], tuple[str, ...]]:
    """Problems of interpolated sizes that may have a better plan than was found, and which sizes
    have none and why.
    """
    best, sizes = found.best, [problem.profile.microbatch_size for problem in problems]
    # Where nothing fits, only what is smaller may.
    near = sizes[0] if best is None else best.microbatch_size
    low = max((n for n in sizes if n < near), default=0)
    high = min((n for n in sizes if n > near), default=math.inf) if best else near
    candidates = [n for n in between if low < n < high]
    candidates.sort(key=lambda n: (n.bit_count() > 1, abs(math.log(n / near)), n))
    samples = sizes[0] * problems[0].options.num_microbatches
    added, notes = [], []
    for size in candidates[:MOST_BETWEEN]:
        try:
            profile = interpolated(profiles, size)
        except OptionError as error:
            notes.append(str(error))
            continue
        options = replace(problems[0].options, num_microbatches=samples // size)
        problem = replace(problems[0], profile=profile, options=options)
        if best is None or best.plan is None or _may_beat(problem, best.plan):
            added.append(problem)
    return sorted(added, key=lambda one: one.profile.microbatch_size), tuple(notes)


def _may_beat(problem: Problem, plan: Plan) -> bool:
    bottleneck = problem.options.objective is Objective.BOTTLENECK
    samples = problem.profile.microbatch_size if bottleneck else 1
    return lower_bound_s(problem) / samples < objective_s(plan) / _samples(plan)


def _compare_each(
    problems: Sequence[Problem],
    names: Sequence[str] | None,
    time_limit_s: float,
    progress: Callable[[str], None],
) -> list[Comparison]:
    """Each problem by itself, within a time for all together."""
    found = []
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for index, problem in enumerate(problems):
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            found.append(compare(problem, names, left_s / (len(problems) - index), progress))
    return found


def _joined(problems: Sequence[Problem], found: Sequence[Comparison]) -> Comparison:
    """One comparison of those of several sizes."""
    if len(found) == 1:
        return found[0]
    rows = tuple(row for one in found for row in one.rows)
    if any(row.reason == OUT_OF_TIME for row in rows):
        rows = tuple(_not_reproducible(row) for row in rows)
    bottleneck = problems[0].options.objective is Objective.BOTTLENECK
    samples = [p.profile.microbatch_size if bottleneck else 1 for p in problems]
    bound_s = min(one.lower_bound_s / n for one, n in zip(found, samples, strict=True))
    return Comparison(
        tuple(_bounded(row, bound_s) for row in rows),
        bound_s * min(samples),
        all(one.proved_infeasible for one in found),
    )


def _bounded(row: Row, bound_s: float) -> Row:
    """The row with a gap to a bound per `_samples`."""
    if row.plan is None:
        return row
    own_s = bound_s * _samples(row.plan)
    gap = objective_s(row.plan) / own_s - 1 if own_s > 0 else 0.0
    certificate = replace(row.plan.certificate, lower_bound_s=own_s, gap=gap)
    return replace(row, plan=replace(row.plan, certificate=certificate))


def _row(problem: Problem, name: str, time_limit_s: float, bound_s: float) -> Row:
    """One solver's answer, judged."""
    start = time.monotonic()
    result = SOLVERS[name](problem, time_limit_s)
    plan = None
    if result.strategy is not None:
        plan, reason = judge(problem, name, result, bound_s)
        result = result if plan else _without_plan(result, reason)
    took_s, size = time.monotonic() - start, problem.profile.microbatch_size
    return Row(name, result.status, plan, result.reason, took_s, size, problem.profile.source)


def _not_reproducible(row: Row) -> Row:
    return row if row.plan is None else replace(row, plan=replace(row.plan, reproducible=False))


def _without_plan(result: Result, reason: str | None) -> Result:
    return Result(Status.UNKNOWN, None, space=result.space, reason=reason)


def judge(
    problem: Problem, solver: str, result: Result, bound_s: float
) -> tuple[Plan | None, str | None]:
    """The plan for a solver's strategy, or None and why it does not fit. Where the simulator finds
    them faster, and they fit, another strategy of the solver is taken, or one more microbatch in
    flight per stage than the default; no more of them than a budget of actions allows, which a
    note says.

    Args:
        bound_s: the lower bound for the problem's objective.

    Raises:
        ValueError: if the strategy is wrong, which is the solver's mistake.
    """
    strategy = result.strategy
    if strategy is None:
        raise ValueError(f"{solver} has no strategy to judge")
    objective = problem.options.objective
    verdicts: list[tuple[Strategy, Prediction]] = []
    shortage = None
    tried = (strategy, *result.others)
    candidates = tuple(dict.fromkeys((*tried, *map(deeper, tried))))
    simulated = left_out = size = 0
    for candidate in candidates:
        # They are about as long as the one before.
        if verdicts and simulated + size > MOST_ACTIONS:
            left_out += 1
            continue
        evaluation = evaluate(problem, candidate)
        if evaluation.shortage is None:
            size = len(evaluation.program.code)
            simulated += size
            times = run(evaluation.program, evaluation.costs, problem.topology)
            verdicts.append((candidate, predict(problem, candidate, evaluation, times)))
        else:
            shortage = shortage or evaluation.shortage
    if not verdicts:
        return None, shortage
    strategy, prediction = min(verdicts, key=lambda one: _objective_s(one[1], objective))
    certificate = _certificate(problem, result, prediction, bound_s)
    plan = _plan(problem, solver, result, strategy, prediction, certificate)
    if left_out:
        note = (
            f"{left_out} of {len(candidates)} variants of the {solver} plan were not simulated:"
            f" an iteration has {size} actions"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return plan, None


def _certificate(
    problem: Problem, result: Result, prediction: Prediction, bound_s: float
) -> Certificate:
    objective = problem.options.objective
    value = _objective_s(prediction, objective)
    return Certificate(
        objective=objective.value,
        lower_bound_s=bound_s,
        gap=(value - bound_s) / bound_s if bound_s > 0 else 0.0,
        space_bound_s=result.bound_s,
        space=result.space,
    )


def under_pipedream(problem: Problem) -> Comparison:
    """PipeDream's plan alone, as its own cost model judges it. The plan is priced and simulated
    like every other one, but kept if it does not fit by the planner's count, which a note says.
    """
    from planner.solvers.pipedream import solve_alone  # compiled: loaded when it is asked

    start, bound_s = time.monotonic(), lower_bound_s(problem)
    name, result, plan = "pipedream", solve_alone(problem), None
    if result.strategy is not None:
        evaluation = evaluate(problem, result.strategy)
        times = run(evaluation.program, evaluation.costs, problem.topology)
        prediction = predict(problem, result.strategy, evaluation, times)
        certificate = _certificate(problem, result, prediction, bound_s)
        plan = _plan(problem, name, result, result.strategy, prediction, certificate)
        notes = ["chosen by PipeDream's cost model; the prediction is the planner's"]
        if evaluation.shortage is not None:
            notes.append(f"it does not fit by the planner's count: {evaluation.shortage}")
        plan = replace(plan, notes=(*plan.notes, *notes))
    took_s, size = time.monotonic() - start, problem.profile.microbatch_size
    row = Row(name, result.status, plan, result.reason, took_s, size, problem.profile.source)
    return Comparison((row,), bound_s, result.status is Status.INFEASIBLE)


def deeper(strategy: Strategy) -> Strategy:
    """The same stages, each with one more microbatch in flight than the default."""
    depths = default_warmups(
        [stage.num_replicas for stage in strategy.stages],
        strategy.num_microbatches,
        1,
        strategy.schedule,
        [stage.devices for stage in strategy.stages],
    )
    stages = zip(strategy.stages, depths, strict=True)
    return replace(strategy, stages=tuple(replace(s, warmup=depth) for s, depth in stages))


def predict(
    problem: Problem, strategy: Strategy, evaluation: Evaluation, times: Times
) -> Prediction:
    """What the simulator says of a strategy."""
    used = used_devices(strategy)
    devices = problem.topology.devices
    num_microbatches = strategy.num_microbatches
    computing, communicating, idle = (share.tolist() for share in shares_s(times))
    return Prediction(
        iteration_s=times.iteration_s,
        bottleneck_s=bottleneck_s(evaluation.stages),
        latency_s=latency_s(evaluation.stages),
        throughput=num_microbatches * problem.profile.microbatch_size / times.iteration_s,
        bubble_fraction=1.0 - sum(computing) / (len(used) * times.iteration_s),
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
                compute_s=compute_s,
                communication_s=communication_s,
                idle_s=idle_s,
                memory=evaluation.memory[d],
            )
            for d, compute_s, communication_s, idle_s in zip(
                used, computing, communicating, idle, strict=True
            )
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
        source=profile.source,
        engine=profile.engine,
        profiled_on=profile.device_type,
    )


def _notes(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """What was approximated, for the user to know."""
    profile, topology = problem.profile, problem.topology
    used = used_devices(strategy)
    notes = list(topology.notes)
    types = {topology.devices[d].type for d in used}
    notes += [f"profile: {warning}" for warning in profile.warnings]
    scaled = [name for name in rescaled(profile, topology) if name in types]
    if scaled:
        notes.append(
            f"{profile.source.value} times, of {profile.device_type}, are rescaled to"
            f" {', '.join(scaled)} by roofline"
        )
    if fits_any_device(profile):
        notes.append(
            "times are imported, and the file does not say from which device: they are taken as"
            f" they are on {', '.join(sorted(types))}"
        )
    slow = max(slowdowns(topology, used).values())
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
        **{name: metadata.version(name) for name in ("numba", "numpy")},
    }
