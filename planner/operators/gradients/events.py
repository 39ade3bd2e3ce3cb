"""What a module's forward does to its backward pass, and the line of the source that does it.

Of torch's functions a mode sees every call; a hook on every call of a submodule says which one it
belongs to. A `torch.autograd.Function` calls its forward from a method of torch's, which is found
among the callers.
"""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_hooks
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from planner.model.export.eager import called

_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_OF_LIBRARY = "GeneratedBackwardFor_"
_APPLY = torch.autograd.function.__file__


@dataclass(frozen=True, slots=True)
class Place:
    """A call of a torch function.

    Attributes:
        index: of the call, in the order of the forward pass.
        function: that is called, such as "linear".
        module: path of the submodule, "" for the whole module.
        kind: its class.
        line: file, number and text of the line that makes the call.
    """

    index: int
    function: str
    module: str
    kind: str
    line: str

    def __str__(self) -> str:
        """
        >>> str(Place(0, "relu", "blocks.1", "Block", "net.py:12: x = torch.relu(x)"))
        'net.py:12: x = torch.relu(x) (in blocks.1, Block)'
        """
        return f"{self.line} (in {f'{self.module}, ' if self.module else ''}{self.kind})"


@dataclass(frozen=True, slots=True)
class Suspect:
    """Something that may give a module another gradient than its operators have.

    Attributes:
        what: such as "register_hook()".
        place: the first call that does it; None for hooks of the module and of its parameters.
        always: whether the file loses it for some inputs, though not for the example inputs.
    """

    what: str
    place: Place | None = None
    always: bool = False

    def __str__(self) -> str:
        """What, and where."""
        return self.what if self.place is None else f"{self.what}: {self.place}"


@dataclass(slots=True)
class Seen:
    """A tensor of floats that a call reads or makes.

    Attributes:
        place: of the first call that has it.
        tensor: itself.
        gradient: of the loss, filled in by the backward pass; None where none flows.
    """

    place: Place
    tensor: Tensor
    gradient: Tensor | None = None


class Events(TorchFunctionMode):
    """Notes suspects while a module's forward runs.

    Attributes:
        suspects: in the order of the calls.
        seen: all tensors of floats, if they are asked for.
    """

    def __init__(self, module: nn.Module, *, tensors: bool) -> None:
        super().__init__()
        self.suspects: dict[tuple[str, str], Suspect] = {}
        self.seen: dict[int, Seen] = {}
        self._tensors = tensors
        self._hooks: list[RemovableHandle] = []
        self._index, self._function = 0, ""
        self._paths = {id(one): path for path, one in module.named_modules()}
        self._within: list[nn.Module] = [module]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which calls of functions and of submodules are seen."""

        def enter(one: nn.Module, _: object) -> None:
            self._within.append(one)

        def leave(one: nn.Module, _: object, __: object) -> None:
            if one in self._within[1:]:
                while self._within.pop() is not one:
                    pass

        before = module_hooks.register_module_forward_pre_hook(enter)
        after = module_hooks.register_module_forward_hook(leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        self._index += 1
        self._function = getattr(func, "__name__", "")
        given = [one for one in pytree.tree_leaves((args, kwargs)) if _flows(one)]
        for what, always in self._doubts(func, given, args, kwargs):
            self._suspect(what, always=always)
        if self._tensors:
            self._see(given)
        made = called(self, func, args, kwargs)
        if self._tensors:
            self._see([one for one in pytree.tree_leaves(made) if _flows(one)])
        return made

    def _doubts(
        self, func: Any, given: list[Tensor], args: Any, kwargs: Any
    ) -> Iterator[tuple[str, bool]]:
        """What a call may do to the backward pass, and whether always."""
        name = self._function
        if func in (functional.embedding, functional.embedding_bag):
            yield from _of_embedding(func, args, kwargs)
        if not any(one.requires_grad for one in given):
            return
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            yield f"{name}()", False
        elif func is Tensor.data.__get__:  # type: ignore[attr-defined]
            yield ".data", False
        elif func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            yield "a change of requires_grad", False
        elif not torch.is_grad_enabled() and name not in ("__get__", "__set__", "size", "dim"):
            function = _function_called()
            if function not in (None, BackwardHookFunction):  # by which a module's hooks run
                yield _named(function), False

    def _suspect(self, what: str, *, always: bool) -> None:
        place = self._place()
        self.suspects.setdefault((what, place.line), Suspect(what, place, always))

    def _place(self) -> Place:
        innermost = next(one for one in reversed(self._within) if id(one) in self._paths)
        path, kind = self._paths[id(innermost)], type(innermost).__name__
        return Place(self._index, self._function, path, kind, _line_of_user(sys._getframe(1)))

    def _see(self, tensors: list[Tensor]) -> None:
        for one in tensors:
            if id(one) in self.seen:
                continue
            seen = self.seen[id(one)] = Seen(self._place(), one)
            if one.requires_grad:
                hook = one.register_hook(partial(_keep, seen))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def forget(self) -> None:
        """Removes the hooks by which gradients are seen, some of which are on parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _keep(seen: Seen, gradient: Tensor | None) -> None:
    seen.gradient = None if gradient is None else gradient.detach().cpu().clone()


def _flows(one: object) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


def _of_embedding(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, bool]]:
    """What a table gets another gradient by than a gathering of its rows."""
    third = "padding_idx" if func is functional.embedding else "offsets"
    named = dict(zip(("input", "weight", third, "max_norm"), args, strict=False)) | kwargs
    if named.get("max_norm") is not None:
        yield "max_norm of an embedding, which changes its table", True


def _function_called() -> type | None:
    """The `torch.autograd.Function` whose forward is running; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename == _APPLY:
            function: type = frame.f_locals["cls"]
            return function
        frame = frame.f_back
    return None


def _named(function: type) -> str:
    """A `torch.autograd.Function`; torch makes one for each operator of `torch.library`."""
    name = function.__name__.removeprefix(_OF_LIBRARY)
    if name != function.__name__:
        return f"{name}, an operator of torch.library with a backward pass of its own"
    return f"{name}, a torch.autograd.Function with a backward pass of its own"


def _line_of_user(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor the planner's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_ROOTS) and not file.startswith("<"):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{Path(file).name}:{frame.f_lineno}: {text}".rstrip(": ")
        frame = frame.f_back
    return "an unknown line"


def standing_suspects(module: nn.Module) -> Iterator[Suspect]:
    """Hooks that a module has before it runs."""
    for path, one in module.named_modules():
        name = f"{path or 'the whole module'} ({type(one).__name__})"
        if one._backward_hooks or one._backward_pre_hooks:
            yield Suspect(f"a backward hook of {name}")
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks:
            yield Suspect(f"a hook of the parameter {path} (register_hook)")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield Suspect(f"a hook of the parameter {path} (register_post_accumulate_grad_hook)")


def functions_in(outputs: list[Tensor]) -> Iterator[Suspect]:
    """The `torch.autograd.Function`s between parameters and outputs."""
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    known, named = set(waiting), set()
    while waiting:
        node = waiting.pop()
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and function.__name__ not in named:
            named.add(function.__name__)
            if function is not BackwardHookFunction:
                yield Suspect(_named(function))
        for source, _ in node.next_functions:
            if source is not None and source not in known:
                known.add(source)
                waiting.append(source)
