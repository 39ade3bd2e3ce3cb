"""What the planner says of a row: the plan that ran, at the degrees of the row."""

from dataclasses import dataclass, replace
from pathlib import Path

import planner
from planner.artefacts.calibration import Calibration
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import device_type
from planner.costs.overlap import with_overlap
from planner.planning.measured import LIMITS_S, UNLIMITED, with_usual_warmup
from planner.solvers.sharded.edges import with_local_all_gathers
from planner.solvers.sharded.options import Megatron
from planner.support.errors import PlannerError
from tests.support.measured import assumptions
from tests.support.measured.bounds import least_s
from tests.support.measured.clusters import cluster
from tests.support.measured.profiles import FOLDER, profile
from tests.support.measured.recomputed import running_again
from tests.support.measured.rows import Row


@dataclass(frozen=True)
class Predicted:
    """A row beside its prediction.

    Attributes:
        row: that was measured.
        iteration_s: predicted.
        bound_s: the lower bound over all plans on these devices, with the profile's kernels.
        peak_bound_s: the same over all kernels; None where the device table has no such peak.
        tensor_bytes: peak of what tensors take on the fullest device.
        total_bytes: the same with the reserve for runtime and libraries.
        fits: whether the total fits all devices.
    """

    row: Row
    iteration_s: float
    bound_s: float
    peak_bound_s: float | None
    tensor_bytes: int
    total_bytes: int
    fits: bool

    @property
    def error(self) -> float:
        """Of the time, relatively: below 0 where the prediction is too fast."""
        return self.iteration_s / self.row.iteration_s - 1

    @property
    def memory_ratio(self) -> float | None:
        """Predicted memory over measured; None where that was not measured."""
        if self.row.memory_bytes is None:
            return None
        own = self.tensor_bytes if self.row.allocated else self.total_bytes
        return own / self.row.memory_bytes


@dataclass(frozen=True)
class Planned:
    """What ran, and what it is predicted to take.

    Attributes:
        problem: that it is an answer to.
    """

    problem: Problem
    plan: Plan


@dataclass(frozen=True)
class LeftOut:
    """A row without a prediction.

    Attributes:
        row: that was measured.
        reason: why the planner does not predict it.
        peak_bound_s: as of a row with a prediction; None also without a network.
    """

    row: Row
    reason: str
    peak_bound_s: float | None = None


def predict(row: Row, folder: Path = FOLDER) -> Predicted | LeftOut:
    """The prediction of a row, or why there is none.

    Args:
        folder: of computed profiles.
    """
    least = least_s(row, folder)
    if row.lacks:
        return LeftOut(row, row.lacks, least)
    if row.network is None:
        return LeftOut(row, "adapters of a rank that is not published", least)
    try:
        ran = planned(row, folder)
    except PlannerError as error:
        return LeftOut(row, str(error), least)
    plan, topology = ran.plan, ran.problem.topology
    capacities = [device_type(topology, d).memory_bytes for d in range(row.num_devices)]
    memories = [one.memory for one in plan.prediction.devices]
    fullest = max(memories, key=lambda memory: memory.total_bytes)
    return Predicted(
        row=row,
        iteration_s=plan.prediction.iteration_s,
        bound_s=plan.certificate.lower_bound_s,
        peak_bound_s=least,
        tensor_bytes=fullest.total_bytes - fullest.reserve_bytes,
        total_bytes=fullest.total_bytes,
        fits=fullest.total_bytes <= min(capacities),
    )


def planned(row: Row, folder: Path = FOLDER, calibration: Calibration | None = None) -> Planned:
    """The row's plan.

    Args:
        calibration: None for what is assumed.

    Raises:
        PlannerError: if the planner has no such plan.
    """
    topology, own = cluster(row), profile(row, folder)
    known = assumptions.calibration(row) if calibration is None else calibration
    tensor, pipeline, data = row.degrees
    degrees = Megatron(
        tensor_degree=tensor,
        data_degree=data,
        pipeline_degree=pipeline,
        sequence_parallel=row.source in assumptions.SEQUENCE_PARALLEL,
        even_layers=True,
        over_replicas=assumptions.level(row),
    )
    training = planner.api.Training(
        global_batch=row.batch,
        microbatch_size=row.microbatch,
        optimizer=assumptions.optimizer(row),
        recompute=assumptions.RECOMPUTE[row.recompute],
        overlap=row.source not in assumptions.IN_LINE,
        device_memory=UNLIMITED,
    )
    for limit_s in LIMITS_S:
        plans = planner.solve(
            own,
            topology=topology,
            training=training,
            search=planner.Search(switches=(degrees,)),
            solvers=("megatron",),
            calibration=known,
            time_limit_s=limit_s,
        )
        if plans.plan is not None:
            break
    if plans.plan is None:
        raise PlannerError(plans.comparison.rows[0].reason or "there is no plan")
    problem = plans.problems[-1]
    strategy = _as_it_ran(row, problem, plans.plan.strategy)
    if strategy == plans.plan.strategy:
        return Planned(problem, plans.plan)
    simulated = planner.simulate(
        replace(plans.plan, strategy=strategy),
        profile=own,
        topology=topology,
        device_memory=UNLIMITED,
        calibration=known,
    )
    assert simulated.plan is not None
    return Planned(problem, simulated.plan)


def _as_it_ran(row: Row, problem: Problem, strategy: Strategy) -> Strategy:
    """A strategy with what no option says: usual depths of 1F1B, the segments that run again,
    HSDP, and parts of tensors that cross stages.
    """
    usual = with_usual_warmup(strategy)
    stages = [running_again(one, row.recompute) for one in usual.stages]
    if row.sharing == "HSDP":
        stages = [replace(one, over=row.per_host) for one in stages]
    if tuple(stages) != usual.stages:
        stages = [replace(one, prefetch=None) for one in stages]
    strategy = with_overlap(problem, replace(usual, stages=tuple(stages)))
    return with_local_all_gathers(problem, strategy)
