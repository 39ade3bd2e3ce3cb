"""`Settings`: what a user says of a training besides the strategy."""

import math
from dataclasses import dataclass

from planner.errors import LaunchError, OptionError
from planner.launcher.failures.page import HANG_TIMEOUT_S
from planner.support.named import function_named


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a training.

    Attributes:
        steps: optimizer steps.
        learning_rate: None takes the optimizer's usual one.
        data: module:function; None draws random data, the same in each step.
        seed: of random data and of random operators; None takes the plan's.
        threads: of torch on a CPU; None takes the profile's.
        hang_timeout: time that a rank may always stand in one action, in s; 0 lets it stand for
            ever.
    """

    steps: int = 10
    learning_rate: float | None = None
    data: str | None = None
    seed: int | None = None
    threads: int | None = None
    hang_timeout: float = HANG_TIMEOUT_S


def check(settings: Settings) -> None:
    """Raises the first thing that is wrong.

    Raises:
        OptionError: if a number is out of its range.
        LaunchError: if the data's function is not there.
    """
    if settings.steps < 1:
        raise OptionError(f"--steps: expected at least 1, got {settings.steps}")
    if settings.threads is not None and settings.threads < 1:
        raise OptionError(f"--threads: expected at least 1, got {settings.threads}")
    if not 0 <= settings.hang_timeout < math.inf:
        raise OptionError(
            f"--hang-timeout: expected 0 or a number of seconds, got {settings.hang_timeout}"
        )
    rate = settings.learning_rate
    if rate is not None and not 0 <= rate < math.inf:
        raise OptionError(f"--lr: expected a finite number of at least 0, got {rate}")
    if settings.data is not None:
        function_named(settings.data, "--data", LaunchError)
