"""`RunnableOperator`: one operator of a model as a torch function that runs alone; `observe`: its
stash, the tensors that autograd keeps for it, seen through autograd's hooks.

A saved tensor is recognised by its storage: that of an input or an output has a name, that of a
parameter is on the device anyway, and every other one is private to the operator. Each input gets
a storage of its own with the same strides: two inputs that share a storage here (slices of one
tensor) are two copies if they come from another device.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from planner.artefacts.graph import Graph, View
from planner.model.load import Model
from planner.operators import input_names, output_names, parameters, to_torch
from planner.operators.casting import WeightCast, cast_once

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunnableOperator:
    """One operator that can run alone.

    Attributes:
        forward: the code that torch.fx generated. It is not the module's `__call__`, whose hooks
            cost time that the operator does not take inside a whole model.
        inputs: names of the tensors that `forward` takes.
        outputs: names of the tensors that it returns.
        parameters: the graph's parameters that `forward` reads itself, by name.
        weights: the trained ones among the parameters, by name.
        constants: all other values that it reads, and the parameters that are not trained.
        casts: copies of weights in the type of autocast, with the names of these.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    constants: tuple[Tensor, ...]
    casts: tuple[tuple[WeightCast, str], ...] = ()

    def leaves(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Its inputs, detached from the operators before; autograd follows the same ones."""
        inputs = (values[name] for name in self.inputs)
        return tuple(v.detach().requires_grad_(v.requires_grad) for v in inputs)


def unit(
    model: Model, operator: int, device: str, values: Mapping[str, Tensor] | None = None,
    *, casts: bool = False,
) -> RunnableOperator:  # fmt: skip
    """One operator of the model.

    Args:
        model: the model.
        operator: index of the operator.
        device: "cpu", "cuda" or "cuda:N".
        values: parameters by name, on the device, the operator's among them; None reads them.
        casts: whether it runs under autocast.

    Raises:
        OperatorError: if it has no conversion.
    """
    names = model.graph.operators[operator].parameters
    held = parameters(model, names, device) if values is None else {n: values[n] for n in names}
    module = to_torch(model, [operator], values=held, device=device)
    return runnable_of(module, model.graph, operator, held, casts=casts)


def runnable_of(
    module: GraphModule,
    graph: Graph,
    operator: int,
    held: Mapping[str, Tensor],
    forward: Callable[..., tuple[Tensor, ...]] | None = None,
    *,
    casts: bool = False,
) -> RunnableOperator:
    """One operator, as a module that was made of it.

    Args:
        held: the graph's parameters that the module reads, by name.
        forward: another function than the module's.
        casts: whether it runs under autocast.
    """
    copies = cast_once(module, graph) if casts else ()
    return RunnableOperator(
        forward=forward or module.forward,
        inputs=input_names(graph, [operator]),
        outputs=output_names(graph, [operator]),
        parameters=held,
        weights={name: value for name, value in held.items() if value.requires_grad},
        constants=tuple(module.buffers()),
        casts=copies,
    )


# ---- the stash


@dataclass(frozen=True, slots=True)
class Stash:
    """The tensors that autograd keeps for an operator, and those of its outputs that are views.

    Attributes:
        tensors: inputs and outputs that autograd keeps.
        private_bytes: bytes of the other storages that it keeps, without parameters.
        views: outputs that lie in the storage of an input or of a parameter.
    """

    tensors: tuple[str, ...]
    private_bytes: int
    views: tuple[View, ...]


def observe(
    unit: RunnableOperator, values: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], Stash]:
    """The outputs and the stash of an operator, from one run of it.

    Args:
        unit: the operator.
        values: tensors by name; the operator's inputs are among them.
    """
    inputs = [_in_own_storage(leaf) for leaf in unit.leaves(values)]
    outputs, kept = _keeping(lambda: unit.forward(*inputs))
    named_inputs = list(zip(unit.inputs, inputs, strict=True))
    named_outputs = list(zip(unit.outputs, outputs, strict=True))
    # Inputs come before outputs, so a storage that both lie in has the name of the input: an output
    # that is a view is kept as its base.
    bases = _name_by_address((*named_inputs, *unit.parameters.items()))
    names = _name_by_address((*named_inputs, *named_outputs))
    copies = [cast.kept for cast, _ in unit.casts if cast.kept is not None]
    elsewhere = {address(value) for value in (*unit.parameters.values(), *unit.constants, *copies)}
    return outputs, Stash(
        tensors=tuple(name for address, name in names.items() if address in kept),
        private_bytes=sum(
            size_bytes
            for address, size_bytes in kept.items()
            if address not in names.keys() | elsewhere
        ),
        views=tuple(
            View(name, bases[address(output)])
            for name, output in named_outputs
            if address(output) in bases
        ),
    )


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage: of the object, as a fake tensor has no bytes."""
    return int(tensor.untyped_storage()._cdata)


def _name_by_address(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """The first name of each storage that is not empty, in order."""
    names: dict[int, str] = {}
    for name, tensor in named:
        if tensor.untyped_storage().nbytes():
            names.setdefault(address(tensor), name)
    return names


def _in_own_storage(tensor: Tensor) -> Tensor:
    """A copy with the same strides and offset, in a copy of the whole storage."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def _keeping(run: Callable[[], T]) -> tuple[T, dict[int, int]]:
    """The result of `run`, and the bytes of each storage that autograd keeps for it, by address."""
    packed: list[Tensor] = []  # keeps the tensors alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, {address(t): t.untyped_storage().nbytes() for t in packed}
