"""Forward times of one model by several engines side by side, as checks on each other.

Some differences have a reason: where PyTorch makes a view, ONNX Runtime may copy.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from planner.artefacts.profile import Profile

SMALL_SHARE = 0.001
"""Operators that take less than this share of the model's forward time are not ranked."""

MAX_WORST = 5
"""Number of operators that are listed as furthest apart."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Forward time of all operators of one type, or of all.

    Attributes:
        type: the ONNX operator type.
        count: number of its operators.
        torch_s: sum of their forward times by PyTorch.
        onnxruntime_s: sum of their forward times by ONNX Runtime.
        analytic_s: sum of their forward times by the roofline; None where it was not asked for.
    """

    type: str
    count: int
    torch_s: float
    onnxruntime_s: float
    analytic_s: float | None

    @property
    def ratio(self) -> float | None:
        """Time by ONNX Runtime over time by PyTorch; None where PyTorch takes no time."""
        return self.onnxruntime_s / self.torch_s if self.torch_s else None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An operator whose forward times by the two engines differ.

    Attributes:
        name: name of the operator.
        type: its ONNX type.
        torch_s: its forward time by PyTorch.
        onnxruntime_s: its forward time by ONNX Runtime.
    """

    name: str
    type: str
    torch_s: float
    onnxruntime_s: float


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """Forward times by PyTorch, ONNX Runtime and perhaps the roofline.

    Attributes:
        rows: one per type, longest time by PyTorch first, ties by name.
        total: all operators.
        num_ranked: number of operators above 0.1 % of PyTorch's forward time.
        rank_correlation: of the times of these by PyTorch and by ONNX Runtime, -1 to 1; None for
            fewer than two.
        analytic_rank_correlation: of their times by PyTorch and by the roofline; None without one,
            or for fewer than two.
        worst: the operators whose times differ most, in s, largest difference first.
        engine: the engine of ONNX Runtime's profile, with its execution providers.
    """

    rows: tuple[EngineRow, ...]
    total: EngineRow
    num_ranked: int
    rank_correlation: float | None
    analytic_rank_correlation: float | None
    worst: tuple[Disagreement, ...]
    engine: str


def compare_engines(
    by_torch: Profile, by_onnxruntime: Profile, analytic: Profile | None = None
) -> EngineComparison:
    """Forward times side by side, per operator type and for the operators that differ most.

    Args:
        by_torch: the profile by PyTorch.
        by_onnxruntime: the profile by ONNX Runtime.
        analytic: the profile by the roofline, if there is one.

    Raises:
        ValueError: if the profiles are not of one model and microbatch.
    """
    operators = by_torch.graph.operators
    others = [by_onnxruntime, *([analytic] if analytic else [])]
    if any(
        one.graph.operators != operators or one.microbatch_size != by_torch.microbatch_size
        for one in others
    ):
        raise ValueError("expected profiles of one model and microbatch, got others")
    torch_s, runtime_s = _forward_s(by_torch), _forward_s(by_onnxruntime)
    analytic_s = _forward_s(analytic) if analytic else None
    of_type: defaultdict[str, list[int]] = defaultdict(list)
    for i, operator in enumerate(operators):
        of_type[operator.type].append(i)

    def row(type_: str, chosen: Sequence[int]) -> EngineRow:
        return EngineRow(
            type=type_,
            count=len(chosen),
            torch_s=sum(torch_s[i] for i in chosen),
            onnxruntime_s=sum(runtime_s[i] for i in chosen),
            analytic_s=sum(analytic_s[i] for i in chosen) if analytic_s else None,
        )

    rows = [row(type_, chosen) for type_, chosen in of_type.items()]
    ranked = [i for i, time_s in enumerate(torch_s) if time_s > SMALL_SHARE * sum(torch_s)]
    furthest = sorted(range(len(operators)), key=lambda i: (-abs(torch_s[i] - runtime_s[i]), i))
    return EngineComparison(
        rows=tuple(sorted(rows, key=lambda one: (-one.torch_s, one.type))),
        total=row("all", range(len(operators))),
        num_ranked=len(ranked),
        rank_correlation=_correlation(torch_s, runtime_s, ranked),
        analytic_rank_correlation=_correlation(torch_s, analytic_s, ranked),
        worst=tuple(
            Disagreement(operators[i].name, operators[i].type, torch_s[i], runtime_s[i])
            for i in furthest[:MAX_WORST]
        ),
        engine=by_onnxruntime.engine,
    )


def _forward_s(profile: Profile) -> list[float]:
    return [cost.forward_s for cost in profile.operators]


def _correlation(
    torch_s: Sequence[float], other_s: Sequence[float] | None, ranked: Sequence[int]
) -> float | None:
    if other_s is None or len(ranked) < 2:
        return None
    from planner.profilers.analytic import rank_correlation

    return rank_correlation([torch_s[i] for i in ranked], [other_s[i] for i in ranked])
