"""The profile for a microbatch of a size that was not profiled.

A computed profile with a growth has it for any size (roofline/grown.py). Others have it between
two sizes: times are linear between the two neighbours, operator by operator. Sizes of tensors are
a + c n for n samples, so they come out exact, or there is no such profile. Outside of the sizes
profiled, which only the user asks for, a sample takes as long as in the nearest of them.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from planner.artefacts.graph import MAX_BYTES, Graph, Parameter, Tensor
from planner.artefacts.profile import ALIKE, LossCost, OperatorCost, Profile, Source
from planner.profilers.roofline.grown import grown
from planner.support.errors import OptionError
from planner.support.memo import remembered

# The fields in which two profiles must agree for a third one to lie between them.
_SAME = (*ALIKE, "engine", "threads")
# Sizes that a search may come back to.
MAX_KEPT = 64


def span(profiles: Sequence[Profile]) -> tuple[int, int | None]:
    """The smallest and the largest size of the microbatch that a search may choose: those profiled
    and all between them, of which `interpolated` refuses some; None is no limit, where a computed
    profile is good for any size.

    Args:
        profiles: of one model on one device, of different sizes, in any order.
    """
    sizes = [profile.microbatch_size for profile in profiles]
    growing = [profile.growth.least for profile in profiles if profile.growth is not None]
    return min(sizes + growing), None if growing else max(sizes)


def interpolated(profiles: Sequence[Profile], size: int) -> Profile:
    """The profile for a microbatch of some size: the one that is there, or one that is made.

    From a computed profile with a growth it is made as from the model. Else, of one that is between
    two, times are linear between the neighbours. Of one that is outside of all, times are those of
    the nearest per sample, and a warning says so. In both cases the shapes of tensors and the sizes
    of dimensions are on the straight line through two neighbours, exactly; so are FLOPs and bytes,
    rounded up to whole ones. Workspace, and how uncertain a time is, are the larger of the two.

    Microbatches of one sample are special: autograd may keep a view there where it keeps a copy of
    any larger one. Next to one, the stash is that of the larger neighbour, and in proportion to it
    where that is more than the straight line.

    Args:
        profiles: of one model on one device, of different sizes, in any order.
        size: samples in a microbatch.

    Raises:
        OptionError: if only another size was profiled, the neighbours differ in more than their
            sizes, or a figure is beyond all limits at the size.
    """
    by_size = {profile.microbatch_size: profile for profile in profiles}
    if size in by_size:
        return by_size[size]
    if not 1 <= size <= MAX_BYTES:
        raise OptionError(
            f"a microbatch of {size}: expected at least 1 and at most {MAX_BYTES:.0e}"
        )
    growing = next((profile for profile in profiles if profile.growth is not None), None)
    if growing is not None:
        with _limited(size):
            return _grown(growing, size)
    if len(by_size) < 2:
        known = " or ".join(map(str, sorted(by_size)))
        raise OptionError(
            f"a microbatch of {size}: expected a size that was profiled, {known};"
            f" {_advice(by_size, size)}"
        )
    gap = _Gap(*_neighbours(by_size, size), size)
    if (reason := next(gap.differences(), None)) is not None:
        how = "interpolated between" if gap.nearest is None else "scaled from"
        raise OptionError(
            f"a microbatch of {size} cannot be {how} those of {gap.low.microbatch_size} and"
            f" {gap.high.microbatch_size}: {reason}; {_advice(by_size, size)}"
        )
    with _limited(size):
        return _made(gap.low, gap.high, gap.size)


@contextmanager
def _limited(size: int) -> Iterator[None]:
    """Refuses a size at which a figure leaves the limits of artefacts, which know them."""
    try:
        yield
    except ValueError as error:
        raise OptionError(f"a microbatch of {size}: {str(error).splitlines()[0]}") from error


def _neighbours(by_size: Mapping[int, Profile], size: int) -> tuple[Profile, Profile]:
    """The nearest profiles below and above a size, or, outside of all, the nearest two."""
    sizes = sorted(by_size)
    place = min(max(bisect(sizes, size), 1), len(sizes) - 1)
    return by_size[sizes[place - 1]], by_size[sizes[place]]


@remembered(kept=MAX_KEPT)
def _made(low: Profile, high: Profile, size: int) -> Profile:
    """The same object each time: memos of a profile go by its identity."""
    return _Gap(low, high, size).profile()


@remembered(kept=MAX_KEPT)
def _grown(profile: Profile, size: int) -> Profile:
    """The same of a profile with a growth."""
    assert profile.growth is not None
    return grown(profile, profile.growth, size)


def _advice(sizes: Iterable[int], size: int) -> str:
    batches = ",".join(map(str, sorted((*sizes, size))))
    return f"profile it too: planner profile MODEL.onnx --batch {batches}"


@dataclass(frozen=True)
class _Gap:
    """Two neighbours, and a size between theirs or outside of both."""

    low: Profile
    high: Profile
    size: int

    def at(self, low: int, high: int) -> Fraction:
        """The figure at the size, of one that is `low` and `high` at the neighbours."""
        # A fraction, because a shape is possible only if it comes out whole, without rounding.
        step = self.high.microbatch_size - self.low.microbatch_size
        return low + (high - low) * Fraction(self.size - self.low.microbatch_size, step)

    @property
    def nearest(self) -> Profile | None:
        """The neighbour that is nearer to a size outside of both; None if the size is between."""
        if self.low.microbatch_size < self.size < self.high.microbatch_size:
            return None
        return self.low if self.size < self.high.microbatch_size else self.high

    def time_s(self, low: float, high: float) -> float:
        """The same for a time, in s; outside, that of the nearer one per sample."""
        if self.nearest is not None:
            time_s = low if self.nearest is self.low else high
            return time_s * (self.size / self.nearest.microbatch_size)
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
                      " whole shape"  # fmt: skip
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

    # The profile

    def profile(self) -> Profile:
        """The profile of the size."""
        low, high = self.low, self.high
        return replace(
            high,
            graph=self._graph(),
            operators=tuple(map(self._cost, low.operators, high.operators)),
            dimensions={
                name: int(self.at(low.dimensions[name], size))
                for name, size in high.dimensions.items()
            },
            microbatch_size=self.size,
            source=Source.INTERPOLATED if self.nearest is None else Source.SCALED,
            repetitions=min(low.repetitions, high.repetitions),
            spread=max(low.spread, high.spread),
            whole_step=None,
            loss_costs=self._loss_costs(),
            versions={k: v for k, v in high.versions.items() if low.versions.get(k) == v},
            warnings=(
                self._note(),
                *dict.fromkeys((*low.warnings, *high.warnings)),
            ),
        )

    def _note(self) -> str:
        """Where the times come from."""
        low, high = self.low.microbatch_size, self.high.microbatch_size
        source = self.low.source.value
        if self.nearest is None:
            return f"times are interpolated between microbatches of {low} and {high}, {source}"
        least = self.nearest is self.low
        return (
            f"times are scaled from a microbatch of {self.nearest.microbatch_size}, the"
            f" {'smallest' if least else 'largest'} profiled, {source}"
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
                host_forward_s=max(lower[high.output].host_forward_s, high.host_forward_s),
                host_backward_s=max(lower[high.output].host_backward_s, high.host_backward_s),
            )
            for high in self.high.loss_costs
            if high.output in lower
        )

    def _cost(self, low: OperatorCost, high: OperatorCost) -> OperatorCost:
        private = self.up(low.stash_private_bytes, high.stash_private_bytes)
        if self.low.microbatch_size == 1:
            share = Fraction(self.size, self.high.microbatch_size)
            private = max(private, ceil(high.stash_private_bytes * share))
        backward_s, of_weight_s = self.time_s(low.backward_s, high.backward_s), None
        if low.backward_weight_s is not None and high.backward_weight_s is not None:
            of_weight_s = self.time_s(low.backward_weight_s, high.backward_weight_s)
        return replace(
            high,
            forward_s=self.time_s(low.forward_s, high.forward_s),
            backward_s=backward_s,
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
            backward_weight_s=None if of_weight_s is None else min(of_weight_s, backward_s),
            # The same kernels are started for any number of samples.
            host_forward_s=max(low.host_forward_s, high.host_forward_s),
            host_backward_s=max(low.host_backward_s, high.host_backward_s),
        )


def _pairs(low: Tensor | Parameter, high: Tensor | Parameter) -> Iterator[tuple[int, int]]:
    """The two sizes of each dimension."""
    return zip(low.shape, high.shape, strict=True)


def _described(value: Tensor | Parameter) -> str:
    return f"{value.dtype}{list(value.shape)}"
