"""Training, by the planner's loop or by the user's."""

import os
import shlex
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.files import read_strategy
from planner.planning.plans import Plans
from planner.support.errors import LaunchError, OptionError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan
    from planner.model.load import Model
    from planner.training.loop import BatchTrainer
    from planner.training.options import Checkpoints, TrainingRequest
    from planner.training.report import LaunchReport
    from planner.training.trials import Trial


def launch(
    strategy: File,
    *,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, loss: None,
    check: "Callable[[Plan], None]" = lambda plan: None,
    **how: Any,
) -> "LaunchReport | None":
    """Trains as a strategy says. Every rank that torchrun starts calls it; a strategy for one
    device needs no torchrun.

    Args:
        strategy: the file; the model is looked for relative to its folder.
        report: called with a line for people on a rank that idles.
        progress: called on rank 0 after each step with the number of steps done, that of all, and
            the loss where it is known.
        check: called with the plan as soon as it is read; the other ranks hear of an error that it
            raises, as of any other.
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
        Preempted: if a signal has asked the training to save and to end; see `save_signal`.
        TypeError: if there is no option of that name.
    """
    from planner.training import launch as planners_loop

    return planners_loop.launch(_asked("launch", strategy, how, check=check), report, progress)


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
) -> "BatchTrainer":
    """A training as a strategy says, in a loop of your own. Every rank that torchrun starts runs
    the whole script; a strategy for one device needs no torchrun.

        with planner.trainer("strategy.json", learning_rate=0.1) as trainer:
            for batch in loader:
                loss = trainer.step(batch)
            trainer.save("run")

    Args:
        strategy: the file, or a plan.
        model: the ONNX file, if it is not where the strategy says; a plan needs it.
        metrics: "module:function"s of (output, target) for `BatchTrainer.evaluate`.
        how: `learning_rate`, `lr_schedule`, `weight_decay`, `no_weight_decay`, `param_groups`,
            `optimizer`, `clip`, `nan`, `dtype`, `seed`, `threads`, `hang_timeout`, `loss`,
            `class_dim`, `device`, `checkpoint`, `checkpoint_keep` and `resume`, as of `launch`.
            A group of `param_groups` is a mapping with `names` (a glob or a list of globs),
            `lr_factor` and `weight_decay`. `BatchTrainer.save` writes to the folder `checkpoint`,
            from which a training that torchrun has restarted goes on.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
        TypeError: if there is no option of that name.
    """
    from planner.training import loop

    given = {**how, "model": model, "reports_loss": True}
    return loop.begin(_asked("trainer", strategy, given, loop.WITHOUT), tuple(metrics))


def _asked(
    function: str,
    strategy: "File | Plan",
    how: Mapping[str, Any],
    without: Collection[str] = (),
    check: "Callable[[Plan], None]" = lambda plan: None,
) -> "TrainingRequest":
    """What is asked of a training: the one place where a rank reads the strategy. If it cannot, the
    other ranks are told.
    """
    from planner.launcher.rendezvous import failure_reported, process_rank
    from planner.training.options import TrainingRequest, check_options, options_of

    with failure_reported(process_rank()):
        options = loop, _, launching, checkpoints = options_of(function, how, without)
        check_options(loop, checkpoints)
        if isinstance(strategy, str | os.PathLike):
            plan, path = read_strategy(strategy), Path(strategy)
        elif launching.model is None:
            raise OptionError(
                f"{function}: expected the ONNX file of the plan, which does not say where it is;"
                " give model, or the strategy as a file"
            )
        else:
            plan, path = strategy, Path("the plan")
        check(plan)
        return TrainingRequest(plan, path, *options)


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


def start_launch(
    strategy: File,
    nproc: int,
    arguments: Sequence[str] = (),
    *,
    checkpoints: "Checkpoints | None" = None,
    check: "Callable[[Plan], None]" = lambda plan: None,
) -> int:
    """Runs `planner launch` in processes of this host, and waits for them.

    Args:
        nproc: number of processes, at least the strategy's devices.
        arguments: options of the command, as on the command line.
        checkpoints: those among them; with a folder, signals are passed on to the ranks, which save
            and end.
        check: called with the plan before a process is started.

    Returns:
        The exit code: 0, 1 if a rank failed and said why, or 143 if the ranks have saved and ended
        as a signal asked.

    Raises:
        FileError: if the strategy cannot be read.
        LaunchError: if there are too few processes, or a rank was killed.
    """
    from planner.launcher.failures.monitor import start_ranks
    from planner.launcher.failures.requests import save_signals

    plan, path = read_strategy(strategy), str(Path(strategy))
    check(plan)
    if nproc < (needed := len(plan.ranks)):
        raise LaunchError(
            f"{path}: the strategy uses {needed} devices, --nproc is {nproc}; "
            f"run: planner launch {shlex.quote(path)} --nproc {needed}"
        )
    has_folder = checkpoints is not None and checkpoints.checkpoint is not None
    signals = save_signals(checkpoints.save_signal) if checkpoints and has_folder else ()
    return start_ranks(["launch", path, *arguments], nproc, passed_on=signals)
