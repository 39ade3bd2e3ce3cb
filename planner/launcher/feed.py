"""A microbatch's data from outside the model: graph inputs and the loss's target."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from planner import graph as graphs
from planner.errors import LaunchError, OptionError
from planner.graph import Graph, producers, tensors_by_name
from planner.model import Model
from planner.operators import synthetic
from planner.support.named import function_named

IGNORED_CLASS = -100  # torch's losses ignore elements of this class


class LossName(StrEnum):
    """The function that compares the model's first output with its target."""

    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one microbatch, a mean over its elements.

    Attributes:
        name: name of the function.
        output: the tensor of the graph that it is computed from.
        operator: type of the operator that makes this tensor. After Softmax the cross-entropy takes
            the logarithm; after LogSoftmax it does not normalise again.
    """

    name: LossName
    output: graphs.Tensor
    operator: str

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of an output; in float32 if the output has a shorter type."""
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()
        if self.name is LossName.MSE:
            return functional.mse_loss(output, target.to(output.dtype))
        scores = output.movedim(synthetic.class_dim(output.ndim), -1).flatten(0, -2)
        if self.operator == "Softmax":
            smallest = torch.finfo(scores.dtype).tiny
            return functional.nll_loss(scores.clamp_min(smallest).log(), target.flatten())
        if self.operator == "LogSoftmax":
            return functional.nll_loss(scores, target.flatten())
        return functional.cross_entropy(scores, target.flatten())

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of a target: that of the output, for cross-entropy without the classes."""
        shape = self.output.shape
        if self.name is LossName.MSE:
            return shape
        classes = synthetic.class_dim(len(shape))
        return (*shape[:classes], *shape[classes + 1 :])

    @property
    def num_classes(self) -> int:
        """The number of classes of a cross-entropy."""
        return self.output.shape[synthetic.class_dim(len(self.output.shape))]

    @property
    def target_dtype(self) -> torch.dtype:
        """The type of a target: integers for class indices, else that of the output."""
        return torch.int64 if self.name is LossName.CROSS_ENTROPY else torch_dtype(self.output)


def torch_dtype(tensor: graphs.Tensor) -> torch.dtype:
    """The torch dtype of a tensor of the graph."""
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_loss(graph: Graph, name: str) -> Loss:
    """The loss that an option names.

    Args:
        graph: the loss is computed from its first output.
        name: "cross-entropy", "mse", or "auto": cross-entropy where there are at least two
            classes, else mean squared error.

    Raises:
        OptionError: if the name is unknown or does not fit the first output.
    """
    output = tensors_by_name(graph)[graph.outputs[0]]
    maker = producers(graph).get(output.name)
    operator = "" if maker is None else graph.operators[maker].type
    shape = output.shape
    num_classes = shape[synthetic.class_dim(len(shape))] if len(shape) > 1 else 0
    if name == "auto":
        name = LossName.CROSS_ENTROPY if num_classes > 1 else LossName.MSE
    if name not in tuple(LossName):
        known = ", ".join(("auto", *LossName))
        raise OptionError(f"--loss: expected one of {known}, got {name!r}")
    if output.dtype not in graphs.FLOAT_DTYPES:
        raise OptionError(
            f"the first output {output.name!r} is {output.dtype}, a loss needs floats; "
            "make a float output the model's first"
        )
    if name == LossName.CROSS_ENTROPY and num_classes < 1:
        raise OptionError(
            f"--loss cross-entropy: expected an output of rank 2 or more, {output.name!r} has the "
            f"shape {shape}; use --loss mse"
        )
    return Loss(LossName(name), output, operator)


# ------------------------------------------------------------------------------------ data


@dataclass(frozen=True, slots=True)
class BatchNeeds:
    """The data of each microbatch that one process needs.

    Attributes:
        inputs: names of graph inputs.
        target: whether it computes the loss.
    """

    inputs: frozenset[str]
    target: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one microbatch that a process needs, on its device.

    Attributes:
        inputs: graph inputs, by name.
        target: the loss's target; None where the process does not compute the loss.
    """

    inputs: Mapping[str, Tensor]
    target: Tensor | None


class Copies(Mapping[int, Batch]):
    """Microbatches whose data is copied at each access, so that it is freed after its last use, as
    data of a real feed is. The originals stay in memory.

    Args:
        batches: the originals, by microbatch.
    """

    def __init__(self, batches: Mapping[int, Batch]) -> None:
        self._batches = batches

    def __getitem__(self, microbatch: int) -> Batch:
        batch = self._batches[microbatch]
        target = None if batch.target is None else batch.target.clone()
        return Batch({name: tensor.clone() for name, tensor in batch.inputs.items()}, target)

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


Feed = Callable[[int, int], Batch]  # (step, microbatch) -> batch
Specification = dict[str, tuple[tuple[int, ...], torch.dtype]]
UserData = Callable[[int, int, Specification], tuple[Mapping[str, Tensor], Tensor]]


def synthetic_feed(model: Model, loss: Loss, needs: BatchNeeds, seed: int, device: str) -> Feed:
    """Random data, the same in every step and on every rank."""

    @cache
    def of(microbatch: int) -> Batch:
        inputs = {}
        if needs.inputs:
            every = synthetic.inputs(model, seed=seed, microbatch=microbatch, device=device)
            inputs = {name: every[name] for name in sorted(needs.inputs)}
        target = None
        if needs.target:
            target = synthetic.target(
                model, loss=loss.name, seed=seed, microbatch=microbatch, device=device
            )
        return Batch(inputs, target)

    return lambda step, microbatch: of(microbatch)


def user_feed(name: str, graph: Graph, loss: Loss, needs: BatchNeeds, device: str) -> Feed:
    """The user's own data.

    Args:
        name: "module:function"; the module may be in the current folder. The function is called as
            `function(step, microbatch, {input: (shape, dtype)})` on every rank that needs the
            microbatch, and has to return the same everywhere: ({input: tensor}, target).
        graph: the graph.
        loss: the loss.
        needs: the data that this process needs.
        device: the device that the data is moved to, such as "cuda:0".

    Raises:
        LaunchError: if the function is not there; later, if it fails or returns something else.
    """
    function = import_data(name)
    tensors = tensors_by_name(graph)
    wanted: Specification = {n: (tensors[n].shape, torch_dtype(tensors[n])) for n in graph.inputs}

    def feed(step: int, microbatch: int) -> Batch:
        where = f"--data {name}: step {step}, microbatch {microbatch}"
        try:
            made: object = function(step, microbatch, dict(wanted))
        except Exception as error:
            raise LaunchError(f"{where}: {type(error).__name__}: {error}") from error
        if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], Mapping)):
            raise LaunchError(
                f"{where}: expected ({{input: tensor}}, target), got {_described(made)}"
            )
        inputs, target = made
        checked = {
            n: _checked(f"{where}: input {n!r}", inputs.get(n), *wanted[n])
            for n in sorted(needs.inputs)
        }
        goal = _checked(f"{where}: target", target, loss.target_shape, loss.target_dtype)
        if loss.name is LossName.CROSS_ENTROPY:
            _check_classes(f"{where}: target", goal, loss.num_classes)
        return Batch({n: t.to(device) for n, t in checked.items()}, goal.to(device))

    return feed


def import_data(name: str) -> UserData:
    """The function that `--data` names.

    Raises:
        LaunchError: if there is none.
    """
    function: UserData = function_named(name, "--data", LaunchError)  # type: ignore[assignment]
    return function


def _checked(where: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    expected = f"expected a tensor of shape {shape} and {dtype}"
    if not isinstance(value, Tensor):
        raise LaunchError(f"{where}: {expected}, got {type(value).__name__}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise LaunchError(f"{where}: {expected}, got shape {tuple(value.shape)} and {value.dtype}")
    return value


def _check_classes(where: str, target: Tensor, num_classes: int) -> None:
    wrong = target[((target < 0) | (target >= num_classes)) & (target != IGNORED_CLASS)]
    if wrong.numel():
        raise LaunchError(
            f"{where}: expected class indices from 0 to {num_classes - 1}, or {IGNORED_CLASS} for "
            f"elements to ignore, got {wrong[0].item()}"
        )


def _described(value: object) -> str:
    """The type of a value; for a pair the types of its items."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
