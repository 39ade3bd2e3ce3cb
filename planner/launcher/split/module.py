"""The module of a stage on the local tensors of one device of its mesh.

It is the module that `to_torch` makes of the whole operators, changed in four places: an operator
whose rule says so has its attributes divided, or another function, which asks the devices with the
other parts (`operators.parts`); an output that is a summand of a mean is divided; and between
producer and consumer stand the conversions that `splitting.reshardings` lists, with one copy for
all who read the same.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from math import prod
from operator import getitem, is_not, truediv
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from planner import graph as graphs
from planner.errors import LaunchError
from planner.graph import Graph, Operator, parameters_by_name, tensors_by_name
from planner.launcher.split.again import GatheredAgain
from planner.launcher.split.convert import Conversion
from planner.launcher.split.mesh import LateLine, Mesh
from planner.model import Model
from planner.operators import to_torch
from planner.operators.normalization import batch_normalization
from planner.operators.parts import HALO, MARKED, Cut, Line
from planner.operators.running import REFUSALS, words_of
from planner.sharding import Rule, dim_of, local_shape, rule_lines
from planner.splitting.reshardings import (
    Resharding,
    has_gradient,
    reads,
    reshardings,
    rule_by,
)
from planner.strategy import Stage, indices_of

_ATTRIBUTE = re.compile(r"(?P<name>\w+)(\[(?P<index>\d+)\])?")


def split_module(
    model: Model, stage: Stage, mesh: Mesh, values: Mapping[str, Tensor], device: str
) -> fx.GraphModule:
    """The operators of a stage as a module on local tensors.

    Args:
        model: the whole.
        stage: one with a sharding.
        mesh: this device's place; it is connected before the module runs.
        values: local parameters, by name.
        device: where tensors are made.

    Raises:
        LaunchError: if an operator cannot run by its rule.
    """
    graph = model.graph
    module = to_torch(model, indices_of(stage, graph), values, device)
    made = _values(module, graph)
    operators = {graph.operators[i].name: graph.operators[i] for i in indices_of(stage, graph)}
    nodes = {node.meta["onnx_name"]: node for node in module.graph.nodes if _is_call(node)}
    assert stage.sharding is not None
    for name, operator in operators.items():
        rule = rule_by(stage.sharding, operator)
        _divide(nodes[name], operator, rule, mesh.sizes)
        parts = _parts_function(model, operator, rule, partial(LateLine, mesh))
        if name in stage.sharding.rules:
            alone = _parts_function(model, operator, rule, lambda a: _Nobody(mesh.sizes[a]))
            function = nodes[name].target if alone is None else alone
            assert callable(function)
            _check(module, (nodes[name], function), (operator, rule), graph, made, mesh.sizes)
        if parts is not None:
            nodes[name] = _exchanged(module, nodes[name], parts, made)
        _take_means(made, operator, rule, mesh.sizes)
    copies = reshardings(stage, graph)
    inserted = [
        _insert(module, nodes, made, one, graph, (mesh, _free(module, "resharding")))
        for one in copies
    ]
    _refuse_lost_statistics(module, stage, graph)
    for name in operators:
        gathered = [
            (made[one.tensor], copy)
            for one, copy in zip(copies, inserted, strict=True)
            if name in one.again
        ]
        if gathered:
            _gather_again(module, nodes[name], gathered)
    module.graph.lint()
    module.recompile()
    return module


def conversions_of(module: nn.Module) -> Iterator[tuple[str, Conversion]]:
    """The conversions in a module, with the names of the tensors that they convert."""
    for one in module.children():
        if isinstance(one, Conversion):
            yield one.tensor, one


class _Parts(nn.Module):
    """An operator's function on parts, which asks the devices with the other parts."""

    def __init__(self, function: Callable[..., Any], cuts: tuple[Cut, ...]) -> None:
        super().__init__()
        self.function, self.cuts = function, cuts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator makes of its local tensors."""
        return self.function(*args, cuts=self.cuts, **kwargs)


class _Nobody:
    """A line on which nothing is sent, to see what shapes an operator makes."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_reduce(self, own: Tensor) -> Tensor:
        return own

    def all_reduce_max(self, own: Tensor) -> Tensor:
        return own

    def exchange(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(after), torch.empty_like(before)


def _parts_function(
    model: Model, operator: Operator, rule: Rule, line: Callable[[int], Line]
) -> _Parts | None:
    """The function that runs in the place of an operator's own, if its rule has a mark.

    Args:
        line: gives the line along an axis.

    Raises:
        LaunchError: if there is none.
    """
    marks = {word for words in rule.local for word in words if word.startswith("@")}
    if not marks:
        return None
    known = sorted(mark for mark, kind in MARKED if kind == operator.type)
    if len(marks) > 1 or not marks.issubset(known):
        raise LaunchError(
            f"operator {operator.name} ({operator.type}): expected one mark among"
            f" {', '.join(known) or 'none'}, got {', '.join(sorted(marks))}"
        )
    (mark,) = marks
    node = next(one for one in model.nodes if one.name == operator.name)
    first = rule.inputs[reads(operator).index(node.inputs[0])]
    cuts = []
    for axis, words in enumerate(rule.local):
        dim = dim_of(first[axis])
        if mark in words:
            if dim is None:
                raise LaunchError(
                    f"operator {operator.name} ({operator.type}): {mark}: expected a cut of"
                    f" {node.inputs[0]}, got {first[axis]}"
                )
            cuts.append(Cut(line(axis), dim))
    if mark == HALO and len({cut.dim for cut in cuts}) < len(cuts):
        raise LaunchError(
            f"operator {operator.name} ({operator.type}): {mark}: expected a dimension to be cut"
            f" along one axis, got {','.join(first)}"
        )
    return _Parts(cast(Callable[..., Any], MARKED[mark, operator.type]), tuple(cuts))


def _exchanged(
    module: fx.GraphModule, node: fx.Node, parts: _Parts, made: dict[str, fx.Node]
) -> fx.Node:
    """Puts the function on parts in the place of an operator's own; gives the new node."""
    name = _free(module, "parts")
    module.add_submodule(name, parts)
    with node.graph.inserting_after(node):
        new = node.graph.call_module(name, node.args, node.kwargs)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    for tensor in [tensor for tensor, value in made.items() if value is node]:
        made[tensor] = new
    node.graph.erase_node(node)
    return new


def _free(module: nn.Module, start: str) -> str:
    """A name that the module does not have."""
    return next(name for i in count() if not hasattr(module, name := f"{start}_{i}"))


def _is_call(node: fx.Node) -> bool:
    return "onnx_name" in node.meta


def _values(module: fx.GraphModule, graph: Graph) -> dict[str, fx.Node]:
    """The nodes of all tensors and parameters, by their names in the model."""
    outputs = {operator.name: operator.outputs for operator in graph.operators}
    made = {}
    for node in module.graph.nodes:
        if "onnx_value" in node.meta:
            made[node.meta["onnx_value"]] = node
        elif _is_call(node) and len(outputs[node.meta["onnx_name"]]) == 1:
            made.setdefault(outputs[node.meta["onnx_name"]][0], node)
    return made


def _divide(
    node: fx.Node, operator: Operator, rule: Rule, sizes: tuple[int, ...]
) -> None:  # fmt: skip
    """Divides the attributes of an operator that its rule names."""
    kwargs = dict(node.kwargs)
    for words, size in zip(rule.local, sizes, strict=True):
        for word in words:
            if word.startswith("@"):
                continue
            match = _ATTRIBUTE.fullmatch(word)
            name = match["name"] if match else ""
            if match is None or kwargs.get(name) is None:
                raise LaunchError(
                    f"operator {operator.name}: {operator.type} has no attribute {word!r} to divide"
                )
            index = None if match["index"] is None else int(match["index"])
            kwargs[name] = _divided(kwargs[name], index, size, f"{operator.name}: {word}")
    node.kwargs = kwargs


def _divided(value: Any, index: int | None, size: int, where: str) -> Any:
    """A number, or a number of several, divided by the size of an axis."""
    whole = list(value) if isinstance(value, list | tuple) else [value]
    which = range(len(whole)) if index is None else [index]
    for i in which:
        if i >= len(whole) or not isinstance(whole[i], int) or whole[i] < 1 or whole[i] % size:
            raise LaunchError(
                f"operator {where}: expected a number that {size} divides, got {value}"
            )
        whole[i] //= size
    return tuple(whole) if isinstance(value, list | tuple) else whole[0]


def _take_means(
    made: dict[str, fx.Node], operator: Operator, rule: Rule, sizes: tuple[int, ...]
) -> None:  # fmt: skip
    """Divides the outputs that are summands of a mean."""
    for name, flags in zip(operator.outputs, rule.mean, strict=True):
        n = prod(size for size, flag in zip(sizes, flags, strict=True) if flag)
        if n > 1:
            node = made[name]
            with node.graph.inserting_after(node):
                mean = node.graph.call_function(truediv, (node, n))
            node.replace_all_uses_with(mean, delete_user_cb=partial(is_not, mean))
            made[name] = mean


def _insert(
    module: fx.GraphModule,
    nodes: Mapping[str, fx.Node],
    made: Mapping[str, fx.Node],
    one: Resharding,
    graph: Graph,
    how: tuple[Mesh, str],
) -> fx.Node:
    """Puts a conversion before the first operator that reads the copy; gives the copy."""
    mesh, name = how
    backward = one.backward if has_gradient(one.tensor, graph) else None
    module.add_submodule(name, Conversion(one.tensor, mesh, one.forward, backward))
    output = next(iter(reversed(module.graph.nodes)))
    users = [output] if one.leaves else [nodes[reader] for reader in one.readers]
    home = made[one.tensor]
    with module.graph.inserting_before(users[0]):
        copy = module.graph.call_module(name, (home,))
    copy.meta["converts"] = one.tensor
    for user in users:
        user.replace_input_with(home, copy)
    return copy


def _gather_again(
    module: fx.GraphModule, node: fx.Node, gathered: list[tuple[fx.Node, fx.Node]]
) -> None:
    """Lets an operator make the copies of parameters anew that its backward reads.

    Args:
        gathered: parameters at home, and their copies.
    """
    conversions = [module.get_submodule(str(copy.target)) for _, copy in gathered]
    own = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    function = cast(Callable[..., Any], own)
    name = _free(module, "again")
    module.add_submodule(name, GatheredAgain(function, cast(list[Conversion], conversions)))
    with node.graph.inserting_after(node):
        new = node.graph.call_module(name, (tuple(gathered), *node.args), node.kwargs)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _refuse_lost_statistics(module: fx.GraphModule, stage: Stage, graph: Graph) -> None:
    """A normalization in training updates its running statistics. A copy would lose them, and they
    are cut as the channels are.
    """
    assert stage.sharding is not None
    operators = {one.name: one for one in graph.operators}
    for node in module.graph.nodes:
        if node.target is not batch_normalization or not node.kwargs.get("training_mode"):
            continue
        operator = operators[node.meta["onnx_name"]]
        rule = rule_by(stage.sharding, operator)
        specs = dict(zip(reads(operator), rule.inputs, strict=True))
        channels = tuple("S0" if part == "S1" else "R" for part in rule.outputs[0])
        for name in ("mean", "var"):
            held = node.kwargs[name]
            assert isinstance(held, fx.Node)
            copied = "converts" in held.meta
            if copied or specs.get(str(held.meta.get("onnx_value")), channels) != channels:
                raise LaunchError(
                    f"operator {operator.name}: running statistics have to lie as its channels do,"
                    f" and the rule to read them so: {','.join(channels)}"
                )


def _check(
    module: fx.GraphModule,
    call: tuple[fx.Node, Callable[..., Any]],
    what: tuple[Operator, Rule],
    graph: Graph,
    made: Mapping[str, fx.Node],
    sizes: tuple[int, ...],
) -> None:
    """Runs an operator on local tensors without numbers, and compares the shapes of its outputs
    with those of the rule.
    """
    (node, function), (operator, rule) = call, what
    specs = dict(zip(reads(operator), rule.inputs, strict=True))
    described: dict[str, graphs.Tensor | graphs.Parameter] = {
        **tensors_by_name(graph), **parameters_by_name(graph)
    }  # fmt: skip
    names = {value: name for name, value in made.items()}

    def empty(given: fx.Node) -> Tensor:
        name = names.get(given, "")
        if name not in specs:
            return _attribute(module, given).to("meta")
        shape = local_shape(described[name].shape, specs[name], sizes)
        return torch.empty(shape, dtype=getattr(torch, described[name].dtype), device="meta")

    where = f"operator {operator.name} ({operator.type}): by the rule {'; '.join(rule_lines(rule))}"
    try:
        args: Any = fx.map_arg(node.args, empty)
        kwargs: Any = fx.map_arg(node.kwargs, empty)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        results = function(*args, **kwargs)
        for name, spec in zip(operator.outputs, rule.outputs, strict=True):
            due = local_shape(described[name].shape, spec, sizes)
            value = made[name]
            one = results[value.args[1]] if value.target is getitem else results
            if tuple(one.shape) != due:
                raise LaunchError(
                    f"{where} it makes {name!r} of shape {tuple(one.shape)}, expected {due}"
                )
    except REFUSALS as error:
        raise LaunchError(f"{where} it does not run: {words_of(error)}") from error


def _attribute(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """A constant that the module holds."""
    held: Any = module
    for part in str(node.target).split("."):
        held = getattr(held, part)
    assert isinstance(held, Tensor)
    return held
