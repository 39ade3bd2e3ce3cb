"""`calibrate`: measured runs -> `Calibration`, and how far it can be trusted.

Each part is a linear regression with a Gaussian prior around what is predicted without it: of the
parameters x, with prior means m and widths s, and of relative errors of width e,

    minimise  sum over observations ((a x - y) / (e y))^2 + sum over parameters ((x - m) / s)^2,

because a trace shows sums over the operators of a stage only, and many types share few sums
(Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3). What must not be negative and
would be is 0.

The error after calibration is told of runs that were not fitted: those of one model at a time, or
one run at a time where there is one model only.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from planner.calibration import Calibration, Deviation, first_output_bytes, whole_share
from planner.costs.collectives import slowest_link
from planner.costs.compute import times_on
from planner.costs.evaluate import evaluate
from planner.plan import Plan
from planner.problem import Problem
from planner.schedules.actions import AllReduce, Compute, Direction, Program, Receive, Send, Step
from planner.simulator.events import run as simulated
from planner.simulator.timeline import Event, Timeline
from planner.strategy import operator_indices
from planner.support.arrays import Floats

# Widths of errors and priors, as shares.
STAGE_ERROR, DIRECTION_ERROR, GAP_ERROR, FLOW_ERROR, TAIL_ERROR = 0.03, 0.1, 0.3, 0.3, 0.2
FACTOR_WIDTH, TYPE_WIDTH, TAIL_WIDTH = 0.3, 0.1, 1.0
# Widths in s, and s per byte.
LAUNCH_WIDTH_S, POST_WIDTH_S, COPY_WIDTH, LOSS_WIDTH = 3e-4, 1e-3, 1e-9, 3e-9


@dataclass(frozen=True, slots=True)
class Run:
    """One measured iteration.

    Attributes:
        name: for people.
        problem: that the strategy was made for, without a calibration.
        plan: that was run.
        timeline: as measured.
    """

    name: str
    problem: Problem
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Checked:
    """The iteration of one run.

    Attributes:
        name: of the run.
        measured_s: its time.
        before_s: as predicted without a calibration.
        after_s: as predicted with one that was fitted to the runs of other models, or, where there
            are none, to all other runs; without other runs, as before.
    """

    name: str
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration with its proof.

    Attributes:
        calibration: fitted to all runs.
        checked: every run.
        left_out: "model" or "run": what was left out at a time.
    """

    calibration: Calibration
    checked: tuple[Checked, ...]
    left_out: str

    @property
    def error_before(self) -> float:
        """Mean of |predicted - measured| / measured without a calibration."""
        return fmean(abs(one.before_s / one.measured_s - 1) for one in self.checked)

    @property
    def error_after(self) -> float:
        """The same with one, of runs that were left out of it."""
        return fmean(abs(one.after_s / one.measured_s - 1) for one in self.checked)


def calibrate(runs: Sequence[Run]) -> Fitted:
    """A calibration for the type of device that the runs were on, checked by cross-validation.

    Args:
        runs: at least one; all on devices of one type.
    """
    profiles = list(dict.fromkeys(one.problem.profile for one in runs))
    by_model = len(profiles) > 1
    groups: dict[int, list[Run]] = defaultdict(list)
    for number, one in enumerate(runs):
        groups[profiles.index(one.problem.profile) if by_model else number].append(one)
    checked = {}
    for number, group in groups.items():
        others = [one for key, rest in groups.items() if key != number for one in rest]
        known = fit(others) if others else Calibration()
        for one in group:
            checked[id(one)] = Checked(
                one.name,
                one.timeline.iteration_s,
                predicted_s(one, Calibration()),
                predicted_s(one, known),
            )
    return Fitted(
        fit(runs), tuple(checked[id(one)] for one in runs), "model" if by_model else "run"
    )


def predicted_s(run: Run, calibration: Calibration) -> float:
    """The simulated iteration of a run's strategy."""
    problem = replace(run.problem, calibration=calibration)
    evaluation = evaluate(problem, run.plan.strategy)
    return simulated(evaluation.program, evaluation.costs, problem.topology).iteration_s


def fit(runs: Sequence[Run]) -> Calibration:
    """The calibration that fits some runs."""
    first = runs[0]
    kind = first.problem.topology.devices[first.plan.ranks[0]].type
    post_s, copy = _posting(runs)
    computation = _computation(runs)
    launch_s = computation.launch_s  # of sums and steps as well
    return replace(
        computation,
        device_type=kind,
        runs=len(runs),
        models=len({one.problem.profile for one in runs}),
        post_s=post_s,
        copy_s_per_byte=copy,
        wire=_wire(runs),
        sums=_factor((p, m - launch_s) for one in runs for p, m in _sums(one)),
        steps=_factor((p, m - launch_s) for one in runs for p, m in _steps(one)),
    )


# ---------------------------------------------------------------------------- regression


def regression(
    rows: Floats, values: Floats, errors: Floats, means: Floats, widths: Floats, least: Floats
) -> Floats:
    """(p,) the parameters that explain some values.

    Args:
        rows: (n, p) a value is the product of a row and the parameters.
        values: (n,) above 0.
        errors: (n,) the relative width of each value's error.
        means: (p,) of the parameters' priors.
        widths: (p,) of the same.
        least: (p,) no parameter is less than this.
    """
    scale = errors * values
    matrix = np.vstack([rows / scale[:, None], np.diag(1 / widths)])
    target = np.concatenate([values / scale, means / widths])
    found, free = least.copy(), np.ones(len(means), dtype=bool)
    while free.any():
        rest = target - matrix[:, ~free] @ least[~free]
        found[free] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
        low = free & (found < least)
        if not low.any():
            break
        found[low], free = least[low], free & ~low
    return found


def _factor(pairs: Iterable[tuple[float, float]]) -> float:
    """The factor between predicted and measured times; 1 where there are none."""
    some = [pair for pair in pairs if pair[0] > 0 and pair[1] > 0]
    if not some:
        return 1.0
    expected, found = np.array(some).T
    return float(
        regression(
            expected[:, None], found, np.full(len(some), TAIL_ERROR), np.ones(1),
            np.full(1, TAIL_WIDTH), np.full(1, 0.01),
        )[0]
    )  # fmt: skip


# ---------------------------------------------------------------------------- computation


@dataclass(frozen=True, slots=True)
class _Stage:
    """One direction of one stage on one device.

    Attributes:
        forward, backward: time of its operators alone, by type.
        loss_forward, loss_backward: bytes of the loss's input.
        measured_s: median over microbatches.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    loss_forward: float
    loss_backward: float
    measured_s: float


def _computation(runs: Sequence[Run]) -> Calibration:
    found = [pair for one in runs for pair in _stages(one)]
    types = sorted({t for pair in found for one in pair for t in (*one.forward, *one.backward)})
    rows, values, errors = [], [], []
    for forward, backward in found:
        sides = [_row(one, types) for one in (forward, backward)]
        rows += [*sides, sides[0] + sides[1]]
        values += [forward.measured_s, backward.measured_s]
        values += [forward.measured_s + backward.measured_s]
        errors += [DIRECTION_ERROR, DIRECTION_ERROR, STAGE_ERROR]
    count = len(types)
    x = regression(
        np.array(rows),
        np.array(values),
        np.array(errors),
        np.array([1.0, 1.0, 0.0, 0.0, 0.0] + [0.0] * 2 * count),
        np.array(
            [FACTOR_WIDTH] * 2 + [LOSS_WIDTH] * 2 + [LAUNCH_WIDTH_S] + [TYPE_WIDTH] * 2 * count
        ),
        np.array([0.1, 0.1, 0.0, 0.0, 0.0] + [-np.inf] * 2 * count),
    ).tolist()
    return Calibration(
        whole=True,
        forward=x[0],
        backward=x[1],
        loss_forward_s_per_byte=x[2],
        loss_backward_s_per_byte=x[3],
        launch_s=x[4],
        deviations=tuple(
            Deviation(name, max(f, 0.05 - x[0]), max(b, 0.05 - x[1]))
            for name, f, b in zip(types, x[5 : 5 + count], x[5 + count :], strict=True)
        ),
    )


def _row(one: _Stage, types: Sequence[str]) -> Floats:
    """Coefficients of: all forwards, all backwards, both losses, the launch, and each type."""
    forward, backward = ([side.get(t, 0.0) for t in types] for side in (one.forward, one.backward))
    whole = [sum(forward), sum(backward), one.loss_forward, one.loss_backward, 1.0]
    return np.array([*whole, *forward, *backward])


def _stages(run: Run) -> Iterator[tuple[_Stage, _Stage]]:
    """Forward and backward of each replica."""
    profile = run.problem.profile
    indices, loss = operator_indices(profile.graph), first_output_bytes(profile)
    types = [operator.type for operator in profile.graph.operators]
    taken: dict[tuple[int, Compute | None], list[float]] = defaultdict(list)
    for event in run.timeline.events:
        if isinstance(event.action, Compute):
            key = replace(event.action, microbatch=0)
            taken[event.device, key].append(event.end_s - event.start_s)
    scale = whole_share(profile)
    for s, stage in enumerate(run.plan.strategy.stages):
        inside = [indices[name] for name in stage.operators]
        lost = float(loss[inside].sum())
        for device in stage.devices:
            times = times_on(run.problem, device)
            sides = []
            for side in (times.forward_s, times.backward_s):
                by_type: dict[str, float] = defaultdict(float)
                for v in inside:
                    by_type[types[v]] += scale * float(side[v])
                sides.append(dict(by_type))
            ahead = median(taken[device, Compute(Direction.FORWARD, s, 0)])
            back = median(taken[device, Compute(Direction.BACKWARD, s, 0)])
            again = stage.recompute
            yield (
                _Stage(sides[0], {}, lost, 0.0, ahead),
                _Stage(sides[0] if again else {}, sides[1], lost if again else 0.0, lost, back),
            )


# ------------------------------------------------------------------------- communication


def _posting(runs: Sequence[Run]) -> tuple[float, float]:
    """Time of posting a transfer, and for each of its bytes: what lies between two actions of a
    device if the second one had nothing to wait for.
    """
    rows, values = [], []
    for run in runs:
        for transfers, size, gap_s in _gaps(run):
            rows.append([float(transfers), float(size)])
            values.append(gap_s)
    if not rows:
        return 0.0, 0.0
    post_s, copy = regression(
        np.array(rows), np.array(values), np.full(len(rows), GAP_ERROR), np.zeros(2),
        np.array([POST_WIDTH_S, COPY_WIDTH]), np.zeros(2),
    ).tolist()  # fmt: skip
    return post_s, copy


def _gaps(run: Run) -> Iterator[tuple[int, int, float]]:
    """Transfers that are posted, their bytes, and the time that passes meanwhile."""
    size = {one.tensor: one.bytes for one in run.plan.crossings}
    program = _program(run)
    came_s: dict[tuple[int, Direction, int], float] = defaultdict(float)
    for flow in run.timeline.flows:
        key = flow.target, flow.direction, flow.microbatch
        came_s[key] = max(came_s[key], flow.end_s)
    for device, actions in program.lists.items():
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
                    yield len(posted), sum(size[one.tensor] for one in posted), gap_s
            before, posted = event, []


def _program(run: Run) -> Program:
    return evaluate(run.problem, run.plan.strategy).program


def _wire(runs: Sequence[Run]) -> float:
    """The share of the bytes that is left when a transfer has been posted, by the transfers that a
    device waited for. Those it did not wait for are seen to end late, because it computed.
    """
    pairs = []
    for run in runs:
        topology = run.problem.topology
        busy_at = {device: _occupying(run.timeline, device) for device in run.plan.ranks}
        for flow in run.timeline.flows:
            busy = any(e.start_s < flow.end_s < e.end_s for e in busy_at[flow.target])
            if not busy and flow.bytes:
                latency, rate = slowest_link(topology, (flow.source,), (flow.target,))
                left_s = max(flow.end_s - flow.start_s - latency, 1e-9)
                pairs.append((flow.bytes / rate, left_s))
    if not pairs:
        return 1.0
    expected, found = np.array(pairs).T
    return float(min(1.0, found.sum() / expected.sum()))


def _occupying(timeline: Timeline, device: int) -> list[Event]:
    """Computations, sums and steps: what a measured timeline has events of."""
    posting = (Send, Receive)
    return [e for e in timeline.events if e.device == device and not isinstance(e.action, posting)]


def _sums(run: Run) -> Iterator[tuple[float, float]]:
    """Predicted and measured time of each sum, from when its last member came."""
    expected = evaluate(run.problem, run.plan.strategy).costs.sum_s
    for index, predicted in enumerate(expected):
        events = [e for e in run.timeline.events if e.action == AllReduce(index)]
        yield predicted, max(e.end_s for e in events) - max(e.start_s for e in events)


def _steps(run: Run) -> Iterator[tuple[float, float]]:
    """Predicted and measured time of each step."""
    expected = evaluate(run.problem, run.plan.strategy).costs.step_s
    for event in run.timeline.events:
        if isinstance(event.action, Step):
            yield expected[event.device], event.end_s - event.start_s
