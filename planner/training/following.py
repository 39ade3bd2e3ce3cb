"""What happens between two steps of a launch: evaluations and the log."""

from pathlib import Path

from planner.launcher.executor import IterationRecord
from planner.launcher.options import Loop
from planner.training.log import Log
from planner.training.report import Evaluation
from planner.training.trainer import Trainer


class Follower:
    """Follows the steps of a training; every rank makes one.

    Attributes:
        evaluations: all figures, in their order.

    Args:
        trainer: whose steps they are, at its first one.
        loop: of the training.
        rank: of this process; rank 0 writes the log.
    """

    def __init__(self, trainer: Trainer, loop: Loop, rank: int) -> None:
        self._trainer, self._every = trainer, loop.eval_every
        self._log: Log | None = None
        if loop.log is not None and rank == 0:
            self._log = Log(Path(loop.log), goes_on=trainer.next_step > 0)
        self.evaluations: list[Evaluation] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """On what evaluations leave out."""
        return () if self._trainer.evaluate is None else self._trainer.evaluate.notes

    def after(self, step: int, record: IterationRecord) -> None:
        """After a step, given by its index."""
        trainer, done = self._trainer, step + 1
        if self._log is not None:
            self._log.step(step, trainer.optimizer_step.last, record.iteration_s)
        is_due = done == trainer.num_steps or (self._every is not None and done % self._every == 0)
        if trainer.evaluate is None or not is_due:
            return
        figures = trainer.evaluate()
        self.evaluations.append(Evaluation(done, figures))
        if self._log is not None:
            self._log.evaluation(step, figures)

    def close(self) -> None:
        """After the last step."""
        if self._log is not None:
            self._log.close()
