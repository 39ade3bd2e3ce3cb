"""How long one operator takes, forward and backward, under the conditions of a real step.

In a step an operator finds its inputs in the caches, where the operator before it left them, and
its weights in memory, where the step before left them. So before each measurement a buffer larger
than the caches is written, and then the inputs are read. Without that, a repeated operator would
find its weights in the cache. Backward finds the arriving gradient in the caches and the stash in
memory.

Backward calls autograd.grad; gradients of parameters are accumulated here. autograd.backward would
also copy gradients into the inputs, which are leaves here but not in a real step.

A product with a weight is asked for the gradients of its inputs alone, too, just before it is asked
for all: what this takes longer is the time of its weight's gradient.

A GPU is timed apart from the host that starts its kernels. The host's time is that of the calls.
For the device's, the device first waits for longer than that (`torch.cuda._sleep`), so that all
kernels are in its queue when it begins.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

import torch
from torch import Tensor

from planner.operators.running import autocast
from planner.profilers.classes import GradientContext
from planner.profilers.runnable import RunnableOperator
from planner.profilers.storages import watching
from planner.support.repeat import repeat

T = TypeVar("T")

SLEEP_CYCLES_PER_S = 2e9
"""Cycles of a GPU's clock; a slower clock sleeps for longer. H100 SXM at most 1.98 GHz."""
HELD, MOST_HELD_S = 2.0, 20e-3
"""A device waits for so many times the time of its host, and at most for that long. The queue has
1,024 places (from memory): behind as many kernels a host waits, too."""
HOST_RUNS = 5
"""The time of a host is the median of so many runs."""
ENOUGH_S = 0.5e-3
"""An operator that takes less is called several times per measurement. Clock, lambda and the entry
into autograd cost 5 to 15 us (torch 2.13, CPU), which is 3 % of this."""
MAX_CALLS = 20
"""Calls per measurement."""
LARGE_BYTES = 2**20
"""An operator with more bytes of weights is called once per measurement of its backward pass."""
WHOLE_STEPS, WHOLE_S = 5, 10.0
"""Number of steps of the whole model that are timed, and the time after which no other one starts;
two are always timed."""
CACHES_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Size of the buffer whose writing clears the caches. It is larger than a core's share of a CPU's
last cache, and than the 50 MB of an H100's."""


@contextmanager
def quiet(threads: int | None) -> Iterator[None]:
    """Sets the number of CPU threads and disables Python's garbage collector, and undoes both."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads or before)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


@dataclass(slots=True)
class Stopwatch:
    """Takes times on one device.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        wall_s: sum of all times that it took on a CPU.
        cpu_s: CPU time of the process meanwhile; less than `wall_s` where others had the core.
        scratch: the buffer that is written to clear the caches.
    """

    device: str
    wall_s: float = field(default=0.0, init=False)
    cpu_s: float = field(default=0.0, init=False)
    scratch: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = CACHES_BYTES[self.device.partition(":")[0]] // 4
        self.scratch = torch.zeros(size, device=self.device)

    def clear_caches(self, fresh: Sequence[Tensor]) -> None:
        """Leaves nothing in the caches but the tensors that the operator before has just made."""
        self.scratch.add_(1)
        for tensor in fresh:
            tensor.detach().sum()

    @property
    def is_host(self) -> bool:
        """Whether the device starts its work itself."""
        return self.device == "cpu"

    def host_seconds(self, run: Callable[[], T]) -> tuple[float, T]:
        """The time in which the host of a GPU starts the kernels of `run`, in s, and its result."""
        torch.cuda.synchronize(self.device)
        before_s = perf_counter()
        result = run()
        return perf_counter() - before_s, result

    def seconds(self, run: Callable[[], T], host_s: float = 0.0) -> tuple[float, T]:
        """The time that `run` takes, in s, and its result.

        Args:
            host_s: time in which a host starts its kernels; they are all in the queue when a GPU
                begins. 0: the GPU begins at once, and may wait for the host.
        """
        if self.is_host:
            cpu_before_s, before_s = process_time(), perf_counter()
            result = run()
            time_s = perf_counter() - before_s
            self.wall_s += time_s
            self.cpu_s += process_time() - cpu_before_s
            return time_s, result
        with torch.cuda.device(self.device):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            if host_s:
                held_s = min(HELD * host_s, MOST_HELD_S)
                torch.cuda._sleep(round(held_s * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]
            begin.record()
            result = run()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3, result


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one step of a whole model, in s.

    Attributes:
        forward_s, backward_s: of the model, without its losses.
        losses_s: of each loss, in the order of the times of a `LossCost`.
    """

    forward_s: float
    backward_s: float
    losses_s: tuple[tuple[float, ...], ...]

    @property
    def model_s(self) -> float:
        """Forward and backward of the model, without its losses."""
        return self.forward_s + self.backward_s


def combined(
    steps: Sequence[StepTimes], mean: Callable[[Sequence[float]], float]
) -> StepTimes:  # fmt: skip
    """The mean or the median of some steps, each time by itself."""
    return StepTimes(
        mean([one.forward_s for one in steps]),
        mean([one.backward_s for one in steps]),
        tuple(
            tuple(mean(times_s) for times_s in zip(*each, strict=True))
            for each in zip(*(one.losses_s for one in steps), strict=True)
        ),
    )


def whole_step_s(
    run: Callable[[], Sequence[Tensor]],
    losses: Sequence[Callable[[Tensor], Tensor]],
    watch: Stopwatch,
) -> StepTimes:
    """Median times of the step of a whole model, after one warm-up.

    Args:
        run: the forward pass; returns the outputs that losses are computed from.
        losses: of these outputs.
        watch: the stopwatch of the device.
    """
    step = partial(_step, run, losses, watch)
    steps = repeat(step, least=2, most=WHOLE_STEPS, budget_s=WHOLE_S, warm_ups=1)
    return combined(steps, median)


def _step(
    run: Callable[[], Sequence[Tensor]],
    losses: Sequence[Callable[[Tensor], Tensor]],
    watch: Stopwatch,
) -> StepTimes:
    """The times of one step, see `whole_step_s`."""
    forward_s, outputs = watch.seconds(run)
    roots, gradients, losses_s = [], [], []
    for output, loss in zip(outputs, losses, strict=True):
        # A leaf of its own, so that the gradient of the loss is timed apart.
        leaf = output.detach().requires_grad_()
        times_s, gradient = timed_loss_s(partial(loss, leaf), leaf, watch)
        losses_s.append(times_s)
        if output.requires_grad:
            roots.append(output)
            gradients.append(gradient)
    backward_s = 0.0
    if roots:
        backward_s, _ = watch.seconds(partial(torch.autograd.backward, roots, gradients))
    return StepTimes(forward_s, backward_s, tuple(losses_s))


def timed_loss_s(
    compute: Callable[[], Tensor], leaf: Tensor, watch: Stopwatch
) -> tuple[tuple[float, ...], Tensor]:
    """The times of a loss, in the order of those of a `LossCost`, and its gradient.

    Args:
        compute: the loss of the leaf.
        leaf: the output that the loss is computed from.
        watch: the stopwatch of the device.
    """

    def gradient_of(value: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(value, leaf)[0]

    host_forward_s = host_backward_s = 0.0
    if not watch.is_host:
        host_forward_s, value = watch.host_seconds(compute)
        host_backward_s, _ = watch.host_seconds(gradient_of(value))
    forward_s, value = watch.seconds(compute, host_forward_s)
    backward_s, gradient = watch.seconds(gradient_of(value), host_backward_s)
    return (forward_s, backward_s, host_forward_s, host_backward_s), gradient


def forwards_s(
    units: Sequence[RunnableOperator],
    inputs: Mapping[str, Tensor],
    dtype: str | None,
    watch: Stopwatch,
) -> list[float]:
    """Median forward time of each operator within forward passes of the whole model, in s. All that
    autograd keeps of a pass is alive, so an operator writes to memory that is in no cache.

    Args:
        units: the model's operators, in an order in which they can run.
        inputs: of the model.
        dtype: the type of autocast.
        watch: the stopwatch of the device.
    """

    def one_pass() -> list[float]:
        values, times_s = dict(inputs), []
        for one in units:
            read = [values[name] for name in one.inputs]
            with autocast(watch.device, dtype):
                time_s, made = watch.seconds(partial(one.forward, *read))
            times_s.append(time_s)
            values.update(zip(one.outputs, made, strict=True))
        return times_s

    passes = repeat(one_pass, least=WHOLE_STEPS, warm_ups=1)
    return [median(some) for some in zip(*passes, strict=True)]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of an operator per measurement, forward and backward."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of one forward and of one backward pass of an operator, in s.

    Attributes:
        forward_s, backward_s: of the passes.
        weight_s: of the backward pass, the time that is not for the gradients of inputs; None where
            these were not timed apart.
    """

    forward_s: float
    backward_s: float
    weight_s: float | None

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Times in which the host of a GPU starts the kernels of one forward and of one backward pass,
    in s; 0 on a CPU.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0


class OperatorTimer:
    """One operator, ready to be timed.

    Attributes:
        unit: the operator.
        inputs: its leaves, in the order of `unit.inputs`.
        watch: the stopwatch of the device.
        dtype: the type of autocast.
        halves: whether the gradients of inputs are timed apart from those of weights.
        arriving: the gradients that arrive at its outputs, by name.
        summands: gradients that other operators have left at its inputs and weights, by name.
        totals: gradients of the microbatches before, of the weights whose gradient is complete.
    """

    def __init__(
        self,
        unit: RunnableOperator,
        inputs: tuple[Tensor, ...],
        around: GradientContext,
        watch: Stopwatch,
        dtype: str | None,
        *,
        halves: bool = False,
    ) -> None:
        self.unit, self.inputs = unit, inputs
        self.watch, self.dtype, self.halves = watch, dtype, halves
        outputs = self._run(inputs)
        self.arriving = {
            name: _gradient(output, around.arriving.get(name))
            for name, output in zip(unit.outputs, outputs, strict=True)
            if name in around.reached and output.requires_grad
        }
        followed = {**dict(_followed(unit.inputs, [inputs])), **unit.weights}
        self.summands = {
            n: torch.randn_like(leaf, requires_grad=False)
            for n, leaf in followed.items()
            if n in around.summed
        }
        self.totals = {n: _total(leaf) for n, leaf in followed.items() if n in around.complete}

    def calls(self) -> Calls:
        """The number of calls per measurement, from one measurement of each pass."""
        forward_s, outputs = self._forward(1)
        backward_s = self._backward_once(outputs)
        weight_bytes = sum(weight.nbytes for weight in self.unit.weights.values())
        if weight_bytes > LARGE_BYTES:  # several calls at once would also sum their gradients
            return Calls(_calls(forward_s), 1)
        if 0 < backward_s < 10 * ENOUGH_S:  # the first one pays for choosing kernels
            backward_s = self._backward_once(self._run(self.inputs))
        return Calls(_calls(forward_s), _calls(backward_s))

    def host_times(self, calls: Calls) -> HostTimes:
        """Median times of the host."""
        if self.watch.is_host:
            return HostTimes()
        forwards_s, backwards_s = [], []
        for _ in range(HOST_RUNS):
            with autocast(self.watch.device, self.dtype):
                forward_s, _ = self.watch.host_seconds(partial(self._runs, calls.forward))
            forwards_s.append(forward_s / calls.forward)
            copies = [_copy(self.inputs) for _ in range(calls.backward)]
            results = [self._run(copy) for copy in copies]
            run = self._gradients(copies, results)
            if run is not None:
                backwards_s.append(self.watch.host_seconds(run)[0] / calls.backward)
        return HostTimes(median(forwards_s), median(backwards_s) if backwards_s else 0.0)

    def sample(self, calls: Calls, host: HostTimes) -> PassTimes:
        """Times of one forward and of one backward pass on the device."""
        forward_s, outputs = self._forward(calls.forward, host.forward_s)

        def backward(*, weights: bool) -> float:
            if calls.backward == 1:
                return self._backward_once(outputs, host.backward_s, weights=weights)
            return self._backward_many(calls.backward, host.backward_s, weights=weights)

        inputs_s = backward(weights=False) if self.halves else None
        backward_s = backward(weights=True)
        weight_s = None if inputs_s is None else max(0.0, backward_s - inputs_s)
        return PassTimes(forward_s, backward_s, weight_s)

    def workspace_bytes(self) -> int:
        """The most memory that a pass takes besides the tensors from before and those it leaves.

        On a CPU this is the memory of tensors between the torch functions of one ONNX operator; on
        a CUDA device it includes the buffers of the kernels.
        """
        before = [
            *self.inputs,
            *self.unit.weights.values(),
            *self.arriving.values(),
            *self.summands.values(),
            *self.totals.values(),
        ]

        with watching(self.watch.device, before) as memory:
            outputs = self._run(self.inputs)
            # Asked for at once: `peak_bytes` starts a new peak for the backward pass.
            peak_bytes, kept_bytes = memory.peak_bytes(), memory.now_bytes()
            gradients = self._gradients([self.inputs], [outputs])
            forward_bytes = peak_bytes - kept_bytes
            if gradients is None:
                return forward_bytes
            made = gradients()
            # The stash counts until the operator has ended, so it is no workspace; nor are the
            # gradients that the pass leaves, unless they lie in a storage from before, which
            # `kept_bytes` has. Counters subtract only down to 0.
            new = _storage_bytes(made) - _storage_bytes([*before, *outputs])
            backward_bytes = memory.peak_bytes() - kept_bytes - sum(new.values())
            return max(forward_bytes, backward_bytes)

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with autocast(self.watch.device, self.dtype):
            return self.unit.forward(*inputs)

    def _runs(self, calls: int) -> list[tuple[Tensor, ...]]:
        forward, inputs = self.unit.forward, self.inputs
        return [forward(*inputs) for _ in range(calls)]

    def _forward(self, calls: int, host_s: float = 0.0) -> tuple[float, tuple[Tensor, ...]]:
        if calls == 1:
            self.watch.clear_caches(self.inputs)
        with autocast(self.watch.device, self.dtype):
            time_s, results = self.watch.seconds(partial(self._runs, calls), calls * host_s)
        return time_s / calls, results[-1]

    def _backward_once(
        self, outputs: tuple[Tensor, ...], host_s: float = 0.0, *, weights: bool = True
    ) -> float:  # fmt: skip
        """The time of the backward pass of one forward pass, in s; 0 for an operator that no
        gradient reaches. It uses up autograd's graph, except without weights.
        """
        run = self._gradients([self.inputs], [outputs], weights=weights)
        if run is None:
            return 0.0
        self.watch.clear_caches(tuple(self.arriving.values()))
        return self.watch.seconds(run, host_s)[0]

    def _backward_many(self, calls: int, host_s: float, *, weights: bool) -> float:
        """The mean time of backward passes in a row, each of a forward pass of its own, in s."""
        copies = [_copy(self.inputs) for _ in range(calls)]
        results = [self._run(copy) for copy in copies]
        run = self._gradients(copies, results, weights=weights)
        return 0.0 if run is None else self.watch.seconds(run, calls * host_s)[0] / calls

    def _gradients(
        self,
        copies: Sequence[tuple[Tensor, ...]],
        results: Sequence[tuple[Tensor, ...]],
        *,
        weights: bool = True,
    ) -> Callable[[], list[Tensor | None]] | None:
        """A function that computes the gradients that leave the operator; None if none leaves it.

        It does all work of a real step: it sums each gradient with the one that has arrived there
        before, and adds a complete one to that of the microbatches before.

        Args:
            copies: the leaves of each call.
            results: the outputs of each call.
            weights: whether gradients of weights are computed, not of inputs alone. Without them,
                autograd's graph stays for another pass.
        """
        pairs = [
            (output, self.arriving[name])
            for outputs in results
            for name, output in zip(self.unit.outputs, outputs, strict=True)
            if name in self.arriving
        ]
        leaves = _followed(self.unit.inputs, copies)
        leaves += self.unit.weights.items() if weights else ()
        if not pairs or not leaves:
            return None
        outputs, arriving = zip(*pairs, strict=True)
        names, wanted = zip(*leaves, strict=True)
        summands = [self.summands.get(name) for name in names]
        complete = [(at, self.totals[n]) for at, n in enumerate(names) if n in self.totals]

        def run() -> list[Tensor | None]:
            made = torch.autograd.grad(
                outputs, wanted, arriving, retain_graph=not weights, allow_unused=True
            )
            sums = [
                _sum(old, new, (*arriving, *made)) for old, new in zip(summands, made, strict=True)
            ]
            # No name may hold a gradient longer than a step would: the peak of memory is watched.
            del made
            for at, total in complete:
                last, sums[at] = sums[at], None
                if last is not None:
                    total.add_(last)
            return sums

        return run


def _followed(
    names: Sequence[str], copies: Sequence[tuple[Tensor, ...]]
) -> list[tuple[str, Tensor]]:  # fmt: skip
    """The leaves of some calls that autograd follows, by name."""
    return [
        (name, leaf)
        for copy in copies
        for name, leaf in zip(names, copy, strict=True)
        if leaf.requires_grad
    ]


def _total(weight: Tensor) -> Tensor:
    """The gradient of the microbatches before; zeros where there is none yet."""
    return torch.zeros_like(weight, requires_grad=False) if weight.grad is None else weight.grad


def _storage_bytes(tensors: Iterable[Tensor | None]) -> Counter[int]:
    """The bytes of each storage, by its address; tensors in one storage count once."""
    storages = [one.untyped_storage() for one in tensors if one is not None]
    return Counter({storage.data_ptr(): storage.nbytes() for storage in storages})


def _gradient(output: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A random gradient of a tensor, with the given strides; a stride of 0 repeats elements."""
    if stride is None or not output.numel():
        return torch.randn_like(output)
    last = sum((size - 1) * step for size, step in zip(output.shape, stride, strict=True))
    made = torch.randn(last + 1, dtype=output.dtype, device=output.device)
    return made.as_strided(output.shape, stride)


def _calls(time_s: float) -> int:
    return min(MAX_CALLS, max(1, ceil(ENOUGH_S / max(time_s, 1e-9))))


def _copy(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in inputs)


def _sum(old: Tensor | None, new: Tensor | None, others: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of two gradients of one tensor, in place where autograd adds in place.

    Autograd makes a new tensor if the older gradient is a view (as that of a transposed weight is),
    or if another gradient lies in the storage of the new one.

    Args:
        others: all gradients of the operator, `new` among them.
    """
    if old is None or new is None:
        return old if new is None else new
    address = new.untyped_storage().data_ptr()
    shared = sum(one is not None and one.untyped_storage().data_ptr() == address for one in others)
    return old + new if shared > 1 or old._is_view() else new.add_(old)
