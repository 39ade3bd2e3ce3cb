"""A profile at a glance: time per operator type, the sum of the operators beside the whole step,
and the sizes of the tensors that a cut would have to send.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from planner.artefacts.clocks import clocks_s, on_clocks_s, pass_times_s
from planner.artefacts.graph import Operator, consumers, producers
from planner.artefacts.profile import OperatorCost, Profile, SplitRule
from planner.artefacts.sharding import dim_of


@dataclass(frozen=True, slots=True)
class TypeRow:
    """All operators of one type.

    Attributes:
        type: the ONNX operator type.
        count: number of its operators.
        forward_s: sum of their forward times.
        backward_s: sum of their backward times.
        forward_share: share of the model's forward time, 0 to 1.
        backward_share: share of the model's backward time, 0 to 1.
    """

    type: str
    count: int
    forward_s: float
    backward_s: float
    forward_share: float
    backward_share: float

    @property
    def time_s(self) -> float:
        """Forward and backward time."""
        return self.forward_s + self.backward_s

    @property
    def backward_per_forward(self) -> float | None:
        """Backward time over forward time; None where forward takes no time."""
        return self.backward_s / self.forward_s if self.forward_s else None


@dataclass(frozen=True, slots=True)
class Summary:
    """A profile at a glance.

    Attributes:
        rows: one per type, longest time first, ties by name.
        sum_s: forward and backward of all operators in a row, by their times one by one.
        whole_s: time of the whole step in one piece, mean of before and after; None if it was not
            measured.
        drift: time of the whole step after the operators were timed over that before, less 1; None
            if it was not measured.
    """

    rows: tuple[TypeRow, ...]
    sum_s: float
    whole_s: float | None
    drift: float | None

    @property
    def sum_per_whole(self) -> float | None:
        """Sum of the operators over the whole step; near 1 on a quiet machine."""
        return self.sum_s / self.whole_s if self.whole_s else None


@dataclass(frozen=True, slots=True)
class EdgeSizes:
    """Sizes of the tensors that operators make for other operators.

    Attributes:
        count: number of tensors.
        total_bytes: sum of their sizes.
        quantiles: sizes in bytes that a tenth, half and nine tenths of them do not exceed.
        largest: name of the largest tensor; the first of several.
        largest_bytes: its size.
    """

    count: int
    total_bytes: int
    quantiles: tuple[int, int, int]
    largest: str
    largest_bytes: int


def edge_sizes(profile: Profile) -> EdgeSizes | None:
    """The sizes of the tensors on a profile's edges; None for a model without edges."""
    graph = profile.graph
    made, read_by = producers(graph), consumers(graph)
    between = [tensor for tensor in graph.tensors if tensor.name in made and read_by[tensor.name]]
    if not between:
        return None
    sizes = sorted(tensor.bytes for tensor in between)
    tenth, half, most = (sizes[int(share * (len(sizes) - 1))] for share in (0.1, 0.5, 0.9))
    largest = max(between, key=lambda tensor: tensor.bytes)
    return EdgeSizes(len(sizes), sum(sizes), (tenth, half, most), largest.name, largest.bytes)


def summary(profile: Profile) -> Summary:
    """Time per operator type, and the sum of the operators beside the whole step."""
    by_type: defaultdict[str, list[OperatorCost]] = defaultdict(list)
    for operator, cost in zip(profile.graph.operators, profile.operators, strict=True):
        by_type[operator.type].append(cost)
    forward_s = sum(cost.forward_s for cost in profile.operators)
    backward_s = sum(cost.backward_s for cost in profile.operators)
    both_s = on_clocks_s(*clocks_s(profile), launch_blocking=profile.launch_blocking)
    alone_s = sum(pass_times_s(*both_s))
    rows = [_row(type_, costs, forward_s, backward_s) for type_, costs in by_type.items()]
    whole = profile.whole_step
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: (-row.time_s, row.type))),
        sum_s=alone_s if whole is None or whole.alone_s is None else whole.alone_s,
        whole_s=(whole.before_s + whole.after_s) / 2 if whole else None,
        drift=whole.after_s / whole.before_s - 1 if whole else None,
    )


def _row(
    type_: str, costs: list[OperatorCost], all_forward_s: float, all_backward_s: float
) -> TypeRow:
    forward_s = sum(cost.forward_s for cost in costs)
    backward_s = sum(cost.backward_s for cost in costs)
    return TypeRow(
        type=type_,
        count=len(costs),
        forward_s=forward_s,
        backward_s=backward_s,
        forward_share=forward_s / all_forward_s if all_forward_s else 0.0,
        backward_share=backward_s / all_backward_s if all_backward_s else 0.0,
    )


class SplitKind(StrEnum):
    """What a rule cuts; the words are FlexFlow's (Jia et al. 2019, section 4), the last is new."""

    SAMPLE = "sample"
    """The first dimension of the output, and no parameter."""
    ATTRIBUTE = "attribute"
    """Another dimension of the output, and no parameter."""
    PARAMETER = "parameter"
    """A parameter and with it the output."""
    REDUCTION = "reduction"
    """A dimension that is summed over: every device makes a summand of the output."""


def split_kind(rule: SplitRule, operator: Operator) -> SplitKind | None:
    """What a rule cuts; None where it only passes summands on.

    >>> linear = Operator("linear", "MatMul", ("x",), ("y",), ("w",))
    >>> lines = "S1,R->S1", "R,S1->S2", "S2,S0->P", "P,R->P"
    >>> [split_kind(SplitRule(line), linear) for line in lines]
    [<SplitKind.ATTRIBUTE: 'attribute'>, <SplitKind.PARAMETER: 'parameter'>, \
<SplitKind.REDUCTION: 'reduction'>, None]
    """
    given, (made, *_) = rule.rule.inputs, rule.rule.outputs
    if made in ("P", "A"):
        cut = any(dim_of(part) is not None for part in given)
        return SplitKind.REDUCTION if cut else None
    if any(dim_of(part) is not None for part in given[len(operator.inputs) :]):
        return SplitKind.PARAMETER
    return SplitKind.SAMPLE if dim_of(made) == 0 else SplitKind.ATTRIBUTE


def split_counts(profile: Profile) -> dict[SplitKind, int]:
    """The number of operators with a rule of each kind."""
    counts = dict.fromkeys(SplitKind, 0)
    for operator, cost in zip(profile.graph.operators, profile.operators, strict=True):
        for kind in {split_kind(rule, operator) for rule in cost.rules}:
            if kind is not None:
                counts[kind] += 1
    return counts
