"""The loop over one device's actions, and the forward and backward of its stages."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from planner.artefacts.graph import Graph, tensors_by_name
from planner.launcher import clocks, ending
from planner.launcher.exchange import Arrival, Exchange, dense
from planner.launcher.failures.causes import here
from planner.launcher.failures.page import Phase
from planner.launcher.feed import Batch
from planner.launcher.gradients import GradientBuffers
from planner.launcher.split.again import function_of
from planner.launcher.split.boxes import Boxes
from planner.launcher.sums import BucketSums
from planner.launcher.world import PostedTransfer, World
from planner.operators.losses import Criterion
from planner.operators.normalization import batch_normalization, updating
from planner.operators.randomness import drawing
from planner.operators.running import REFUSALS, evaluating
from planner.profilers.storages import MemoryWatch
from planner.schedules.actions import (
    Action,
    AllReduce,
    Compute,
    Direction,
    Receive,
    Send,
    Step,
    waits,
)
from planner.support.errors import LaunchError

Tensors = dict[str, Tensor]
_PHASES = {Direction.FORWARD: Phase.FORWARD, Direction.BACKWARD: Phase.BACKWARD}


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Reports errors that torch raises at run time, such as an index beyond a table or too little
    memory. They are the fault of the data or the machine, since all shapes have been checked.
    """
    try:
        yield
    except REFUSALS as error:
        raise LaunchError(f"{here()}: {type(error).__name__}: {error}") from error


class Updating(Protocol):
    """An optimizer, or what stands around one."""

    def step(self) -> object:
        """Changes the weights."""


@dataclass(slots=True)
class Record:
    """The actions of one device in one iteration; times since the iteration's start, in s.

    Attributes:
        loss: its share of the iteration's loss.
        begun_s: when the iteration started, on this process's clock.
        iteration_s: how long it took.
        events: action, start, end.
        sends: by target, in order: when each was posted.
        receives: by source, in order: the receive, when it was posted, when it was there.
        peaks_bytes: by event, the most memory from the end of the one before to its end, where it
            was watched.
    """

    loss: float = 0.0
    begun_s: float = 0.0
    iteration_s: float = 0.0
    events: list[tuple[Action, float, float]] = field(default_factory=list)
    sends: dict[int, list[float]] = field(default_factory=dict)
    receives: dict[int, list[tuple[Receive, float, float]]] = field(default_factory=dict)
    peaks_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """The results of a forward pass, with their autograd graph.

    Attributes:
        loss: the sum of the losses that are computed here.
        told: the sum of those that this device tells.
    """

    outputs: Tensors
    loss: Tensor | None
    told: Tensor | None


@dataclass(frozen=True, slots=True)
class _SavedForward:
    """Tensors that a stage keeps from forward to backward; `made` is None where it recomputes."""

    leaves: Tensors
    targets: Mapping[str, Tensor]
    made: _ForwardPass | None


class Passes(Protocol):
    """The forward and backward passes of one stage: a `StageRunner`, or what stands around one."""

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def forward(
        self, microbatch: int, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensors, float]:
        """As `StageRunner.forward`."""

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Tensors:
        """As `StageRunner.backward`."""


class StageRunner:
    """Forward and backward of one stage.

    Attributes:
        module: its operators and their parameters.
        running: the running statistics of its batch normalizations in training, by the target of
            the buffer in the module that holds them. Each forward pass updates them once, by the
            microbatch of this replica; running it again for its backward pass does not.

    Args:
        module: with `input_names` and `output_names`.
        graph: knows which tensors carry a gradient.
        recompute: whether to run the forward pass again instead of stashing it.
        criteria: the losses of the outputs that the stage makes, by output, already divided by the
            number of microbatches.
        precision: gives the context that forward passes run in.
        scale: gives the factor of the losses in a backward pass.
        untold: outputs whose loss this device computes and another one tells.
    """

    def __init__(
        self,
        module: GraphModule,
        graph: Graph,
        recompute: bool,
        criteria: Mapping[str, Criterion],
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        scale: Callable[[], float] = lambda: 1.0,
        untold: Collection[str] = (),
    ) -> None:
        tensors = tensors_by_name(graph)
        self._untold = untold
        self.input_names = cast(tuple[str, ...], module.input_names)
        self.output_names = cast(tuple[str, ...], module.output_names)
        self._trained = {name for name in self.input_names if tensors[name].gradient}
        self.module = module
        self._recompute = recompute
        self._criteria = criteria
        self._precision = precision
        self._scale = scale
        self.running = running_statistics(module)
        self._stash: dict[int, _SavedForward] = {}

    def forward(
        self, microbatch: int, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensors, float]:
        """The outputs of the stage, and the microbatch's share of the losses computed here.

        Args:
            tensors: inputs of the stage, by name.
            targets: of the losses that have one, by output.
        """
        # Leaves of their own: the stage's autograd graph ends at its inputs, also at those that
        # another stage of this process has made.
        leaves = {
            name: tensors[name].detach().requires_grad_(name in self._trained)
            for name in self.input_names
        }
        with torch.set_grad_enabled(not self._recompute), updating(self.running.values()):
            made = self._run(leaves, targets)
        self._stash[microbatch] = _SavedForward(leaves, targets, None if self._recompute else made)
        loss = 0.0 if made.told is None else made.told.item()
        return {name: tensor.detach() for name, tensor in made.outputs.items()}, loss

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Tensors:
        """Accumulates the parameters' gradients.

        Args:
            gradients: of the outputs that other devices read.

        Returns:
            The gradients of the inputs that carry one.
        """
        stashed = self._stash.pop(microbatch)
        made = stashed.made or self._run(stashed.leaves, stashed.targets)
        roots: list[tuple[Tensor, Tensor | None]] = [
            (made.outputs[name], gradient) for name, gradient in gradients.items()
        ]
        if made.loss is not None and made.loss.requires_grad:
            roots.append((made.loss, torch.full_like(made.loss, self._scale())))
        if roots:
            torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
        # A gradient that no path leads to is sent as zeros, because its receive has been posted.
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in stashed.leaves.items()
            if leaf.requires_grad
        }

    def evaluate(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The outputs of the stage as in evaluation, without losses and without a stash.

        Args:
            tensors: inputs of the stage, by name.
        """
        with torch.no_grad(), evaluating(), self._precision():
            results = self.module(*(tensors[name] for name in self.input_names))
        return dict(zip(self.output_names, results, strict=True))

    def _run(self, leaves: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> _ForwardPass:
        with self._precision():
            results = self.module(*(leaves[name] for name in self.input_names))
        outputs = dict(zip(self.output_names, results, strict=True))
        losses = {n: of(outputs[n], targets.get(n)) for n, of in self._criteria.items()}
        loss = _sum([*losses.values()])
        if not self._untold:
            return _ForwardPass(outputs, loss, loss)
        told = _sum([one for name, one in losses.items() if name not in self._untold])
        return _ForwardPass(outputs, loss, told)


def _sum(losses: Sequence[Tensor]) -> Tensor | None:
    return sum(losses[1:], losses[0]) if losses else None


def running_statistics(module: GraphModule) -> dict[str, Tensor]:
    """The buffers with the running statistics of batch normalizations in training, by target.

    Those that are computed, or trained, are not among them.
    """
    found = {}
    for node in module.graph.nodes:
        if function_of(module, node) is batch_normalization and node.kwargs.get("training_mode"):
            for name in ("mean", "var"):
                held = cast(Node, node.kwargs[name])
                if held.op == "get_attr" and (str(held.target) in dict(module.named_buffers())):
                    found[str(held.target)] = module.get_buffer(str(held.target))
    return found


class LocalHandover:
    """Tensors that the stages of one device hand to later stages, and gradients that they hand to
    earlier ones, added up; both by microbatch. A device runs each microbatch in the order of its
    stages, and backward in the reverse order.

    Args:
        stages: by index.
    """

    def __init__(self, stages: Mapping[int, Passes]) -> None:
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
                gradient = waiting.pop(name) + gradient
            (waiting if name in self._earlier[stage] else leaving)[name] = gradient
        if waiting:
            self._gradients[microbatch] = waiting
        return leaving


def _add(tensors: Tensors, name: str, more: Tensor) -> None:
    tensors[name] = tensors[name].add_(more) if name in tensors else more


class Runtime:
    """Runs the action list of one device, iteration after iteration.

    Args:
        actions: its list.
        boxes: describes the tensors that it sends and receives.
        stages: by index, those that this device runs.
        gradients: of its trainable parameters.
        optimizer: of the same.
        world: the other devices.
        waiting: directions of computations that wait for sends.
        seed: of the numbers that operators draw.
        scatter: as of `BucketSums`.
    """

    def __init__(
        self, actions: Sequence[Action], boxes: Boxes, stages: Mapping[int, Passes],
        gradients: GradientBuffers, optimizer: Updating | None, world: World,
        waiting: Collection[Direction], seed: int = 0,
        scatter: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._actions = actions
        self._boxes = boxes
        self._stages = stages
        self._handover = LocalHandover(stages)
        self._gradients = gradients
        self._optimizer = optimizer
        self._sums = BucketSums(actions, gradients, world, scatter)
        self._world = world
        self._start_s = 0.0
        self._batches: Mapping[int, Batch] = {}
        self._record = Record()
        self._watch: MemoryWatch | None = None
        self._exchange = Exchange(world)
        self._awaited: list[Arrival] = []
        # By stage and direction: the transfers of the results of the latest computations.
        self._sending: dict[tuple[int, Direction], deque[list[PostedTransfer]]] = {}
        self._waiting = waiting
        self._seed, self._step_index = seed, 0
        self._page = ending.page()
        self._made: Tensors = {}  # by the last computation, for the sends right after it

    @property
    def loss(self) -> float:
        """This device's share of the loss in the current or last iteration."""
        return self._record.loss

    def iterate(
        self, batches: Mapping[int, Batch], watch: MemoryWatch | None = None, *, step: int = 0
    ) -> Record:
        """One iteration.

        Args:
            batches: the data of this device's microbatches.
            watch: of the memory in use.
            step: its index, for the numbers that operators draw.
        """
        self._step_index, self._batches = step, batches
        self._begin(step, watch)
        for action in self._actions:
            self._run(action)
        return self._end()

    def _begin(self, step: int, watch: MemoryWatch | None) -> None:
        self._record, self._watch = Record(), watch
        self._page.begin_step(step)
        self._world.barrier()
        self._start_s = self._record.begun_s = clocks.now_s()

    def _end(self) -> Record:
        self._page.enter(Phase.SEND)
        for transfers in chain.from_iterable(self._sending.values()):
            self._finish(transfers)
        self._record.iteration_s = self._now_s()
        self._sending, self._made = {}, {}
        assert not self._awaited, "the dry run lets no receive be forgotten"
        self._page.end_step()
        return self._record

    def _run(self, action: Action) -> None:
        match action:
            case Receive():
                self._receive(action)
            case Compute():
                self._made = {}  # a transfer keeps the result that it sends
                arrived = self._wait_for(action)
                self._wait_for_sends(action)
                start_s = self._now_s()
                step, microbatch = self._place(action.microbatch)
                self._page.enter(_PHASES[action.direction], action.stage, microbatch)
                with _reporting_errors(), drawing(self._seed, step, microbatch):
                    self._made = self._compute(action, arrived)
                self._note(action, start_s, self._now_s())
            case Send():
                self._send(action)
            case AllReduce(index):
                self._page.enter(Phase.ALL_REDUCE, index)
                start_s, end_s = (time_s - self._start_s for time_s in self._sums.finish(index))
                self._note(action, start_s, end_s)
            case Step():
                self._page.enter(Phase.STEP)
                start_s = self._now_s()
                self._step()
                self._note(action, start_s, self._now_s())

    def _place(self, microbatch: int) -> tuple[int, int]:
        """The step that a microbatch of the lists belongs to, and its number there."""
        return self._step_index, microbatch

    def _receive(self, action: Receive) -> None:
        shape, dtype = self._boxes.shape(action), self._boxes.dtype(action)
        self._awaited.append(self._exchange.expect(action, shape, dtype))

    def _wait_for(self, compute: Compute) -> Tensors:
        """The tensors that a computation needs; several gradients of one tensor are added up."""
        arrived: Tensors = {}
        for arrival in self._awaited:
            receive = arrival.action
            if waits(compute, receive):
                _, microbatch = self._place(compute.microbatch)
                self._page.enter(Phase.RECEIVE, compute.stage, microbatch, receive.device)
                tensor, ended_s = self._exchange.take(arrival, self._boxes.shape(receive))
                posted_s = arrival.transfer.posted_s
                known = self._record.receives.setdefault(receive.device, [])
                known.append((receive, posted_s - self._start_s, ended_s - self._start_s))
                self._boxes.put(arrived, receive, tensor)
        self._awaited = [one for one in self._awaited if not waits(compute, one.action)]
        return arrived

    def _wait_for_sends(self, compute: Compute) -> None:
        """Waits until the results of the second computation before this one, of its stage and
        direction, are sent, as `actions.waiting_for_sends` says.
        """
        sending = self._sending.setdefault((compute.stage, compute.direction), deque())
        # A list of transfers for each computation, the latest last. All but the last one's have to
        # be over: these are the results of the second computation before, and older ones.
        if compute.direction in self._waiting:
            while len(sending) > 1:
                self._page.enter(Phase.SEND, compute.stage)
                self._finish(sending.popleft())
        # A transfer holds its tensor, so those that are over are let go of as early as possible.
        while sending and all(transfer.is_over() for transfer in sending[0]):
            sending.popleft()
        sending.append([])

    def _finish(self, transfers: list[PostedTransfer]) -> None:
        for transfer in transfers:
            self._world.finish(transfer)

    def _compute(self, action: Compute, arrived: Tensors) -> Tensors:
        stage, s, m = self._stages[action.stage], action.stage, action.microbatch
        if action.direction is Direction.BACKWARD:
            self._sums.begin(action)
            gradients = stage.backward(m, self._handover.gradients(s, m, arrived))
            return self._handover.leave(s, m, gradients)
        batch, here = self._batches[m], self._handover.tensors(s, m)
        outputs, loss = stage.forward(m, {**batch.inputs, **here, **arrived}, batch.targets)
        self._handover.keep(s, m, {**arrived, **outputs})
        self._lost(m, loss)
        return outputs

    def _lost(self, microbatch: int, loss: float) -> None:
        """A forward has given this device's share of a loss."""
        self._record.loss += loss

    def _send(self, action: Send) -> None:
        made = self._made[action.tensor]
        part = dense(self._boxes.cut(action, made))
        if part.shape == made.shape:
            self._made[action.tensor] = part  # one copy for all targets
        transfer = self._exchange.send(action, part)
        self._sending[action.stage, action.direction][-1].append(transfer)
        self._record.sends.setdefault(action.device, []).append(transfer.posted_s - self._start_s)

    def _step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        self._gradients.clear()

    def _now_s(self) -> float:
        """Since the start of the iteration, with all computation done."""
        if self._world.torch_device != "cpu":
            torch.cuda.current_stream().synchronize()
        return clocks.now_s() - self._start_s

    def _note(self, action: Action, start_s: float, end_s: float) -> None:
        self._record.events.append((action, start_s, end_s))
        if self._watch is not None:
            self._record.peaks_bytes.append(self._watch.peak_bytes())
