"""How near predictions are to what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from statistics import fmean, median

from tests.support.measured.predict import LeftOut, Predicted

CLEAR = 0.05
"""Plans whose measured times differ by less than this share of the shorter one have no order; nor
has a plan that was measured twice with itself.
"""


@dataclass(frozen=True)
class Score:
    """The errors of some predictions.

    Attributes:
        rows: number of predictions.
        mape: mean of the errors of the time without their signs.
        bias: mean of the errors of the time.
        pairs: of plans for one question whose order was measured clearly.
        in_order: pairs that are predicted in that order.
        questions: with several plans.
        regret: by question with several plans, the mean of the relative loss of time of the plan
            that is predicted to be the fastest; None without such questions.
        largest_regret: of these questions.
        memory: median of predicted over measured memory; None where none was measured.
        unfit: predictions of runs that ran, by which they do not fit.
        below_bound: runs that were faster than the lower bound over the profile's kernels.
        below_peak: runs that were faster than the bound over all kernels.
    """

    rows: int
    mape: float
    bias: float
    pairs: int
    in_order: int
    questions: int
    regret: float | None
    largest_regret: float | None
    memory: float | None
    unfit: int
    below_bound: int
    below_peak: int


def score(some: Sequence[Predicted]) -> Score:
    """The errors of some predictions.

    Raises:
        ValueError: if there is none.
    """
    pairs = [pair for answers in _questions(some) for pair in _clear_pairs(answers)]
    regrets = [_regret(answers) for answers in _questions(some) if len(answers) > 1]
    ratios = [one.memory_ratio for one in some if one.memory_ratio is not None]
    return Score(
        rows=len(some),
        mape=fmean(abs(one.error) for one in some),
        bias=fmean(one.error for one in some),
        pairs=len(pairs),
        in_order=sum(fast.iteration_s < slow.iteration_s for fast, slow in pairs),
        questions=len(regrets),
        regret=fmean(regrets) if regrets else None,
        largest_regret=max(regrets, default=None),
        memory=median(ratios) if ratios else None,
        unfit=sum(not one.fits for one in some),
        below_bound=sum(one.row.iteration_s < one.bound_s for one in some),
        below_peak=sum(below_peak(one) for one in some),
    )


def below_peak(one: Predicted | LeftOut) -> bool:
    """Whether a run was faster than the bound over all kernels says that any can be."""
    return one.peak_bound_s is not None and one.row.iteration_s < one.peak_bound_s


def _questions(some: Sequence[Predicted]) -> Iterator[list[Predicted]]:
    """The predictions by the question that their plans answer."""
    ordered = sorted(some, key=lambda one: repr(one.row.question))
    for _, answers in groupby(ordered, key=lambda one: one.row.question):
        yield list(answers)


def _clear_pairs(answers: Sequence[Predicted]) -> Iterator[tuple[Predicted, Predicted]]:
    """Pairs of answers to a question, the one that was measured to be clearly faster first."""
    ordered = sorted(answers, key=lambda one: one.row.iteration_s)
    for fast, slow in combinations(ordered, 2):
        is_clear = slow.row.iteration_s > (1 + CLEAR) * fast.row.iteration_s
        if is_clear and slow.row.plan != fast.row.plan:
            yield fast, slow


def _regret(answers: Sequence[Predicted]) -> float:
    """Of the plan that is predicted to be the fastest; what was measured twice takes the mean."""
    plans = {one.row.plan: [other for other in answers if other.row.plan == one.row.plan]
             for one in answers}  # fmt: skip
    took_s = {plan: fmean(one.row.iteration_s for one in same) for plan, same in plans.items()}
    chosen = min(answers, key=lambda one: one.iteration_s)
    return took_s[chosen.row.plan] / min(took_s.values()) - 1
