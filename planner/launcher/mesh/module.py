"""The module of a stage on the local tensors of one device of its mesh.

It is the module that `to_torch` makes of the whole operators, changed in four places: an operator
whose rule says so has its attributes divided, or another function, which asks the devices with the
other parts (`operators.parts`); an output that is a summand of a mean is divided; and between
producer and consumer stand the conversions that `resharding.reshardings` lists, with one copy for
all who read the same. Where each of them starts and ends is that of `resharding.overlap`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from planner.artefacts import graph as graphs
from planner.artefacts.graph import Graph, Operator, parameters_by_name, tensors_by_name
from planner.artefacts.operator_types import PRODUCTS
from planner.artefacts.sharding import Rule, local_shape, reads, rule_by
from planner.artefacts.strategy import Stage, indices_of, operator_indices
from planner.launcher.denominators import Denominator
from planner.launcher.mesh.convert import Conversion, finished
from planner.launcher.mesh.gather_again import GatheringOperator, RegatheredOperator
from planner.launcher.mesh.late_gradients import ProductInTwo, late_parameters
from planner.launcher.mesh.lines import Mesh
from planner.model.load import Model
from planner.operators.convert import as_written, detach_inputs, to_torch
from planner.operators.losses import StepDivision
from planner.operators.parts.calls import (
    NoCommunication,
    divide,
    exchanged,
    free_name,
    is_call,
    parts_function,
    take_means,
    values_of,
)
from planner.operators.running import REFUSALS, next_state
from planner.resharding.overlap import pass_order
from planner.resharding.reshardings import Resharding, has_gradient, reshardings
from planner.resharding.sent_types import with_products_in
from planner.support.errors import LaunchError, words_of


def split_module(
    model: Model, stage: Stage, mesh: Mesh, values: Mapping[str, Tensor], device: str,
    denominators: Sequence[Denominator] = (), shorter: str | None = None,
) -> fx.GraphModule:  # fmt: skip
    """The operators of a stage as a module on local tensors.

    Args:
        model: the whole.
        stage: the module of one without a sharding is to_torch's.
        mesh: this device's place.
        values: local parameters, by name.
        device: where tensors are made.
        denominators: of operators of the stage, which divide by those of the step.
        shorter: the type that autocast computes in; None without autocast.

    Raises:
        LaunchError: if an operator cannot run by its rule.
    """
    graph = model.graph
    if stage.sharding is None:
        whole = to_torch(model, indices_of(stage, graph), values, device)
        _divide_by_totals(whole, model, denominators)
        return whole
    divided = {model.nodes[one.operator].name: one for one in denominators}
    module = to_torch(model, indices_of(stage, graph), values, device, all_recorded=True)
    in_file = as_written(model)
    made = values_of(module, graph)
    operators = {graph.operators[i].name: graph.operators[i] for i in indices_of(stage, graph)}
    nodes = {node.meta["onnx_name"]: node for node in module.graph.nodes if is_call(node)}
    for name, operator in operators.items():
        rule = rule_by(stage.sharding, operator)
        divide(nodes[name], operator, rule, mesh.sizes)
        parts = parts_function(model, operator, rule, lambda axis: mesh.lines[axis])
        if name in stage.sharding.rules:
            alone = parts_function(model, operator, rule, lambda a: NoCommunication(mesh.sizes[a]))
            function = nodes[name].target if alone is None else alone
            assert callable(function)
            _check(module, (nodes[name], function), (operator, rule), in_file, made, mesh.sizes)
        if parts is not None:
            nodes[name] = exchanged(module, nodes[name], parts, made)
        if name not in divided:
            take_means(made, operator, rule, mesh.sizes)
            continue
        num_parts = rule.num_means(mesh.sizes)[0]
        nodes[name] = _divided_by_total(module, nodes[name], divided[name], made, num_parts)
    under_autocast = graph if shorter is None else with_products_in(graph, shorter)
    _convert(module, nodes, made, (stage, under_autocast), mesh)
    detach_inputs(module, graph)
    module.graph.lint()
    module.recompile()
    return module


def _divide_by_totals(
    module: fx.GraphModule, model: Model, denominators: Sequence[Denominator]
) -> None:
    """Lets operators of whole tensors divide by the denominators of a step."""
    nodes = {node.meta["onnx_name"]: node for node in module.graph.nodes if is_call(node)}
    made = values_of(module, model.graph) if denominators else {}
    for one in denominators:
        _divided_by_total(module, nodes[model.nodes[one.operator].name], one, made, 1)
    module.recompile()


def _divided_by_total(
    module: fx.GraphModule, node: fx.Node, one: Denominator, made: dict[str, fx.Node], parts: int
) -> fx.Node:
    """Lets an operator divide by a denominator of a step; gives its new node.

    Args:
        parts: the number of devices whose means it makes a mean of.
    """
    function = cast(Callable[..., Any], node.target)
    is_loss = one.ignored is not None
    division = StepDivision(function, one.name, is_loss=is_loss, num_parts=parts)
    return exchanged(module, node, division, made)


def conversions_of(module: nn.Module) -> Iterator[tuple[str, Conversion]]:
    """The conversions in a module, with the names of the tensors that they convert."""
    for one in module.children():
        if isinstance(one, Conversion):
            yield one.tensor, one


def _convert(
    module: fx.GraphModule,
    nodes: dict[str, fx.Node],
    made: Mapping[str, fx.Node],
    of: tuple[Stage, Graph],
    mesh: Mesh,
) -> None:
    """Puts the conversions of a stage between its operators, where `pass_order` says.

    Args:
        nodes: of operators, by name.
        made: nodes of all tensors and parameters, by name.
    """
    stage, graph = of
    copies, order = reshardings(stage, graph), pass_order(stage, graph)
    output = next(iter(reversed(module.graph.nodes)))
    # In the graph's order, as the places of `order` are; the end of the stage is one more.
    calls = [*(nodes[name] for name in stage.operators), output]
    started = {}
    for c in order.order:
        one, name = copies[c], free_name(module, "resharding")
        backward = one.backward if has_gradient(one.tensor, graph) else None
        conversion = Conversion(one.tensor, mesh, one.forward, backward)
        parameter = parameters_by_name(graph).get(one.tensor)
        if parameter is not None:
            conversion.dtype = getattr(torch, one.dtype)
            added_up = parameter.gradient_dtype or parameter.dtype
            conversion.gradient_dtype = getattr(torch, added_up)
        module.add_submodule(name, conversion)
        with module.graph.inserting_before(calls[order.start[c]]):
            started[c] = module.graph.call_module(name, (made[one.tensor],))
    ends, late = {}, dict[int, fx.Node]()
    for c in order.order:
        one, first = copies[c], calls[order.first[c]]
        for place in reversed(order.late.get(c, ())):
            held = graph.operators[operator_indices(graph)[stage.operators[place]]].parameters
            with module.graph.inserting_before(first):
                parameters = tuple(made[name] for name in held)
                late[place] = module.graph.call_function(late_parameters, parameters)
        with module.graph.inserting_before(first):
            ends[c] = module.graph.call_function(finished, (started[c],))
        ends[c].meta["converts"] = one.tensor
        for user in [output] if one.leaves else [nodes[reader] for reader in one.readers]:
            user.replace_input_with(made[one.tensor], ends[c])
    _refuse_lost_statistics(module, stage, graph)
    for place, parameters_node in late.items():
        name = stage.operators[place]
        nodes[name] = _wrapped(module, nodes[name], "late", ProductInTwo, (parameters_node,))
    _gather_again(module, nodes, made, of, [(copies[c], started[c], ends[c]) for c in sorted(ends)])


def _gather_again(
    module: fx.GraphModule,
    nodes: dict[str, fx.Node],
    made: Mapping[str, fx.Node],
    of: tuple[Stage, Graph],
    copies: Sequence[tuple[Resharding, fx.Node, fx.Node]],
) -> None:
    """Lets operators make the copies of parameters anew that their backwards read, and start that
    before the backwards of others.

    Args:
        copies: each with the nodes of its start and its end.
    """
    stage, graph = of
    types = {one.name: one.type for one in graph.operators}
    again = dict[str, RegatheredOperator]()
    for name in stage.operators:
        gathered = [(made[one.tensor], start, end) for one, start, end in copies
                    if name in one.again]  # fmt: skip
        if gathered:
            some = [module.get_submodule(str(start.target)) for _, start, _ in gathered]
            make = partial(
                RegatheredOperator, conversions=cast(list[Conversion], some),
                is_product=types[name] in PRODUCTS,
            )  # fmt: skip
            pairs = tuple((home, end) for home, _, end in gathered)
            nodes[name] = _wrapped(module, nodes[name], "again", make, (pairs,))
            again[name] = cast(RegatheredOperator, module.get_submodule(str(nodes[name].target)))
    if stage.prefetch is not None:
        for place, others in pass_order(stage, graph).again.items():
            name = stage.operators[place]
            before = [again[stage.operators[other]] for other in others]
            gathering = partial(GatheringOperator, gathered=before)
            nodes[name] = _wrapped(module, nodes[name], "gathering", gathering)


def _wrapped(
    module: fx.GraphModule,
    node: fx.Node,
    start: str,
    make: Callable[[Callable[..., Any]], nn.Module],
    more: tuple[Any, ...] = (),
) -> fx.Node:
    """Puts a module around an operator's function; gives the new node.

    Args:
        start: of the name of the module.
        make: the module of a function.
        more: what it is given before the arguments of the function.
    """
    own = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    name = free_name(module, start)
    module.add_submodule(name, make(cast(Callable[..., Any], own)))
    with node.graph.inserting_after(node):
        new = node.graph.call_module(name, (*more, *node.args), node.kwargs)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _refuse_lost_statistics(module: fx.GraphModule, stage: Stage, graph: Graph) -> None:
    """A normalization in training updates its running statistics. A copy would lose them, and they
    are cut as the channels are. Other state is whole.
    """
    assert stage.sharding is not None
    operators = {one.name: one for one in graph.operators}
    for node in module.graph.nodes:
        if node.target is next_state and "converts" in node.kwargs["state"].meta:
            raise LaunchError(
                f"operator {node.meta['onnx_name']}: expected the state that forward changes whole"
                " on every device"
            )
        operator = operators.get(node.meta.get("onnx_name", ""))
        trains = node.kwargs.get("training_mode") and not node.kwargs.get("always")
        if operator is None or operator.type != "BatchNormalization" or not trains:
            continue
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

    where = f"operator {operator.name} ({operator.type}): by the rule {'; '.join(rule.lines)}"
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
