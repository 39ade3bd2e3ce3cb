"""Denominators of the model's own losses (`planner/model/denominators.py`): counted in the data of
a microbatch, and replaced in the module of a stage by those of a whole step.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from planner.launcher.batch import Batch
from planner.model.denominators import Denominator, makers
from planner.model.load import Model
from planner.operators import parameters, to_torch
from planner.operators.parts.calls import exchanged, is_call, values_of
from planner.operators.running import total_of


def name_of(denominator: Denominator, model: Model) -> str:
    """The name of a denominator among the totals of a step."""
    return f"denominator of {model.nodes[denominator.operator].name}"


class Counter:
    """Counts a denominator in the data of a microbatch, by the operators that make it of inputs.

    Args:
        denominator: of an operator of the model.
        device: of the data.
    """

    def __init__(self, model: Model, denominator: Denominator, device: str) -> None:
        self._denominator, summed = denominator, denominator.summed
        self._module = to_torch(model, makers(summed, model.graph), device=device)
        self._read = cast(tuple[str, ...], self._module.input_names)
        self._made = cast(tuple[str, ...], self._module.output_names)
        held = [name for name in summed if name not in {*self._made, *model.graph.inputs}]
        self._constants = parameters(model, held, device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """The count, a scalar."""
        known = {**self._constants, **batch.inputs, **batch.counted}
        results = self._module(*(known[name] for name in self._read))
        known.update(zip(self._made, results, strict=True))
        first, *others = (known[name] for name in self._denominator.summed)
        if self._denominator.ignored is None:
            return first.reshape(())
        counted = first != self._denominator.ignored
        if not others:
            return counted.sum()
        # The operator itself refuses a label beyond the classes.
        (weights,) = others
        inside = counted & (first >= 0) & (first < len(weights))
        return weights.double()[first[inside].long()].sum()


class StepDivision(nn.Module):
    """An operator that divides by the step's denominator, and by its own where there is none.

    Args:
        function: of the operator.
        name: of the denominator.
        is_loss: whether the operator is a loss, whose denominator is the number of its labels; if
            not, it is the operator's last input.
        parts: the number of devices whose means a loss operator takes the mean of; of sums that are
            divided by the step's denominator it takes the sum.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, *, is_loss: bool, parts: int = 1
    ) -> None:
        super().__init__()
        self.function, self._name, self._is_loss, self._parts = function, name, is_loss, parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's outputs."""
        total = total_of(self._name)
        if not self._is_loss:
            return (
                self.function(*args, **kwargs) if total is None else self._over(total, args, kwargs)
            )
        if total is not None:
            kwargs = {**kwargs, "reduction": "sum"}
        made = self.function(*args, **kwargs)
        loss, *others = made if isinstance(made, tuple) else (made,)
        loss = loss / (self._parts if total is None else total)
        return (loss, *others) if others else loss

    def _over(self, total: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The quotient by another denominator of the same shape and type."""
        if not kwargs:
            return self.function(*args[:-1], torch.full_like(args[-1], total))
        last = [*kwargs][-1]
        return self.function(**{**kwargs, last: torch.full_like(kwargs[last], total)})


def step_division(
    function: Callable[..., Any], denominator: Denominator, model: Model, parts: int = 1
) -> StepDivision:
    """An operator's function as one that divides by the step's denominator.

    Args:
        parts: as of `StepDivision`.
    """
    is_loss = denominator.ignored is not None
    return StepDivision(function, name_of(denominator, model), is_loss=is_loss, parts=parts)


def divide_by_totals(
    module: fx.GraphModule, model: Model, denominators: Iterable[Denominator]
) -> None:
    """Lets operators of a whole module divide by the denominators of a step.

    Args:
        denominators: of operators of the module.
    """
    made = values_of(module, model.graph)
    nodes = {node.meta["onnx_name"]: node for node in module.graph.nodes if is_call(node)}
    for one in denominators:
        node = nodes[model.nodes[one.operator].name]
        assert callable(node.target), "it calls a function"
        exchanged(module, node, step_division(node.target, one, model), made)
    module.recompile()
