"""How long the operators of a model take, each alone, under the conditions of a real step.

A repetition is a step taken apart: forward over all operators in order, backward over all in
reverse order with the gradients that arrive, a clock around each. So every operator finds the
caches, the allocator and the values as it would in a real step, and a disturbance that lasts a
moment hits one repetition of an operator and not all of them. Repeating one operator until it is
measured would find its weights in the cache.

Backward uses autograd.grad and adds what belongs to parameters itself. autograd.backward would
copy gradients into the inputs, which are leaves here and are none in a real step.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from planner.profilers.unit import Unit

T = TypeVar("T")

ENOUGH_S = 0.5e-3
"""An operator that takes less is called several times per measurement. Clock, lambda and the entry
into autograd cost 5 to 15 us (torch 2.13, CPU), 3 % of this."""
MAX_CALLS = 20


@dataclass(frozen=True, slots=True)
class Calls:
    """How often an operator is called per measurement, forward and backward."""

    forward: int
    backward: int


@dataclass(slots=True)
class Tape:
    """What the backward pass of one operator needs.

    Attributes:
        inputs: its leaves.
        outputs: with their graph; None where it is run again, because one graph is not enough.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] | None


@contextmanager
def quiet(threads: int | None) -> Iterator[None]:
    """Set the number of CPU threads, and keep Python's garbage collector out."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads or before)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def seconds(run: Callable[[], T], device: str) -> tuple[float, T]:
    """The time that `run` takes on the device, and what it returns."""
    if device == "cpu":
        start = perf_counter()
        result = run()
        return perf_counter() - start, result
    with torch.cuda.device(device):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        result = run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


def whole_step_s(
    run: Callable[[], Tensor], gradient: Tensor, device: str, repetitions: int
) -> float:
    """Median time of forward and backward of a whole model, after one warm-up.

    Args:
        run: forward; returns the output that the loss is computed from.
        gradient: of that output.
    """

    def step() -> None:
        output = run()
        if output.requires_grad:
            torch.autograd.backward(output, gradient)

    return median([seconds(step, device)[0] for _ in range(repetitions + 1)][1:])


class Bench:
    """The operators of a model with the buffers of a training step.

    Attributes:
        units: in topological order.
        gradients: of the weights, by name; they grow in place as they do over microbatches.
        output: the tensor that the loss is computed from.
        device: where everything lies.
        last_use: by tensor, the operator after which nobody reads it.
        first_use: by weight, the operator after whose backward its gradient is complete.
    """

    def __init__(
        self, units: Sequence[Unit], gradients: Mapping[str, Tensor], output: str, device: str
    ) -> None:
        self.units = units
        self.gradients = gradients
        self.output = output
        self.device = device
        self.last_use = {name: i for i, unit in enumerate(units) for name in unit.inputs}
        self.first_use = {
            name: i for i, unit in reversed(list(enumerate(units))) for name in unit.weights
        }

    def calls(self, operator: int, inputs: tuple[Tensor, ...]) -> Calls:
        """How often to call an operator per measurement, from a first look at it."""
        unit = self.units[operator]
        forward_s, outputs = seconds(lambda: unit.forward(*inputs), self.device)
        arriving = {
            name: torch.ones_like(value) for name, value in zip(unit.outputs, outputs, strict=True)
        }
        backward_s, _ = self._backward(operator, Tape(inputs, outputs), arriving, 1)
        if 0 < backward_s < 10 * ENOUGH_S:  # the first one pays for choosing kernels
            backward_s, _ = self._backward(operator, Tape(inputs, None), arriving, 1)
        return Calls(_calls(forward_s), _calls(backward_s))

    def repetition(
        self,
        values: Mapping[str, Tensor],
        gradient: Tensor,
        calls: Sequence[Calls],
        tick: Callable[[], None],
    ) -> list[tuple[float, float]]:
        """Times of forward and backward of every operator, in s, over one step.

        Args:
            values: inputs of the graph by name.
            gradient: of the output.
            calls: per operator.
            tick: called after every operator.
        """
        forward_s, tapes = self._forwards(values, calls, tick)
        backward_s = [0.0] * len(self.units)
        arriving = {self.output: gradient}
        for i in reversed(range(len(self.units))):
            time_s, leaving = self._backward(i, tapes.pop(), arriving, calls[i].backward)
            backward_s[i] = time_s
            for name in self.units[i].outputs:
                arriving.pop(name, None)
            arriving.update(leaving)
        return list(zip(forward_s, backward_s, strict=True))

    def _forwards(
        self, values: Mapping[str, Tensor], calls: Sequence[Calls], tick: Callable[[], None]
    ) -> tuple[list[float], list[Tape]]:
        alive = dict(values)
        times, tapes = [], []
        for i, unit in enumerate(self.units):
            inputs = unit.leaves(alive)
            time_s, outputs = self._forward(unit, inputs, calls[i].forward)
            times.append(time_s)
            tapes.append(Tape(inputs, outputs if calls[i].backward == 1 else None))
            alive.update(zip(unit.outputs, outputs, strict=True))
            for name in {*unit.inputs, *unit.outputs}:
                if self.last_use.get(name, -1) <= i:
                    del alive[name]
            tick()
        return times, tapes

    def _forward(
        self, unit: Unit, inputs: tuple[Tensor, ...], calls: int
    ) -> tuple[float, tuple[Tensor, ...]]:
        time_s, results = seconds(
            lambda: [unit.forward(*inputs) for _ in range(calls)], self.device
        )
        return time_s / calls, results[-1]

    def _backward(
        self, operator: int, tape: Tape, arriving: Mapping[str, Tensor], calls: int
    ) -> tuple[float, dict[str, Tensor]]:
        """The time of one backward pass, and the gradients that leave it.

        Those are of the inputs, and of weights that operators before it read too; they are summed
        with what had arrived there. An operator that no gradient reaches takes no time.
        """
        unit = self.units[operator]
        copies = [tape.inputs] if tape.outputs else [_copy(tape.inputs) for _ in range(calls)]
        results = [tape.outputs or unit.forward(*copy) for copy in copies]
        pairs = [
            (output, arriving[name])
            for outputs in results
            for name, output in zip(unit.outputs, outputs, strict=True)
            if name in arriving and output.requires_grad
        ]
        leaves = [
            (name, leaf)
            for copy in copies
            for name, leaf in zip(unit.inputs, copy, strict=True)
            if leaf.requires_grad
        ]
        if not pairs or not (leaves or unit.weights):
            return 0.0, {}
        outputs, gradients = zip(*pairs, strict=True)
        names, wanted = zip(*leaves, *unit.weights.items(), strict=True)
        summands = [arriving.get(name) for name in names]
        complete = [
            (at, self.gradients[name])
            for at, name in enumerate(names)
            if self.first_use.get(name) == operator
        ]

        def run() -> list[Tensor | None]:
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            sums = [
                _sum(old, new, (*gradients, *found))
                for old, new in zip(summands, found, strict=True)
            ]
            del found
            for at, total in complete:
                last, sums[at] = sums[at], None
                if last is not None:
                    total.add_(last)
            return sums

        time_s, sums = seconds(run, self.device)
        leaving = {name: new for name, new in zip(names, sums, strict=True) if new is not None}
        return time_s / len(copies), leaving


def _calls(time_s: float) -> int:
    return min(MAX_CALLS, max(1, ceil(ENOUGH_S / max(time_s, 1e-9))))


def _copy(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in inputs)


def _sum(old: Tensor | None, new: Tensor | None, others: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of two gradients of one tensor, in place where autograd does it in place: not if the
    one that was there first is a view (as the gradient of a transposed weight is).

    Args:
        others: every gradient in sight, `new` too; none may share its storage.
    """
    if old is None or new is None:
        return old if new is None else new
    address = new.untyped_storage().data_ptr()
    shared = sum(one is not None and one.untyped_storage().data_ptr() == address for one in others)
    return old + new if shared > 1 or old._is_view() else new.add_(old)
