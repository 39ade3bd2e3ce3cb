"""The judge: every strategy, whoever found it, is priced by the one evaluator and run by the one
simulator.
"""

from dataclasses import replace
from importlib import metadata

from planner.clusters.routes import host_order
from planner.costs.closed_form import bottleneck_s, iteration_s
from planner.costs.compute import fits_any_device, rescaled, slowdowns
from planner.costs.evaluate import Evaluation, evaluate
from planner.files import artefact_hash
from planner.plan import Certificate, DevicePrediction, Plan, Prediction, StagePrediction
from planner.problem import Objective, Problem, Result
from planner.schedules.actions import Kind
from planner.schedules.orders import default_warmups, with_microbatches
from planner.schedules.program import program
from planner.simulator.events import run
from planner.simulator.timeline import Times, shares_s
from planner.strategy import ScheduleName, Strategy, crossings, used_devices
from planner.version import __version__

# Variants of a solver's strategy are simulated up to so many actions together: some seconds.
MOST_ACTIONS = 4_000_000


def objective_s(plan: Plan) -> float:
    """The figure of a plan that its objective minimises, in s."""
    return _objective_s(plan.prediction, Objective(plan.certificate.objective))


def samples_of(plan: Plan) -> int:
    """What an objective is divided by to compare microbatches of different sizes: a bottleneck is
    per microbatch, iterations have the same samples.
    """
    bottleneck = plan.certificate.objective == Objective.BOTTLENECK.value
    return plan.microbatch_size if bottleneck else 1


def comparable_s(plan: Plan) -> float:
    """The objective of a plan, to compare it with plans of other sizes of the microbatch, in s."""
    return objective_s(plan) / samples_of(plan)


def _objective_s(prediction: Prediction, objective: Objective) -> float:
    match objective:
        case Objective.ITERATION:
            return prediction.iteration_s
        case Objective.BOTTLENECK:
            return prediction.bottleneck_s
    return prediction.latency_s


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
    certificate = certificate_of(problem, result, prediction, bound_s)
    plan = as_plan(problem, solver, result, strategy, prediction, certificate)
    if left_out:
        note = (
            f"{left_out} of {len(candidates)} variants of the {solver} plan were not simulated:"
            f" an iteration has {size} actions"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return plan, None


def exactly(
    problem: Problem, solver: str, result: Result, bound_s: float
) -> tuple[Plan, Evaluation, Times]:
    """The plan for a solver's strategy as it is, even if it does not fit by the planner's count,
    which a note says; and what it was priced and timed at.

    Args:
        bound_s: the lower bound for the problem's objective.

    Raises:
        ValueError: if there is no strategy, or it is wrong.
    """
    if result.strategy is None:
        raise ValueError(f"{solver} has no strategy to judge")
    evaluation = evaluate(problem, result.strategy)
    times = run(evaluation.program, evaluation.costs, problem.topology)
    prediction = predict(problem, result.strategy, evaluation, times)
    certificate = certificate_of(problem, result, prediction, bound_s)
    plan = as_plan(problem, solver, result, result.strategy, prediction, certificate)
    if evaluation.shortage is not None:
        note = f"it does not fit by the planner's count: {evaluation.shortage}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan, evaluation, times


def certificate_of(
    problem: Problem, result: Result, prediction: Prediction, bound_s: float
) -> Certificate:
    """What a prediction proves against the lower bound for the problem's objective, in s."""
    objective = problem.options.objective
    value = _objective_s(prediction, objective)
    return Certificate(
        objective=objective.value,
        lower_bound_s=bound_s,
        gap=(value - bound_s) / bound_s if bound_s > 0 else 0.0,
        space_bound_s=result.bound_s,
        space=result.space,
    )


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
        latency_s=_latency_s(problem, strategy, evaluation, times),
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


def _latency_s(problem: Problem, strategy: Strategy, evaluation: Evaluation, times: Times) -> float:
    """When the last backward of one microbatch ends that is alone, in s."""
    if strategy.num_microbatches > 1:
        lists = program(
            with_microbatches(strategy, 1),
            problem.profile.graph,
            [StagePrediction(stage.forward_s, stage.backward_s) for stage in evaluation.stages],
        )
        times = run(lists, evaluation.costs, problem.topology)
    return float(times.end_s[times.code.kind == Kind.COMPUTE].max(initial=0.0))


def as_plan(
    problem: Problem,
    solver: str,
    result: Result,
    strategy: Strategy,
    prediction: Prediction,
    certificate: Certificate,
) -> Plan:
    """The artefact: a strategy with all that is said of it, and what it was made from."""
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
    known = problem.calibration
    if known.device_type in types:
        runs = "1 run" if known.runs == 1 else f"{known.runs} runs"
        models = "1 model" if known.models == 1 else f"{known.models} models"
        notes.append(f"calibrated from {runs} of {models}")
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
        "planner": __version__,
        **{name: metadata.version(name) for name in ("numba", "numpy")},
    }
