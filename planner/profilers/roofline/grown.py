"""The profile for a microbatch of any size, from a computed profile with its `Growth`: shapes and
work by straight lines, times by the roofline. Neither the model nor torch is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from planner.artefacts.graph import (
    Graph,
    Parameter,
    Tensor,
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
    on_line,
    rule_at,
)
from planner.artefacts.profile import (
    LossCost,
    OperatorCost,
    Profile,
    SplitRule,
)
from planner.artefacts.weight_gradients import with_parameter_work, without_parameter_work
from planner.profilers.roofline.times import PassKernels, PassSeconds, both_passes_s
from planner.support.errors import OptionError

Value = TypeVar("Value", Tensor, Parameter)


def grown(profile: Profile, growth: Growth, size: int) -> Profile:
    """The profile for a microbatch of some size, as it would be computed from the model.

    Args:
        profile: of one size.
        growth: the profile's, or one with the speeds of another device.
        size: samples in a microbatch.

    Returns:
        The profile, without a growth.

    Raises:
        OptionError: if the model cannot have so few samples.
        ValueError: if a figure leaves the limits of artefacts.
    """
    if size < growth.least:
        raise OptionError(f"a microbatch of {size}: expected at least {growth.least} samples")
    profile = without_parameter_work(profile)
    more = size - profile.microbatch_size
    # What no line describes is the same for all sizes from two on; the growth has it for one
    # sample where the profile has it for more, and for more where the profile has it for one.
    across = (size < LEAST) != (profile.microbatch_size < LEAST)
    views = growth.views if across else None
    gradient_views = growth.gradient_views if across else None
    graph = _graph(profile.graph, growth, more)
    made = replace(
        profile,
        graph=graph,
        operators=_costs(profile, growth, graph, size, across=across),
        views=profile.views if views is None else views,
        gradient_views=profile.gradient_views if gradient_views is None else gradient_views,
        dimensions={
            name: own + growth.dimensions.get(name, 0) * more
            for name, own in profile.dimensions.items()
        },
        microbatch_size=size,
        loss_costs=_loss_costs(growth, size),
        growth=None,
    )
    return with_parameter_work(made, growth)


# ---- shapes


def _graph(graph: Graph, growth: Growth, more: int) -> Graph:
    """A graph with the shapes of so many more samples."""
    tensors = zip(graph.tensors, growth.tensors, strict=True)
    parameters = zip(graph.parameters, growth.parameters, strict=True)
    return replace(
        graph,
        tensors=tuple(_shaped(value, growth.steps[index], more) for value, index in tensors),
        parameters=tuple(_shaped(value, growth.steps[index], more) for value, index in parameters),
    )


def _shaped(value: Value, steps: Sequence[int], more: int) -> Value:
    if not any(steps):
        return value
    pairs = zip(value.shape, steps, strict=True)
    return replace(value, shape=tuple(size + step * more for size, step in pairs))


# ---- costs


def _kernels(classes: Iterable[Growing | GrowingLoss], size: int) -> list[PassKernels]:
    """The kernels of operators or losses at a size."""

    def at(kernels: Sequence[GrowingKernel]) -> tuple[Kernel, ...]:
        return tuple(kernel.at(size) for kernel in kernels)

    return [PassKernels(at(one.forward), at(one.backward)) for one in classes]


def _loss_costs(growth: Growth, size: int) -> tuple[LossCost, ...]:
    times_s = both_passes_s(_kernels(growth.losses, size), growth.rates)
    return tuple(
        LossCost(one.output, *own_s) for one, own_s in zip(growth.losses, times_s, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _ClassCost:
    """What all operators of a class cost; the figures of `OperatorCost`."""

    times_s: PassSeconds
    flops: int
    bytes_moved: int
    stash_private_bytes: int
    rules: tuple[SplitRule, ...]


def _class_costs(growth: Growth, size: int) -> list[_ClassCost]:
    """The costs of every class at a size."""
    kernels = _kernels(growth.classes, size)
    both = zip(growth.classes, kernels, both_passes_s(kernels, growth.rates), strict=True)
    return [
        _ClassCost(
            times_s,
            sum(kernel.flops for kernel in own.forward),
            sum(kernel.bytes for kernel in own.forward),
            on_line(one.stash_private_bytes, size),
            tuple(SplitRule.parse(rule_at(text, size)) for text in one.rules),
        )
        for one, own, times_s in both
    ]


def _costs(
    profile: Profile, growth: Growth, graph: Graph, size: int, *, across: bool
) -> tuple[OperatorCost, ...]:
    """The costs of every operator at a size.

    Args:
        graph: at the size.
        across: whether stash tensors are those of the growth.
    """
    classes = _class_costs(growth, size)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    stash = growth.stash_tensors if across else {}
    costs = []
    indices = growth.classes_at(size)
    for operator, own, index in zip(graph.operators, profile.operators, indices, strict=True):
        one = classes[index]
        costs.append(
            replace(
                own,
                **one.times_s._asdict(),
                output_bytes=sum(tensors[name].bytes for name in operator.outputs),
                parameter_bytes=sum(parameters[name].bytes for name in operator.parameters),
                flops=one.flops,
                bytes_moved=one.bytes_moved,
                stash_tensors=stash.get(own.name, own.stash_tensors),
                stash_private_bytes=one.stash_private_bytes,
                rules=own.rules if size == profile.microbatch_size else one.rules,
                parts=(),  # measured at other local shapes
                backward_weight_s=None,  # measured at other shapes
            )
        )
    return tuple(costs)
