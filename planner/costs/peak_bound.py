"""A time that no implementation of the model's operators can beat on some devices, whatever its
kernels: `bounds.py` speaks of the profile's.

    max(FLOPs / (sum of the devices' peaks), compulsory bytes / (sum of their memory bandwidths))

FLOPs are those of products, convolutions and attention, forward, and backward once for the
gradients of inputs and once for those of parameters, in the profile's number format. Half of what
attention multiplies is enough, because a causal mask hides the rest, and a quarter of a convolution
with a 3 x 3 kernel and a stride of 1 (Lavin and Gray, CVPR 2016, F(4 x 4, 3 x 3)). Compulsory bytes
are parameters, their gradients, the optimizer's state and the model's inputs, each once per
iteration.
"""

from planner.artefacts.graph import (
    Graph,
    Operator,
    differentiated,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.operator_types import facts
from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.topology import device_type
from planner.costs.update import update_copies

_HALF = frozenset({"MatMul", "Einsum"})
"""Products that are attention's where they have no parameters."""


def peak_bound_s(problem: Problem) -> float:
    """The bound on the problem's objective, in s: of an iteration, or of a microbatch on all
    devices at once.
    """
    profile, topology = problem.profile, problem.topology
    kinds = [device_type(topology, d) for d in range(len(topology.devices))]
    flops = sum(_least_flops(problem, v, one.flops) for v, one in enumerate(profile.operators))
    computing_s = flops / sum(kind.peak_flops(profile.dtype) for kind in kinds)
    if problem.training.objective is not Objective.ITERATION:
        return computing_s
    moved_s = _compulsory_bytes(problem) / sum(one.memory_bandwidth_bytes_per_s for one in kinds)
    return max(problem.num_microbatches * computing_s, moved_s)


def _least_flops(problem: Problem, v: int, flops: int) -> float:
    """Of an operator, forward and backward.

    Args:
        flops: of its forward, as the profile counts them.
    """
    graph = problem.profile.graph
    operator, known = graph.operators[v], parameters_by_name(graph)
    if not facts(operator.type).flops:  # no product
        return 0.0
    passes = 1
    if v in differentiated(graph):
        tensors = tensors_by_name(graph)
        passes += any(tensors[name].gradient for name in operator.inputs)
        passes += any(known[name].trainable for name in operator.parameters)
    return passes * flops * _needed_share(operator, graph)


def _needed_share(operator: Operator, graph: Graph) -> float:
    """The part of an operator's products that no way to compute it can leave out."""
    kind = facts(operator.type).flops
    if kind == "conv" and operator.parameters and operator.inputs:
        known, tensors = parameters_by_name(graph), tensors_by_name(graph)
        kernel = max((known[name].shape for name in operator.parameters), key=len)
        sizes = [tensors[one].shape[2:] for one in (operator.inputs[0], operator.outputs[0])]
        return 0.25 if kernel[2:] == (3, 3) and sizes[0] == sizes[1] else 1.0
    return (
        0.5 if "attention" in kind or (operator.type in _HALF and not operator.parameters) else 1.0
    )


def _compulsory_bytes(problem: Problem) -> int:
    """Bytes that an iteration reads or writes at least once."""
    graph, copies = problem.profile.graph, update_copies(problem)
    tensors = tensors_by_name(graph)
    held = sum(one.bytes * (1 + copies if one.trainable else 1) for one in graph.parameters)
    return held + problem.num_microbatches * sum(tensors[name].bytes for name in graph.inputs)
