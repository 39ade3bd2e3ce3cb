"""`Settings`: what a user says of a training besides the strategy."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypedDict

from planner.artefacts.problem import Optimizer
from planner.launcher.failures.page import HANG_TIMEOUT_S
from planner.launcher.rates import rate_factor
from planner.support.errors import LaunchError, OptionError
from planner.support.named import function_named

USUAL_STEPS = 10
MAX_THREADS = 1024
"""Of a rank; with a million, OpenMP takes the process down."""


class NanRule(StrEnum):
    """What is done about a loss or gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a training.

    Attributes:
        steps: optimizer steps, counted from the very first; None takes those of `epochs`, or 10.
        epochs: passes over the dataset of `data`, instead of steps.
        learning_rate: None takes the optimizer's usual one.
        data: "module:callable", or the callable or dataset itself; None draws random data, the
            same in each step.
        seed: of random data, of the order of samples and of random operators; None takes the
            plan's.
        threads: of torch on a CPU; None takes the profile's.
        hang_timeout: time that a rank may always stand in one action, in s; 0 lets it stand for
            ever.
        optimizer: its name; None takes the plan's.
        lr_schedule: "constant", "linear:W:N", "cosine:W:N" or "module:function".
        weight_decay: None takes the optimizer's usual one.
        clip: the largest norm of all gradients together; None leaves them as they are.
        nan: what is done if a loss or gradient is not finite; None goes on.
        dtype: type that products and convolutions are computed in; None takes the plan's.
        shuffle: whether the samples of a dataset are drawn in another order in each epoch.
        eval_data: "module:callable" that returns a dataset, or the dataset itself.
        eval_every: steps between two evaluations; None evaluates after the last step only.
        metrics: "module:function"s of (output, target), besides loss and accuracy.
        log: file that rank 0 writes a line of JSON into after each step.
        tells: whether somebody wants to know the loss after each step.
        config: name and hash of the file that options are from; "" for none.
    """

    steps: int | None = None
    learning_rate: float | None = None
    data: object = None
    seed: int | None = None
    threads: int | None = None
    hang_timeout: float = HANG_TIMEOUT_S
    epochs: int | None = None
    optimizer: str | None = None
    lr_schedule: str = "constant"
    weight_decay: float | None = None
    clip: float | None = None
    nan: str | None = None
    dtype: str | None = None
    shuffle: bool = True
    eval_data: object = None
    eval_every: int | None = None
    metrics: tuple[str, ...] = ()
    log: Path | None = None
    tells: bool = False
    config: str = ""


class LoopOptions(TypedDict, total=False):
    """Fields of `Settings` that a training has whoever writes its loop, as keyword arguments."""

    learning_rate: float | None
    seed: int | None
    threads: int | None
    hang_timeout: float
    optimizer: str | None
    lr_schedule: str
    weight_decay: float | None
    clip: float | None
    nan: str | None
    dtype: str | None


class TrainingOptions(LoopOptions, total=False):
    """All fields of `Settings`, as keyword arguments."""

    steps: int | None
    data: object
    epochs: int | None
    shuffle: bool
    eval_data: object
    eval_every: int | None
    metrics: tuple[str, ...]
    log: Path | None
    tells: bool
    config: str


def check(settings: Settings) -> None:
    """Raises the first thing that is wrong.

    Raises:
        OptionError: if a number is out of its range, or options contradict each other.
        LaunchError: if a function of the user is not there.
    """
    for name in ("steps", "epochs", "threads", "eval_every"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise OptionError(f"{_option(name)}: expected at least 1, got {value}")
    if settings.threads is not None and settings.threads > MAX_THREADS:
        raise OptionError(f"--threads: expected at most {MAX_THREADS}, got {settings.threads}")
    for name in ("learning_rate", "weight_decay"):
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise OptionError(
                f"{_option(name)}: expected a finite number of at least 0, got {value}"
            )
    if settings.clip is not None and not 0 < settings.clip < math.inf:
        raise OptionError(f"--clip: expected a finite number above 0, got {settings.clip}")
    if not 0 <= settings.hang_timeout < math.inf:
        raise OptionError(
            f"--hang-timeout: expected 0 or a number of seconds, got {settings.hang_timeout}"
        )
    _check_choices(settings)
    _check_together(settings)
    rate_factor(settings.lr_schedule, settings.steps or USUAL_STEPS)
    named = [("--data", settings.data), ("--eval-data", settings.eval_data)]
    for option, given in (*named, *(("--metric", one) for one in settings.metrics)):
        if isinstance(given, str):
            function_named(given, option, LaunchError)


def _check_choices(settings: Settings) -> None:
    for option, given, known in (
        ("--optimizer", settings.optimizer, tuple(Optimizer)),
        ("--nan", settings.nan, tuple(NanRule)),
    ):
        if given is not None and given not in known:
            raise OptionError(f"{option}: expected one of {', '.join(known)}, got {given!r}")


def _check_together(settings: Settings) -> None:
    if settings.epochs is not None and settings.steps is not None:
        raise OptionError(
            f"--epochs {settings.epochs} and --steps {settings.steps}: expected one of the two;"
            " leave one out"
        )
    if settings.epochs is not None and settings.data is None:
        raise OptionError("--epochs: synthetic data has no epochs; give --steps, or --data")
    if settings.eval_data is None and (settings.eval_every is not None or settings.metrics):
        option = "--metric" if settings.metrics else "--eval-every"
        raise OptionError(f"{option}: there is no data to evaluate on; give --eval-data")


def _option(field: str) -> str:
    names = {"learning_rate": "--lr"}
    return names.get(field, f"--{field.replace('_', '-')}")
