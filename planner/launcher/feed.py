"""A microbatch's data from outside the model: graph inputs and the targets of losses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from planner.artefacts import graph as graphs
from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.losses import Loss, LossName
from planner.model.load import Model
from planner.operators import synthetic
from planner.support.errors import LaunchError

IGNORED_CLASS = -100  # torch's losses ignore elements of this class


def torch_dtype(tensor: graphs.Tensor) -> torch.dtype:
    """The torch dtype of a tensor of the graph."""
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class BatchNeeds:
    """The data of each microbatch that one process needs.

    Attributes:
        inputs: names of graph inputs.
        targets: names of outputs whose loss it computes, and compares with a target.
    """

    inputs: frozenset[str]
    targets: frozenset[str]


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one microbatch that a process needs, on its device.

    Attributes:
        inputs: graph inputs, by name.
        targets: targets of losses, by the output that they are compared with.
    """

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]


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
        return Batch(_clones(batch.inputs), _clones(batch.targets))

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


Feed = Callable[[int, int], Batch]  # (step, microbatch) -> batch
Specification = dict[str, tuple[tuple[int, ...], torch.dtype]]


def synthetic_feed(
    model: Model, losses: Sequence[Loss], needs: BatchNeeds, seed: int, device: str
) -> Feed:
    """Random data, the same in every step and on every rank."""

    @cache
    def of(microbatch: int) -> Batch:
        inputs = {}
        if needs.inputs:
            every = synthetic.inputs(model, seed=seed, microbatch=microbatch, device=device)
            inputs = {name: every[name] for name in sorted(needs.inputs)}
        targets = {
            loss.output.name: synthetic.target(
                loss, seed=seed, microbatch=microbatch, device=device
            )
            for loss in losses
            if loss.output.name in needs.targets
        }
        return Batch(inputs, targets)

    return lambda step, microbatch: of(microbatch)


def user_feed(
    name: str,
    function: Callable[..., object],
    graph: Graph,
    losses: Sequence[Loss],
    needs: BatchNeeds,
    device: str,
) -> Feed:
    """The user's own data.

    Args:
        name: how messages call it, such as "--data mine:data".
        function: called as `function(step, microbatch, {input: (shape, dtype)})` on every rank
            that needs the microbatch, and has to return the same everywhere: ({input: tensor},
            target). The target is a tensor; with several losses that have one, {output: tensor};
            without any, it is not read.
        graph: the graph.
        losses: the losses.
        needs: the data that this process needs.
        device: the device that the data is moved to, such as "cuda:0".

    Raises:
        LaunchError: later, if it fails or returns something else.
    """
    compared = [loss for loss in losses if loss.has_target]
    tensors = tensors_by_name(graph)
    wanted: Specification = {n: (tensors[n].shape, torch_dtype(tensors[n])) for n in graph.inputs}

    def feed(step: int, microbatch: int) -> Batch:
        where = f"{name}: step {step}, microbatch {microbatch}"
        try:
            made: object = function(step, microbatch, dict(wanted))
        except Exception as error:
            raise LaunchError(f"{where}: {type(error).__name__}: {error}") from error
        if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], Mapping)):
            raise LaunchError(
                f"{where}: expected ({{input: tensor}}, target), got {described(made)}"
            )
        inputs, given = made
        targets = _targets(where, given, compared)
        read = {
            n: checked(f"{where}: input {n!r}", inputs.get(n), *wanted[n])
            for n in sorted(needs.inputs)
        }
        goals = {
            loss.output.name: checked_target(where, targets.get(loss.output.name), loss)
            for loss in compared
            if loss.output.name in needs.targets
        }
        return Batch(moved(read, device), moved(goals, device))

    return feed


def moved(tensors: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """The tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _targets(where: str, given: object, compared: Sequence[Loss]) -> Mapping[str, object]:
    """The targets that the user's function gave, by output."""
    if len(compared) == 1 and not isinstance(given, Mapping):
        return {compared[0].output.name: given}
    if compared and not isinstance(given, Mapping):
        names = ", ".join(f"{loss.output.name!r}: tensor" for loss in compared)
        raise LaunchError(f"{where}: target: expected {{{names}}}, got {type(given).__name__}")
    return given if isinstance(given, Mapping) else {}


def checked_target(where: str, value: object, loss: Loss) -> Tensor:
    """A target that a loss can be computed from; one for the user's function is any tensor."""
    place = f"{where}: target of {loss.output.name!r}"
    if loss.is_users:
        if not isinstance(value, Tensor):
            raise LaunchError(f"{place}: expected a tensor, got {type(value).__name__}")
        return value
    goal = checked(place, value, loss.target_shape, getattr(torch, loss.target_dtype))
    if loss.class_dim is not None:
        _check_classes(place, goal, loss.num_classes)
    elif loss.function == LossName.BCE:
        wrong = goal[~((goal >= 0) & (goal <= 1))]
        if wrong.numel():
            raise LaunchError(f"{place}: expected values from 0 to 1, got {wrong[0].item()}")
    return goal


def checked(where: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape and type, from the user.

    Raises:
        LaunchError: if it is none.
    """
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


def described(value: object) -> str:
    """The type of a value; for a pair the types of its items."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
