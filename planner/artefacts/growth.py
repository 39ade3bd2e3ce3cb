"""`Growth`: how a computed profile grows with the samples of a microbatch, so that the profile of
any size follows from it without the model.

From `LEAST` samples on, every figure is on a straight line: sizes of dimensions, FLOPs and bytes
of each kernel, private stash. A line is given by its figures at `LEAST` samples and at one more, so
all its coefficients are whole. One sample is a special case: autograd and torch may keep a view
there where they make a copy of more, so its kernels may be others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from planner.artefacts.graph import LEFT_OUT_AS_DEFAULT, Graph, Parameter, Tensor, View

LEAST = 2
"""Samples from which on everything grows by straight lines."""

Line = tuple[int, int]
"""The figures at `LEAST` samples and at one more."""

MAX_FIGURE = 10**30
"""FLOPs or bytes; no kernel has more."""
MIN_RATE, MAX_RATE = 1e-9, 1e30
"""FLOP/s or bytes/s; every device is between them."""


def on_line(line: Line, size: int) -> int:
    """The figure at some samples.

    >>> [on_line((5, 8), size) for size in (1, 2, 3, 10)]
    [2, 5, 8, 29]
    """
    return line[0] + (size - LEAST) * (line[1] - line[0])


class Work(StrEnum):
    """Kinds of kernels, by what bounds them and how well they are tuned."""

    PRODUCT = "product"
    BATCHED_PRODUCT = "batched product"
    UNALIGNED_PRODUCT = "batched product of sizes that are no multiples of 8"
    CONVOLUTION = "convolution"
    SMALL_WINDOW = "convolution with a window of 3 or 5 and stride 1"
    FEW_CHANNELS = "convolution with less than 32 channels per group"
    ATTENTION = "attention"
    CAUSAL_ATTENTION = "causal attention"
    CAUSAL_ATTENTION_BACKWARD = "gradient of causal attention"
    ELEMENTWISE = "elementwise"
    UPDATE = "elementwise in place"
    TRANSCENDENTAL = "transcendental"
    COPY = "copy"
    REDUCTION = "reduction"
    NORMALIZATION = "normalization"
    MAX_POOLING = "pooling of maxima"
    MEAN_POOLING = "pooling of means, resizing"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of an elementary function.

    Attributes:
        work: its kind.
        flops: floating-point operations, as torch counts them: of causal attention all products,
            also those that its kernel skips. Where torch counts none: one per element of every
            window of a pooling (one per window in the backward pass of maxima), one per element
            that a reduction or normalization reads, and one per element that all other kernels
            make.
        bytes: bytes that it reads and writes.
    """

    work: Work
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """The speeds that kernels reach on a device, and those of the host that starts them. A kernel
    takes

        launch + max(FLOPs / flops_per_s, bytes / bytes_per_s)

    with the speeds of its kind.

    Attributes:
        launch_s: time of a kernel that does nothing, in s.
        flops_per_s: by kind of kernel.
        bytes_per_s: by kind of kernel.
        host_forward_s: time in which the host starts an elementwise kernel of a forward pass, while
            the device runs those before, in s; 0 where the host is the device.
        host_backward_s: the same for a backward pass.

    Raises:
        ValueError: if a time is negative, or a speed is none.
    """

    launch_s: float
    flops_per_s: dict[Work, float]
    bytes_per_s: dict[Work, float]
    host_forward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    host_backward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        times = ("launch_s", "host_forward_s", "host_backward_s")
        taken = [(name, getattr(self, name)) for name in times]
        problems = [f"{name}: got {time_s!r}" for name, time_s in taken if not 0 <= time_s <= 1]
        for name in ("flops_per_s", "bytes_per_s"):
            rates: Mapping[Work, float] = getattr(self, name)
            wrong = {work: rate for work, rate in rates.items() if not MIN_RATE <= rate <= MAX_RATE}
            problems += [
                f"{name}.{work}: expected a speed of at least {MIN_RATE:.0e} and at most"
                f" {MAX_RATE:.0e}, got {rate!r}"
                for work, rate in wrong.items()
            ]
        _raise(problems)


@dataclass(frozen=True, slots=True)
class GrowingKernel:
    """A kernel of microbatches of any size.

    Attributes:
        work: its kind.
        flops: floating-point operations, see `Kernel`.
        bytes: bytes that it reads and writes.

    Raises:
        ValueError: if a line is below zero at one sample, or falls.
    """

    work: Work
    flops: Line
    bytes: Line

    def __post_init__(self) -> None:
        _raise(_falling({"flops": self.flops, "bytes": self.bytes}))

    def at(self, size: int) -> Kernel:
        """The kernel of a microbatch of some samples."""
        return Kernel(self.work, on_line(self.flops, size), on_line(self.bytes, size))


@dataclass(frozen=True, slots=True)
class Growing:
    """The growing costs of operators that cost the same.

    Attributes:
        forward: kernels of the forward pass.
        backward: kernels of the backward pass.
        stash_private_bytes: as of `OperatorCost`.
        rules: ways to split it, as of `SplitRule.text`, with "/n" where a dimension is cut in as
            many blocks as there are samples, and "/2n" where it is cut in twice as many.

    Raises:
        ValueError: if a line is below zero at one sample, or falls.
    """

    forward: tuple[GrowingKernel, ...]
    backward: tuple[GrowingKernel, ...]
    stash_private_bytes: Line = field(default=(0, 0), metadata=LEFT_OUT_AS_DEFAULT)
    rules: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        _raise(_falling({"stash_private_bytes": self.stash_private_bytes}))


@dataclass(frozen=True, slots=True)
class GrowingLoss:
    """The kernels of a loss.

    Attributes:
        output: the output that it is computed from.
        forward: kernels of the loss.
        backward: kernels of its gradient.
    """

    output: str
    forward: tuple[GrowingKernel, ...]
    backward: tuple[GrowingKernel, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """Everything of which the profile of another size is made, each kind of operator once.

    What does not grow (tensors of the stash, views) is the same for all sizes from `LEAST` on, and
    may be different for one sample. The profile has it for its own side; `stash_tensors`, `views`
    and `gradient_views` are those of the other side, where they differ.

    Attributes:
        rates: speeds of the profile's device.
        classes: the costs of operators, each once.
        operators: per operator of the graph, the index of its class from `LEAST` samples on.
        single: per operator, the index of its class at one sample; None where the model cannot
            have a single sample.
        steps: how many elements a sample adds to each dimension of a tensor, each list once.
        tensors: per tensor of the graph, the index of its steps.
        parameters: per parameter of the graph, the index of its steps.
        dimensions: how much a sample adds to a named dimension; 0 is left out.
        losses: as `Profile.loss_costs`.
        stash_tensors: by operator.
        views: None where they do not differ.
        gradient_views: None where they do not differ.

    Raises:
        ValueError: if there is no class or list of steps of an index, or a tensor shrinks.
    """

    rates: Rates
    classes: tuple[Growing, ...]
    operators: tuple[int, ...]
    single: tuple[int, ...] | None
    steps: tuple[tuple[int, ...], ...]
    tensors: tuple[int, ...]
    parameters: tuple[int, ...]
    dimensions: dict[str, int]
    losses: tuple[GrowingLoss, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    stash_tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    views: tuple[View, ...] | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    gradient_views: tuple[View, ...] | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        problems = [
            *_unknown("operators", self.operators, self.classes),
            *_unknown("single", self.single or (), self.classes),
            *_unknown("tensors", self.tensors, self.steps),
            *_unknown("parameters", self.parameters, self.steps),
        ]
        if any(step < 0 for steps in self.steps for step in steps):
            problems.append("steps: expected none below 0")
        if any(step < 0 for step in self.dimensions.values()):
            problems.append("dimensions: expected none below 0")
        used = {k.work for one in self.classes for k in (*one.forward, *one.backward)}
        used |= {k.work for one in self.losses for k in (*one.forward, *one.backward)}
        for name in ("flops_per_s", "bytes_per_s"):
            if missing := sorted(used - getattr(self.rates, name).keys()):
                problems.append(f"rates.{name}: expected a speed of {missing[0].value!r}")
        _raise(problems)

    @property
    def least(self) -> int:
        """The smallest size of the microbatch."""
        return LEAST if self.single is None else 1

    def classes_at(self, size: int) -> tuple[int, ...]:
        """Per operator, the index of its class in a microbatch of at least `least` samples."""
        return self.single if size < LEAST and self.single is not None else self.operators


def mismatches(growth: Growth, graph: Graph) -> Iterator[str]:
    """The places at which a growth is of another graph."""
    values: tuple[Tensor | Parameter, ...] = (*graph.tensors, *graph.parameters)
    due = {
        "operators": (growth.operators, len(graph.operators)),
        "single": (growth.single, len(graph.operators)),
        "tensors": (growth.tensors, len(graph.tensors)),
        "parameters": (growth.parameters, len(graph.parameters)),
    }
    wrong = [
        f"{name}: expected one per element of the graph ({count}), got {len(indices)}"
        for name, (indices, count) in due.items()
        if indices is not None and len(indices) != count
    ]
    yield from wrong
    if wrong:
        return
    for value, index in zip(values, (*growth.tensors, *growth.parameters), strict=True):
        if len(value.shape) != len(growth.steps[index]):
            yield (
                f"steps[{index}]: expected one per dimension of {value.name!r}, got"
                f" {len(growth.steps[index])}"
            )


_BLOCKS = re.compile(r"/(\d*)n\b")


def rule_at(text: str, size: int) -> str:
    """A rule for a microbatch of some samples, as text.

    >>> rule_at("S0/n,R->S0/n", 4), rule_at("S0/2n,R->S0/2n at 2", 3), rule_at("S0/n->S0/n", 1)
    ('S0/4,R->S0/4', 'S0/6,R->S0/6 at 2', 'S0->S0')
    """
    counts = _BLOCKS.sub(lambda found: f"/{int(found[1] or 1) * size}", text)
    return re.sub(r"/1\b", "", counts)  # one block is the whole dimension


def _falling(lines: Mapping[str, Line]) -> Iterator[str]:
    for name, line in lines.items():
        if not 0 <= on_line(line, 1) <= line[0] <= line[1] <= MAX_FIGURE:
            yield (
                f"{name}: expected figures of at most {MAX_FIGURE:.0e} that grow, from 0 on at one"
                f" sample, got [{line[0]}, {line[1]}]"
            )


def _unknown(name: str, indices: Sequence[int], table: Sequence[object]) -> Iterator[str]:
    for i, index in enumerate(indices):
        if not 0 <= index < len(table):
            yield f"{name}[{i}]: expected the index of one of {len(table)}, got {index}"


def _raise(problems: "Iterator[str] | list[str]") -> None:
    if text := "\n".join(problems):
        raise ValueError(text)
