"""Stopped gradients of a trace, written as an operator that stays.

A trace of torch.export still has `detach` and regions without gradients; the simpler operators that
it is translated from have neither. So each tensor that a gradient would flow through but for a stop
passes through `planner::stop_gradient` here. `tidy` makes it an Identity with a mark.

Only tensors that depend on a trained parameter are marked. All others have no gradient in training,
and the file stays as it is without them.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.support.errors import ExportError

aten = torch.ops.aten
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_FLAG = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_DETACH = (aten.detach.default, aten.detach_.default)


@torch.library.custom_op("planner::stop_gradient", mutates_args=())
def stop_gradient(x: Tensor) -> Tensor:
    """A copy, through which no gradient flows back."""
    return x.clone()


@stop_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


STOP = torch.ops.planner.stop_gradient.default


@contextmanager
def modes_traced() -> Iterator[None]:
    """A context in which a trace shows where the module turns gradients off.

    `torch.inference_mode` only turns them off: of what it does else, a trace shows nothing. Within
    a `torch.autograd.Function`, where gradients are off anyway, `torch.no_grad` does nothing: what
    comes back is differentiated by the function's own backward, as checkpointing does.
    """
    function: Any = torch.autograd.Function
    switch: Any = torch.set_grad_enabled  # which torch.no_grad calls
    mode: Any = torch.inference_mode
    before = function.__dict__["apply"], switch.__init__, mode.__enter__, mode.__exit__
    within = 0

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal within
        within += 1
        try:
            return before[0].__func__(cls, *args, **kwargs)
        finally:
            within -= 1

    def switched(self: Any, on: bool) -> None:
        if within:
            self.prev = self.mode = torch.is_grad_enabled()
        else:
            before[1](self, on)

    def turn_off(self: Any) -> None:
        self.planner_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def turn_back(self: Any, *_: object) -> None:
        torch.set_grad_enabled(self.planner_before)

    def put(apply: Any, start: Any, enter: Any, leave: Any) -> None:
        function.apply, switch.__init__, mode.__enter__, mode.__exit__ = apply, start, enter, leave

    put(classmethod(applied), switched, turn_off, turn_back)
    try:
        yield
    finally:
        put(*before)


class FlagChanges(TorchFunctionMode):
    """While a module is traced under it, changes of its parameters' `requires_grad` are noted.

    Attributes:
        names: of the parameters, in the order of their first change.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        if func in _FLAG:
            before = args[0].requires_grad
            made = func(*args, **kwargs)
            if args[0].requires_grad != before:
                own = self._module.named_parameters(remove_duplicate=False)
                self.names |= dict.fromkeys(name for name, one in own if one is args[0])
            return made
        return func(*args, **kwargs)


def keep_stops(program: ExportedProgram, module: nn.Module) -> None:
    """Puts `stop_gradient` where the module stops a gradient, in place.

    Args:
        program: the module's trace, before it is made of simpler operators.
        module: whose parameters say which of them are trained.

    Raises:
        ExportError: if the module writes into a tensor whose gradient it stops: the operator makes
            a copy, which the write would miss.
    """
    trained = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    held = program.graph_signature.inputs_to_parameters
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    try:
        _mark(program.graph_module, [held.get(name) in trained for name in names])
    except _WriteError as error:
        raise ExportError(f"{type(module).__name__}: {error}") from None


class _WriteError(Exception):
    """A write into a tensor whose gradient is stopped, in words."""


def _check_unrecorded_write(node: Node, flows: Collection[Node]) -> None:
    """Refuses an operator of a region that autograd does not record, if it writes into a tensor
    from outside through which a gradient flows.
    """
    if _writes(node) and _root(node) in flows and _root(node).op == "placeholder":
        raise _WriteError(
            f"{_named(node)} writes under torch.no_grad() into a tensor with a gradient, which a"
            " graph cannot have; compute a new tensor"
        )


def _mark(module: GraphModule, given: Sequence[bool], *, recorded: bool = True) -> list[bool]:
    """Marks the stops of a graph; for each of its outputs, whether a gradient flows through it.

    Args:
        given: for each input, whether a gradient flows through it.
        recorded: whether autograd records the operators. A region that it records is never within
            one that it does not: torch.export puts them beside each other.
    """
    marking = _Marking(module, recorded, list(given))
    for node in tuple(module.graph.nodes):
        if node.op == "output":
            return _outputs(module, node, marking.flows, recorded)
        if marking.flows_through(node):
            marking.flows.add(node)
    raise AssertionError("a graph without an output")


@dataclass
class _Marking:
    """A graph whose stops are marked, node by node.

    Attributes:
        module: the graph.
        recorded: as of `_mark`.
        waiting: for each input that is still to come, whether a gradient flows through it.
        flows: nodes through which a gradient flows.
        of_outputs: for each region, the same of its outputs.
    """

    module: GraphModule
    recorded: bool
    waiting: list[bool]
    flows: set[Node] = field(default_factory=set)
    of_outputs: dict[Node, list[bool]] = field(default_factory=dict)

    def flows_through(self, node: Node) -> bool:
        """Whether a gradient flows through a node, which is marked where it stops there."""
        sources = not self.flows.isdisjoint(node.all_input_nodes)
        if node.op == "placeholder":
            return self.waiting.pop(0)
        if node.target in _DETACH:
            if sources and _is_float(node):
                _check_writes(self.module, node)
                node.target, node.kwargs = STOP, {}
                self.module.recompile()
            return False
        if node.target is _REGION:
            on, inner, *operands = node.args
            given = [one in self.flows for one in operands]
            self.of_outputs[node] = _mark(_held(self.module, inner), given, recorded=bool(on))
            return False
        arguments: Any = node.args
        if node.target is getitem and arguments[0] in self.of_outputs:
            return bool(self.of_outputs[arguments[0]][arguments[1]])
        for inner in node.all_input_nodes:
            if isinstance(held := _held(self.module, inner), GraphModule):
                inputs = sum(one.op == "placeholder" for one in held.graph.nodes)
                _mark(held, [sources] * inputs, recorded=self.recorded)
        if not self.recorded:
            _check_unrecorded_write(node, self.flows)
        return sources and _is_float(node)


def _outputs(module: GraphModule, output: Node, flows: set[Node], recorded: bool) -> list[bool]:
    """Marks the outputs of a graph that autograd does not record; whether gradients flow."""
    made = [one for one in output.all_input_nodes if one in flows]
    if not recorded:
        for one in made:
            with module.graph.inserting_before(output):
                stopped = module.graph.call_function(STOP, (one,))
            stopped.meta = dict(one.meta)
            output.replace_input_with(one, stopped)
        module.recompile()
    results = output.args[0]
    every = results if isinstance(results, list | tuple) else (results,)
    return [recorded and one in flows for one in every]


def _held(module: GraphModule, node: object) -> Any:
    """The graph that a node stands for; None for other nodes."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    return getattr(module, str(node.target), None)


def _is_float(node: Node) -> bool:
    """Whether a node makes a tensor that can have a gradient."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    return any(one.is_floating_point() or one.is_complex() for one in tensors)


def _check_writes(module: GraphModule, stop: Node) -> None:
    """Refuses a later write into the memory of a tensor that is detached."""
    root, is_later = _root(stop), False
    for node in module.graph.nodes:
        if is_later and _writes(node) and node.target not in _DETACH and _root(node) is root:
            raise _WriteError(
                f"{_named(node)} writes into the memory of a tensor behind detach(), which a graph"
                " cannot have; write .detach().clone()"
            )
        is_later = is_later or node is stop


def _named(node: Node) -> str:
    """An operator that writes, for messages."""
    is_norm = node.target is aten.embedding_renorm_.default
    return "max_norm of an embedding, which" if is_norm else f"forward: {node.target}"


def _writes(node: Node) -> bool:
    """Whether an operator writes into its first argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _root(node: Node) -> Node:
    """The node that made the memory that the output of a node lies in."""
    while isinstance(node.target, OpOverload) and node.target._schema.returns:
        first = node.args[0] if node.args else None
        if node.target._schema.returns[0].alias_info is None or not isinstance(first, Node):
            break
        node = first
    return node
