"""`Unit`: one operator of a model as a torch function, cut off from its neighbours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from planner.model import Model
from planner.operators import input_names, output_names, parameters, to_torch


@dataclass(frozen=True, slots=True)
class Unit:
    """One operator that can run alone.

    Attributes:
        forward: the code that torch.fx generated, without the hooks of a module's `__call__`,
            which the operator does not pay for as a line of the whole model.
        inputs: names of the tensors that `forward` takes.
        outputs: names of the tensors that it returns.
        parameters: those of the graph by name, which `forward` reads itself.
        weights: the trained ones of them.
        constants: all other values that it reads, and the parameters that are not trained.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    constants: tuple[Tensor, ...]

    def leaves(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Its inputs, detached from what made them; they get a gradient where that would."""
        found = (values[name] for name in self.inputs)
        return tuple(v.detach().requires_grad_(v.requires_grad) for v in found)


def units(model: Model, values: Mapping[str, Tensor], device: str) -> tuple[Unit, ...]:
    """One unit per operator of the graph, in its order; the weights are shared.

    Args:
        values: the parameters by name, on the device.
    """
    return tuple(unit(model, i, device, values) for i in range(len(model.graph.operators)))


def unit(
    model: Model, operator: int, device: str, values: Mapping[str, Tensor] | None = None
) -> Unit:
    """One operator of the model.

    Args:
        values: its parameters by name, on the device, among others; None reads them.

    Raises:
        OperatorError: if it has no conversion.
    """
    names = model.graph.operators[operator].parameters
    held = parameters(model, names, device) if values is None else {n: values[n] for n in names}
    module = to_torch(model, [operator], values=held, device=device)
    return Unit(
        forward=module.forward,
        inputs=input_names(model.graph, [operator]),
        outputs=output_names(model.graph, [operator]),
        parameters=held,
        weights={name: value for name, value in held.items() if value.requires_grad},
        constants=tuple(module.buffers()),
    )
