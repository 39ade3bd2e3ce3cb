"""`BatchTrainer`: a training by a strategy in a loop that the user writes; `planner.trainer`.

Every rank has the user's whole script, and gets the batch of the whole step; it takes what its own
stages read. Before each step the ranks compare their batches and learning rates, after it they add
up the loss: two all-reduces of a few numbers between CPUs.
"""

import gc
import math
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from planner.launcher.batch import Batch, StepBatches
from planner.launcher.failures.rank import current_rank, current_status, enter_from_script
from planner.launcher.failures.requests import REQUEST
from planner.launcher.failures.status import Phase
from planner.launcher.rates import KNOWN
from planner.launcher.rendezvous import ProcessRank
from planner.launcher.totals import why_nothing_counts
from planner.support.errors import LaunchError, OptionError
from planner.support.named import function_named
from planner.training.checkpoints.folder import name_of
from planner.training.checkpoints.start import check_later
from planner.training.data.agreement import ReadBatch, compares_all, difference
from planner.training.data.fingerprints import fingerprint, number, prints
from planner.training.data.samples import samples_of
from planner.training.options import TrainingRequest, check_folder
from planner.training.trainer import SET_RATE, Trainer

WITHOUT = frozenset({
    "steps", "epochs", "data", "shuffle", "eval_data", "eval_every", "metrics", "log_file",
    "config", "trace", "track_memory", "checkpoint_every",
})  # fmt: skip
"""Options of the planner's own loop alone."""
EVALUATE = "evaluate"
"""How messages call the data of an evaluation."""
_OTHER_BATCHES = (
    "give each rank the batch of the whole step, without DistributedSampler, and with shuffle=True"
    " only after the same torch.manual_seed on all ranks"
)


class BatchTrainer:
    """A training whose loop the user writes; every rank makes one, and all call the same methods.

    It is a context manager: its end is `close`.

    Args:
        request: what is trained.
        trainer: of this rank, at its first step.
    """

    def __init__(self, request: TrainingRequest, trainer: Trainer) -> None:
        self._checkpoints, self._metrics = request.checkpoints, request.loop.metrics
        self._trainer: Trainer | None = trainer
        self._folders: set[Path] = set()
        self._has_warned = False
        self._requests = ExitStack()
        self._awaits_requests = False

    @property
    def batch_size(self) -> int:
        """Samples of a step; the last one of an epoch may have fewer."""
        return self._open().layout.samples

    @property
    def steps_done(self) -> int:
        """Steps since the very first one, those before a checkpoint too."""
        return self._open().next_step

    @property
    def lr(self) -> float:
        """The learning rate of the next step, before --lr-schedule."""
        return self._open().optimizer_step.rate

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM, or `save_signal`, has asked a rank to save and to end; after a step, it
        is the same on all ranks.

        From the first time on that the loop asks, such a signal does not end the process: `save`,
        and leave the loop. A second SIGTERM ends it.
        """
        trainer = self._open()
        if not self._awaits_requests:
            self._awaits_requests = True
            is_rank = current_rank() is not None
            requests = REQUEST.awaited(self._checkpoints.save_signal, is_rank=is_rank)
            self._requests.enter_context(requests)
        return trainer.should_end

    def set_lr(self, lr: float) -> None:
        """Changes the learning rate from the next step on; to the same one on every rank.

        Raises:
            OptionError: if it is no finite number of at least 0.
        """
        if not 0 <= lr < math.inf:
            raise OptionError(f"set_lr: expected a finite number of at least 0, got {lr}")
        self._open().set_rate(float(lr))

    def step(self, batch: object) -> float:
        """One step of the optimizer; under the schedule pipedream one for each microbatch, with an
        empty pipeline before and after.

        Args:
            batch: of the whole step, the same on every rank: inputs in the model's order and then
                targets, as a DataLoader gives them; (inputs, target); or a mapping from their
                names. Tensors have a row for each sample, on any device. With fewer rows than
                `batch_size` the step has fewer microbatches, and rows that fill none are left out.
                A rank whose stages read neither inputs nor targets may give None.

        Returns:
            The loss of the whole batch before the step: of classes the mean over all targets that
            are not -100, of the user's function with (sum, count) the sum over the count, else the
            mean over all microbatches. Under the schedule pipedream it is the mean of such losses
            of microbatches. Without a counted target in the batch, nothing is done but a warning
            on rank 0, and the loss is nan.

        Raises:
            LaunchError: if the batch does not fit the model, or ranks have different ones.
            Stopped: if another rank has ended.
        """
        with self._failing() as trainer:
            where = f"step {trainer.next_step}"
            _compare(trainer, batch, where)
            before = trainer.uncounted
            data, left = _microbatches(trainer, batch, where)
            trainer.step(data)
            if trainer.uncounted > before and (trainer.rank == 0 or trainer.flow is not None):
                why = why_nothing_counts(trainer.job)
                done = (
                    "is left out" if trainer.flow is None else "has microbatches that learn nothing"
                )
                warnings.warn(f"{where} {done}: {why}", stacklevel=2)
        if left and not self._has_warned and trainer.rank == trainer.first_reader:
            self._has_warned = True
            size = trainer.layout.size
            warnings.warn(
                f"{where}: the last {left} rows of the batch fill no microbatch of {size}"
                " samples and are left out, as in all such batches", stacklevel=2,
            )  # fmt: skip
        loss = trainer.optimizer_step.last.loss
        assert loss is not None, "the settings ask for it"
        return loss

    def evaluate(self, data: object) -> dict[str, float]:
        """The mean loss, the accuracy where targets are classes, and the metrics, as in evaluation:
        without dropout, by running statistics. Every sample counts once.

        Args:
            data: a map-style dataset or a DataLoader of one, or batches as `step` takes them, with
                any number of rows; the same on every rank.

        Raises:
            LaunchError: if it does not fit the model.
        """
        with self._failing() as trainer:
            samples = samples_of(data, EVALUATE) if trainer.reader.reads else data
            return trainer.evaluate(samples, EVALUATE, self._metrics)

    def save(self, folder: str | Path | None = None) -> Path:
        """Writes a checkpoint, for `resume`, `planner launch --resume` and `planner weights`.

        Args:
            folder: for checkpoints; None takes that of `checkpoint`.

        Returns:
            Its own folder; it is whole by then.

        Raises:
            PlannerError: if it cannot be written, or the folder has later ones of another training.
            Stopped: if another rank has ended.
        """
        self._open()
        chosen = self._checkpoints.checkpoint if folder is None else Path(folder)
        if chosen is None:
            raise OptionError("save: expected a folder; give one here, or checkpoint= at the start")
        with self._failing() as trainer:
            if chosen not in self._folders:
                check_folder(replace(self._checkpoints, checkpoint=chosen))
                start = trainer.start
                check_later(chosen, -1 if start is None else start.record.step)
                self._folders.add(chosen)
            saver = trainer.saver(chosen, self._checkpoints.checkpoint_keep)
            saver.save(trainer.next_step, trainer.extras())
            saver.finish()
            trainer.groups.barrier()
            current_status().enter(Phase.BETWEEN)
        return chosen / name_of(trainer.next_step)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all trained parameters and running statistics, by names of initializers, in the
        memory of every rank's CPU; all ranks call it together.
        """
        with self._failing() as trainer:
            return trainer.content.state_dict()

    def close(self) -> None:
        """After the last step; all ranks call it."""
        if self._trainer is None:
            return
        self._trainer.close()
        self._requests.close()
        rank = current_rank()
        if rank is not None:
            rank.end_work()
        self._trainer = None
        # The threads of gloo end with its groups. At the end of Python, they would abort it.
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.close()
        elif self._trainer is not None:
            self._requests.close()
            self._trainer.__exit__(*error)

    def _open(self) -> Trainer:
        if self._trainer is None:
            raise LaunchError("the trainer is closed; make another one with planner.trainer")
        return self._trainer

    @contextmanager
    def _failing(self) -> Iterator[Trainer]:
        """The trainer, while errors are those of its rank."""
        trainer = self._open()
        with trainer.errors():
            yield trainer


def _compare(trainer: Trainer, batch: object, where: str) -> None:
    """Refuses to train where ranks differ."""
    if batch is None and trainer.reader.reads:
        raise LaunchError(f"{where}: expected the batch of the whole step, got None")
    if len(trainer.job.plan.ranks) == 1:
        return
    begun = 0 if trainer.start is None else trainer.start.record.step
    whole = compares_all(trainer.next_step - begun, trainer.next_step)
    named = None if batch is None else trainer.reader.named(batch, where)
    own = None
    if named is not None:
        own = number(prints(named)) if whole else fingerprint(named)
    rate = trainer.optimizer_step.rate
    current_status().enter(Phase.BARRIER)
    (first, last), (slowest, fastest) = trainer.groups.extremes([own, rate])
    if first < last:
        read = trainer.groups.gather(None if named is None else ReadBatch(prints(named)))
        raise LaunchError(difference("planner.trainer", where, read, _OTHER_BATCHES))
    if slowest < fastest:
        raise LaunchError(
            f"{where}: expected the same learning rate on all ranks, got {rate} here"
            " and another one elsewhere; call set_lr with the same value on all"
        )


def _microbatches(trainer: Trainer, batch: object, where: str) -> tuple[StepBatches, int]:
    """The microbatches of this rank, and the number of rows that fill none."""
    reader, layout = trainer.reader, trainer.layout
    if not reader.reads:
        return StepBatches(None, {m: Batch({}, {}) for m in trainer.microbatches}), 0
    samples = reader.num_samples(batch, layout.size, layout.count, where)
    number = layout.microbatches(samples)
    left = samples - number * layout.size
    if samples < trainer.least:
        raise LaunchError(
            f"{where}: expected a batch of {layout.samples} samples, or of at least"
            f" {trainer.least}, got {samples}; give batches of trainer.batch_size"
        )
    due = (m for m in trainer.microbatches if m < number)
    parts = {m: trainer.local(reader.part(batch, m, where)) for m in due}
    return StepBatches(number, parts), left


def begin(request: TrainingRequest, metrics: Sequence[str]) -> BatchTrainer:
    """A training in the user's own loop; every rank that torchrun has started calls it.

    Args:
        metrics: "module:function"s for evaluations.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
    """
    if dist.is_initialized():
        raise LaunchError(
            "planner.trainer: torch.distributed is in use already; leave init_process_group out, as"
            " the trainer calls it, and close a trainer before the next one"
        )
    enter_from_script()
    # The ranks compare the metrics, too.
    request = replace(request, loop=replace(request.loop, metrics=tuple(metrics)))

    def check(process: ProcessRank | None) -> None:
        _check_schedule(request.loop.lr_schedule)
        for name in metrics:
            function_named(name, "metrics", LaunchError)
        _check_ranks(request, 1 if process is None else process.world_size)

    trainer = Trainer.open(request, check)
    assert trainer is not None, "none idles: there are as many processes as devices"
    if trainer.start is not None and SET_RATE in trainer.start.record.extras:
        # It was set after the start, as it is here.
        trainer.set_rate(float(trainer.start.record.extras[SET_RATE]))
    return BatchTrainer(request, trainer)


def _check_schedule(text: str) -> None:
    """Refuses a schedule that ends with the last step."""
    name, *rest = text.split(":")
    if name in KNOWN[1:] and len(rest) < 2:
        raise OptionError(
            f"lr_schedule {text}: expected {name}:W:N with the step N at which the rate is 0, as a"
            " loop of your own has no known number of steps"
        )


def _check_ranks(request: TrainingRequest, num_processes: int) -> None:
    """Refuses another number of processes than the strategy has devices: none may idle."""
    needed = len(request.plan.ranks)
    if num_processes != needed:
        script = shlex.quote(sys.argv[0] or "SCRIPT")
        started = "this is one process" if num_processes == 1 else f"{num_processes} were started"
        raise LaunchError(
            f"{request.path}: the strategy uses {needed} devices, a process each, and {started};"
            f" run: torchrun --nproc-per-node {needed} {script}"
        )
