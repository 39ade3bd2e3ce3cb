"""Training, by the planner's loop or by the user's."""

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.planning.plans import Plans
from planner.support.errors import OptionError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.model.load import Model
    from planner.training.own_loop import LoopTrainer
    from planner.training.report import LaunchReport
    from planner.training.trials import Trial


def launch(
    strategy: File,
    *,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, loss: None,
    **how: Any,
) -> "LaunchReport | None":
    """Trains as a strategy says. Every rank that torchrun starts calls it; a strategy for one
    device needs no torchrun.

    Args:
        strategy: the file; the model is looked for relative to its folder.
        report: called with a line for people on a rank that idles.
        progress: called on rank 0 after each step with the number of steps done, that of all, and
            the loss where it is known.
        how: the options of the command line, called after the fields of
            `planner.launcher.options.Loop` (such as `steps` and `learning_rate`),
            `planner.training.options.Launching` (`model`, `device`, `trace`, `track_memory`),
            `planner.training.options.Checkpoints` (`checkpoint`, `checkpoint_every`,
            `checkpoint_keep`, `resume`) and `planner.artefacts.options.LossOptions` (`loss`,
            `class_dim`; the profile's without). `data` and `eval_data` may be a function or dataset
            itself. `read_config` reads all of them from a file, which `config` names.

    Returns:
        Predicted beside measured times on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
        TypeError: if there is no option of that name.
    """
    from planner.training import run

    return run.launch(Path(strategy), report=report, progress=progress, **how)


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
    strategy: "File | Plan", model: File | None = None, *, metrics: Sequence[str] = (), **how: Any
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
        metrics: "module:function"s of (output, target) for `LoopTrainer.evaluate`.
        how: `learning_rate`, `lr_schedule`, `weight_decay`, `optimizer`, `clip`, `nan`, `dtype`,
            `seed`, `threads`, `hang_timeout`, `loss`, `class_dim`, `device`, `checkpoint`,
            `checkpoint_keep` and `resume`, as of `launch`. `LoopTrainer.save` writes to the folder
            `checkpoint`, from which a training that torchrun has restarted goes on.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
        TypeError: if there is no option of that name.
    """
    from planner.training import own_loop
    from planner.training.joining import Asked, options_of

    given = {**how, "model": model, "tells": True}
    options = options_of("trainer", given, own_loop.WITHOUT)
    plan, path = _plan_and_path(strategy, model)
    return own_loop.begin(Asked(plan, path, *options), tuple(metrics))


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
