"""The profile for a microbatch of a size that was not profiled, between two that were.

Times are linear between the two neighbours, operator by operator. Sizes of tensors are a + c n for
n samples, so they come out exact, or there is no such profile. There is none for sizes outside.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from planner.artefacts.graph import Graph, Parameter, Tensor
from planner.artefacts.profile import ALIKE, LossCost, OperatorCost, Profile, Source
from planner.support.errors import OptionError
from planner.support.memo import remembered

# The fields in which two profiles must agree for a third one to lie between them.
_SAME = (*ALIKE, "engine", "threads")


def interpolated(profiles: Sequence[Profile], size: int) -> Profile:
    """The profile for a microbatch of some size: the one that is there, or one between two.

    Of one that is made, times are linear between the neighbours; so are, exactly, the shapes of
    tensors and the sizes of dimensions; and so are FLOPs and bytes, rounded up to whole ones.
    Workspace, and how uncertain a time is, are the larger of the two.

    Microbatches of one sample are special: autograd may keep a view there where it keeps a copy of
    any larger one. Next to one, the stash is that of the larger neighbour, and in proportion to it
    where that is more than the straight line.

    Args:
        profiles: of one model on one device, of different sizes, in any order.
        size: samples in a microbatch.

    Raises:
        OptionError: if the size is outside those profiled, or the neighbours differ in more than
            their sizes.
    """
    by_size = {profile.microbatch_size: profile for profile in profiles}
    if size in by_size:
        return by_size[size]
    smaller, larger = (n for n in by_size if n < size), (n for n in by_size if n > size)
    below, above = max(smaller, default=None), min(larger, default=None)
    if below is None or above is None:
        known = " or ".join(map(str, sorted(by_size)))
        between = f", or between {min(by_size)} and {max(by_size)}" if len(by_size) > 1 else ""
        raise OptionError(
            f"a microbatch of {size}: expected a size that was profiled, {known}{between};"
            f" {_advice(by_size, size)}"
        )
    gap = _Gap(by_size[below], by_size[above], size)
    if (reason := next(gap.differences(), None)) is not None:
        raise OptionError(
            f"a microbatch of {size} cannot be interpolated between those of {below} and {above}:"
            f" {reason}; {_advice(by_size, size)}"
        )
    return _made(gap.low, gap.high, gap.size)


@remembered
def _made(low: Profile, high: Profile, size: int) -> Profile:
    """The same object each time: memos of a profile go by its identity."""
    return _Gap(low, high, size).profile()


def _advice(sizes: Iterable[int], size: int) -> str:
    batches = ",".join(map(str, sorted((*sizes, size))))
    return f"profile it too: planner profile MODEL.onnx --batch {batches}"


@dataclass(frozen=True)
class _Gap:
    """Two neighbours and a size between theirs."""

    low: Profile
    high: Profile
    size: int

    def at(self, low: int, high: int) -> Fraction:
        """The figure at the size, of one that is `low` and `high` at the neighbours."""
        # A fraction, because a shape is possible only if it comes out whole, without rounding.
        step = self.high.microbatch_size - self.low.microbatch_size
        return low + (high - low) * Fraction(self.size - self.low.microbatch_size, step)

    def time_s(self, low: float, high: float) -> float:
        """The same for a time, in s."""
        step = self.high.microbatch_size - self.low.microbatch_size
        return low + (high - low) * ((self.size - self.low.microbatch_size) / step)

    def up(self, low: int, high: int) -> int:
        """The same for bytes or FLOPs, rounded up."""
        return ceil(self.at(low, high))

    # The differences that rule it out

    def differences(self) -> Iterator[str]:
        """Why there is no profile between the two."""
        low, high = self.low, self.high
        for name in _SAME:
            if getattr(low, name) != getattr(high, name):
                yield f"{name} is {getattr(low, name)!r} and {getattr(high, name)!r}"
        if low.graph.operators != high.graph.operators:
            yield "their operators differ"
        elif low.dimensions.keys() != high.dimensions.keys():
            yield "their dimensions differ"
        else:
            yield from self._dimensions()
            yield from self._values(low.graph.tensors, high.graph.tensors)
            yield from self._values(low.graph.parameters, high.graph.parameters)
            yield from self._ends()
            yield from self._kept()

    def _dimensions(self) -> Iterator[str]:
        for name, size in self.low.dimensions.items():
            if self.at(size, self.high.dimensions[name]).denominator > 1:
                yield f"dimension {name} is {size} and {self.high.dimensions[name]}"

    def _values(
        self, low: Sequence[Tensor | Parameter], high: Sequence[Tensor | Parameter]
    ) -> Iterator[str]:
        if [value.name for value in low] != [value.name for value in high]:
            yield "their tensors or parameters differ"
            return
        for one, other in zip(low, high, strict=True):
            alike = replace(one, shape=()) == replace(other, shape=())
            if not alike or len(one.shape) != len(other.shape):
                yield f"{one.name} is {_described(one)} and {_described(other)}"
            elif any(self.at(*sizes).denominator > 1 for sizes in _pairs(one, other)):
                yield f"{one.name} is {_described(one)} and {_described(other)}, which leaves no" \
                      " whole shape between"  # fmt: skip
            elif isinstance(one, Parameter) and one.trainable and one != other:
                yield f"{one.name} is trained, and is {_described(one)} and {_described(other)}"

    def _ends(self) -> Iterator[str]:
        low, high = self.low.graph, self.high.graph
        if (low.inputs, low.outputs) != (high.inputs, high.outputs):
            yield "their inputs or outputs differ"
        if low.losses != high.losses:
            yield "their losses differ"

    def _kept(self) -> Iterator[str]:
        """Of more than one sample, autograd keeps the same things, whatever the size."""
        if self.low.microbatch_size == 1:
            return
        if self.low.views != self.high.views:
            yield "other tensors are views"
        if self.low.gradient_views != self.high.gradient_views:
            yield "other gradients are views"
        for one, other in zip(self.low.operators, self.high.operators, strict=True):
            if one.stash_tensors != other.stash_tensors:
                yield f"{one.name} keeps other tensors for its backward pass"

    # The profile between

    def profile(self) -> Profile:
        """The profile of the size."""
        low, high = self.low, self.high
        sizes = f"{low.microbatch_size} and {high.microbatch_size}"
        return replace(
            high,
            graph=self._graph(),
            operators=tuple(map(self._cost, low.operators, high.operators)),
            dimensions={
                name: int(self.at(low.dimensions[name], size))
                for name, size in high.dimensions.items()
            },
            microbatch_size=self.size,
            source=Source.INTERPOLATED,
            repetitions=min(low.repetitions, high.repetitions),
            spread=max(low.spread, high.spread),
            whole_step=None,
            loss_costs=self._loss_costs(),
            versions={k: v for k, v in high.versions.items() if low.versions.get(k) == v},
            warnings=(
                f"times are interpolated between microbatches of {sizes}, {low.source.value}",
                *dict.fromkeys((*low.warnings, *high.warnings)),
            ),
        )

    def _graph(self) -> Graph:
        low, high = self.low.graph, self.high.graph
        return replace(
            high,
            tensors=tuple(
                replace(b, shape=self._shape(a, b))
                for a, b in zip(low.tensors, high.tensors, strict=True)
            ),
            parameters=tuple(
                replace(b, shape=self._shape(a, b))
                for a, b in zip(low.parameters, high.parameters, strict=True)
            ),
        )

    def _shape(self, low: Tensor | Parameter, high: Tensor | Parameter) -> tuple[int, ...]:
        return tuple(int(self.at(*sizes)) for sizes in _pairs(low, high))

    def _loss_costs(self) -> tuple[LossCost, ...]:
        lower = {one.output: one for one in self.low.loss_costs}
        return tuple(
            replace(
                high,
                forward_s=self.time_s(lower[high.output].forward_s, high.forward_s),
                backward_s=self.time_s(lower[high.output].backward_s, high.backward_s),
            )
            for high in self.high.loss_costs
            if high.output in lower
        )

    def _cost(self, low: OperatorCost, high: OperatorCost) -> OperatorCost:
        private = self.up(low.stash_private_bytes, high.stash_private_bytes)
        if self.low.microbatch_size == 1:
            share = Fraction(self.size, self.high.microbatch_size)
            private = max(private, ceil(high.stash_private_bytes * share))
        return replace(
            high,
            forward_s=self.time_s(low.forward_s, high.forward_s),
            backward_s=self.time_s(low.backward_s, high.backward_s),
            output_bytes=self.up(low.output_bytes, high.output_bytes),
            parameter_bytes=self.up(low.parameter_bytes, high.parameter_bytes),
            flops=self.up(low.flops, high.flops),
            bytes_moved=self.up(low.bytes_moved, high.bytes_moved),
            stash_private_bytes=private,
            workspace_bytes=max(low.workspace_bytes, high.workspace_bytes),
            interval=max(low.interval, high.interval),
            # Blocks may be as many as there are samples; what both have does not depend on them.
            rules=tuple(one for one in high.rules if "/" not in one.line or one in low.rules),
            parts=(),  # measured at other local shapes
        )


def _pairs(low: Tensor | Parameter, high: Tensor | Parameter) -> Iterator[tuple[int, int]]:
    """The two sizes of each dimension."""
    return zip(low.shape, high.shape, strict=True)


def _described(value: Tensor | Parameter) -> str:
    return f"{value.dtype}{list(value.shape)}"
