"""`calibrate`: measured runs -> `Calibration`, and how far it can be trusted.

Each part is a linear regression with a Gaussian prior around the prediction without a calibration:
for the parameters x, with prior means m and widths s, and for relative errors of width e,

    minimise  sum over observations ((a x - y) / (e y))^2 + sum over parameters ((x - m) / s)^2,

because a trace shows only sums over the operators of a stage, and many types share few sums
(Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3). Times are not negative, so
their parameters have a lower bound, and the minimum is sought within it.

The error after calibration is that of runs that were not fitted: each model's runs are predicted
from those of the other models, or, with one model only, each run from the other runs.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from planner.artefacts.calibration import Calibration, Deviation, whole_share
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.segments import segments_of
from planner.artefacts.strategy import Stage
from planner.costs.actions import ActionCosts
from planner.costs.evaluate import evaluate
from planner.costs.local_stage import local_stage
from planner.costs.operators import loss_input_bytes
from planner.costs.stage_pass import collective_steps, count_collectives, stage_pass
from planner.costs.transfers import transfer_s
from planner.schedules.actions import AllReduce, Compute, Direction, Receive, Send, Step
from planner.simulator.events import run as simulated
from planner.simulator.timeline import Event, Timeline, timeline_of
from planner.support.arrays import Floats, Ints

# Widths of errors and priors, as shares.
STAGE_ERROR, DIRECTION_ERROR, GAP_ERROR, TAIL_ERROR = 0.03, 0.1, 0.3, 0.2
FACTOR_WIDTH, TYPE_WIDTH, TAIL_WIDTH = 0.3, 0.1, 1.0
# Widths in s, and s per byte.
LAUNCH_WIDTH_S, POST_WIDTH_S, COPY_WIDTH, LOSS_WIDTH = 3e-4, 1e-3, 1e-9, 3e-9
COLLECTIVE_WIDTH_S = 1e-3
LEAST_TYPE_FACTOR = 0.05
"""No type of operator is faster than this share of its measured time."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One measured iteration.

    Attributes:
        name: the name that reports show.
        problem: the problem that the strategy was made for, without a calibration.
        plan: the plan that was run.
        timeline: the measured timeline.
    """

    name: str
    problem: Problem
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The iteration time of one run, measured and predicted.

    Attributes:
        name: the run's name.
        measured_s: measured time.
        before_s: time predicted without a calibration.
        after_s: time predicted with a calibration that was fitted to the runs of other models, or
            to the other runs of the only model; `before_s` where there is no other run.
    """

    name: str
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class CheckedCalibration:
    """A calibration and its cross-validation.

    Attributes:
        calibration: the calibration that was fitted to all runs.
        checked: every run.
        left_out: "model" or "run": the unit that cross-validation left out.
    """

    calibration: Calibration
    checked: tuple[CheckedRun, ...]
    left_out: str

    @property
    def error_before(self) -> float:
        """Mean of |predicted - measured| / measured, without a calibration."""
        return fmean(abs(one.before_s / one.measured_s - 1) for one in self.checked)

    @property
    def error_after(self) -> float:
        """The same by calibrations that the run was left out of."""
        return fmean(abs(one.after_s / one.measured_s - 1) for one in self.checked)


def calibrate(runs: Sequence[MeasuredRun]) -> CheckedCalibration:
    """A calibration for the device type of some runs, checked by cross-validation.

    Args:
        runs: at least one run; all are on devices of one type.
    """
    profiles = _profiles_of(runs)
    by_model = len(profiles) > 1
    groups: dict[int, list[MeasuredRun]] = defaultdict(list)
    for number, one in enumerate(runs):
        groups[profiles.index(one.problem.profile) if by_model else number].append(one)
    checked = {}
    for number, group in groups.items():
        others = [one for key, rest in groups.items() if key != number for one in rest]
        known = fit(others) if others else Calibration()
        for one in group:
            checked[id(one)] = CheckedRun(
                one.name,
                one.timeline.iteration_s,
                predicted_s(one, Calibration()),
                predicted_s(one, known),
            )
    return CheckedCalibration(
        fit(runs), tuple(checked[id(one)] for one in runs), "model" if by_model else "run"
    )


def _profiles_of(runs: Iterable[MeasuredRun]) -> list[Profile]:
    """The profiles of some runs, each once."""
    profiles: list[Profile] = []
    for one in runs:
        if one.problem.profile not in profiles:
            profiles.append(one.problem.profile)
    return profiles


def predicted_s(run: MeasuredRun, calibration: Calibration) -> float:
    """The simulated iteration time of a run's strategy, in s."""
    problem = replace(run.problem, calibration=calibration)
    evaluation = evaluate(problem, run.plan.strategy)
    return simulated(evaluation.program, evaluation.costs, problem.topology).iteration_s


def fit(runs: Sequence[MeasuredRun]) -> Calibration:
    """The calibration that fits the runs best."""
    first = runs[0]
    kind = first.problem.topology.devices[first.plan.ranks[0]].type
    post_s, copy_s_per_byte = _posting(runs)
    computation = _computation(runs)
    launch_s = computation.launch_s  # all-reduces and steps are launched, too
    return replace(
        computation,
        device_type=kind,
        runs=len(runs),
        models=len(_profiles_of(runs)),
        post_s=post_s,
        copy_s_per_byte=copy_s_per_byte,
        wire=_share_left_for_links(runs),
        sums=_factor(pair for one in runs for pair in _all_reduces(one, launch_s)),
        steps=_factor((p, m - launch_s) for one in runs for p, m in _steps(one)),
    )


# ---------------------------------------------------------------------------- regression


def regression(
    rows: Floats, values: Floats, errors: Floats, means: Floats, widths: Floats, least: Floats
) -> Floats:
    """(p,) the parameters that explain some values best, within their lower bounds.

    Args:
        rows: (n, p) coefficients: a value is the product of its row and the parameters.
        values: (n,) positive values.
        errors: (n,) relative width of each value's error.
        means: (p,) means of the parameters' priors.
        widths: (p,) widths of the parameters' priors.
        least: (p,) lower bound of each parameter; -inf where there is none.

    Source: bounded-variable least squares, Stark and Parker, Computational Statistics 10, 1995.
    """
    from scipy.optimize import lsq_linear  # it takes half a second to load, and only calibrate does

    count = len(means)
    scale = errors * values
    # The unknowns are distances from the means in widths, so that parameters of 1e-9 and of 1 have
    # the same order of magnitude, and the priors become an identity matrix of full rank: the
    # minimum is unique.
    matrix = np.vstack([rows * widths / scale[:, None], np.eye(count)])
    target = np.concatenate([(values - rows @ means) / scale, np.zeros(count)])
    # A parameter that was set to its bound is freed again where its gradient says that this helps.
    # Without that step the result may be far off: one parameter's bound changes the others.
    solution = lsq_linear(
        matrix, target, ((least - means) / widths, np.inf), method="bvls", tol=1e-12,
        max_iter=100 * count,
    )  # fmt: skip
    assert solution.success, solution.message
    parameters: Floats = means + widths * solution.x
    return np.maximum(least, parameters)  # rounding may leave one just below its bound


def _factor(pairs: Iterable[tuple[float, float]]) -> float:
    """The factor from predicted to measured times; 1 where there are none."""
    positive = [pair for pair in pairs if pair[0] > 0 and pair[1] > 0]
    if not positive:
        return 1.0
    predicted_s, measured_s = np.array(positive).T
    factor = regression(
        predicted_s[:, None], measured_s, np.full(len(positive), TAIL_ERROR), np.ones(1),
        np.full(1, TAIL_WIDTH), np.full(1, 0.01),
    )  # fmt: skip
    return float(factor[0])


# ---------------------------------------------------------------------------- computation


@dataclass(frozen=True, slots=True)
class _MeasuredPass:
    """One direction of one stage on one device.

    Attributes:
        forward, backward: times of the operators that run in it, by type.
        loss_forward, loss_backward: bytes of the loss's input, where it is computed here.
        collectives: inside the stage: their number, and their predicted time in s.
        measured_s: median time over microbatches.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    loss_forward: float
    loss_backward: float
    collectives: tuple[float, float]
    measured_s: float


class _Column(NamedTuple):
    """A parameter of the regression of passes: a field of `Calibration`, or, by direction and type
    of operator, of its deviations.

    Attributes:
        mean: before any measurement.
        width: of its prior.
        least: its bound.
    """

    name: str
    mean: float
    width: float
    least: float


COLUMNS = (
    _Column("forward", 1.0, FACTOR_WIDTH, 0.1),
    _Column("backward", 1.0, FACTOR_WIDTH, 0.1),
    _Column("loss_forward_s_per_byte", 0.0, LOSS_WIDTH, 0.0),
    _Column("loss_backward_s_per_byte", 0.0, LOSS_WIDTH, 0.0),
    _Column("launch_s", 0.0, LAUNCH_WIDTH_S, 0.0),
    _Column("collective_s", 0.0, COLLECTIVE_WIDTH_S, 0.0),
    _Column("collectives", 1.0, TAIL_WIDTH, 0.01),
)


def _computation(runs: Sequence[MeasuredRun]) -> Calibration:
    """The part of the calibration that is about forwards and backwards."""
    stages = [pair for one in runs for pair in _stages(one)]
    types = sorted({t for pair in stages for one in pair for t in (*one.forward, *one.backward)})
    of_types = [_Column(f"{way} {t}", 0.0, TYPE_WIDTH, -np.inf)
                for way in ("forward", "backward") for t in types]  # fmt: skip
    columns = (*COLUMNS, *of_types)
    rows, values, errors = [], [], []
    for forward, backward in stages:
        # Both directions and their sum: noise moves time from one to the other, and the sum is
        # known better than its parts.
        sides = [_coefficients(one, columns) for one in (forward, backward)]
        rows += [*sides, sides[0] + sides[1]]
        values += [forward.measured_s, backward.measured_s]
        values += [forward.measured_s + backward.measured_s]
        errors += [DIRECTION_ERROR, DIRECTION_ERROR, STAGE_ERROR]
    means, widths, least = (np.array([one[i] for one in columns]) for i in (1, 2, 3))
    fitted = regression(np.array(rows), np.array(values), np.array(errors), means, widths, least)
    found = dict(zip((one.name for one in columns), fitted.tolist(), strict=True))
    # A bound on a sum of two parameters, which the regression does not know.
    lowest = {way: LEAST_TYPE_FACTOR - found[way] for way in ("forward", "backward")}
    return Calibration(
        whole=True,
        **{one.name: found[one.name] for one in COLUMNS},
        deviations=tuple(
            Deviation(t, *(max(found[f"{way} {t}"], low) for way, low in lowest.items()))
            for t in types
        ),
    )


def _coefficients(one: _MeasuredPass, columns: Sequence[_Column]) -> Floats:
    """(columns,) by how much each parameter makes a pass longer."""
    number, collectives_s = one.collectives
    known = {
        "forward": _total_s(one.forward),
        "backward": _total_s(one.backward),
        "loss_forward_s_per_byte": one.loss_forward,
        "loss_backward_s_per_byte": one.loss_backward,
        "launch_s": 1.0,
        "collective_s": number,
        "collectives": collectives_s,
        **{f"forward {t}": time_s for t, time_s in one.forward.items()},
        **{f"backward {t}": time_s for t, time_s in one.backward.items()},
    }
    return np.array([known.get(column.name, 0.0) for column in columns])


def _total_s(by_type: Mapping[str, float]) -> float:
    """In one order of the types, so that the same runs give the same bits."""
    return sum(by_type[t] for t in sorted(by_type))


def _stages(run: MeasuredRun) -> Iterator[tuple[_MeasuredPass, _MeasuredPass]]:
    """Forward and backward of each replica of each stage."""
    closing = {(device, one.action) for device, one in _closing_backwards(run).items()}
    taken_s, slow = _passes_s(run.timeline, closing), _slowdowns(run)
    for s, stage in enumerate(run.plan.strategy.stages):
        for device in stage.devices:
            work = _work(run.problem, stage, device)
            (forward, backward), (ahead, back) = work.operators, work.collectives
            passes = [(device, Compute(way, s, 0)) for way in Direction]
            forward_s, backward_s = (taken_s[one] / slow[one] for one in passes)
            whole = stage.reruns_whole  # then a backward runs the forward, too
            both = (ahead[0] + back[0], ahead[1] + back[1]) if whole else back
            yield (
                _MeasuredPass(forward, {}, work.loss_bytes, 0.0, ahead, forward_s),
                _MeasuredPass(
                    forward if whole else work.again,
                    backward,
                    work.loss_bytes if whole else 0.0,
                    work.loss_bytes,
                    both,
                    backward_s,
                ),
            )


@dataclass(frozen=True, slots=True)
class _Work:
    """A stage on a device, as the profile and the topology have it.

    Attributes:
        operators: by side, forward and backward, times of its operators by type, in s.
        again: the same of the forwards of segments that a backward runs again.
        loss_bytes: of the inputs of its losses.
        collectives: by side, their number, and their time in s.
    """

    operators: tuple[dict[str, float], ...]
    again: dict[str, float]
    loss_bytes: float
    collectives: tuple[tuple[float, float], ...]


def _work(problem: Problem, stage: Stage, device: int) -> _Work:
    profile, own = problem.profile, stage_pass(problem, stage, device)
    inside = own.operators >= 0
    indices, shares = own.operators[inside], np.ones(int(inside.sum()))
    counts: tuple[float, ...] = 0, 0
    places = [i for one in segments_of(stage, profile.graph) for i in one.computed]
    again = np.flatnonzero(inside)[places]
    waited = np.array([side.total for side in own.times]) - own.compute_s.sum(axis=1)
    waited[1] -= own.compute_s[0, again].sum()
    if stage.sharding is not None:
        shares = np.array(local_stage(profile, stage).loss_share)[inside]
        # Of what runs beside computations, only what these wait for is in a pass.
        whole = own.collective_s.sum(axis=1)
        exposed = np.divide(waited, whole, out=np.zeros(2), where=whole > 0)
        both = zip(collective_steps(profile, stage), exposed.tolist(), strict=True)
        counts = tuple(count_collectives(steps) * part for steps, part in both)
    both_s = own.compute_s[:, inside]
    return _Work(
        tuple(_by_type(profile, indices, side) for side in both_s),
        _by_type(profile, own.operators[again], own.compute_s[0, again]),
        float((loss_input_bytes(profile)[indices] * shares).sum()),
        tuple(zip(counts, waited.tolist(), strict=True)),
    )


def _by_type(profile: Profile, operators: Ints, times_s: Floats) -> dict[str, float]:
    """Times of some operators by their type, in s."""
    scale, found = whole_share(profile), dict[str, float]()
    for v, time_s in zip(operators.tolist(), times_s.tolist(), strict=True):
        kind = profile.graph.operators[v].type
        found[kind] = found.get(kind, 0.0) + scale * time_s
    return found


def _passes_s(
    timeline: Timeline, left_out: Collection[tuple[int, Compute]] = ()
) -> dict[tuple[int, Compute], float]:
    """Median time of each pass, by device and by its action for microbatch 0.

    Args:
        left_out: computations that do not count, by device.
    """
    taken_s: dict[tuple[int, Compute], list[float]] = defaultdict(list)
    for event in timeline.events:
        if isinstance(event.action, Compute) and (event.device, event.action) not in left_out:
            key = replace(event.action, microbatch=0)
            taken_s[event.device, key].append(event.end_s - event.start_s)
    return {key: median(some) for key, some in taken_s.items()}


def _slowdowns(run: MeasuredRun) -> dict[tuple[int, Compute], float]:
    """How much slower each pass is than alone where other devices compute at the same time, as
    simulated: a calibration is about times alone.
    """
    evaluation = evaluate(run.problem, run.plan.strategy)
    costs, topology = evaluation.costs, run.problem.topology
    together = simulated(evaluation.program, costs, topology)
    alone = simulated(evaluation.program, replace(costs, contention=()), topology)
    slow_s, alone_s = (_passes_s(timeline_of(times)) for times in (together, alone))
    return {key: time_s / alone_s[key] if alone_s[key] else 1.0 for key, time_s in slow_s.items()}


# ------------------------------------------------------------------------- communication


def _posting(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Time of posting a transfer, in s, and time of copying each of its bytes, in s per byte.

    They are fitted to the gaps between two actions of a device whose second one had nothing to wait
    for: all that the device does in such a gap is posting.
    """
    rows, values = [], []
    for run in runs:
        for num_transfers, size_bytes, gap_s in _gaps(run):
            rows.append([float(num_transfers), float(size_bytes)])
            values.append(gap_s)
    if not rows:
        return 0.0, 0.0
    post_s, copy_s_per_byte = regression(
        np.array(rows), np.array(values), np.full(len(rows), GAP_ERROR), np.zeros(2),
        np.array([POST_WIDTH_S, COPY_WIDTH]), np.zeros(2),
    ).tolist()  # fmt: skip
    return post_s, copy_s_per_byte


def _gaps(run: MeasuredRun) -> Iterator[tuple[int, int, float]]:
    """Gaps between computations in which transfers are posted: number of transfers, their bytes,
    and length in s.
    """
    size_bytes = {one.tensor: one.bytes for one in run.plan.crossings}
    # When the last input of a computation came, by device, direction and microbatch.
    came_s: dict[tuple[int, Direction, int], float] = defaultdict(float)
    for transfer in run.timeline.transfers:
        key = transfer.target, transfer.direction, transfer.microbatch
        came_s[key] = max(came_s[key], transfer.end_s)
    for device, actions in evaluate(run.problem, run.plan.strategy).program.lists.items():
        # A measured timeline has no events of sends and receives, so the events are walked beside
        # the list: each action that is no transfer takes the next one.
        events = iter(_occupying(run.timeline, device))
        before: Event | None = None
        posted: list[Send | Receive] = []
        for action in actions:
            if isinstance(action, Send | Receive):
                posted.append(action)
                continue
            event = next(events)
            if before is not None and isinstance(action, Compute) and posted:
                waited_s = came_s[device, action.direction, action.microbatch]
                gap_s = event.start_s - before.end_s
                if waited_s < before.end_s and gap_s > 0:
                    yield len(posted), sum(size_bytes[one.tensor] for one in posted), gap_s
            before, posted = event, []


def _share_left_for_links(runs: Sequence[MeasuredRun]) -> float:
    """The share of a transfer's bytes that is left for the link after posting.

    It is taken from the transfers that a device waited for. A transfer that comes while the device
    computes is noticed late, so its end says nothing of the link.
    """
    pairs = []
    for run in runs:
        topology = run.problem.topology
        busy_at = {device: _occupying(run.timeline, device) for device in run.plan.ranks}
        for transfer in run.timeline.transfers:
            busy = any(e.start_s < transfer.end_s < e.end_s for e in busy_at[transfer.target])
            if not busy and transfer.bytes:
                ends = (transfer.source,), (transfer.target,)
                latency_s = transfer_s(topology, *ends, 0)
                left_s = max(transfer.end_s - transfer.start_s - latency_s, 1e-9)
                pairs.append((transfer_s(topology, *ends, transfer.bytes, messages=0), left_s))
    if not pairs:
        return 1.0
    expected_s, measured_s = np.array(pairs).T
    return float(min(1.0, measured_s.sum() / expected_s.sum()))


def _occupying(timeline: Timeline, device: int) -> list[Event]:
    """Computations, all-reduces and steps of a device: the events of a measured timeline."""
    posting = (Send, Receive)
    return [e for e in timeline.events if e.device == device and not isinstance(e.action, posting)]


def _measured_sum_s(
    run: MeasuredRun, index: int, costs: ActionCosts, computed_s: Mapping[int, float]
) -> float:
    """The time of a sum from when its last member had the gradients.

    Args:
        computed_s: when the computations of each device end.
    """
    events = [e for e in run.timeline.events if e.action == AllReduce(index)]
    begun_s = max(
        e.start_s
        if (index, e.device) in costs.backward_left_s
        else max(e.start_s, computed_s[e.device])
        for e in events
    )
    return max(0.0, max(e.end_s for e in events) - begun_s)


def _all_reduces(run: MeasuredRun, launch_s: float) -> Iterator[tuple[float, float]]:
    """Predicted and measured time of the all-reduces of each device, each from when its last member
    had the gradients, without launching them.

    Where the prediction has an all-reduce behind the backward (`costs/stage_pass.py`), it counts
    from where the last member's backward would have ended without it.
    """
    evaluation = evaluate(run.problem, run.plan.strategy)
    costs, sums = evaluation.costs, evaluation.program.sums
    # How much longer the last backward takes beside a sum counts as time of the sum. Without that
    # the fit finds that sums take no time. A device whose sum is predicted behind its backward:
    #
    #     another of the stage  [ backward       ]
    #     the last one          [ backward beside the sum  ][ rest of the sum ]
    #                                            | longer_s|    measured_s    |
    #                                   own_end_s  computed_s               end
    #
    # Together they are the time from `own_end_s` to the end, as a sum behind the backward takes.
    closing = _closing_backwards(run)
    computed_s = {
        device: max((e.end_s for e in own if isinstance(e.action, Compute)), default=0.0)
        for device in run.plan.ranks
        for own in [_occupying(run.timeline, device)]
    }
    own_end_s = {d: end_s - closing[d].longer_s if d in closing else end_s
                 for d, end_s in computed_s.items()}  # fmt: skip
    measured_s = [
        _measured_sum_s(run, index, costs, computed_s) - launch_s for index in range(len(sums))
    ]
    for device in run.plan.ranks:
        # Together, because a small bucket tells more of launching than of the links.
        own = [index for index, one in enumerate(sums) if device in one.devices]
        if own:
            members = {d for index in own for d in sums[index].devices}
            longer_s = max(computed_s[d] for d in members) - max(own_end_s[d] for d in members)
            yield sum(costs.sum_s[i] for i in own), longer_s + sum(measured_s[i] for i in own)


class _Closing(NamedTuple):
    """The last backward of a device, beside which all-reduces may have run.

    Attributes:
        action: the backward.
        longer_s: how much more it took than the others of its stage on this device, in s.
    """

    action: Compute
    longer_s: float


def _closing_backwards(run: MeasuredRun) -> dict[int, _Closing]:
    """By device, the last backward, where all-reduces are predicted behind it and there are others
    of its stage to compare with. In a run they begin within it, and make it longer.
    """
    evaluation = evaluate(run.problem, run.plan.strategy)
    behind = {
        device
        for index, one in enumerate(evaluation.program.sums)
        for device in one.devices
        if (index, device) not in evaluation.costs.backward_left_s
    }
    found = {}
    for device in sorted(behind):
        *others, last = [
            (e.action, e.end_s - e.start_s)
            for e in sorted(_occupying(run.timeline, device), key=lambda e: e.end_s)
            if isinstance(e.action, Compute) and e.action.direction is Direction.BACKWARD
        ]
        alike = [took_s for action, took_s in others if action.stage == last[0].stage]
        if alike:
            found[device] = _Closing(last[0], max(0.0, last[1] - median(alike)))
    return found


def _steps(run: MeasuredRun) -> Iterator[tuple[float, float]]:
    """Predicted and measured time of each step."""
    evaluation = evaluate(run.problem, run.plan.strategy)
    times = simulated(evaluation.program, evaluation.costs, run.problem.topology)
    predicted_s = {
        event.device: event.end_s - event.start_s
        for event in timeline_of(times).events
        if isinstance(event.action, Step)
    }
    for event in run.timeline.events:
        if isinstance(event.action, Step):
            yield predicted_s[event.device], event.end_s - event.start_s
