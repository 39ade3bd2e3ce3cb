"""A module's call of an operator, changed to run on one part of its tensors: attributes that the
rule names are divided, a function that asks the devices with the other parts takes the place of the
operator's own, and summands of means are divided.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from operator import is_not, truediv
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from planner.artefacts.graph import Graph, Operator
from planner.artefacts.sharding import Rule, dim_of, reads
from planner.model.load import Model
from planner.operators.parts import MARKED
from planner.operators.parts.attributes import divided
from planner.operators.parts.line import Cut, MeshAxisGroup
from planner.support.errors import LaunchError


class Parts(nn.Module):
    """An operator's function on parts, which asks the devices with the other parts."""

    def __init__(self, function: Callable[..., Any], cuts: tuple[Cut, ...]) -> None:
        super().__init__()
        self.function, self.cuts = function, cuts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator makes of its local tensors."""
        return self.function(*args, cuts=self.cuts, **kwargs)


class NoCommunication:
    """A line on which nothing is sent, to see what an operator makes, and to time it."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_reduce(self, own: Tensor) -> Tensor:
        """The tensor itself."""
        return own

    def all_reduce_max(self, own: Tensor) -> Tensor:
        """The tensor itself."""
        return own

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors of the shapes of those that neighbours would give."""
        return torch.empty_like(after), torch.empty_like(before)


def parts_function(
    model: Model, operator: Operator, rule: Rule, line: Callable[[int], MeshAxisGroup]
) -> Parts | None:
    """The function that runs in the place of an operator's own, if its rule has a mark.

    Args:
        line: gives the line along an axis.

    Raises:
        LaunchError: if there is none.
    """
    mark = _mark(operator, rule)
    if mark is None:
        return None
    node = next(one for one in model.nodes if one.name == operator.name)
    place = reads(operator).index(node.inputs[0])
    cuts = []
    for axis, own in enumerate(rule.axes):
        if mark in own.marks:
            dim = dim_of(own.inputs[place])
            if dim is None:
                raise LaunchError(
                    f"operator {operator.name} ({operator.type}): {mark}: expected a cut of"
                    f" {node.inputs[0]}, got {own.inputs[place]}"
                )
            cuts.append(Cut(line(axis), dim))
    return Parts(cast(Callable[..., Any], MARKED[mark, operator.type]), tuple(cuts))


def _mark(operator: Operator, rule: Rule) -> str | None:
    """The mark of an operator's rule; None if it has none."""
    marks = {mark for axis in rule.axes for mark in axis.marks}
    if not marks:
        return None
    known = sorted(mark for mark, kind in MARKED if kind == operator.type)
    if not marks.issubset(known):
        raise LaunchError(
            f"operator {operator.name} ({operator.type}): expected one mark among"
            f" {', '.join(known) or 'none'}, got {', '.join(marks)}"
        )
    return marks.pop()


def exchanged(
    module: fx.GraphModule, node: fx.Node, function: nn.Module, made: dict[str, fx.Node]
) -> fx.Node:
    """Puts another function in the place of an operator's own; gives the new node."""
    name = free_name(module, "parts")
    module.add_submodule(name, function)
    with node.graph.inserting_after(node):
        new = node.graph.call_module(name, node.args, node.kwargs)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    for tensor in [tensor for tensor, value in made.items() if value is node]:
        made[tensor] = new
    node.graph.erase_node(node)
    return new


def free_name(module: nn.Module, start: str) -> str:
    """A name that the module does not have."""
    return next(name for i in count() if not hasattr(module, name := f"{start}_{i}"))


def divide(
    node: fx.Node, operator: Operator, rule: Rule, sizes: tuple[int, ...]
) -> None:  # fmt: skip
    """Divides the attributes of an operator that its rule names.

    Raises:
        LaunchError: if one is not there, or cannot be divided.
    """
    kwargs = dict(node.kwargs)
    for axis, size in zip(rule.axes, sizes, strict=True):
        try:
            kwargs = divided(kwargs, axis.attributes, size)
        except ValueError as error:
            raise LaunchError(f"operator {operator.name} ({operator.type}): {error}") from None
    node.kwargs = kwargs


def take_means(
    made: dict[str, fx.Node], operator: Operator, rule: Rule, sizes: tuple[int, ...]
) -> None:  # fmt: skip
    """Divides the outputs that are summands of a mean."""
    for name, n in zip(operator.outputs, rule.num_means(sizes), strict=True):
        if n > 1:
            node = made[name]
            with node.graph.inserting_after(node):
                mean = node.graph.call_function(truediv, (node, n))
            node.replace_all_uses_with(mean, delete_user_cb=partial(is_not, mean))
            made[name] = mean


def is_call(node: fx.Node) -> bool:
    """Whether a node calls an operator of the model."""
    return "onnx_name" in node.meta


def values_of(module: fx.GraphModule, graph: Graph) -> dict[str, fx.Node]:
    """The nodes of all tensors and parameters, by their names in the model."""
    outputs = {operator.name: operator.outputs for operator in graph.operators}
    made = {}
    for node in module.graph.nodes:
        if "onnx_value" in node.meta:
            made[node.meta["onnx_value"]] = node
        elif is_call(node) and len(outputs[node.meta["onnx_name"]]) == 1:
            made.setdefault(outputs[node.meta["onnx_name"]][0], node)
    return made
