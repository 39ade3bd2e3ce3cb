"""`Asked` -> `TrainingJob`: how a rank comes to what it trains, whoever writes the loop."""

from dataclasses import dataclass, replace
from pathlib import Path

from planner.artefacts.losses import LossOptions
from planner.artefacts.plan import Plan
from planner.launcher.greeting import compare_jobs
from planner.launcher.handshake import Agreement
from planner.launcher.job import TrainingJob, prepare, with_settings
from planner.launcher.settings import Settings, check
from planner.launcher.world import ProcessRank
from planner.training.checkpoints.folder import Checkpoint
from planner.training.checkpoints.keeping import Keeping, check_fits, start_of
from planner.training.checkpoints.keeping import check as check_keeping


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks of a training.

    Attributes:
        plan: strategy.json.
        path: of strategy.json; messages name it, and the model is relative to its folder.
        model_path: the ONNX file; None takes the plan's.
        loss: functions and dimensions of classes that replace those of the plan.
        device: auto, cpu or cuda.
        settings: of the training.
        keeping: the checkpoints to write and to go on from.
    """

    plan: Plan
    path: Path
    model_path: Path | None
    loss: LossOptions
    device: str
    settings: Settings
    keeping: Keeping


def check_options(settings: Settings, keeping: Keeping) -> None:
    """Raises the first thing that is wrong with options, before any file is read.

    Raises:
        PlannerError: a message for the user.
    """
    check(settings)
    check_keeping(keeping)


def seated(plan: Plan, agreed: Agreement) -> Plan:
    """The plan with the ranks that the handshake has given to its devices."""
    return replace(plan, ranks=agreed.ranks, hosts=())


def read_job(
    asked: Asked, agreed: Agreement, seat: ProcessRank
) -> tuple[TrainingJob, Checkpoint | None]:
    """What is trained, and the checkpoint to go on from; every rank with a device calls it.

    Raises:
        PlannerError: if files and options do not fit each other, or the ranks have others.
        Stopped: if another rank has ended.
    """
    job = prepare(asked.plan, asked.path, asked.model_path, seat, (asked.loss, asked.device))
    # Before any rank can write a checkpoint.
    start = start_of(asked.keeping, restarted=agreed.restarted)
    if start is not None:
        check_fits(start, job)
    compare_jobs(job, seat, "" if start is None else start.path.name)
    planned = seated(asked.plan, agreed)
    return with_settings(replace(job, plan=planned), asked.settings), start
