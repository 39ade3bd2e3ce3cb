"""The two halves of the backward pass of a product: the gradients of its inputs, and those of its
trained parameters.

Operators before it wait for the first half alone. So a split product may start the all-reduce of
its input's gradient, and compute its weight's gradient meanwhile.

Some kernels work on a gradient of a parameter that is there: a cast, and the sum with that of other
microbatches. They are as long for one sample as for many. So a device with a part of the samples
casts all of it, and adds up what of it lies there.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from planner.artefacts.graph import Graph, Operator, parameters_by_name, tensors_by_name
from planner.artefacts.growth import LEAST, Growing, GrowingKernel, Growth, Rates, Work
from planner.artefacts.operator_types import facts
from planner.artefacts.profile import FIXED, OperatorCost, Profile
from planner.support.arrays import Floats
from planner.support.memo import remembered

SHARE_OF_PRODUCT = 0.5
"""y = x w has two products in its backward pass, dx = dy w' and dw = x' dy, with the same FLOPs."""


def has_both_gradients(graph: Graph, v: int) -> bool:
    """Whether the backward pass of an operator has a product for its inputs and one for its weight.

    Trained parameters with fewer than two dimensions are no weights but biases, whose gradient is a
    sum.

    Args:
        v: index of the operator.
    """
    operator, parameters = graph.operators[v], parameters_by_name(graph)
    held = (parameters[name] for name in operator.parameters)
    weights = any(one.trainable and len(one.shape) > 1 for one in held)
    return weights and bool(facts(operator.type).flops) and _inputs_have_gradients(graph, v)


@remembered
def backward_weight_share(profile: Profile) -> tuple[float, ...]:
    """Per operator, the share of its backward pass, without losses, that computes the gradients of
    its trained parameters: in [0, 1], as measured, or else by default the share of FLOPs.

    By default it is 1 where no input has a gradient (an embedding), one half of other products with
    a weight, and 0 of all others: their parameters' gradients are sums beside the work on inputs.
    """
    graph, shares = profile.graph, []
    for v, cost in enumerate(profile.operators):
        if cost.backward_weight_s is None:
            shares.append(_usual_share(graph, v))
        else:
            shares.append(cost.backward_weight_s / cost.backward_s if cost.backward_s > 0 else 0.0)
    return tuple(shares)


def _usual_share(graph: Graph, v: int) -> float:
    """The share of FLOPs."""
    parameters = parameters_by_name(graph)
    if not any(parameters[name].trainable for name in graph.operators[v].parameters):
        return 0.0
    if not _inputs_have_gradients(graph, v):
        return 1.0
    return SHARE_OF_PRODUCT if has_both_gradients(graph, v) else 0.0


def _inputs_have_gradients(graph: Graph, v: int) -> bool:
    tensors = tensors_by_name(graph)
    return any(tensors[name].gradient for name in graph.operators[v].inputs)


@remembered
def parameter_work(profile: Profile) -> tuple[Floats, Floats]:
    """(2, N) the shares of the forward and backward of each operator, without losses, in
    `OperatorCost.fixed_forward_s` and `fixed_backward_s`; and (N,) that of the backward in
    `sums_s`.
    """
    rows = [(one.fixed_forward_s, one.fixed_backward_s, one.sums_s) for one in profile.operators]
    whole = [(one.forward_s, one.backward_s, one.backward_s) for one in profile.operators]
    parts_s, whole_s = np.array(rows, dtype=float).T, np.array(whole, dtype=float).T
    shares = np.divide(parts_s, whole_s, out=np.zeros_like(parts_s), where=whole_s > 0)
    return shares[:2], shares[2]


def with_parameter_work(profile: Profile, growth: Growth) -> Profile:
    """The profile with the times that do not grow with samples.

    Args:
        growth: which says what they are.
    """
    return replace(
        profile,
        operators=tuple(
            _with_parameter_work(cost, operator, profile.graph, growth.classes[k], growth.rates)
            for cost, operator, k in zip(
                profile.operators, profile.graph.operators, growth.operators, strict=True
            )
        ),
    )


def _with_parameter_work(
    cost: OperatorCost, operator: Operator, graph: Graph, one: Growing, rates: Rates
) -> OperatorCost:
    known = parameters_by_name(graph)
    if not any(known[name].trainable for name in operator.parameters):
        return _without_parameter_work(cost)
    forward, backward = ([k for k in side if _is_fixed(k)] for side in (one.forward, one.backward))
    sums = [k for k in backward if k.work is Work.UPDATE]
    others = [k for k in backward if k.work is not Work.UPDATE]
    sums_s = min(cost.backward_s, _time_s(sums, rates))
    return replace(
        cost,
        fixed_forward_s=min(cost.forward_s, _time_s(forward, rates)),
        fixed_backward_s=min(cost.backward_s - sums_s, _time_s(others, rates)),
        sums_s=sums_s,
    )


def without_parameter_work(profile: Profile) -> Profile:
    """The profile without the times that do not grow with samples."""
    if not any(getattr(one, name) for one in profile.operators for name in FIXED):
        return profile
    return replace(profile, operators=tuple(map(_without_parameter_work, profile.operators)))


def _without_parameter_work(cost: OperatorCost) -> OperatorCost:
    return replace(cost, fixed_forward_s=0.0, fixed_backward_s=0.0, sums_s=0.0)


def _is_fixed(kernel: GrowingKernel) -> bool:
    return kernel.flops[0] == kernel.flops[1] and kernel.bytes[0] == kernel.bytes[1]


def _time_s(kernels: Iterable[GrowingKernel], rates: Rates) -> float:
    """Of kernels of one size."""
    own = [one.at(LEAST) for one in kernels]
    return sum(
        rates.launch_s
        + max(one.flops / rates.flops_per_s[one.work], one.bytes / rates.bytes_per_s[one.work])
        for one in own
    )
