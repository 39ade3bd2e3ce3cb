"""`Loop`: the options of the loop of a training, besides the strategy."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from sys import maxsize
from typing import Any

from planner.artefacts.options import SIZE, Optimizer
from planner.launcher.failures.status import HANG_TIMEOUT_S
from planner.launcher.rates import rate_factor
from planner.support.errors import LaunchError, OptionError
from planner.support.named import function_named
from planner.support.options import Options, given, option, options_in
from planner.support.units import parse_bytes

USUAL_STEPS = 10
LARGEST_BYTES = 256 * 1024**2
MAX_THREADS = 1024
"""Of a rank; with a million, OpenMP takes the process down."""
FUNCTION = "module:function"


class DeviceKind(StrEnum):
    """The kind of device that ranks run on; auto takes GPUs where the plan does."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class NanRule(StrEnum):
    """What is done about a loss or gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Probing(Options):
    """How a cluster is measured."""

    device: DeviceKind = option(
        "Kind of device to measure between: CPUs with gloo (cpu), GPUs with nccl (cuda), or GPUs"
        " where there are any (auto).",
        DeviceKind.AUTO,
    )
    largest: int = option(
        "Largest message to send.", LARGEST_BYTES, parse=parse_bytes, words=SIZE, above=0,
        metavar="SIZE", shown="256 MiB",
    )  # fmt: skip


def function_name(text: str) -> str:
    """A text "module:function"."""
    module, _, name = text.partition(":")
    if not module or not name or "\0" in text:
        raise ValueError(f"expected {FUNCTION}, got {text!r:.60}")
    return text


@dataclass(frozen=True, slots=True)
class ParameterGroup(Options):
    """Trained parameters with a learning rate and a weight decay of their own.

    Its text is that of the command line: "*.bias,*norm*:lr_factor=0.5:weight_decay=0".

    Attributes:
        names: globs of names of parameters.
        lr_factor: multiplies the learning rate.
        weight_decay: None takes that of the launch.
    """

    names: tuple[str, ...] = option("", (), flag="names", separator=",")
    lr_factor: float = option("", 1.0, flag="lr_factor", least=0)
    weight_decay: float | None = option("", flag="weight_decay", least=0)

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # super() finds no class that dataclass has made with slots
        if not self.names:
            raise OptionError("names: expected a glob of names of parameters, got none")

    def __str__(self) -> str:
        changed = {name: value for name, value in given(self).items() if name != "names"}
        return ":".join([",".join(self.names), *(f"{key}={one!r}" for key, one in changed.items())])


def _parameter_group(text: str) -> ParameterGroup:
    """The group that a text says. A name may have colons, as those of TensorFlow have.

    Raises:
        ValueError: if a key is unknown, or a value is no number.

    >>> str(_parameter_group("a:0,*.bias:weight_decay=0"))
    'a:0,*.bias:weight_decay=0.0'
    """
    *parts, last = text.split(":")
    values: dict[str, Any] = {}
    while parts and "=" in last:
        key, _, number = last.partition("=")
        if key in values:
            raise ValueError(f"{key} is given twice")
        try:
            values[key] = float(number)
        except ValueError:
            raise ValueError(f"{key}: expected a number, got {number!r:.60}") from None
        last = parts.pop()
    group = options_in(ParameterGroup, {**values, "names": ":".join((*parts, last))})
    assert isinstance(group, ParameterGroup)
    return group


@dataclass(frozen=True, slots=True)
class Loop(Options):
    """The loop of a training.

    Attributes:
        data, eval_data: in Python, the function or dataset itself, too.
        reports_loss: whether the loss is needed after each step.
        config: name and hash of the file that options are from; "" for none.
    """

    steps: int | None = option(
        "Optimizer steps, counted from the first step of the whole training.", least=1,
        shown=str(USUAL_STEPS),
    )  # fmt: skip
    epochs: int | None = option("Passes over the dataset of --data, instead of --steps.", least=1)
    optimizer: Optimizer | None = option(
        "Optimizer, with at most the state that was planned.", shown="the strategy's"
    )
    learning_rate: float | None = option(
        "Learning rate.", flag="--lr", least=0, shown="the optimizer's usual one"
    )
    lr_schedule: str = option(
        "Factor of the learning rate: constant; linear:W:N or cosine:W:N, with W steps of warm-up"
        " (0) and the rate 0 at step N (the last one); or your module:function (step) -> factor.",
        "constant", metavar="SCHEDULE",
    )  # fmt: skip
    weight_decay: float | None = option("Weight decay.", least=0, shown="the optimizer's usual one")
    no_weight_decay: tuple[str, ...] = option(
        "Glob of names of parameters without weight decay, such as '*.bias'. May be repeated.", (),
        metavar="NAME",
    )  # fmt: skip
    param_groups: tuple[ParameterGroup, ...] = option(
        "Parameters with a learning rate and a weight decay of their own, by globs of their names,"
        " such as '*.bias,*norm*:weight_decay=0' or 'embed.*:lr_factor=0.1'. May be repeated; the"
        " first one that matches counts.", (), flag="--param-group", parse=_parameter_group,
        metavar="NAMES[:KEY=X..]",
        words="NAMES[:lr_factor=X][:weight_decay=X], or a mapping with names, lr_factor and"
        " weight_decay",
    )  # fmt: skip
    clip: float | None = option(
        "Largest norm of all gradients together. Longer gradients are scaled down to it.",
        above=0, metavar="NORM",
    )  # fmt: skip
    nan: NanRule | None = option(
        "End the training, or skip the step, when a loss or gradient is not finite.",
        shown="go on",
    )
    dtype: str | None = option(
        "Type that products and convolutions are computed in (autocast). float16 has a loss scale.",
        choices=("float64", "float32", "bfloat16", "float16"), shown="the strategy's",
    )  # fmt: skip
    data: object = option(
        "Function without parameters that returns a dataset, or a DataLoader with the batch of a"
        " step; or function (step, microbatch, inputs) -> (tensors by input, target).",
        metavar="MODULE:CALLABLE", parse=function_name, words=FUNCTION, shown="synthetic data",
    )  # fmt: skip
    shuffle: bool = option(
        "Draw the samples of a dataset in another order in each epoch. A DataLoader has an order of"
        " its own.",
        True,
    )
    eval_data: object = option(
        "Function that returns a dataset to evaluate on: loss, accuracy and --metric.",
        metavar="MODULE:CALLABLE", parse=function_name, words=FUNCTION,
    )  # fmt: skip
    eval_every: int | None = option(
        "Evaluate after every N steps.", least=1, shown="after the last step"
    )
    metrics: tuple[str, ...] = option(
        "Function (output, target) -> number, a mean over samples. May be repeated.", (),
        flag="--metric", metavar="MODULE:FUNCTION", parse=function_name, words=FUNCTION,
    )  # fmt: skip
    log_file: Path | None = option(
        "Write a line of JSON for each step and evaluation to this file.", former="log",
        per_rank=True,
    )  # fmt: skip
    threads: int | None = option(
        "CPU threads per rank.", least=1, most=MAX_THREADS, shown="as in the profile",
        per_rank=True,
    )  # fmt: skip
    seed: int | None = option(
        "Seed of synthetic data and of random operators such as Dropout.", shown="the strategy's"
    )
    hang_timeout: float = option(
        "Seconds after which a rank that stands in one action counts as hung; 0 for never.",
        HANG_TIMEOUT_S, least=0, metavar="S", per_rank=True,
    )  # fmt: skip
    reports_loss: bool = option("", False, per_rank=True)
    config: str | None = option("")


def check(loop: Loop) -> None:
    """Raises the first contradiction between options.

    Raises:
        OptionError: if options contradict each other.
        LaunchError: if a function of the user is not there.
    """
    if loop.epochs is not None and loop.steps is not None:
        raise OptionError(
            f"--epochs {loop.epochs} and --steps {loop.steps}: expected one of the two; leave one"
            " out"
        )
    if loop.epochs is not None and loop.data is None:
        raise OptionError("--epochs: synthetic data has no epochs; give --steps, or --data")
    if loop.eval_data is None and (loop.eval_every is not None or loop.metrics):
        flag = "--metric" if loop.metrics else "--eval-every"
        raise OptionError(f"{flag}: there is no data to evaluate on; give --eval-data")
    if loop.no_weight_decay and loop.param_groups:
        raise OptionError(
            "--no-weight-decay and --param-group: expected one of the two, as the first group that"
            " matches counts; write weight_decay=0 into groups"
        )
    # The steps of epochs are known once the data is read; a training checks the schedule again.
    rate_factor(loop.lr_schedule, loop.steps or (USUAL_STEPS if loop.epochs is None else maxsize))
    named = [("--data", loop.data), ("--eval-data", loop.eval_data)]
    for flag, value in (*named, *(("--metric", one) for one in loop.metrics)):
        if isinstance(value, str):
            function_named(value, flag, LaunchError)
