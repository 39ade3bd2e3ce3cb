"""The learning rate of each step, as a factor of --lr.

    constant      1
    linear:W:N    warm-up over W steps, then straight down to 0 at step N
    cosine:W:N    warm-up over W steps, then half a cosine down to 0 at step N
    module:name   the user's function: step -> factor

W is 0 and N is the number of steps where they are left out. The warm-up multiplies by 1/W, 2/W, ..
1. A factor is a function of the step alone, so a training that is resumed needs no state.
"""

import math
from collections.abc import Callable

from planner.support.errors import LaunchError, OptionError
from planner.support.named import function_named

KNOWN = ("constant", "linear", "cosine")

Factor = Callable[[int], float]
"""The index of a step, from 0, -> the factor of the learning rate in it."""


def rate_factor(text: str, num_steps: int) -> Factor:
    """The schedule that a text names.

    Args:
        text: as in the table above.
        num_steps: N where the text leaves it out.

    Raises:
        OptionError: if there is no such schedule.
        LaunchError: if the user's function is not there; later, if it fails or returns no number.
    """
    name, *rest = text.split(":")
    if name not in KNOWN or not all(part.isascii() and part.isdecimal() for part in rest):
        if ":" not in text or name in KNOWN:
            raise _unknown(text)
        return _users(text)
    if len(rest) > (0 if name == "constant" else 2):
        raise _unknown(text)
    numbers = [int(part) for part in rest]
    warmup = numbers[0] if numbers else 0
    end = numbers[1] if len(numbers) > 1 else num_steps
    if name == "constant":
        return lambda step: 1.0
    if not warmup <= end or end < 1:
        raise OptionError(
            f"--lr-schedule {text}: expected a warm-up of at most the {end} steps after which the"
            f" rate is 0, got {warmup}; give {name}:W:N with a smaller W"
        )
    return lambda step: _factor(name, step, warmup, end)


def _factor(name: str, step: int, warmup: int, end: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if step >= end:
        return 0.0
    gone = (step - warmup) / (end - warmup)
    return 1 - gone if name == "linear" else (1 + math.cos(math.pi * gone)) / 2


def _users(text: str) -> Factor:
    function = function_named(text, "--lr-schedule", LaunchError)

    def factor(step: int) -> float:
        where = f"--lr-schedule {text}: step {step}"
        try:
            value = function(step)
        except Exception as error:
            raise LaunchError(f"{where}: {type(error).__name__}: {error}") from error
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise LaunchError(f"{where}: expected a finite factor of at least 0, got {value!r}")
        return float(value)

    return factor


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"--lr-schedule: expected constant, linear:W:N or cosine:W:N (W steps of warm-up, 0 at"
        f" step N), or module:function, got {text!r}"
    )
