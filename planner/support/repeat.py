"""`repeat`: the loop of everything that is measured."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


def repeat(
    sample: Callable[[], T],
    *,
    least: int,
    most: int | None = None,
    budget_s: float = 0.0,
    precise: Callable[[list[T]], bool] = lambda samples: False,
    warm_ups: int = 0,
) -> list[T]:
    """Samples until there are `least`, then until the budget is spent or they are precise enough.

    Args:
        sample: takes one.
        least: number of samples that are always taken.
        most: number of samples after which no other one is taken; None for any number.
        budget_s: time after which no other one is taken, from the first sample on; 0 for `least`.
        precise: whether some samples are enough; asked only from `least` on.
        warm_ups: number of samples before the first one, which are thrown away.

    >>> repeat(iter(range(9)).__next__, least=3, warm_ups=2)
    [2, 3, 4]
    """
    for _ in range(warm_ups):
        sample()
    begin_s = perf_counter()
    samples: list[T] = []
    while len(samples) < least or (
        (most is None or len(samples) < most)
        and perf_counter() - begin_s < budget_s
        and not precise(samples)
    ):
        samples.append(sample())
    return samples
