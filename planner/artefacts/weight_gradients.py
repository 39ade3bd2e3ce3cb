"""The two halves of the backward pass of a product: the gradients of its inputs, and those of its
trained parameters.

Operators before it wait for the first half alone. So a split product may start the all-reduce of
its input's gradient, and compute its weight's gradient meanwhile.
"""

from planner.artefacts.graph import Graph, parameters_by_name, tensors_by_name
from planner.artefacts.operator_types import facts
from planner.artefacts.profile import Profile
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
