"""Running operators: the type that they compute in, their mode and state, and what is said where
torch does not run one.

The operators of a file are anybody's: torch, and the functions here that call it, meet attributes
and sizes that nobody foresaw, and raise whatever they raise.
"""

import linecache
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType

import torch
from torch import Tensor, fx

from planner.model.load import Model, Node
from planner.support.contexts import holding
from planner.support.errors import OperatorError, words_of

REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""What torch, numpy and Python raise of arguments that do not fit or of numbers that are too large.
`OperatorError` and the other errors of the planner are none of them."""

# A line of the code that torch.fx generates: "conv_0 = planner_operators_convolution_conv(x, w)".
_ASSIGNED = re.compile(r"\s*(\w+)(?: : [^=]*)? = ")


def autocast(device: str, dtype: str | None) -> AbstractContextManager[object]:
    """Products and convolutions in another type, sums and norms in float32, chosen operator by
    operator, as torch.autocast has it; None changes nothing. Weights are converted anew for every
    operator that reads them.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: "bfloat16" or "float16".
    """
    if dtype is None:
        return nullcontext()
    kind = device.partition(":")[0]
    return torch.autocast(kind, getattr(torch, dtype), cache_enabled=False)


@contextmanager
def naming_operator(model: Model, operator: int) -> Iterator[None]:
    """Turns what torch raises while an operator runs into an error that names the operator.

    Args:
        operator: index of the operator.

    Raises:
        OperatorError: instead of `REFUSALS`.
    """
    try:
        yield
    except REFUSALS as error:
        raise OperatorError(_refused(model, model.nodes[operator], error)) from error


@contextmanager
def naming_failed_operator(model: Model, module: fx.GraphModule) -> Iterator[None]:
    """The same while all operators of a module run.

    Raises:
        OperatorError: instead of `REFUSALS`.
    """
    try:
        yield
    except REFUSALS as error:
        name = failing_operator(module, error)
        node = next((one for one in model.nodes if one.name == name), None)
        raise OperatorError(_refused(model, node, error)) from error


def _refused(model: Model, node: Node | None, error: BaseException) -> str:
    what = f"{node.type} {node.name!r} (version {node.version})" if node else "the whole model"
    return f"{model.path}: {what}: torch does not run it: {words_of(error)}"


def failing_operator(module: fx.GraphModule, error: BaseException) -> str | None:
    """The ONNX name of the operator of a module in whose call an error was raised; None where it
    was raised elsewhere, such as in a backward pass.
    """
    names = {node.name: node.meta.get("onnx_name") for node in module.graph.nodes}
    for filename, line in _places(error.__traceback__):
        if filename.startswith("<eval_with_key>"):
            match = _ASSIGNED.match(linecache.getline(filename, line))
            if match is not None and names.get(match[1]) is not None:
                return str(names[match[1]])
    return None


def _places(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    """File and line of each frame of a traceback, from the outermost on."""
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


# ---- training and evaluation

_evaluates: ContextVar[bool] = ContextVar("evaluates", default=False)


@contextmanager
def evaluating() -> Iterator[None]:
    """A context in which operators compute as in evaluation, whatever mode the file says:
    BatchNormalization normalizes by its running statistics and leaves them as they are, Dropout
    keeps everything. Marks of the export are obeyed (`model/scopes.py`).
    """
    with holding(_evaluates, True):
        yield


def evaluates() -> bool:
    """Whether operators compute as in evaluation here."""
    return _evaluates.get()


# ---- denominators that are those of a whole step (`planner/launcher/denominators.py`)

_totals: ContextVar[Mapping[str, float]] = ContextVar("totals", default={})  # noqa: B039


@contextmanager
def dividing(totals: Mapping[str, float]) -> Iterator[None]:
    """A context in which operators divide by other denominators than their own.

    Args:
        totals: by name.
    """
    with holding(_totals, totals):
        yield


def total_of(name: str) -> float | None:
    """The denominator of a name here; None where operators divide by their own."""
    return _totals.get().get(name)


# ---- state, which forward passes of a training update inside of `updating`, and nothing elsewhere

_updated: ContextVar[frozenset[int]] = ContextVar("updated", default=frozenset())
_before: ContextVar[Mapping[int, Tensor]] = ContextVar("before", default={})  # noqa: B039


@contextmanager
def updating(states: Iterable[Tensor]) -> Iterator[None]:
    """A context in which operators update these tensors.

    Args:
        states: running statistics of normalizations, and state of the module's own.
    """
    with holding(_updated, frozenset(map(id, states))):
        yield


_runs_again: ContextVar[bool] = ContextVar("runs_again", default=False)


@contextmanager
def running_again() -> Iterator[None]:
    """A context in which operators run once more with what they have read before: they update
    nothing, and keep the same tensors for their backward.
    """
    with updating(()), holding(_runs_again, True):
        yield


def runs_again() -> bool:
    """Whether operators run once more here."""
    return _runs_again.get()


def is_updated(state: Tensor) -> bool:
    """Whether operators update a tensor here."""
    # By identity, because torch.fx hands the very tensor over: an equal one is another state.
    return id(state) in _updated.get()


def updated_in_place(state: Tensor) -> Tensor | None:
    """What a normalization gives torch to be updated: the state where it is, a copy that nobody
    keeps where operators run once more, else nothing.
    """
    if is_updated(state):
        return state
    return state.clone() if runs_again() else None


@contextmanager
def reading(before: Mapping[int, Tensor]) -> Iterator[None]:
    """A context in which operators read other values of state: those of a microbatch.

    Args:
        before: by the id of the tensor that is updated.
    """
    with holding(_before, before):
        yield


def value_of(state: Tensor) -> Tensor:
    """The value of state that the operators of this microbatch read."""
    return _before.get().get(id(state), state)


def next_state(value: Tensor, state: Tensor) -> Tensor:
    """Its first argument, which is the value of the state from the next microbatch on."""
    value = value.detach()
    if is_updated(state):
        state.copy_(value)
    return value


def by_mode(training: Tensor, evaluation: Tensor) -> Tensor:
    """The first argument in training, the second one in evaluation."""
    return evaluation if evaluates() else training
