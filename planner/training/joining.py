"""`Asked` -> `TrainingJob`: how a rank comes to what it trains, whoever writes the loop."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.artefacts.options import LossOptions
from planner.artefacts.plan import Plan
from planner.launcher.greeting import compare_jobs
from planner.launcher.handshake import Agreement
from planner.launcher.job import TrainingJob, prepare, with_choices
from planner.launcher.options import Loop, check
from planner.launcher.rendezvous import ProcessRank
from planner.support.options import Options, options_from
from planner.training.checkpoints.folder import Checkpoint
from planner.training.checkpoints.keeping import check as check_checkpoints
from planner.training.checkpoints.keeping import check_fits, start_of
from planner.training.options import Checkpoints, Launching


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks of a training.

    Attributes:
        plan: strategy.json.
        path: of strategy.json; messages name it, and the model is relative to its folder.
        loop: how it trains.
        loss: functions and dimensions of classes that replace those of the plan.
        launching: where it runs.
        checkpoints: to write and to go on from.
    """

    plan: Plan
    path: Path
    loop: Loop
    loss: LossOptions
    launching: Launching
    checkpoints: Checkpoints

    @property
    def options(self) -> tuple[Options, ...]:
        """All options, which the ranks compare."""
        return self.loop, self.loss, self.launching, self.checkpoints


def options_of(
    function: str, how: Mapping[str, Any], without: Collection[str] = ()
) -> tuple[Loop, LossOptions, Launching, Checkpoints]:
    """The options of a training from the keyword arguments of a function.

    Args:
        function: its name, for the message.
        without: options that it does not take.

    Raises:
        TypeError: if it takes no option of that name.
        OptionError: if a value is wrong.
    """
    kinds = (Loop, LossOptions, Launching, Checkpoints)
    loop, loss, launching, checkpoints = options_from(
        function, how, *kinds, without={"output", *without}
    )
    return loop, loss, launching, checkpoints


def check_options(loop: Loop, checkpoints: Checkpoints) -> None:
    """Raises the first contradiction between options, before any file is read.

    Raises:
        PlannerError: a message for the user.
    """
    check(loop)
    check_checkpoints(checkpoints)


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
    choices = asked.loss, asked.launching.device
    job = prepare(asked.plan, asked.path, asked.launching.model, seat, choices)
    # Before any rank can write a checkpoint.
    start = start_of(asked.checkpoints, restarted=agreed.restarted)
    if start is not None:
        check_fits(start, job)
    compare_jobs(job, seat, "" if start is None else start.path.name)
    planned = seated(asked.plan, agreed)
    return with_choices(replace(job, plan=planned), asked.loop), start
