"""A run in float64, and the random numbers that it draws.

Two ways to compute one gradient differ by rounding. In float64 that is some 1e-12 of it, so that
nothing else is taken for rounding. The module is run as it is, with its own tensors in float64, and
every operator that asks for a shorter type gets float64, too.

Each random operator is made of numbers that are uniform in [0, 1) or standard normal, in the way in
which the exporter translates it. They are recorded, and the graph is fed them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model.export.eager import UnseenError
from planner.operators.randomness import NORMAL, PICKED, UNIFORM, Draw

aten = torch.ops.aten
WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widened(value: Any) -> Any:
    """A tensor in float64, a type of floats as float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE else value
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def shortened(value: Any) -> Any:
    """A number with the digits of a float32; anything else as it is.

    >>> shortened(0.1), shortened(-1e300), shortened(3)
    (0.10000000149011612, -3.4028234663852886e+38, 3)
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    largest = torch.finfo(torch.float32).max
    return float(np.float32(min(max(value, -largest), largest)))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators, in float64 if asked for, and records their random numbers.

    Args:
        double: whether to run in float64.
        short_scalars: whether numbers among the arguments have the digits of a float32, as in a
            module in float32 and in its file.
        rounding: types to which casts round, though their results are in float64, too.

    Attributes:
        draws: in the order in which they were drawn.
        strange: random operators whose numbers are not known, by name.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        double: bool,
        short_scalars: bool = False,
        rounding: Collection[torch.dtype] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.double, self.short_scalars, self.rounding = double, short_scalars, rounding
        self.draws: list[Draw] = []
        self.strange: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator of torch.

        Raises:
            UnseenError: if it is one of higher order.
        """
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise UnseenError(func)
        if func in DRAWN:
            made = DRAWN[func](self, *args, **kwargs)
        else:
            if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
                self.strange.add(str(func))
            if self.double and func is not aten.view.dtype:
                args, kwargs = self._wide_arguments(func, args, kwargs)
            if self.short_scalars:
                args, kwargs = pytree.tree_map_only(float, shortened, (args, kwargs))
            made = func(*args, **kwargs)
        if self.double and not func._schema.is_mutable:
            made = pytree.tree_map(widened, made)
        return made

    def _wide_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in float64, but for a tensor that the operator writes to."""

        def wide(value: Any) -> Any:
            keeps = isinstance(value, torch.dtype) and value in self.rounding
            return value if keeps else widened(value)

        schema = func._schema.arguments
        written = {one.name for one in schema if one.alias_info and one.alias_info.is_write}
        positional = [
            value if one.name in written else pytree.tree_map(wide, value)
            for one, value in zip(schema, args, strict=False)
        ]
        named = {
            name: value if name in written else pytree.tree_map(wide, value)
            for name, value in kwargs.items()
        }
        return positional, named

    def uniform(self, shape: Sequence[int], device: object = None) -> Tensor:
        """Numbers uniform in [0, 1), in float64, drawn by the CPU."""
        drawn = self._drawn(UNIFORM, torch.rand(tuple(shape), dtype=torch.float64))
        return drawn.to(device or "cpu")  # type: ignore[call-overload, no-any-return]

    def normal(self, shape: Sequence[int], device: object = None) -> Tensor:
        """Standard normal numbers, likewise."""
        drawn = self._drawn(NORMAL, torch.randn(tuple(shape), dtype=torch.float64))
        return drawn.to(device or "cpu")  # type: ignore[call-overload, no-any-return]

    def picked(self, indices: Tensor) -> Tensor:
        """Indices that were drawn otherwise."""
        return self._drawn(PICKED, indices)

    def _drawn(self, kind: str, numbers: Tensor) -> Tensor:
        self.draws.append(Draw(kind, numbers.cpu()))
        return numbers


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may draw numbers does: those of attention only with dropout."""
    for at, one in enumerate(func._schema.arguments):
        if one.name in ("dropout_p", "dropout"):
            given = args[at] if at < len(args) else kwargs.get(one.name, one.default_value)
            return bool(given)
    return True


@contextmanager
def own_tensors(module: nn.Module, *, double: bool) -> Iterator[None]:
    """Gives a module copies of its tensors, in float64 if asked for; afterwards it has its own
    again, their gradients, and every attribute of its submodules as it was.

    Tensors keep their identity, and with it their hooks and their ties.
    """
    modules = [*module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    data = [one.data for one in tensors]
    states = [(one.grad, one.requires_grad) for one in tensors]
    attributes = [dict(vars(one)) for one in modules]
    tables = [(dict(one._parameters), dict(one._buffers)) for one in modules]
    try:
        for one in tensors:
            one.grad = None
            one.data = one.data.to(WIDE[one.dtype]) if double and one.dtype in WIDE else (
                one.data.clone())  # fmt: skip
        yield
    finally:
        for owner, known, (parameters, buffers) in zip(modules, attributes, tables, strict=True):
            vars(owner).clear()
            vars(owner).update(known)
            owner._parameters.clear()
            owner._parameters.update(parameters)
            owner._buffers.clear()
            owner._buffers.update(buffers)
        for one, own, (grad, requires_grad) in zip(tensors, data, states, strict=True):
            one.grad = None
            one.data = own
            one.requires_grad_(requires_grad)
            one.grad = grad


# ---- random operators, each as the exporter translates it


def _dtype_of(kwargs: dict[str, Any], like: Tensor | None = None) -> torch.dtype:
    usual = torch.get_default_dtype() if like is None else like.dtype
    return kwargs.get("dtype") or usual


def _fill(self: Tensor, numbers: Tensor) -> Tensor:
    return self.copy_(numbers)


def _bernoulli_(run: Recording, self: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return _fill(self, (run.uniform(self.shape, self.device) < p).to(torch.float64))


def _bernoulli(run: Recording, self: Tensor, p: Any = None, **_: Any) -> Tensor:
    return (run.uniform(self.shape, self.device) < (self if p is None else p)).to(self.dtype)


def _dropout(
    run: Recording, input: Tensor, p: float, train: bool | None = None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = run.uniform(input.shape, input.device) < 1 - p
    return input * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _rand(run: Recording, size: Sequence[int], **kwargs: Any) -> Tensor:
    return run.uniform(size, kwargs.get("device")).to(_dtype_of(kwargs))


def _rand_like(run: Recording, self: Tensor, **kwargs: Any) -> Tensor:
    return run.uniform(self.shape, self.device).to(_dtype_of(kwargs, self))


def _uniform_(
    run: Recording, self: Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> Tensor:
    return _fill(self, low + (high - low) * run.uniform(self.shape, self.device))


def _randn(run: Recording, size: Sequence[int], **kwargs: Any) -> Tensor:
    return run.normal(size, kwargs.get("device")).to(_dtype_of(kwargs))


def _randn_like(run: Recording, self: Tensor, **kwargs: Any) -> Tensor:
    return run.normal(self.shape, self.device).to(_dtype_of(kwargs, self))


def _normal_(run: Recording, self: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _fill(self, mean + std * run.normal(self.shape, self.device))


def _normal_float(
    run: Recording, mean: float, std: float, size: Sequence[int], **kwargs: Any
) -> Tensor:
    return (mean + std * run.normal(size, kwargs.get("device"))).to(_dtype_of(kwargs))


def _normal(run: Recording, mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    tensors = [one for one in (mean, std) if isinstance(one, Tensor)]
    like: Tensor = sum(tensors[1:], tensors[0])
    drawn: Tensor = mean + std * run.normal(like.shape, like.device)
    return drawn.to(like.dtype)


def _exponential_(run: Recording, self: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return _fill(self, -torch.log(run.uniform(self.shape, self.device)) / rate)


def _randint(run: Recording, high: int, size: Sequence[int], **kwargs: Any) -> Tensor:
    return _randint_low(run, 0, high, size, **kwargs)


def _randint_low(run: Recording, low: int, high: int, size: Sequence[int], **kwargs: Any) -> Tensor:
    drawn = torch.floor(low + (high - low) * run.uniform(size, kwargs.get("device")))
    return drawn.to(kwargs.get("dtype") or torch.int64)


def _multinomial(
    run: Recording, self: Tensor, num_samples: int, replacement: bool = False, **_: Any
) -> Tensor:
    return run.picked(torch.multinomial(self, num_samples, replacement))


DRAWN: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _bernoulli_,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.native_dropout.default: _dropout,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.uniform_.default: _uniform_,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
    aten.normal_.default: _normal_,
    aten.normal.float_float: _normal_float,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.exponential_.default: _exponential_,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.multinomial.default: _multinomial,
}

__all__ = ["Recording", "own_tensors", "widened"]
