"""What a dataset of the user gives -> tensors by their names in the model, checked.

A sample, or a batch of them, is one of

    (x, target)            of a model with one input; x is a tensor
    (x1, x2, .., target)   the inputs in the model's order, then the targets in that of the losses
    (inputs, target)       inputs by name, or a tuple of them
    {name: tensor}         inputs by name, targets by the output that they are compared with; the
                           only target may be called target, targets, label or labels

A model that computes its loss itself has no targets; its labels are inputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset

from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.losses import Loss, LossName
from planner.launcher.batch import Batch, torch_dtype
from planner.operators.losses import IGNORED_CLASS
from planner.support.errors import LaunchError

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
USUAL_TARGETS = ("target", "targets", "label", "labels")


@dataclass(frozen=True, slots=True)
class Named:
    """A sample or batch, by the names of the model.

    Attributes:
        inputs: of the graph.
        targets: of losses, by output.
    """

    inputs: Mapping[str, object]
    targets: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class NeededData:
    """The data of each microbatch that one process needs.

    Attributes:
        inputs: names of graph inputs.
        targets: names of outputs whose loss it computes, and compares with a target.
    """

    inputs: frozenset[str]
    targets: frozenset[str]


class BatchReader:
    """Reads batches of the user for one device.

    Attributes:
        reads: whether the device needs any data.
        wanted: shape and type of each input of the model, for functions of the user.

    Args:
        graph: the model's.
        losses: that are trained.
        needs: of this device.
    """

    def __init__(self, graph: Graph, losses: Sequence[Loss], needs: NeededData) -> None:
        self._inputs = {name: tensors_by_name(graph)[name] for name in graph.inputs}
        self._losses = {loss.output.name: loss for loss in losses if loss.has_target}
        self._needs = needs
        self.reads = bool(needs.inputs or needs.targets)
        self.wanted = {name: (one.shape, torch_dtype(one)) for name, one in self._inputs.items()}

    def microbatch(self, item: object, where: str) -> Batch:
        """The data of one microbatch.

        Args:
            item: in one of the forms above.
            where: it is from, for messages.

        Raises:
            LaunchError: if it does not fit the model.
        """
        return self._batch(self.named(item, where), where)

    def returned(self, item: object, where: str) -> Batch:
        """The data of one microbatch as a function of the user returns it: ({input: tensor},
        target). The target is a tensor; with several losses that have one, {output: tensor};
        without any, it is not read.

        Raises:
            LaunchError: if it is something else.
        """
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Mapping)):
            raise LaunchError(
                f"{where}: expected ({{input: tensor}}, target), got {described(item)}"
            )
        return self.microbatch(item, where)

    def num_samples(self, item: object, size: int, count: int, where: str) -> int:
        """The samples in the batch of a step: those of a whole step, or fewer.

        Args:
            item: of a whole step, or shorter.
            size: samples of a microbatch.
            count: microbatches of a whole step.

        Raises:
            LaunchError: if its tensors have other numbers of rows.
        """
        counts: set[int] = set()
        for name, value, height in self._sized(self.named(item, where)):
            rows = value.shape[0] if value.dim() else 0
            counts.add(rows * size // height)
            if not value.dim() or rows > count * height or len(counts) > 1:
                raise LaunchError(
                    f"{where}: {name}: expected {count * height} samples on dimension 0 ({count}"
                    f" microbatches of {height}), or fewer, as many in all tensors, got shape"
                    f" {tuple(value.shape)}"
                )
        return counts.pop() if counts else size * count

    def _sized(self, named: Named) -> Iterator[tuple[str, Tensor, int]]:
        """The tensors of a batch that this device needs, and that have a row for each sample; how
        messages call them, and the rows of a microbatch.
        """
        for name in sorted(self._needs.inputs):
            value, size = named.inputs.get(name), self._inputs[name].shape[:1]
            if isinstance(value, Tensor) and size != () and size[0]:
                yield f"input {name!r}", value, size[0]
        for name in sorted(self._needs.targets):
            value, size = named.targets.get(name), self._losses[name].target_shape[:1]
            if isinstance(value, Tensor) and size != () and size[0]:
                yield f"target of {name!r}", value, size[0]

    def part(self, item: object, microbatch: int, where: str) -> Batch:
        """The data of one microbatch out of the batch of a step.

        Args:
            item: whose rows `num_samples` has counted.
            microbatch: its index.
        """
        return self._batch(self.named_part(item, microbatch, where, self._needs), where)

    def named_part(
        self, item: object, microbatch: int, where: str, needs: NeededData | None = None
    ) -> Named:
        """The same, by the names of the model.

        Args:
            needs: what is taken of it; None takes all.
        """
        named = self.named(item, where)

        def narrow(value: object, shape: tuple[int, ...]) -> object:
            if not isinstance(value, Tensor) or not shape or not shape[0]:
                return value
            return value[microbatch * shape[0] : (microbatch + 1) * shape[0]]

        inputs, targets = self._inputs, self._losses
        return Named(
            {
                name: narrow(named.inputs.get(name), inputs[name].shape)
                for name in sorted(inputs if needs is None else needs.inputs)
            },
            {
                name: narrow(named.targets.get(name), targets[name].target_shape)
                for name in sorted(targets if needs is None else needs.targets)
            },
        )

    def named(self, item: object, where: str) -> Named:
        """A sample or batch by the names of the model.

        Raises:
            LaunchError: if it has none of the forms above.
        """
        if isinstance(item, Mapping):
            return Named(self._inputs_in(item), self._targets_in(item))
        values: Sequence[object] = (item,)
        if isinstance(item, Sequence) and not isinstance(item, str):
            values = item
        first = values[0] if values else None
        num_inputs, num_targets = len(self._inputs), len(self._losses)
        if len(values) == 2 and isinstance(first, Mapping):
            return Named(self._inputs_in(first), self._targets_of(values[1], where))
        packed = len(values) == 2 and num_targets > 0
        if packed and isinstance(first, Sequence) and len(first) == num_inputs:
            return Named(self._in_order(first), self._targets_of(values[1], where))
        if len(values) == num_inputs + num_targets:
            given = dict(zip(self._losses, values[num_inputs:], strict=True))
            return Named(self._in_order(values[:num_inputs]), given)
        raise LaunchError(
            f"{where}: expected {self._expected()}, or a dict of them by name, got"
            f" {described(item)}"
        )

    def _inputs_in(self, item: Mapping[str, object]) -> dict[str, object]:
        return {name: item[name] for name in self._inputs if name in item}

    def _in_order(self, values: Sequence[object]) -> dict[str, object]:
        return dict(zip(self._inputs, values, strict=True))

    def _targets_in(self, item: Mapping[str, object]) -> dict[str, object]:
        targets = {name: item[name] for name in self._losses if name in item}
        if not targets and len(self._losses) == 1:
            usual = (name for name in USUAL_TARGETS if name in item and name not in self._inputs)
            targets = {next(iter(self._losses)): item[name] for name in [*usual][:1]}
        return targets

    def _targets_of(self, given: object, where: str) -> Mapping[str, object]:
        if isinstance(given, Mapping):
            return given
        if not self._losses:
            return {}
        if len(self._losses) == 1:
            return {next(iter(self._losses)): given}
        if isinstance(given, Sequence) and len(given) == len(self._losses):
            return dict(zip(self._losses, given, strict=True))
        names = ", ".join(f"{name!r}: tensor" for name in self._losses)
        raise LaunchError(f"{where}: target: expected {{{names}}}, got {described(given)}")

    def _expected(self) -> str:
        targets = [f"target of {name!r}" for name in self._losses]
        return f"({', '.join([*map(repr, self._inputs), *targets])})"

    def _batch(self, named: Named, where: str) -> Batch:
        inputs = {
            name: _checked(f"{where}: input {name!r}", named.inputs.get(name), *self.wanted[name])
            for name in sorted(self._needs.inputs)
        }
        targets = {
            name: _checked_target(where, named.targets.get(name), self._losses[name])
            for name in sorted(self._needs.targets)
        }
        return Batch(inputs, targets)


def _checked_target(where: str, value: object, loss: Loss) -> Tensor:
    """A target that a loss can be computed from; one for the user's function is any tensor."""
    place = f"{where}: target of {loss.output.name!r}"
    if loss.is_users:
        if not isinstance(value, Tensor):
            raise LaunchError(f"{place}: expected a tensor, got {type(value).__name__}")
        return value
    goal = _checked(place, value, loss.target_shape, getattr(torch, loss.target_dtype))
    if loss.class_dim is not None:
        _check_classes(place, goal, loss.num_classes)
    elif loss.function == LossName.BCE:
        wrong = goal[~((goal >= 0) & (goal <= 1))]
        if wrong.numel():
            raise LaunchError(f"{place}: expected values from 0 to 1, got {wrong[0].item()}")
    return goal


def _checked(where: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape and type, from the user. Integers of a narrower type are widened.

    Raises:
        LaunchError: if it is none.
    """
    expected = f"expected a tensor of shape {shape} and {dtype}"
    if not isinstance(value, Tensor):
        raise LaunchError(f"{where}: {expected}, got {type(value).__name__}")
    if tuple(value.shape) != shape or not (value.dtype == dtype or _widens(value.dtype, dtype)):
        raise LaunchError(f"{where}: {expected}, got shape {tuple(value.shape)} and {value.dtype}")
    return value.to(dtype)


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether both are types of integers, and the second one has all numbers of the first."""
    if {source, target} - INTEGERS:
        return False
    narrow, wide = torch.iinfo(source), torch.iinfo(target)
    return wide.min <= narrow.min and narrow.max <= wide.max


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


# ------------------------------------------------------------------------------ rows of batches


def _tensors_in(batch: object) -> Iterator[Tensor]:
    """All tensors of a sample or batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Iterable) and not isinstance(batch, str):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(one)


def samples_of(data: object, where: str) -> object:
    """A dataset to evaluate on: itself, or the rows of batches, each with as many as it likes.

    Raises:
        LaunchError: if the tensors of a batch have different numbers of rows.
    """
    if isinstance(data, Dataset | DataLoader) or not isinstance(data, Iterable):
        return data
    batches = list(data)
    for b, batch in enumerate(batches):
        counts = {one.shape[0] if one.dim() else None for one in _tensors_in(batch)}
        if len(counts) != 1 or None in counts:
            found = " and ".join(sorted(map(str, counts))) or "no"
            raise LaunchError(
                f"{where}: batch {b}: expected tensors with a row for each sample, got {found} rows"
            )
    return ConcatDataset(map(_rows, batches)) if batches else []


def _rows(batch: Any) -> Any:
    """The rows of a batch as a dataset; each has the form of the batch."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        return StackDataset(**{name: _rows(one) for name, one in batch.items()})
    return StackDataset(*map(_rows, batch))
