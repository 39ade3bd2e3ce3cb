"""The forward and backward of a stage, and tensors that stages of one device hand to each other."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from planner.artefacts.graph import Graph, tensors_by_name, unread_tensors
from planner.launcher.mesh.gather_again import function_of
from planner.operators.losses import Criterion, LossValue
from planner.operators.normalization import batch_normalization
from planner.operators.parts import moments
from planner.operators.running import (
    dividing,
    evaluating,
    next_state,
    reading,
    updating,
    value_of,
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """The results of a forward pass, with their autograd graph.

    Attributes:
        loss: the sum of the losses that are computed here, each divided by its total.
        reported_loss: the sum of those that this device reports.
        counted: how much the reported losses count, where they say so themselves; else 1 each.
    """

    outputs: Tensors
    loss: Tensor | None
    reported_loss: Tensor | None
    counted: float


class ReportedLoss(NamedTuple):
    """The part of a microbatch in the losses that one device reports.

    Attributes:
        loss: divided by the totals.
        counted: how much it counts, where the user's function says so; else 1 for each loss.
    """

    loss: float
    counted: float


@dataclass(frozen=True, slots=True)
class _SavedForward:
    """Tensors that a stage keeps from forward to backward; without the pass where it recomputes.

    Attributes:
        states: values of the state that operators read, by the id of the tensor that is updated.
    """

    leaves: Tensors
    targets: Mapping[str, Tensor]
    totals: Mapping[str, float]
    states: Mapping[int, Tensor]
    forward_pass: _ForwardPass | None


class StageModule:
    """Forward and backward of one stage.

    Attributes:
        module: its operators and their parameters.
        states: the running statistics of its batch normalizations in training, and state of the
            module's own, by the target of the buffer in the module that holds them. Each forward
            pass updates them once, by the microbatch of this replica; running it again for its
            backward pass does not, and reads what the first one has read.

    Args:
        module: with `input_names` and `output_names`.
        graph: knows which tensors carry a gradient.
        recompute: whether to run the whole forward pass again instead of stashing it.
        criteria: the losses of the outputs that the stage makes, by output.
        precision: gives the context that forward passes run in.
        scale: gives the factor of the losses in a backward pass.
        unreported: outputs whose loss this device computes and another one reports.
        parted: puts the segments of the module that are run again into modules of their own.
    """

    def __init__(
        self,
        module: GraphModule,
        graph: Graph,
        recompute: bool,
        criteria: Mapping[str, Criterion],
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        scale: Callable[[], float] = lambda: 1.0,
        unreported: Collection[str] = (),
        parted: Callable[[GraphModule], GraphModule] = lambda module: module,
    ) -> None:
        tensors = tensors_by_name(graph)
        self._unreported = unreported
        self.input_names = cast(tuple[str, ...], module.input_names)
        self.output_names = cast(tuple[str, ...], module.output_names)
        self._next_states = unread_tensors(graph)
        self._trained = {name for name in self.input_names if tensors[name].gradient}
        self.module = module
        self._recompute = recompute
        self._criteria = criteria
        self._precision = precision
        self._scale = scale
        self._read = _read_states(module)
        self.states = _running_statistics(module) | {
            target: module.get_buffer(target) for target in self._read
        }
        self._stash: dict[int, _SavedForward] = {}
        self._parted = parted

    @cached_property
    def _called(self) -> GraphModule:
        """The module with its segments, once all nodes are in it."""
        return self._parted(self.module)

    def forward(
        self, microbatch: int, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor],
        totals: Mapping[str, float],
    ) -> tuple[Tensors, ReportedLoss]:  # fmt: skip
        """The outputs of the stage, and the microbatch's part in the losses reported here.

        Args:
            tensors: inputs of the stage, by name.
            targets: of the losses that have one, by output.
            totals: as `LossTotals` has them: what losses are divided by, by output. One that is not
                among them is divided by its own count. Nothing counts in a total of 0, and
                the loss is 0.
        """
        # Leaves of their own: the stage's autograd graph ends at its inputs, also at those that
        # another stage of this process has made.
        leaves = {
            name: tensors[name].detach().requires_grad_(name in self._trained)
            for name in self.input_names
        }
        # Copies, because autograd may keep what operators read until the backward pass.
        before = {id(self.states[name]): self.states[name].clone() for name in self._read}
        with torch.set_grad_enabled(not self._recompute), updating(self.states.values()):
            done = self._run(leaves, targets, totals, before)
        self._stash[microbatch] = (
            _SavedForward(leaves, targets, totals, before, None)
            if self._recompute
            else _SavedForward(leaves, targets, totals, {}, done)
        )
        loss = 0.0 if done.reported_loss is None else done.reported_loss.item()
        outputs = {name: tensor.detach() for name, tensor in done.outputs.items()}
        return outputs, ReportedLoss(loss, done.counted)

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Tensors:
        """Accumulates the parameters' gradients.

        Args:
            gradients: of the outputs that other devices read.

        Returns:
            The gradients of the inputs that carry one.
        """
        stashed = self._stash.pop(microbatch)
        done = stashed.forward_pass or self._run(
            stashed.leaves, stashed.targets, stashed.totals, stashed.states
        )
        roots: list[tuple[Tensor, Tensor | None]] = [
            (done.outputs[name], gradient) for name, gradient in gradients.items()
        ]
        if done.loss is not None and done.loss.requires_grad:
            roots.append((done.loss, torch.full_like(done.loss, self._scale())))
        if roots:
            torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
        # A gradient that no path leads to is sent as zeros, because its receive has been posted.
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in stashed.leaves.items()
            if leaf.requires_grad
        }

    def evaluate(self, tensors: Mapping[str, Tensor], totals: Mapping[str, float]) -> Tensors:
        """The outputs of the stage as in evaluation, without losses and without a stash.

        Args:
            tensors: inputs of the stage, by name.
            totals: denominators of the model's own losses, by name; others are the microbatch's.
        """
        with torch.no_grad(), evaluating(), self._precision(), dividing(totals):
            results = self._called(*(tensors[name] for name in self.input_names))
        return dict(zip(self.output_names, results, strict=True))

    def _run(
        self,
        leaves: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        totals: Mapping[str, float],
        states: Mapping[int, Tensor],
    ) -> _ForwardPass:
        with self._precision(), reading(states), dividing(totals):
            results = self._called(*(leaves[name] for name in self.input_names))
        made = zip(self.output_names, results, strict=True)
        outputs = {name: one for name, one in made if name not in self._next_states}
        values = {n: of(outputs[n], targets.get(n)) for n, of in self._criteria.items()}
        losses = {n: _divided(one, totals.get(n)) for n, one in values.items()}
        reported = [name for name in losses if name not in self._unreported]
        counts = [values[name].counted for name in reported]
        return _ForwardPass(
            outputs, _sum([*losses.values()]), _sum([losses[name] for name in reported]),
            sum(1.0 if one is None else one for one in counts),
        )  # fmt: skip


def _divided(one: LossValue, total: float | None) -> Tensor:
    """A loss over its total, or over its own count; 0 where nothing counts."""
    if total is None:
        total = 1.0 if one.counted is None else one.counted
    return one.value / total if total else one.value * 0.0


def _sum(losses: Sequence[Tensor]) -> Tensor | None:
    return sum(losses[1:], losses[0]) if losses else None


_NORMALIZING = (batch_normalization, moments.batch_normalization)


def _running_statistics(module: GraphModule) -> dict[str, Tensor]:
    """The buffers with the running statistics of batch normalizations in training, by target.

    Those that are computed, or trained, are not among them.
    """
    found = {}
    for node in module.graph.nodes:
        trains = node.kwargs.get("training_mode") and not node.kwargs.get("always")
        if trains and function_of(module, node) in _NORMALIZING:
            for name in ("mean", "var"):
                held = cast(Node, node.kwargs[name])
                if held.op == "get_attr" and (str(held.target) in dict(module.named_buffers())):
                    found[str(held.target)] = module.get_buffer(str(held.target))
    return found


def _read_states(module: GraphModule) -> tuple[str, ...]:
    """Targets of the buffers that operators give new values. All that read one of them get a node
    before them that gives its value of the microbatch.
    """
    written = {
        cast(Node, node.kwargs["state"]): node
        for node in module.graph.nodes
        if function_of(module, node) is next_state
    }
    for held, writer in written.items():
        readers = [user for user in held.users if user is not writer]
        with module.graph.inserting_after(held):
            value = module.graph.call_function(value_of, (held,))
        for reader in readers:
            reader.replace_input_with(held, value)
    if written:
        module.recompile()
    return tuple(str(held.target) for held in written)


class LocalHandover:
    """Tensors that the stages of one device hand to later stages, and gradients that they hand to
    earlier ones, added up; both by microbatch. A device runs each microbatch in the order of its
    stages, and backward in the reverse order.

    Args:
        stages: by index.
    """

    def __init__(self, stages: Mapping[int, StageModule]) -> None:
        order = sorted(stages)
        self._later: dict[int, frozenset[str]] = {}
        self._earlier: dict[int, frozenset[str]] = {}
        self._made: dict[int, frozenset[str]] = {}
        for i, s in enumerate(order):
            own, before = stages[s], [stages[t] for t in order[:i]]
            there = {n for one in before for n in (*one.input_names, *one.output_names)}
            self._later[s] = frozenset(n for t in order[i + 1 :] for n in stages[t].input_names)
            self._earlier[s] = frozenset(there.intersection(own.input_names))
            self._made[s] = frozenset(own.output_names)
        self._tensors: dict[int, Tensors] = {}
        self._gradients: dict[int, Tensors] = {}

    def tensors(self, stage: int, microbatch: int) -> Tensors:
        """The tensors that earlier stages have left for the forward of a stage."""
        held = self._tensors.get(microbatch, {})
        return {name: held[name] for name in self._earlier[stage] if name in held}

    def keep(self, stage: int, microbatch: int, tensors: Mapping[str, Tensor]) -> None:
        """After a forward: keeps the tensors that later stages read, received or made."""
        held = {**self._tensors.pop(microbatch, {}), **tensors}
        left = {name: tensor for name, tensor in held.items() if name in self._later[stage]}
        if left:
            self._tensors[microbatch] = left

    def gradients(self, stage: int, microbatch: int, arrived: Tensors) -> Tensors:
        """The gradients of a stage's outputs: those from other devices, and those left here."""
        waiting = self._gradients.get(microbatch, {})
        for name in sorted(self._made[stage] & waiting.keys()):
            _add(arrived, name, waiting.pop(name))
        return arrived

    def leave(self, stage: int, microbatch: int, gradients: Tensors) -> Tensors:
        """After a backward: leaves the gradients that earlier stages add to or use, and gives the
        others. Both have the parts in them that later stages have left.
        """
        waiting = self._gradients.pop(microbatch, {})
        leaving: Tensors = {}
        for name, gradient in gradients.items():
            if name in waiting:
                # Later stages first, as autograd of one process adds them up: the same bits.
                gradient = waiting.pop(name) + gradient
            # Also a tensor that an earlier stage has only received: that stage sends the gradient.
            (waiting if name in self._earlier[stage] else leaving)[name] = gradient
        if waiting:
            self._gradients[microbatch] = waiting
        return leaving


def _add(tensors: Tensors, name: str, more: Tensor) -> None:
    tensors[name] = tensors[name].add_(more) if name in tensors else more
