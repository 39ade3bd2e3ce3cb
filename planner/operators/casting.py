"""Copies of weights in the type of autocast: one per step, not one per microbatch in flight.

torch keeps such copies for a context of autocast at most, and each forward pass of a microbatch is
one of its own. Here a copy stays until it is cleared, before a step changes the weight: the version
of the weight would not tell, because steps of fused optimizers leave that as it is. Every
microbatch reads it, each by its own node of autograd, so that gradients are those of a conversion.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.artefacts.graph import Graph, parameters_by_name
from planner.artefacts.operator_types import PRODUCTS
from planner.operators.parts.calls import free_name


class WeightCast(nn.Module):
    """A parameter in the type of autocast; without autocast itself.

    Attributes:
        kept: the copy; None before the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self._of: Tensor | None = None

    def forward(self, parameter: Tensor) -> Tensor:
        """The copy, which is made if there is none of this parameter."""
        kind = parameter.device.type
        if parameter.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return parameter
        dtype = torch.get_autocast_dtype(kind)
        if self.kept is None or self._of is not parameter or self.kept.dtype != dtype:
            self.clear()  # so that there are never two
            self.kept, self._of = parameter.detach().to(dtype), parameter
        made: Tensor = _Cast.apply(parameter, self.kept)  # type: ignore[no-untyped-call]
        return made

    def clear(self) -> None:
        """Lets go of the copy."""
        self.kept = self._of = None


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        ctx.set_materialize_grads(False)
        return kept.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else gradient.to(ctx.dtype), None


def cast_once(
    module: fx.GraphModule, graph: Graph, others: Collection[object] = (),
    there: dict[str, WeightCast] | None = None,
) -> tuple[tuple[WeightCast, str], ...]:  # fmt: skip
    """Lets the products of a module read copies of their weights that stay; gives the copies, with
    the names of the weights.

    Args:
        module: of operators of the graph.
        graph: the model's.
        others: functions that are given the weights of one product, and read no others.
        there: copies of other modules, by weight; those of this one are added.
    """
    known = parameters_by_name(graph)
    products = {one.name for one in graph.operators if one.type in PRODUCTS}
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    casts, there = [], {} if there is None else there
    for node in tuple(module.graph.nodes):
        name = node.meta.get("onnx_value")
        if node.op != "get_attr" or name not in known or known[name].dtype != "float32":
            continue
        readers = [
            user
            for user in node.users
            if user.meta.get("onnx_name") in products or user.target in others
            # What gathers a weight again is given its part at home among other things.
            if node in (*user.args, *user.kwargs.values())
        ]
        if readers:
            cast, word = there.setdefault(name, WeightCast()), free_name(module, "cast")
            module.add_submodule(word, cast)
            # Where it is read first: autograd runs backwards in the reverse order, and lets go of
            # the gradient of the copy at once.
            with module.graph.inserting_before(min(readers, key=place.__getitem__)):
                made = module.graph.call_module(word, (node,))
            for reader in readers:
                reader.replace_input_with(node, made)
            casts.append((cast, str(name)))
    if casts:
        module.recompile()
    return tuple(casts)
