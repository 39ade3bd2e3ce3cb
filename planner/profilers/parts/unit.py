"""A part of an operator as a torch function that can run alone: the operator's own function, or
that on parts, on the local tensors of the first device of a mesh. Nothing is sent.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.artefacts.profile import Part
from planner.artefacts.sharding import Spec, reads, rule_of
from planner.model.load import Model
from planner.operators import parameters, to_torch
from planner.operators.parts.calls import (
    NoCommunication,
    divide,
    exchanged,
    is_call,
    parts_function,
    take_means,
    values_of,
)
from planner.operators.parts.slices import local_part
from planner.profilers.runnable import RunnableOperator, runnable_of


def part_unit(
    model: Model, operator: int, part: Part, device: str, values: Mapping[str, Tensor] | None,
    *, casts: bool = False,
) -> RunnableOperator:  # fmt: skip
    """A part of one operator of the model.

    Args:
        model: the model.
        operator: index of the operator.
        part: of it.
        device: "cpu", "cuda" or "cuda:N".
        values: whole parameters by name, on the device, the operator's among them; None reads them.
        casts: whether it runs under autocast.

    Raises:
        OperatorError: if the operator has no conversion.
        LaunchError: if it cannot run by the rule.
    """
    mesh, rule = part[0], rule_of(part[1])
    own, graph = model.graph.operators[operator], model.graph
    whole = parameters(model, own.parameters, device) if values is None else values
    held = {}
    for name, spec in zip(reads(own), rule.inputs, strict=True):
        if name in own.parameters:
            one = local(whole[name].detach(), spec, mesh)
            held[name] = nn.Parameter(one) if whole[name].requires_grad else one
    module = to_torch(model, [operator], values=held, device=device)
    made = values_of(module, graph)
    (node,) = (one for one in module.graph.nodes if is_call(one))
    divide(node, own, rule, mesh)
    parts = parts_function(model, own, rule, lambda axis: NoCommunication(mesh[axis]))
    if parts is not None:
        exchanged(module, node, parts, made)
    take_means(made, own, rule, mesh)
    module.graph.lint()
    module.recompile()
    return runnable_of(module, graph, operator, held, casts=casts)


def local_values(
    model: Model, operator: int, part: Part, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The local parts of the tensors that an operator reads.

    Args:
        values: whole tensors by name.
    """
    own, rule = model.graph.operators[operator], rule_of(part[1])
    specs = dict(zip(reads(own), rule.inputs, strict=True))
    return {
        name: local(values[name].detach(), specs[name], part[0]).requires_grad_(
            values[name].requires_grad
        )
        for name in own.inputs
    }


def local(whole: Tensor, spec: Spec, mesh: Sequence[int]) -> Tensor:
    """The part of a tensor that the first device has, in memory of its own, with its dimensions in
    memory in the order in which the whole tensor has them. Of a summand, all.

    >>> local(torch.arange(12).reshape(2, 6).t(), ("S0",), (3,)).tolist()
    [[0, 6], [1, 7]]
    """
    part = local_part(whole, spec, mesh, (0,) * len(mesh))
    order = by_stride(whole.stride())
    back = [order.index(dim) for dim in range(whole.dim())]
    return part.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def by_stride(strides: Sequence[int]) -> list[int]:
    """The dimensions of a tensor, that with the largest stride first.

    >>> by_stride((1, 6))
    [1, 0]
    """
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def local_strides(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a local tensor of some shape, whose dimensions lie as those of a whole one; a
    stride of 0 stays.

    >>> local_strides((1, 6, 0), (3, 4, 5))
    (1, 3, 0)
    """
    made, step = [0] * len(strides), 1
    for dim in reversed(by_stride(strides)):
        if strides[dim]:
            made[dim], step = step, step * shape[dim]
    return tuple(made)
