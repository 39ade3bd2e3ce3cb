"""`rules_at`: every way to split an operator into n parts, found by running it (EasyDist's test).

1. Which part of the outputs does a part of an input reach? If the first of n parts of an input,
   cut along a dimension, reaches only the first of n parts of an output, the two may be cut alike.
2. For each way to cut the first output, and for sums and means of outputs, the inputs are given in
   all ways that this allows: cut, whole, or as summands.
3. The operator runs on the parts. A way is a rule if the ranks' outputs make up the whole ones.

A part of an operator that no rank needs is no way to split it: what does not reach any output is
never cut. Largest and smallest numbers of parts (of TopK, MaxPool over everything) have rules, but
no gradient that follows from them, and are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from torch import Tensor

from planner.artefacts.sharding import AxisRule
from planner.operators.parts.attributes import divisible
from planner.profilers.rules.trial import Given, Trial, joined

MAX_WAYS = 3_000
"""Of giving the inputs; where there are more, inputs of one shape are all given alike."""


def rules_at(trial: Trial, kind: str) -> tuple[AxisRule, ...]:
    """The rules of an operator for the trial's number of parts.

    Args:
        kind: the operator's ONNX type.

    Raises:
        TooLargeError: if it cannot be tried.
    """
    # An experiment with each input rules out most ways before any is run. All combinations of specs
    # took 0.9 s for an Attention with six inputs.
    seen = _Dependence(trial)
    found: dict[object, AxisRule] = {}
    for dim in (*seen.output_dims(), None):
        for local in divisible(kind, trial.call, dim, trial.whole[0].dim()):
            for given in _ways(seen.options(dim), trial.shapes):
                if (set(given) <= {"R"} and not local) or (given, local) in found:
                    continue
                made = trial.outcome(given, local, _may_be(trial, dim))
                if made is not None and _needs(local, given, found):
                    found[given, local] = AxisRule(given, made, local)
    return tuple(found.values())


def _needs(local: tuple[str, ...], given: Given, found: Mapping[object, AxisRule]) -> bool:
    """Whether a rule is not already one without its local attributes."""
    return not local or (given, ()) not in found


def holds(trial: Trial, rule: AxisRule) -> bool:
    """Whether a rule makes the same of the trial's numbers."""
    return trial.outcome(rule.inputs, rule.local) == rule.outputs


def _may_be(trial: Trial, dim: int | None) -> Callable[[Tensor], bool]:
    """A check of the first rank's first output: its part along a dimension, or of the shape of a
    summand.
    """
    whole = trial.whole[0]
    if dim is None:
        return lambda made: made.shape == whole.shape
    expected = whole.chunk(trial.parts, dim)[0]
    return lambda made: joined([made], expected) == "R"


def _ways(options: Sequence[Sequence[str]], shapes: Sequence[object]) -> Iterator[Given]:
    """All ways to give the inputs, or where there are too many, those alike for equal shapes."""
    if prod(map(len, options)) <= MAX_WAYS:
        yield from product(*options)
        return
    groups: dict[tuple[object, tuple[str, ...]], list[int]] = {}
    for i, alike in enumerate(options):
        groups.setdefault((shapes[i], tuple(alike)), []).append(i)
    for chosen in product(*(alike for _, alike in groups)):
        given = [""] * len(options)
        for part, members in zip(chosen, groups.values(), strict=True):
            for i in members:
                given[i] = part
        yield tuple(given)


class _Dependence:
    """Which parts of the outputs the parts of the inputs reach."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.parts = trial, trial.parts
        # Per value and dimension, the ways to make the first output if the value is cut so. A part
        # that reaches nothing is not cut: who knows what it reaches with other numbers?
        self.allowed: list[dict[int, frozenset[int | None]]] = []
        self.used: list[bool] = []
        for i, shape in enumerate(trial.shapes):
            constant = trial.template.values[i].constant is not None
            everywhere = None if constant else trial.reached(i, None)
            self.used.append(everywhere is not None and any(map(_any, everywhere)))
            reached = {dim: trial.reached(i, dim) for dim in self._cuttable(shape, self.used[-1])}
            self.allowed.append({
                dim: self._allowed(changed[0])
                for dim, changed in reached.items()
                if changed is not None and any(map(_any, changed))
            })  # fmt: skip

    def output_dims(self) -> list[int]:
        """The dimensions along which the first output can be cut."""
        return self._cuttable(self.trial.whole[0].shape)

    def _cuttable(self, shape: Sequence[int], used: bool = True) -> list[int]:
        return [d for d, size in enumerate(shape) if used and size > 1 and size % self.parts == 0]

    def _allowed(self, changed: Tensor) -> frozenset[int | None]:
        """The ways to make the first output, cut along a dimension, or None, as a sum: along those
        in which the first part of a value reaches its first part alone; all of them where it only
        reaches other outputs.
        """
        if not _any(changed):
            return frozenset((*self.output_dims(), None))
        inside = []
        for d in self.output_dims():
            size = changed.shape[d] // self.parts
            if not _any(changed.narrow(d, size, changed.shape[d] - size)):
                inside.append(d)
        return frozenset(inside) or frozenset((None,))

    def options(self, dim: int | None) -> list[list[str]]:
        """How each value may be given if the first output is cut along a dimension, or is a sum."""
        every = []
        for i, own in enumerate(self.allowed):
            options = ["R", *(f"S{d}" for d, allowed in own.items() if dim in allowed)]
            if dim is None and self.used[i] and self.trial.values[i].is_floating_point():
                options.append("P")
            every.append(options)
        return every


def _any(changed: Tensor) -> bool:
    return bool(changed.any())
