"""Training, by the planner's loop or by the user's."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from planner.planning.plans import Plans
from planner.support.errors import OptionError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.launcher.settings import LoopOptions, TrainingOptions
    from planner.model.load import Model
    from planner.training.own_loop import LoopTrainer
    from planner.training.report import LaunchReport
    from planner.training.trials import Trial


def launch(
    strategy: File,
    *,
    model: File | None = None,
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    device: str = "auto",
    trace: File | None = None,
    track_memory: bool = False,
    checkpoint: File | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int = 3,
    resume: File | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, loss: None,
    **how: "Unpack[TrainingOptions]",
) -> "LaunchReport | None":
    """Trains as a strategy says. Every rank that torchrun starts calls it; a strategy for one
    device needs no torchrun.

    Args:
        strategy: the file; the model is looked for relative to its folder.
        model: the ONNX file, if it is not where the strategy says.
        loss: of all outputs that the profile gave one, or by output: see `read_model`; None takes
            the profile's.
        class_dim: the dimension that classes lie on, of all of them or by output.
        device: "auto", "cpu" or "cuda".
        trace: file to write a measured iteration to.
        track_memory: whether memory is watched in one more step, which is slow.
        checkpoint: folder for checkpoints; one is written at the end.
        checkpoint_every: steps from one checkpoint to the next; None writes that one only.
        checkpoint_keep: number of checkpoints that stay, the newest ones.
        resume: a checkpoint, or a folder with some, to go on from; it may be that of another
            strategy of the same model.
        report: called with a line for people on a rank that idles.
        progress: called on rank 0 after each step with the number of steps done, that of all, and
            the loss where it is known.
        how: the training itself: the options of the command line, in its words, such as `steps`,
            `learning_rate` (--lr), `lr_schedule`, `weight_decay`, `optimizer`, `clip`, `nan`,
            `dtype`, `data`, `epochs`, `shuffle`, `eval_data`, `eval_every`, `metrics`, `log`,
            `seed` and `threads`; `planner.launcher.settings.Settings` describes them. `read_config`
            reads them, and the arguments above, from a file that `config` names.

    Returns:
        Predicted beside measured times on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
    """
    from planner.artefacts.losses import LossOptions
    from planner.training import run
    from planner.training.checkpoints.keeping import Keeping

    return run.launch(
        Path(strategy),
        model_path=None if model is None else Path(model),
        loss=LossOptions(functions=loss, class_dims=class_dim),
        device=device,
        trace=None if trace is None else Path(trace),
        track_memory=track_memory,
        keeping=Keeping(
            None if checkpoint is None else Path(checkpoint),
            checkpoint_every,
            checkpoint_keep,
            None if resume is None else Path(resume),
        ),
        report=report,
        progress=progress,
        **how,
    )


def read_config(path: File) -> dict[str, Any]:
    """The options of a training in a YAML file, as keyword arguments of `launch`:

        planner.launch("strategy.json", **planner.read_config("train.yaml"))

    Keys are the options of the command line, with - or _ inside; paths are relative to the folder
    of the file. `config`, the name of the file and the hash of its content, is added: ranks that
    have read different files refuse to train.

    Raises:
        FileError: if the file is missing, no YAML, or has unknown options or wrong values.
    """
    from planner.training import config

    return config.read_config(Path(path))


def trainer(
    strategy: "File | Plan",
    model: File | None = None,
    *,
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    device: str = "auto",
    metrics: Sequence[str] = (),
    checkpoint: File | None = None,
    checkpoint_keep: int = 3,
    resume: File | None = None,
    **how: "Unpack[LoopOptions]",
) -> "LoopTrainer":
    """A training as a strategy says, in a loop of your own. Every rank that torchrun starts runs
    the whole script; a strategy for one device needs no torchrun.

        with planner.trainer("strategy.json", learning_rate=0.1) as trainer:
            for batch in loader:
                loss = trainer.step(batch)
            trainer.save("run")

    Args:
        strategy: the file, or a plan.
        model: the ONNX file, if it is not where the strategy says; a plan needs it.
        loss, class_dim, device: see `launch`.
        metrics: "module:function"s of (output, target) for `LoopTrainer.evaluate`.
        checkpoint: folder that `LoopTrainer.save` writes to, and that a training that torchrun has
            restarted goes on from.
        checkpoint_keep: number of checkpoints that stay, the newest ones.
        resume: a checkpoint, or a folder with some, to go on from.
        how: `learning_rate`, `lr_schedule`, `weight_decay`, `optimizer`, `clip`, `nan`, `dtype`,
            `seed`, `threads` and `hang_timeout`, as of `launch`.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
    """
    from planner.artefacts.losses import LossOptions
    from planner.launcher.settings import Settings
    from planner.training import own_loop
    from planner.training.checkpoints.keeping import Keeping
    from planner.training.joining import Asked

    plan, path = _plan_and_path(strategy, model)
    keeping = Keeping(
        folder=None if checkpoint is None else Path(checkpoint),
        keep=checkpoint_keep,
        resume=None if resume is None else Path(resume),
    )
    asked = Asked(
        plan, path, None if model is None else Path(model), LossOptions((), loss, class_dim),
        device, Settings(**how, tells=True), keeping,
    )  # fmt: skip
    return own_loop.begin(asked, tuple(metrics))


def _plan_and_path(strategy: "File | Plan", model: File | None) -> "tuple[Plan, Path]":
    """A plan, and how messages call it."""
    from planner.artefacts.files import read_plan

    if isinstance(strategy, str | os.PathLike):
        return read_plan(Path(strategy)), Path(strategy)
    if model is None:
        raise OptionError(
            "trainer: expected the ONNX file of the plan, which does not say where it is; give"
            " model, or the strategy as a file"
        )
    return strategy, Path("the plan")


def measure(
    plans: Plans,
    model: "File | Model",
    *,
    steps: int,
    progress: Callable[[int, str], None] = lambda done, solver: None,
) -> "Generator[Trial, None, None]":
    """Launches the plan of every solver on this host, one after the other, on synthetic data.

    A plan that needs more processes or another device than there are, or that fails while it runs,
    has a reason instead of times. Equal plans are run once.

    Args:
        plans: of `compare`.
        model: their ONNX file, read or not.
        steps: steps of each plan that are timed, after one that warms up.
        progress: called before each plan with the number of plans before it and its solver.

    Yields:
        A trial for each plan, as soon as it is there.

    Raises:
        OptionError: if there are no steps.
    """
    from planner.training.trials import Candidate, trials

    if steps < 1:
        raise OptionError(f"steps: expected 1 or more, got {steps}")
    path = Path(model) if isinstance(model, str | os.PathLike) else model.path
    candidates = [
        Candidate(row.solver, row.plan, row.shortage is None)
        for row in plans.comparison.rows
        if row.plan is not None
    ]
    return trials(candidates, path.absolute(), steps, progress)


def start_launch(strategy: File, nproc: int, arguments: Sequence[str] = ()) -> int:
    """Runs `planner launch` in processes of this host, and waits for them.

    Args:
        nproc: number of processes, at least the strategy's devices.
        arguments: options of the command, as on the command line.

    Returns:
        The exit code: 0, or 1 if a rank failed and said why.

    Raises:
        FileError: if the strategy cannot be read.
        LaunchError: if there are too few processes, or a rank was killed.
    """
    from planner.launcher import processes

    return processes.start_launch(Path(strategy), nproc, arguments)
