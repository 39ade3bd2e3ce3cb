"""What a dataset of the user gives -> tensors by their names in the model, checked.

A sample, or a batch of them, is one of

    (x, target)            of a model with one input; x is a tensor
    (x1, x2, .., target)   the inputs in the model's order, then the targets in that of the losses
    (inputs, target)       inputs by name, or a tuple of them
    {name: tensor}         inputs by name, targets by the output that they are compared with; the
                           only target may be called target, targets, label or labels

A model that computes its loss itself has no targets; its labels are inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.losses import Loss
from planner.launcher.feed import (
    Batch,
    BatchNeeds,
    checked,
    checked_target,
    described,
    moved,
    torch_dtype,
)
from planner.support.errors import LaunchError

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


class Reader:
    """Reads batches of the user for one device.

    Args:
        graph: the model's.
        losses: that are trained.
        needs: of this device.
        device: that the data is moved to.
    """

    def __init__(
        self, graph: Graph, losses: Sequence[Loss], needs: BatchNeeds, device: str
    ) -> None:
        self._inputs = {name: tensors_by_name(graph)[name] for name in graph.inputs}
        self._losses = {loss.output.name: loss for loss in losses if loss.has_target}
        self._needs, self._device = needs, device

    def microbatch(self, item: object, where: str) -> Batch:
        """The data of one microbatch.

        Args:
            item: in one of the forms above.
            where: it is from, for messages.

        Raises:
            LaunchError: if it does not fit the model.
        """
        return self._batch(self.named(item, where), where)

    def part(self, item: object, microbatch: int, count: int, where: str) -> Batch:
        """The data of one microbatch out of the batch of a whole step.

        Args:
            microbatch: its index.
            count: microbatches of the step.
        """
        named = self.named(item, where)

        def narrow(name: str, value: object, size: int) -> object:
            if not isinstance(value, Tensor) or not size:
                return value
            rows = value.shape[0] if value.dim() else 0
            if rows != count * size:
                raise LaunchError(
                    f"{where}: {name}: expected {count * size} samples on dimension 0 ({count}"
                    f" microbatches of {size}), got shape {tuple(value.shape)}"
                )
            return value[microbatch * size : (microbatch + 1) * size]

        inputs, targets = {}, {}
        for name in sorted(self._needs.inputs):
            sizes = self._inputs[name].shape[:1]
            inputs[name] = narrow(f"input {name!r}", named.inputs.get(name), *(sizes or (0,)))
        for name in sorted(self._needs.targets):
            sizes = self._losses[name].target_shape[:1]
            what = f"target of {name!r}"
            targets[name] = narrow(what, named.targets.get(name), *(sizes or (0,)))
        return self._batch(Named(inputs, targets), where)

    def named(self, item: object, where: str) -> Named:
        """A sample or batch by the names of the model.

        Raises:
            LaunchError: if it has none of the forms above.
        """
        if isinstance(item, Mapping):
            return Named(item, self._targets_in(item))
        values: Sequence[object] = (item,)
        if isinstance(item, Sequence) and not isinstance(item, str):
            values = item
        first = values[0] if values else None
        num_inputs, num_targets = len(self._inputs), len(self._losses)
        if len(values) == 2 and isinstance(first, Mapping):
            return Named(first, self._targets_of(values[1], where))
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
        if len(self._losses) == 1:
            return {next(iter(self._losses)): given}
        if isinstance(given, Sequence) and len(given) == len(self._losses):
            return dict(zip(self._losses, given, strict=True))
        raise LaunchError(
            f"{where}: targets: expected one for each of {', '.join(map(repr, self._losses))},"
            f" got {described(given)}"
        )

    def _expected(self) -> str:
        targets = [f"target of {name!r}" for name in self._losses]
        return f"({', '.join([*map(repr, self._inputs), *targets])})"

    def _batch(self, named: Named, where: str) -> Batch:
        inputs = {
            name: checked(
                f"{where}: input {name!r}", named.inputs.get(name),
                self._inputs[name].shape, torch_dtype(self._inputs[name]),
            )
            for name in sorted(self._needs.inputs)
        }  # fmt: skip
        targets = {
            name: checked_target(where, named.targets.get(name), self._losses[name])
            for name in sorted(self._needs.targets)
        }
        return Batch(moved(inputs, self._device), moved(targets, self._device))
