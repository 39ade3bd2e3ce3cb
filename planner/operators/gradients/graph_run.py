"""The graph of a file on example inputs, by the functions that the launcher runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from planner.model.load import Model, Node
from planner.model.scopes import NEXT_STATE, OWN_DOMAIN
from planner.operators.convert import parameters, to_torch
from planner.operators.gradients.module_run import Gradients, dense, leaf, loss_of
from planner.operators.gradients.precision import Recording, widened
from planner.operators.randomness import Draw, fed, random_operators
from planner.operators.running import evaluating, naming_failed_operator


@dataclass(slots=True)
class Value:
    """A tensor of floats of the graph, with its gradient; None where none flows."""

    tensor: Tensor
    gradient: Tensor | None = None


class _Keeping(fx.Interpreter):
    """Runs a module, and keeps every tensor of floats on the way."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: list[Value] = []

    def run_node(self, n: fx.Node) -> object:
        """One operator, parameter or input."""
        made = super().run_node(n)
        if isinstance(made, Tensor) and made.is_floating_point():
            value = Value(made)
            self.values.append(value)
            if made.requires_grad:
                made.register_hook(partial(_keep, value))  # type: ignore[no-untyped-call]
        return made


def _keep(value: Value, gradient: Tensor) -> None:
    value.gradient = gradient.detach().clone()


def run_graph(
    model: Model,
    inputs: Sequence[Tensor],
    draws: Sequence[Draw],
    trained: Collection[str],
    own: Sequence[int],
    counted: Sequence[int],
    *,
    usual: bool,
    double: bool,
    rounding: Collection[torch.dtype] = (),
    nudged: bool = False,
    tensors: bool = False,
) -> tuple[Gradients, Sequence[Value]]:
    """Runs all operators of a model; its outputs are those of the graph.

    Args:
        inputs: in the order of the graph's.
        draws: random numbers to feed it.
        trained: parameters that get a gradient.
        own: as of `loss_of`, positions among the graph's outputs.
        counted: the same.
        usual: whether the loss is the one that the file is trained by, so that its operators run as
            the launcher runs them: those without a backward are not recorded.
        double: in float64, or else in the types of the file.
        rounding: as of `Recording`.
        nudged: with constants that differ by the rounding of float32.
        tensors: whether to keep all tensors on the way.

    Raises:
        OperatorError: if an operator cannot be converted, or finds no random numbers.
    """
    held = _held(model, trained, double)
    if nudged:
        held |= _nudged({name: one for name, one in held.items() if name not in trained})
    module = to_torch(model, values=held, all_recorded=not usual)
    leaves = [leaf(one, double) for one in inputs]
    by_name = dict(zip(model.graph.inputs, leaves, strict=True))
    given = [by_name[name] for name in module.input_names]  # type: ignore[union-attr]
    runner = _Keeping(module) if tensors else None
    recording = Recording(double=double, rounding=rounding)
    with torch.enable_grad(), recording, fed(draws), naming_failed_operator(model, module):
        made = module(*given) if runner is None else runner.run(*given)
        by_output = dict(zip(module.output_names, made, strict=True))  # type: ignore[arg-type]
        outputs = [by_output[name] for name in model.graph.outputs]
        loss = loss_of(outputs, own, counted)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
    gradients = Gradients(
        [one.detach() for one in outputs],
        {name: dense(one.grad) for name, one in held.items()},
        [dense(one.grad) for one in leaves],
        {node.inputs[1]: by_output[node.outputs[0]].detach() for node in _next_states(model)},
    )
    return gradients, runner.values if runner is not None else ()


def run_graph_in_evaluation(
    model: Model, inputs: Sequence[Tensor], draws: Sequence[Draw], *, double: bool
) -> list[Tensor]:
    """The outputs of the graph in evaluation; arguments as of `run_graph`.

    Raises:
        OperatorError: if an operator cannot be converted, or finds no random numbers.
    """
    module = to_torch(model, values=_held(model, (), double))
    by_name = {
        name: leaf(one, double, False) for name, one in zip(model.graph.inputs, inputs, strict=True)
    }
    given = [by_name[name] for name in module.input_names]  # type: ignore[union-attr]
    # Operators of the training draw, too; what follows of it is not in the outputs.
    drawing = fed(draws) if draws else random_operators(0, 0, 0)
    with (
        torch.no_grad(),
        Recording(double=double),
        drawing,
        evaluating(),
        naming_failed_operator(model, module),
    ):
        made = module(*given)
    by_output = dict(zip(module.output_names, made, strict=True))  # type: ignore[arg-type]
    return [by_output[name].detach() for name in model.graph.outputs]


def _next_states(model: Model) -> list[Node]:
    """The nodes that make new values of state."""
    return [one for one in model.nodes if one.type == NEXT_STATE and one.domain == OWN_DOMAIN]


def _held(model: Model, trained: Collection[str], double: bool) -> dict[str, Tensor]:
    """The parameters and constants that the nodes read, by name."""
    names = dict.fromkeys(name for node in model.nodes for name in node.inputs)
    held = parameters(model, [name for name in names if name in model.values])
    return {name: _leaf(one, double, name in trained) for name, one in held.items()}


def _leaf(held: Tensor, double: bool, trained: bool) -> Tensor:
    """A parameter or constant, in float64 if asked for."""
    one: Tensor = widened(held.detach()) if double else held.detach()
    return nn.Parameter(one) if trained else one


def _nudged(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Constants of floats, each number larger or smaller by the rounding of float32."""
    generator = torch.Generator().manual_seed(0)
    nudged = {}
    for name, one in constants.items():
        if one.is_floating_point():
            up = torch.randint(2, one.shape, generator=generator)
            nudged[name] = one * (1 + (2 * up - 1) * torch.finfo(torch.float32).eps / 2)
    return nudged
