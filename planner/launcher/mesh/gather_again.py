"""Operators that keep no gathered parameter for their backward, but gather it again there (ZeRO-3;
Rajbhandari et al., SC 2020, section 5.3).

Autograd keeps what an operator's backward reads. What lies in the storage of a gathered copy is
kept as a view of it; the first of these views that is read makes the copy anew. That may be started
before, in the backward of a later operator (`PassOrder.again`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from planner.launcher.mesh.convert import Conversion
from planner.launcher.mesh.late_gradients import ProductInTwo
from planner.launcher.mesh.queue import Done, Pending
from planner.launcher.stash.offload import kept, restored
from planner.operators.parts.calls import Parts


class RegatheredOperator(nn.Module):
    """An operator's function with the copies that its backward makes anew.

    Attributes:
        function: of the operator.

    Args:
        function: the same.
        conversions: that made the copies.
        is_product: whether autocast runs it in a shorter type. Then that is converted to here, so
            that the shorter copies are made anew, too.
    """

    def __init__(
        self, function: Callable[..., Any], conversions: Sequence[Conversion], *, is_product: bool
    ) -> None:
        super().__init__()
        self.function, self._is_product = function, is_product
        self._conversions = list(conversions)  # held elsewhere, so no submodules
        self._latest: list[_RegatheredTensor] = []

    def latest(self) -> list["_RegatheredTensor"]:
        """The copies of the pass that has called it last."""
        return self._latest

    def forward(self, gathered: Sequence[tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """What the operator makes.

        Args:
            gathered: per conversion, the parameter at home and the copy.
        """
        # A tensor lies in a copy if its storage has the same address. That is sure only while all
        # copies are alive, hence it is noted here, before the hooks.
        copies = {
            _address(copy): _RegatheredTensor(partial(how.started, home.detach()))
            for (home, copy), how in zip(gathered, self._conversions, strict=True)
        }
        self._latest = [*copies.values()]
        kind = gathered[0][1].device.type
        if self._is_product and torch.is_autocast_enabled(kind):
            shorter = torch.get_autocast_dtype(kind)
            args = tuple(_cast(one, copies, shorter) for one in args)
            kwargs = {name: _cast(one, copies, shorter) for name, one in kwargs.items()}

        def keep(tensor: Tensor) -> Any:
            copy = copies.get(_address(tensor))
            return kept(tensor) if copy is None else copy.view_of(tensor)

        # To keep the copies until their backward makes the peak of a microbatch that of whole
        # parameters. To run the operator again, as checkpointing does, costs its forward.
        with saved_tensors_hooks(keep, _read):
            return self.function(*args, **kwargs)


class GatheringOperator(nn.Module):
    """An operator before whose backward parameters are started to be gathered again.

    Attributes:
        function: of the operator.

    Args:
        function: the same.
        gathered: the operators whose parameters these are, in the order in which they start. They
            are not behind it, so that they belong to the same pass.
    """

    def __init__(
        self, function: Callable[..., Any], gathered: Sequence[RegatheredOperator]
    ) -> None:
        super().__init__()
        self.function, self._gathered = function, list(gathered)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the operator makes."""
        made = self.function(*args, **kwargs)
        copies = [copy for one in self._gathered for copy in one.latest()]

        def start(_: Any) -> None:
            for copy in copies:
                copy.start_early()

        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.grad_fn.register_prehook(start)
        return made


def function_of(module: fx.GraphModule, node: fx.Node) -> object:
    """What a node of a module calls: for those that gather again, or that ask the devices with
    other parts, the operator's function.
    """
    if node.op != "call_module":
        return node.target
    called: object = module.get_submodule(str(node.target))
    while isinstance(called, Parts | RegatheredOperator | GatheringOperator | ProductInTwo):
        called = called.function
    return called


class _RegatheredTensor:
    """A copy that is not there until it is read.

    Args:
        start: starts to make it.
    """

    def __init__(self, start: Callable[[], Pending[Tensor]]) -> None:
        self._start = start
        self._pending: Pending[Tensor] | None = None
        self._made: Tensor | None = None
        self._views = self._unread = 0
        self._was_read = False

    def view_of(self, tensor: Tensor) -> "_SavedView":
        """The view that a tensor is of the copy."""
        self._views += 1
        self._unread += 1
        return _SavedView(self, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def start_early(self) -> None:
        """Starts to make it, once, if it will be read."""
        if self._views and not self._was_read and self._pending is None:
            self._pending = self._start()

    def made(self) -> Tensor:
        """The copy: held until all of its views have been read."""
        made = self._waited_for() if self._made is None else self._made
        self._was_read = True
        self._unread -= 1
        self._made = made if self._unread else None
        if not self._unread:
            self._unread = self._views
        return made

    def _waited_for(self) -> Tensor:
        pending, self._pending = self._pending or self._start(), None
        return pending.wait()


class _SavedView:
    """A view of a copy that is not there."""

    def __init__(
        self, copy: _RegatheredTensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        self.copy, self.shape, self.stride, self.offset = copy, shape, stride, offset


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cast(given: Any, copies: dict[int, _RegatheredTensor], shorter: torch.dtype) -> Any:
    """What autocast would make of an argument that lies in a copy: a copy itself, in a shorter
    type.
    """
    if not isinstance(given, Tensor) or given.dtype != torch.float32:
        return given
    copy = copies.get(_address(given))
    if copy is None:
        return given
    view, made = copy.view_of(given), given.to(shorter)
    copies[_address(made)] = _RegatheredTensor(lambda: Done(_read(view).to(shorter)))
    return made


def _read(one: Any) -> Tensor:
    if not isinstance(one, _SavedView):
        return restored(one)
    return torch.as_strided(one.copy.made(), one.shape, one.stride, one.offset)
