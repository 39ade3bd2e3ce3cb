"""A set of operators of a model -> a `torch.fx.GraphModule` that computes them.

Every ONNX operator becomes one fx node of the same name, whose target is its function in the
table. Before that each call is tried on meta tensors, which have shapes and no numbers: so a call
that a function refuses, or whose outputs are not those of the model, is known before anything runs.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from keyword import kwlist
from operator import getitem

import torch
from torch import Tensor, fx, nn

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    consumers,
    differentiated,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.operator_types import facts
from planner.artefacts.strategy import operator_indices
from planner.model.load import Model, Node
from planner.model.schemas import REGISTER
from planner.model.scopes import module_names
from planner.model.values import Values
from planner.operators.binding import Call, bind
from planner.operators.running import REFUSALS
from planner.support.errors import OperatorError, words_of
from planner.support.memo import remembered
from planner.support.printable import few


def input_names(graph: Graph, operators: Iterable[int]) -> tuple[str, ...]:
    """Tensors that the operators read and do not make, in the order of `graph.tensors`."""
    chosen = set(operators)
    made = {name for i in chosen for name in graph.operators[i].outputs}
    read = {name for i in chosen for name in graph.operators[i].inputs}
    return tuple(sorted(read - made, key=_position(graph).__getitem__))


def output_names(graph: Graph, operators: Iterable[int]) -> tuple[str, ...]:
    """Tensors that the operators make and others read, the graph returns, or the next microbatch
    reads as state, in that order.
    """
    chosen = set(operators)
    read_by, returned = consumers(graph), set(graph.outputs)
    leaving = [
        name
        for i in chosen
        for name in graph.operators[i].outputs
        if name in returned or not read_by[name] or not chosen.issuperset(read_by[name])
    ]
    return tuple(sorted(leaving, key=_position(graph).__getitem__))


@remembered
def _position(graph: Graph) -> Mapping[str, int]:
    return {tensor.name: i for i, tensor in enumerate(graph.tensors)}


def parameters(model: Model, names: Iterable[str], device: str = "cpu") -> dict[str, Tensor]:
    """The values by name, in memory of their own: `nn.Parameter`s of the graph's types where they
    are trained.
    """
    known = parameters_by_name(model.graph)
    tensors = {}
    for name in names:
        tensor = written(model, name, device)
        if name in known and known[name].trainable:
            tensor = nn.Parameter(tensor.to(getattr(torch, known[name].dtype)))
        tensors[name] = tensor
    return tensors


def written(model: Model, name: str, device: str = "cpu") -> Tensor:
    """A value as the file has it, in memory of its own."""
    return _tensor(name, model.values).to(device)


def as_written(model: Model) -> Graph:
    """The graph with the types that parameters have in the file, so that operators agree on types
    without autocast.
    """
    described = model.values.described
    parameters = (replace(p, dtype=described(p.name)[0].name) for p in model.graph.parameters)
    return replace(model.graph, parameters=tuple(parameters))


def _tensor(name: str, values: Values) -> Tensor:
    tensor = _empty(name, values, "cpu")
    # numpy knows bfloat16 only through ml_dtypes
    numbers = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    values.fill(name, numbers.numpy())
    return tensor


def _empty(name: str, values: Values, device: str) -> Tensor:
    """A tensor of the value's type and shape, which is not read."""
    kind, shape = values.described(name)
    if kind.name not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise OperatorError(f"{name}: expected a type among {known}, got {kind.name}")
    return torch.empty(shape, dtype=getattr(torch, kind.name), device=device)


def check(model: Model) -> None:
    """Whether every operator of the model can be converted.

    Raises:
        OperatorError: otherwise; it lists all that cannot.
    """
    _calls(model, range(len(model.nodes)), "cpu")


def to_torch(
    model: Model,
    operators: Sequence[int] | None = None,
    values: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
    *,
    all_recorded: bool = False,
) -> fx.GraphModule:
    """The operators as a module that maps their outer inputs to a tuple of their outer outputs.

    Parameters keep their ONNX names, a dot being a submodule; each has the same target in every
    module that holds it. fx nodes have `meta["onnx_name"]` where they are operators, and
    `meta["onnx_value"]` where they are placeholders, parameters or one output of several.

    Args:
        model: the whole.
        operators: their indices in `model.graph`, in any order; all without.
        values: parameters to hold, by ONNX name, shared and not copied; others are read from the
            model.
        device: where new parameters are put and tensors are made.
        all_recorded: whether autograd follows operators without a backward, too; see
            `detach_inputs`.

    Returns:
        The module; its `input_names` and `output_names` are the tensors' names in the model.

    Raises:
        OperatorError: if an operator cannot be converted; it lists all.
    """
    chosen = sorted(range(len(model.nodes)) if operators is None else operators)
    calls = _calls(model, chosen, device)
    inputs, outputs = input_names(model.graph, chosen), output_names(model.graph, chosen)
    held = _held(calls.values(), model.graph)
    given = {name: values[name] for name in held if values and name in values}
    given |= parameters(model, [name for name in held if name not in given], device)
    root = _root({_targets(model)[name]: given[name] for name in held})
    module = fx.GraphModule(root, _graph(model, calls, inputs, outputs), "Stage")
    if not all_recorded:
        detach_inputs(module, model.graph)
    vars(module).update(input_names=inputs, output_names=outputs)
    return module


def _held(calls: Iterable[Call], graph: Graph) -> list[str]:
    """Parameters and constants that the calls read, in order."""
    flowing = tensors_by_name(graph)
    return [n for n in dict.fromkeys(n for call in calls for n in call.reads) if n not in flowing]


def _graph(
    model: Model, calls: Mapping[int, Call], inputs: Sequence[str], outputs: Sequence[str]
) -> fx.Graph:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for name in inputs:
        made[name] = graph.create_node("placeholder", _word(name), name=_word(name))
        made[name].meta["onnx_value"] = name
    for name in _held(calls.values(), model.graph):
        made[name] = graph.create_node("get_attr", _targets(model)[name], name=_word(name))
        made[name].meta["onnx_value"] = name
    for i, call in calls.items():
        node = model.nodes[i]
        args, kwargs = call.fill(made.__getitem__)
        result = graph.create_node("call_function", call.function, args, kwargs, _word(node.name))
        result.meta["onnx_name"] = node.name
        made.update(_outputs(graph, node, result))
    graph.output(tuple(made[name] for name in outputs))
    return graph


def detach_inputs(module: fx.GraphModule, graph: Graph) -> None:
    """Detaches what operators without a backward read, so that autograd records nothing of them and
    keeps no tensor for them: those before a stopped gradient, and those that no loss needs.

    Args:
        module: of operators of the graph.
    """
    index, with_backward = operator_indices(graph), differentiated(graph)
    detached: dict[fx.Node, fx.Node] = {}
    for node in tuple(module.graph.nodes):
        name = node.meta.get("onnx_name")
        if name is None or index[name] in with_backward:
            continue
        for source in node.all_input_nodes:
            if _carries_gradient(source, graph):
                if source not in detached:
                    with module.graph.inserting_before(node):
                        detached[source] = module.graph.call_function(torch.detach, (source,))
                node.replace_input_with(source, detached[source])
    if detached:
        module.recompile()


def _carries_gradient(node: fx.Node, graph: Graph) -> bool:
    """Whether the value of a node of a module has a gradient in training."""
    name = node.meta.get("onnx_value", node.meta.get("converts"))
    if name is not None:
        known = parameters_by_name(graph).get(name)
        if known is not None:
            return known.trainable
        return name in tensors_by_name(graph) and tensors_by_name(graph)[name].gradient
    if "onnx_name" in node.meta:
        return operator_indices(graph)[node.meta["onnx_name"]] in differentiated(graph)
    # A summand of a mean, divided.
    return any(_carries_gradient(one, graph) for one in node.all_input_nodes)


def _outputs(graph: fx.Graph, node: Node, result: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    if len(node.outputs) == 1:
        yield node.outputs[0], result
        return
    for i, name in enumerate(node.outputs):
        if name:
            item = graph.create_node("call_function", getitem, (result, i), name=_word(name))
            item.meta["onnx_value"] = name
            yield name, item


def _word(name: str) -> str:
    """The name as an identifier; fx makes it unique."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)
    return word if word[:1].isalpha() or word[:1] == "_" else f"_{word}"


# ---- parameters in submodules


@remembered
def _targets(model: Model) -> Mapping[str, str]:
    """The place of each parameter or constant of the model in a module.

    Parts that would hide an attribute of the module, are a word of Python, or stand for a tensor
    and a submodule at once, get an underscore at the end. Asking the whole model makes them the
    same in every stage.
    """
    names = dict.fromkeys(p.name for p in model.graph.parameters)
    names |= dict.fromkeys(n for node in model.nodes for n in node.inputs if n in model.values)
    reserved = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))) | {
        *("input_names", "output_names"),
        *kwlist,
    }
    leaves: set[str] = set()
    folders: set[str] = set()
    targets = {}
    for name in names:
        *outer, leaf = (_part(part, reserved) for part in name.split("."))
        path = ""
        for part in outer:
            path = _free(path + part, leaves) + "."
            folders.add(path[:-1])
        targets[name] = _free(path + leaf, leaves | folders)
        leaves.add(targets[name])
    return targets


def _part(part: str, reserved: frozenset[str]) -> str:
    part = re.sub(r"[^\w/:;,+-]", "_", part, flags=re.ASCII) or "_"
    return _free(part, reserved)


def _free(path: str, taken: Iterable[str]) -> str:
    while path in taken:
        path += "_"
    return path


def _root(tensors: Mapping[str, Tensor]) -> nn.Module:
    root = nn.Module()
    for target, tensor in tensors.items():
        *outer, leaf = target.split(".")
        owner = root
        for part in outer:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    return root


# ---- calls, and the mistakes in them


def _calls(model: Model, operators: Iterable[int], device: str) -> dict[int, Call]:
    """The call of each operator, tried on meta tensors."""
    calls, problems = {}, []
    unknown: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for i in operators:
        node = model.nodes[i]
        if facts(node.kind).function is None:
            unknown[node.type, node.domain or "ai.onnx", node.version].append(node.name)
            continue
        try:
            calls[i] = bind(model, node, device)
            _try(model, node, calls[i])
        except OperatorError as error:
            problems.append(f"{node.type} {node.name!r} (version {node.version}): {error}")
        except REFUSALS as error:
            problems.append(
                f"{node.type} {node.name!r} (version {node.version}): torch refuses it:"
                f" {words_of(error)}"
            )
    lines = [
        _unsupported(model, operator, domain, version, names)
        for (operator, domain, version), names in sorted(unknown.items())
    ]
    if lines or problems:
        raise OperatorError("\n".join(f"{model.path}: {line}" for line in (*lines, *problems)))
    return calls


def _unsupported(
    model: Model, operator: str, domain: str, version: int, names: Sequence[str]
) -> str:
    """The problem that an operator has no function, with its users and where these came from."""
    users = set(names)
    modules = module_names(node for node in model.proto.graph.node if node.name in users)
    where = f" (in {', '.join(modules[:3])})" if modules else ""
    why = facts(operator).refused if domain == "ai.onnx" else ""
    mend = why or f"export the model without it, or give it a function with {REGISTER}"
    return (
        f"{operator} (domain {domain}, version {version}) is not supported; used by"
        f" {few([*map(repr, names)])}{where}; {mend}"
    )


def _try(model: Model, node: Node, call: Call) -> None:
    """Calls the function on meta tensors and compares its outputs with those of the model."""
    tensors = {name: _meta(model, name) for name in call.reads}
    if any(tensor.dtype in _RARE for tensor in tensors.values()):
        tensors = {n: torch.ones_like(t, device="cpu") for n, t in tensors.items()}
    args, kwargs = call.fill(tensors.__getitem__)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    result = call.function(*args, **kwargs)
    made = result if len(node.outputs) > 1 else (result,)
    for name, tensor in zip(node.outputs, made, strict=True):
        if not name:
            continue
        due = tensors_by_name(model.graph)[name]
        expected, got = _described(due.dtype, due.shape), _described(tensor.dtype, tensor.shape)
        if got != expected:
            raise OperatorError(f"output {name!r}: the model says {expected}, torch makes {got}")


# Torch lacks most functions for these types, and notices only when there are numbers.
_RARE = frozenset({torch.uint16, torch.uint32, torch.uint64})


def _described(dtype: object, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _meta(model: Model, name: str) -> Tensor:
    """A tensor of the value's type and shape that holds no numbers."""
    known = tensors_by_name(model.graph).get(name)
    if known is None:  # in the file's type: there is no autocast here
        return _empty(name, model.values, "meta")
    return torch.empty(known.shape, dtype=getattr(torch, known.dtype), device="meta")
