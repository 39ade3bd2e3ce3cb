"""The judge: the one evaluator prices every strategy, whichever solver it is from, and the one
simulator runs it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata

from planner.artefacts.files import artefact_hash
from planner.artefacts.graph import gradient_dtype, losses_of
from planner.artefacts.modules import blocks
from planner.artefacts.options import Objective
from planner.artefacts.plan import Certificate, DevicePrediction, Plan, Prediction
from planner.artefacts.problem import Problem, Result
from planner.artefacts.profile import Profile
from planner.artefacts.roofline import device_is_unknown, rescaled, unknown_speeds
from planner.artefacts.strategy import Strategy, crossings, in_parts, indices_of, used_devices
from planner.artefacts.topology import Topology
from planner.clusters.routes import host_order
from planner.costs.closed_form import bottleneck_s, iteration_s
from planner.costs.evaluate import Evaluation, evaluate, evaluation_work_s
from planner.costs.operators import hosts_with_contention, slowdowns
from planner.costs.overlap import evaluated_with_overlap, with_overlap
from planner.costs.peak_bound import peak_bound_s
from planner.schedules.orders import default_warmups
from planner.simulator.estimate import estimated_iteration_s, least_s, least_work_s
from planner.simulator.objective import latency_s
from planner.simulator.steady import Iteration, iterate
from planner.simulator.timeline import shares_s
from planner.solvers.fewest import with_least_again
from planner.solvers.sharded.edges import with_local_all_gathers
from planner.support.version import __version__

# The work of all variants of a solver's strategy, in seconds of an ordinary core.
MAX_WORK_S = 5.0
# A time per minibatch that changes by less than this share has settled.
_SETTLED = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """A strategy, priced and simulated.

    Attributes:
        strategy: the solver's, or a variant of it that is faster.
        prediction: the simulator's figures.
        notes: where the judge did less than usual, or accepted more.
        shortage: why it does not fit by the planner's count; None if it does.
        work_s: the work of pricing and simulating all variants, in seconds of an ordinary core.
    """

    strategy: Strategy
    prediction: Prediction
    notes: tuple[str, ...] = ()
    shortage: str | None = None
    work_s: float = 0.0


def predicted_s(prediction: Prediction, objective: Objective) -> float:
    """The figure that an objective minimises, in s."""
    match objective:
        case Objective.ITERATION:
            return prediction.iteration_s
        case Objective.BOTTLENECK:
            return prediction.bottleneck_s
    return prediction.latency_s


def objective_s(plan: Plan) -> float:
    """The figure of a plan that its objective minimises, in s."""
    return predicted_s(plan.prediction, Objective(plan.certificate.objective))


def samples_in(objective: Objective, microbatch_size: int) -> int:
    """The samples that the figure of an objective is for, where microbatches of several sizes are
    compared: a bottleneck is per microbatch, iterations have the same samples.
    """
    return microbatch_size if objective is Objective.BOTTLENECK else 1


def comparable_s(plan: Plan) -> float:
    """The objective of a plan, to compare it with plans of other sizes of the microbatch, in s."""
    samples = samples_in(Objective(plan.certificate.objective), plan.microbatch_size)
    return objective_s(plan) / samples


def gap_to(bound_s: float, value_s: float) -> float:
    """The gap of a figure to its lower bound, relatively; 0 if the bound says nothing."""
    return (value_s - bound_s) / bound_s if bound_s > 0 else 0.0


def judge(
    problem: Problem, solver: str, result: Result, limit_s: float = MAX_WORK_S
) -> tuple[Verdict | None, str | None]:
    """The verdict on a solver's strategy, or None and why it does not fit. Where the simulator
    finds them faster, and they fit, another strategy of the solver is taken, or one that cuts what
    crosses stages (`solvers/sharded/edges.py`), or one more microbatch in flight per stage than the
    default, or one that runs less again (`solvers/fewest.py`). Other strategies are
    simulated unless they are certainly slower than the best so far (`simulator/estimate.py`), and
    then variants of those that were, the fastest first. Their work is limited; a note counts those
    that are left out.

    Args:
        limit_s: limit of that work, in seconds of an ordinary core, and at most `MAX_WORK_S`. The
            first variant that fits is simulated whatever it takes.

    Raises:
        ValueError: if the strategy is wrong, which is the solver's mistake.
    """
    if result.strategy is None:
        raise ValueError(f"{solver} has no strategy to judge")
    trial = _Trial(problem, min(limit_s, MAX_WORK_S))
    for strategy in (result.strategy, *result.others):
        if not trial.is_slower(strategy):
            trial.run(strategy)
    for vary in (partial(with_local_all_gathers, problem), with_deeper_warmup):
        for strategy in trial.fastest_first:
            trial.run(vary(strategy))
    for strategy in trial.fastest_first:
        trial.rerun_less(strategy)
    if trial.best is None:
        return None, trial.shortage
    best = replace(trial.best, work_s=trial.work_s)
    if not trial.left_out:
        return best, None
    note = (
        f"{len(trial.left_out)} of {len(trial.left_out) + len(trial.simulated)} variants of the"
        f" {solver} plan were not simulated: the work for that was done"
    )
    return replace(best, notes=(*best.notes, note)), None


class _Trial:
    """A solver's strategies, and variants of them, while they are simulated.

    Attributes:
        best: the best verdict; None while nothing fits.
        shortage: why the first one that does not fit does not.
        simulated: by strategy, before its collectives were put beside its computations, its
            objective in s; inf of those that do not fit.
        left_out: strategies for which there was no work.
        work_s: the work of all, in seconds of an ordinary core.
    """

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self.problem, self.limit_s = problem, limit_s
        self.best: Verdict | None = None
        self.shortage: str | None = None
        self.simulated: dict[Strategy, float] = {}
        self.left_out: dict[Strategy, None] = {}
        self.work_s, self._next_s = 0.0, 0.0

    @property
    def fastest_first(self) -> list[Strategy]:
        """What was simulated; those that do not fit are last."""
        return sorted(self.simulated, key=lambda one: self.simulated[one])

    def is_slower(self, strategy: Strategy) -> bool:
        """Whether a strategy is certainly slower than the best so far."""
        if self.best is None or self._is_out_of_work:
            return False
        strategy = with_overlap(self.problem, strategy)
        self.work_s += least_work_s(strategy)
        return least_s(self.problem, strategy) > self._value_s(self.best)

    def run(self, strategy: Strategy) -> None:
        """Evaluates and simulates a strategy, once, if there is work for it."""
        if strategy in self.simulated or strategy in self.left_out:
            return
        if self.best is not None and self._is_out_of_work:
            self.left_out[strategy] = None
            return
        self.simulated[strategy] = math.inf
        overlapped = with_overlap(self.problem, strategy)
        overlapped, evaluation = evaluated_with_overlap(self.problem, overlapped)
        self._next_s = evaluation_work_s(overlapped, evaluation)
        self.work_s += self._next_s
        if evaluation.shortage is not None:
            self.shortage = self.shortage or evaluation.shortage
            return
        verdict = _verdict(self.problem, overlapped, evaluation)
        self.simulated[strategy] = value_s = self._value_s(verdict)
        if self.best is None or value_s < self._value_s(self.best):
            self.best = verdict

    def rerun_less(self, strategy: Strategy) -> None:
        """Evaluates and simulates what a strategy becomes where it runs again only what it has to,
        if there is work for it.
        """
        if not self._is_out_of_work:
            for less, work_s in with_least_again(self.problem, strategy):
                self.run(less)
                self.work_s += work_s

    def _value_s(self, verdict: Verdict) -> float:
        return predicted_s(verdict.prediction, self.problem.training.objective)

    @property
    def _is_out_of_work(self) -> bool:
        # Variants are about as long as the one before.
        return self.work_s + self._next_s > self.limit_s


def _verdict(problem: Problem, strategy: Strategy, evaluation: Evaluation) -> Verdict:
    """Simulates a strategy that has been evaluated."""
    iteration = iterate(problem, strategy, evaluation)
    prediction = predict(problem, strategy, evaluation, iteration)
    if iteration.unsettled < _SETTLED:
        return Verdict(strategy, prediction)
    note = (
        f"the time per minibatch had not settled after {iteration.num_minibatches} minibatches: it"
        f" is a mean, {100 * iteration.unsettled:.1g} % from that of their second half"
    )
    return Verdict(strategy, prediction, (note,))


def judge_unchanged(problem: Problem, strategy: Strategy) -> tuple[Verdict, int]:
    """The verdict on a strategy and no variant of it, even if it does not fit by the planner's
    count, which a note says; and the number of actions that were simulated.

    Raises:
        ValueError: if the strategy is wrong.
    """
    evaluation = evaluate(problem, strategy)
    verdict = _verdict(problem, strategy, evaluation)
    if evaluation.shortage is not None:
        note = f"it does not fit by the planner's count: {evaluation.shortage}"
        notes = (note, *verdict.notes)
        verdict = replace(verdict, notes=notes, shortage=evaluation.shortage)
    return verdict, len(evaluation.program.code)


def with_deeper_warmup(strategy: Strategy) -> Strategy:
    """The same stages, each with one more microbatch in flight than the default; unchanged under an
    asynchronous schedule, where the minibatches in flight decide what is trained.
    """
    if strategy.schedule.is_asynchronous:
        return strategy
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
    problem: Problem, strategy: Strategy, evaluation: Evaluation, iteration: Iteration
) -> Prediction:
    """The simulator's figures of a strategy."""
    times = iteration.window
    used = used_devices(strategy)
    devices = problem.topology.devices
    num_microbatches = strategy.num_microbatches
    closed_s = (
        estimated_iteration_s(problem, strategy)
        if any(map(in_parts, strategy.stages))
        else iteration_s(evaluation.stages, num_microbatches, strategy.schedule)
    )
    computing, communicating, idle = (share.tolist() for share in shares_s(times))
    return Prediction(
        iteration_s=times.iteration_s,
        bottleneck_s=bottleneck_s(evaluation.stages, strategy.schedule),
        latency_s=latency_s(problem, strategy, evaluation, iteration.times),
        throughput=num_microbatches * problem.profile.microbatch_size / times.iteration_s,
        bubble_fraction=max(0.0, 1.0 - sum(computing) / (len(used) * times.iteration_s)),
        closed_form_s=closed_s,
        stages=evaluation.times,
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


def _modules(strategy: Strategy, profile: Profile) -> tuple[tuple[str, ...], ...]:
    """Per stage, the modules that its operators came from."""
    if not profile.modules:
        return ()
    return tuple(
        blocks([profile.modules[v] for v in indices_of(stage, profile.graph)])
        for stage in strategy.stages
    )


def as_plan(
    problem: Problem,
    solver: str,
    result: Result,
    verdict: Verdict,
    bound_s: float,
) -> Plan:
    """The artefact: a strategy with its prediction, its certificate, its notes and its origins. All
    but the paths is filled in here, and only here.

    Args:
        bound_s: the lower bound for the problem's objective.
    """
    profile, topology = problem.profile, problem.topology
    value_s = predicted_s(verdict.prediction, problem.training.objective)
    graph = profile.graph
    ranks = host_order(topology, used_devices(verdict.strategy))
    return Plan(
        strategy=verdict.strategy,
        prediction=verdict.prediction,
        certificate=Certificate(
            objective=problem.training.objective.value,
            lower_bound_s=bound_s,
            gap=gap_to(bound_s, value_s),
            space_bound_s=result.bound_s,
            space=result.space,
            peak_bound_s=peak_bound_s(problem) or None,
        ),
        solver=solver,
        status=result.status.value,
        reproducible=result.reproducible,
        ranks=ranks,
        hosts=_hosts(topology, ranks),
        crossings=crossings(verdict.strategy, profile.graph),
        model_path=profile.model_path,
        model_hash=profile.model_hash,
        train=tuple(sorted(p.name for p in profile.graph.parameters if p.trainable)),
        profile_hash=artefact_hash(profile),
        topology=topology.name,
        topology_hash=artefact_hash(topology),
        dimensions=profile.dimensions,
        microbatch_size=profile.microbatch_size,
        dtype=profile.dtype,
        optimizer=problem.training.optimizer.value,
        threads=profile.threads,
        seed=problem.search.seed,
        notes=(*_notes(problem, verdict.strategy), *verdict.notes),
        versions=versions(),
        source=profile.source,
        engine=profile.engine,
        profiled_on=profile.device_type,
        modules=_modules(verdict.strategy, profile),
        tie=profile.tie,
        untie=profile.untie,
        losses=losses_of(graph) if graph.losses or len(graph.outputs) > 1 else (),
        batch_norm=profile.batch_norm,
        parameter_dtype=profile.parameter_dtype,
        gradient_dtype=gradient_dtype(profile.graph),
    )


def _hosts(topology: Topology, ranks: Sequence[int]) -> tuple[str, ...]:
    """The host of each rank; none where all are on one."""
    hosts = tuple(topology.devices[device].host for device in ranks)
    return hosts if len({*hosts}) > 1 else ()


def _notes(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """The approximations that the user has to know."""
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
        kinds = [kind for kind in topology.device_types if kind.name in scaled]
        own = [] if problem.measured_on is None else [problem.measured_on]
        notes += unknown_speeds(profile.dtype, own + kinds)
    if device_is_unknown(profile):
        notes.append(
            "times are imported, and the file does not say from which device: they are taken as"
            f" they are on {', '.join(sorted(types))}"
        )
    if (calibrated := calibration_note(problem, types)) is not None:
        notes.append(calibrated)
    slow = max(slowdowns(problem, used).values())
    if slow > 1:
        measured = any(topology.devices[d].host in hosts_with_contention(problem) for d in used)
        much = (
            f"{slow:.3g}x slower while all of them compute, as measured"
            if measured
            else (f"{slow:.3g}x slower")
        )
        notes.append(f"{len(used)} processes share the cores: computation is {much}")
    spare = len(topology.devices) - len(used)
    if spare:
        notes.append(f"{len(used)} of {len(topology.devices)} devices are used")
    return tuple(notes)


def calibration_note(problem: Problem, types: Collection[str]) -> str | None:
    """A note on the calibration that corrects the times of a problem; None if none does.

    Args:
        types: of the devices that are used.
    """
    known = problem.calibration
    if known.device_type not in types:
        return None
    models = "1 model" if known.models == 1 else f"{known.models} models"
    if known.runs != 1:
        return f"calibrated from {known.runs} runs of {models}"
    return (
        f"calibrated from 1 run of {models}, whose chance errors are in all times: give planner"
        " calibrate more traces, or --no-calibration here"
    )


def versions() -> dict[str, str]:
    """The software that a plan depends on."""
    return {
        "planner": __version__,
        **{name: metadata.version(name) for name in ("numba", "numpy")},
    }
