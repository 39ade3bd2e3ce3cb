"""`Unit`: one operator of a model as a torch function that can run alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from planner.model.load import Model
from planner.operators import input_names, output_names, parameters, to_torch


@dataclass(frozen=True, slots=True)
class Unit:
    """One operator that can run alone.

    Attributes:
        forward: the code that torch.fx generated. It is not the module's `__call__`, whose hooks
            cost time that the operator does not take inside a whole model.
        inputs: names of the tensors that `forward` takes.
        outputs: names of the tensors that it returns.
        parameters: the graph's parameters that `forward` reads itself, by name.
        weights: the trained ones among the parameters, by name.
        constants: all other values that it reads, and the parameters that are not trained.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    constants: tuple[Tensor, ...]

    def leaves(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Its inputs, detached from the operators before; autograd follows the same ones."""
        inputs = (values[name] for name in self.inputs)
        return tuple(v.detach().requires_grad_(v.requires_grad) for v in inputs)


def unit(
    model: Model, operator: int, device: str, values: Mapping[str, Tensor] | None = None
) -> Unit:
    """One operator of the model.

    Args:
        model: the model.
        operator: index of the operator.
        device: "cpu", "cuda" or "cuda:N".
        values: parameters by name, on the device, the operator's among them; None reads them.

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
