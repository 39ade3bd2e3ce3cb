"""The growth of a computed profile: it is computed at two sizes, and checked at others.

The lines through the figures of two and of three samples have to give, to the last digit, the
profiles of one sample, of `CHECKED` samples and of the profile's own size, as they are computed
from the model. Where one figure differs, the profile has no growth, and says which.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from planner.artefacts.graph import (
    Graph,
    Parameter,
    Tensor,
    View,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.growth import (
    LEAST,
    Growing,
    GrowingKernel,
    GrowingLoss,
    Growth,
    Kernel,
    Line,
    Rates,
    on_line,
    rule_at,
)
from planner.artefacts.profile import Profile, SplitRule, has_rules
from planner.artefacts.sharding import reads
from planner.artefacts.weight_gradients import with_parameter_work
from planner.model.dataflow import MAX_STATIC_ELEMENTS
from planner.model.load import Model, resized
from planner.profilers.analytic import Computed
from planner.profilers.roofline.grown import grown
from planner.profilers.roofline.times import PassKernels
from planner.support.errors import ModelError, OptionError

Value = TypeVar("Value")

CHECKED = 8
"""Samples of a microbatch at which the lines are checked."""

Rules = Sequence[Sequence[SplitRule]]
"""Per operator, the ways to split it."""


def with_growth(
    own: Computed,
    model: Model,
    rates: Rates,
    *,
    compute: Callable[[Model], Computed],
    rules_of: Callable[[Model], Rules],
) -> Profile:
    """A computed profile that is good for any size of the microbatch, or that says in a warning why
    it is not.

    Args:
        own: the profile with its rules, if it has any, and its kernels.
        model: that it was computed from.
        rates: the speeds of its device.
        compute: computes the profile of the model with another batch.
        rules_of: finds the rules of the model with another batch.
    """
    profile = own.profile
    try:
        known = _sizes(own, model, compute)
        _check_constants(*(known[size][0] for size in (LEAST, LEAST + 1)))
        rules: Sequence[tuple[str, ...]] = [()] * len(profile.operators)
        if has_rules(profile):
            rules = _growing_rules(profile, known, rules_of)
        growth = _Lines(profile, known).growth(rates, rules)
        for size, (_, one) in sorted(known.items()):
            _check(grown(profile, growth, size), one.profile)
    except (_NoLineError, ModelError, OptionError) as error:
        why = f"good for microbatches of {profile.microbatch_size} only: {error}"
        return replace(profile, warnings=(*profile.warnings, why.splitlines()[0]))
    return replace(with_parameter_work(profile, growth), growth=growth)


class _NoLineError(Exception):
    """A figure is on no straight line; its text says which."""


_Sizes = Mapping[int, tuple[Model, Computed]]
"""A model with several batches, and what was computed from it."""


def _sizes(own: Computed, model: Model, compute: Callable[[Model], Computed]) -> _Sizes:
    """The sizes that lines are drawn through and checked at: the profile's own, two, three and
    `CHECKED` samples, and a single one if the model can have it.

    Raises:
        ModelError: if it cannot have the others, or they cannot be computed.
    """
    known = {model.batch: (model, own)}
    for size in (LEAST, LEAST + 1, CHECKED, 1):
        if size in known:
            continue
        try:
            other = resized(model, size)
            known[size] = other, compute(other)
        except ModelError:
            if size > 1:
                raise
    return known


def _check_constants(few: Model, many: Model) -> None:
    """Refuses constants that grow with the samples and configure an operator: the loader makes a
    parameter of one that has grown too large, so that operators are others in larger microbatches.
    """
    held = {*tensors_by_name(few.graph), *parameters_by_name(few.graph)}
    for node in few.nodes:
        for name in {*node.inputs} - held - {""}:
            if name in many.values and few.values[name].size != many.values[name].size:
                raise _NoLineError(
                    f"{name}, a constant that {node.name} reads, grows with the samples, and is a"
                    f" parameter from more than {MAX_STATIC_ELEMENTS} elements on"
                )


# ---- rules

_BLOCKS = re.compile(r"/(\d+)")


def _growing_rules(
    profile: Profile, known: _Sizes, rules_of: Callable[[Model], Rules]
) -> list[tuple[str, ...]]:
    """The rules of each operator that hold at two sizes, and so at all, see `Growing.rules`."""
    own = profile.microbatch_size
    few, many = LEAST, max(own, LEAST + 1)
    at = {own: [cost.rules for cost in profile.operators]} | {
        size: rules_of(known[size][0]) for size in (few, many) if size != own
    }
    return [_grow(few, low, many, high) for low, high in zip(at[few], at[many], strict=True)]


def _grow(
    few: int, low: Sequence[SplitRule], many: int, high: Sequence[SplitRule]
) -> tuple[str, ...]:
    """The rules that hold for few and for many samples. Blocks grow with the samples, or not.

    >>> low, high = (
    ...     [SplitRule("S0->S0"), SplitRule(f"S0/{n}->S0/{n}"), SplitRule("S1/3->S1/3")]
    ...     for n in (2, 8)
    ... )
    >>> _grow(2, low, 8, high)
    ('S0->S0', 'S0/n->S0/n', 'S1/3->S1/3')
    """

    def growing(count: re.Match[str]) -> str:
        times, rest = divmod(int(count[1]), many)
        return count[0] if rest else f"/{times if times > 1 else ''}n"

    known = {rule.text for rule in low}
    texts = (text for rule in high for text in (_BLOCKS.sub(growing, rule.text), rule.text))
    return tuple(dict.fromkeys(text for text in texts if rule_at(text, few) in known))


# ---- lines


@dataclass(frozen=True, slots=True)
class _Lines:
    """A profile, and its model computed at several sizes."""

    profile: Profile
    known: _Sizes

    @property
    def ends(self) -> tuple[Computed, Computed]:
        """The two that lines are drawn through."""
        return self.known[LEAST][1], self.known[LEAST + 1][1]

    def growth(self, rates: Rates, rules: Sequence[tuple[str, ...]]) -> Growth:
        """The growth.

        Args:
            rules: of each operator, as of `Growing`.

        Raises:
            _NoLineError: if there is none.
        """
        low, high = (one.profile for one in self.ends)
        if not low.graph.operators == high.graph.operators == self.profile.graph.operators:
            raise _NoLineError("microbatches of other sizes have other operators")
        _check_ranks(low.graph, high.graph, self.profile.graph)
        classes: dict[Growing, int] = {}
        steps: dict[tuple[int, ...], int] = {}
        costs = [self.cost(v, own) for v, own in enumerate(rules)]
        return Growth(
            rates=rates,
            operators=_indices(costs, classes),
            single=None if 1 not in self.known else _indices(self.single(costs), classes),
            classes=tuple(classes),
            tensors=_indices(_steps(low.graph.tensors, high.graph.tensors), steps),
            parameters=_indices(_steps(low.graph.parameters, high.graph.parameters), steps),
            steps=tuple(steps),
            dimensions={
                name: high.dimensions[name] - size
                for name, size in low.dimensions.items()
                if high.dimensions[name] != size
            },
            losses=self.losses(),
            stash_tensors=self.stash_tensors(),
            views=self.across("views"),
            gradient_views=self.across("gradient_views"),
        )

    def cost(self, operator: int, rules: tuple[str, ...]) -> Growing:
        """The growing cost of an operator."""
        low, high = self.ends
        name = self.profile.operators[operator].name
        few, many = (one.profile.operators[operator].stash_private_bytes for one in (low, high))
        forward, backward = _kernels(low.operators[operator], high.operators[operator], name)
        return Growing(forward, backward, _line(f"private stash of {name}", few, many), rules)

    def single(self, costs: Sequence[Growing]) -> Iterator[Growing]:
        """The costs of one sample: on the line, or others."""
        _, alone = self.known[1]
        for cost, kernels, own in zip(costs, alone.operators, alone.profile.operators, strict=True):
            private = own.stash_private_bytes
            same = (
                kernels.forward == tuple(one.at(1) for one in cost.forward)
                and kernels.backward == tuple(one.at(1) for one in cost.backward)
                and private == on_line(cost.stash_private_bytes, 1)
            )
            alone_cost = replace(
                cost,
                forward=tuple(map(_constant, kernels.forward)),
                backward=tuple(map(_constant, kernels.backward)),
                stash_private_bytes=(private, private),
            )
            yield cost if same else alone_cost

    def losses(self) -> tuple[GrowingLoss, ...]:
        """The growing costs of the losses."""
        low, high = (one.losses for one in self.ends)
        if not low.keys() == high.keys() == {one.output for one in self.profile.loss_costs}:
            raise _NoLineError("microbatches of other sizes have other losses")
        return tuple(
            GrowingLoss(output, *_kernels(one, high[output], f"the loss of {output}"))
            for output, one in low.items()
        )

    # What no line describes, of one sample where the profile has more, and of more where it has one

    @property
    def other_side(self) -> Profile:
        """A profile of the other side; the profile itself where none can be computed."""
        size = LEAST if self.profile.microbatch_size < LEAST else 1
        return self.known[size][1].profile if size in self.known else self.profile

    def stash_tensors(self) -> dict[str, tuple[str, ...]]:
        """The stash tensors of each operator that keeps others there."""
        both = zip(self.profile.operators, self.other_side.operators, strict=True)
        return {
            one.name: one.stash_tensors
            for own, one in both
            if one.stash_tensors != own.stash_tensors
        }

    def across(self, name: str) -> tuple[View, ...] | None:
        """The views there; None where they are those of the profile."""
        views: tuple[View, ...] = getattr(self.other_side, name)
        return None if views == getattr(self.profile, name) else views


def _indices(values: Iterable[Value], table: dict[Value, int]) -> tuple[int, ...]:
    """The place of each value in a table, to which it adds new ones."""
    return tuple(table.setdefault(value, len(table)) for value in values)


def _line(what: str, low: int, high: int) -> Line:
    """The line through the figures of two and of three samples."""
    if low <= high and on_line((low, high), 1) >= 0:
        return low, high
    raise _NoLineError(
        f"the {what} do not grow evenly: {low} for {LEAST} samples, {high} for {LEAST + 1}"
    )


def _kernels(
    low: PassKernels, high: PassKernels, name: str
) -> tuple[tuple[GrowingKernel, ...], tuple[GrowingKernel, ...]]:
    """The growing kernels of both passes."""

    def growing(few: Sequence[Kernel], many: Sequence[Kernel]) -> tuple[GrowingKernel, ...]:
        if [one.work for one in few] != [one.work for one in many]:
            raise _NoLineError(
                f"{name} starts other kernels for {LEAST} samples than for {LEAST + 1}"
            )
        return tuple(
            GrowingKernel(
                one.work,
                _line(f"FLOPs of {name}", one.flops, other.flops),
                _line(f"bytes of {name}", one.bytes, other.bytes),
            )
            for one, other in zip(few, many, strict=True)
        )

    return growing(low.forward, high.forward), growing(low.backward, high.backward)


def _constant(kernel: Kernel) -> GrowingKernel:
    """A kernel of a single sample, which is asked for at no other size."""
    return GrowingKernel(kernel.work, (kernel.flops, kernel.flops), (kernel.bytes, kernel.bytes))


def _check_ranks(*graphs: Graph) -> None:
    """Refuses graphs of the same operators in which a tensor has other numbers of dimensions."""
    for kind in ("tensors", "parameters"):
        for values in zip(*(getattr(graph, kind) for graph in graphs), strict=True):
            if len({len(value.shape) for value in values}) > 1:
                shapes = " and ".join(str(list(value.shape)) for value in values)
                raise _NoLineError(f"{values[0].name} has the shapes {shapes} at different sizes")


def _steps(
    low: Sequence[Tensor | Parameter], high: Sequence[Tensor | Parameter]
) -> Iterator[tuple[int, ...]]:
    """How many elements a sample adds to each dimension of each tensor."""
    for one, other in zip(low, high, strict=True):
        pairs = zip(one.shape, other.shape, strict=True)
        steps = tuple(more - size for size, more in pairs)
        is_weight = isinstance(one, Parameter) and one.trainable
        if min(steps, default=0) < 0 or (is_weight and any(steps)):
            raise _NoLineError(
                f"the shape of {one.name} is {list(one.shape)} for {LEAST} samples and"
                f" {list(other.shape)} for {LEAST + 1}"
            )
        yield steps


# ---- the check

_WORDS = {
    "forward_s": "forward time", "backward_s": "backward time",
    "host_forward_s": "launches forward", "host_backward_s": "launches backward",
    "output_bytes": "output",
    "parameter_bytes": "parameters", "flops": "FLOPs", "bytes_moved": "bytes moved",
    "stash_tensors": "stash", "stash_private_bytes": "private stash",
}  # fmt: skip
"""Figures of an operator that have to agree, in words."""


def _check(found: Profile, due: Profile) -> None:
    """Refuses a profile that lines give, if it is another one than is computed from the model."""
    if (difference := next(_differences(found, due), None)) is not None:
        what, one, other = difference
        raise _NoLineError(
            f"the {what} for {due.microbatch_size} samples is {other}, which is not on the straight"
            f" line through {LEAST} and {LEAST + 1} samples ({one})"
        )


def _differences(found: Profile, due: Profile) -> Iterator[tuple[str, object, object]]:
    """What two profiles differ in, with both figures."""
    for one, other in zip(found.graph.operators, due.graph.operators, strict=True):
        if one != other:
            yield f"inputs of {one.name}", [*reads(one)], [*reads(other)]
            return
    for kind in ("tensors", "parameters"):
        for one, other in zip(getattr(found.graph, kind), getattr(due.graph, kind), strict=True):
            if one != other:
                yield f"shape of {one.name}", list(one.shape), list(other.shape)
    for cost, own in zip(found.operators, due.operators, strict=True):
        for name, word in _WORDS.items():
            if getattr(cost, name) != getattr(own, name):
                yield f"{word} of {cost.name}", getattr(cost, name), getattr(own, name)
    for name in ("dimensions", "views", "gradient_views", "loss_costs"):
        if getattr(found, name) != getattr(due, name):
            yield name.replace("_", " "), getattr(found, name), getattr(due, name)
