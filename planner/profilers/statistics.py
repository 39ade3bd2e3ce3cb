"""How sure a median is."""

from collections.abc import Sequence
from math import comb
from statistics import median

CONFIDENCE = 0.95


def interval(samples: Sequence[float]) -> float:
    """Half the width of the confidence interval of the median, over the median.

    The interval lies between two order statistics, and holds for every distribution: with n
    samples, the r-th smallest and the r-th largest enclose the median unless fewer than r samples
    fall on one side, which has the probability

        2 sum over k < r of C(n, k) / 2^n

    The largest r is taken that keeps it under 5 %. Fewer than 6 samples cannot be so sure, and
    their whole range is taken; one sample says nothing: 1.

    Args:
        samples: at least one, not negative.

    Source: Conover, Practical Nonparametric Statistics, section 3.2.

    >>> interval([1.0, 1.1, 0.9, 1.0, 1.0, 1.2])
    0.15
    """
    n, middle = len(samples), median(samples)
    if n == 1:
        return 1.0
    if middle == 0:
        return 0.0
    outside, r = 0.0, 0
    while True:
        outside += 2 * comb(n, r) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        r += 1
    ordered = sorted(samples)
    r = max(r, 1)
    return round((ordered[n - r] - ordered[r - 1]) / 2 / middle, 4)
