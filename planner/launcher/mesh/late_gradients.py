"""Products that compute the gradients of their parameters when that of their input is on its way
to be converted (`PassOrder.late`).

Such a product is two functions of autograd with one graph of its own between them, which the second
one has recorded. Autograd runs backwards in the reverse order of forwards:

    forward     LateParameters    end of the copy    Product
    backward    LateParameters <- end of the copy <- Product
                of parameters     starts the         of inputs
                                  conversion
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.launcher.mesh.convert import stand_in


class _Recorded:
    """The graph of a product from its forward to the second part of its backward.

    Attributes:
        edges: of the output, and of the parameters that are trained.
        gradient: of the output.
    """

    def __init__(self) -> None:
        self.edges: tuple[GradientEdge, Sequence[GradientEdge]] | None = None
        self.gradient: Tensor | None = None


class LateParameters(NamedTuple):
    """The parameters of a product whose gradients are computed late.

    Attributes:
        own: themselves.
        there: stands for those that are trained in autograd's graph; None where it records nothing.
        recorded: by the product.
    """

    own: tuple[Tensor, ...]
    there: Tensor | None
    recorded: _Recorded


def late_parameters(*own: Tensor) -> LateParameters:
    """Parameters of a product; their gradients come where this is called."""
    recorded, trained = _Recorded(), [one for one in own if one.requires_grad]
    there = None
    if trained and torch.is_grad_enabled():
        there = _Parameters.apply(recorded, *trained)  # type: ignore[no-untyped-call]
    return LateParameters(own, there, recorded)


class ProductInTwo(nn.Module):
    """A product whose backward has two parts.

    Attributes:
        function: of the operator.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, late: LateParameters, *args: Any, **kwargs: Any) -> Tensor:
        """The product.

        Args:
            late: its parameters, which are among its arguments, too.
        """
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        known = {id(one) for one in late.own}
        inputs = {
            name: one
            for name, one in given.items()
            if isinstance(one, Tensor) and one.requires_grad and id(one) not in known
        }
        if late.there is None or not inputs:
            return self.function(*args, **kwargs)

        def run(leaves: Mapping[int | str, Tensor], parameters: Mapping[int, Tensor]) -> Tensor:
            every = {
                name: leaves[name] if name in leaves else parameters.get(id(one), one)
                for name, one in given.items()
            }
            placed = [every[i] for i in range(len(args))]
            return self.function(*placed, **{name: every[name] for name in kwargs})

        made: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            late, (*inputs,), run, late.there, *inputs.values()
        )
        return made


class _Parameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, *trained: Tensor) -> Tensor:
        ctx.recorded, ctx.number = recorded, len(trained)
        ctx.set_materialize_grads(False)
        return stand_in(trained[0].device).detach()

    @staticmethod
    def backward(ctx: Any, there: Tensor | None) -> Any:
        if there is None:
            return (None,) * (1 + ctx.number)
        (output, parameters), gradient = ctx.recorded.edges, ctx.recorded.gradient
        ctx.recorded.edges = ctx.recorded.gradient = None
        return None, *torch.autograd.grad([output], parameters, [gradient], allow_unused=True)


class _Input(torch.autograd.Function):
    """A tensor at which a graph begins. That of a leaf would keep it."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("nothing goes back beyond the inputs of a product")


def _begun(begin: Tensor, tensor: Tensor) -> Tensor:
    made: Tensor = _Input.apply(begin, tensor.detach())  # type: ignore[no-untyped-call]
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, late: LateParameters, names: Sequence[int | str], run: Callable[..., Tensor],
        there: Tensor, *inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        trained = [one for one in late.own if one.requires_grad]
        parameters = [one.detach().requires_grad_() for one in trained]
        begin = stand_in(there.device).detach().requires_grad_()
        with torch.enable_grad():
            leaves = [_begun(begin, one) for one in inputs]
            made = run(
                dict(zip(names, leaves, strict=True)),
                dict(zip(map(id, trained), parameters, strict=True)),
            )
        # Edges of the graph, not tensors: nothing else would keep the output.
        ctx.output, ctx.inputs = get_gradient_edge(made), [*map(get_gradient_edge, leaves)]
        late.recorded.edges = ctx.output, [*map(get_gradient_edge, parameters)]
        ctx.recorded = late.recorded
        return made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * (4 + len(ctx.inputs))
        ctx.recorded.gradient = gradient
        # What the parameters' part reads stays until then.
        some = torch.autograd.grad(
            [ctx.output], ctx.inputs, [gradient], retain_graph=True, allow_unused=True
        )
        ctx.output = ctx.inputs = None
        return None, None, None, stand_in(gradient.device), *some
