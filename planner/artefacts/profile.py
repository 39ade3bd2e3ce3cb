"""`Profile`: a graph with the costs of each operator on one type of device, and their source."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    LEFT_OUT_AS_DEFAULT,
    MAX_BYTES,
    Graph,
    View,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.growth import LEAST, GrowingLoss, Growth, mismatches, rule_at
from planner.artefacts.sharding import AxisRule, rule_of
from planner.support.errors import shown
from planner.support.memo import remembered

MAX_SECONDS = 1e9
MAX_FLOPS = 10**30
MAX_THREADS = 4096
"""More than any machine has cores; a runtime that is asked for a million threads aborts."""


ROOFLINE = "roofline"
"""The engine of profiles whose times are computed from FLOPs and bytes."""
SHORT_PARAMETERS = "bfloat16"
"""The type that trained parameters may have while the optimizer steps float32 copies of them."""

COMPILED = "roofline, compiled"
"""The same for a step that `torch.compile` has compiled; more words may follow both."""


class Source(StrEnum):
    """How the figures of a profile were obtained."""

    MEASURED = "measured"
    ANALYTIC = "analytic"
    RESCALED = "rescaled"
    INTERPOLATED = "interpolated"
    SCALED = "scaled"
    """From a microbatch of another size, per sample."""
    IMPORTED = "imported"


class BatchNorm(StrEnum):
    """What the batch normalizations of a model normalise by."""

    TRAINING = "training"
    """All by the statistics of the microbatch; running statistics are updated beside."""
    FROZEN = "frozen"
    """All by their running statistics, which stay as they are."""
    MIXED = "mixed"
    """Some by the one and some by the other, as the file says."""


def _outside(
    fields: Iterable[tuple[str, float]], least: float, most: float = math.inf
) -> Iterator[str]:
    for name, value in fields:
        if not least <= value <= most:
            limit = f" and at most {most:.0e}" if most < math.inf else ""
            yield f"{name}: expected at least {least}{limit}, got {value!r:.30}"


def _raise(problems: Iterable[str]) -> None:
    if text := "\n".join(problems):
        raise ValueError(text)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """One way to split an operator over the devices of an axis; `sharding.py` has the words.

    Attributes:
        line: the rule for one axis, such as "S2,S0->P shape[2]". Its inputs are the tensors that
            the operator reads, and then its parameters.
        sizes: sizes of the axis for which it holds; None where it holds for all that divide every
            dimension that the rule cuts.

    Raises:
        ValueError: if the line is none, or a size is below 2.
    """

    line: str
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        AxisRule.parse(self.line)
        if self.sizes is not None and min(self.sizes, default=0) < 2:
            raise ValueError(f"{self.line}: expected sizes of at least 2, got {self.sizes}")

    @property
    def rule(self) -> AxisRule:
        """The rule that the line says."""
        return AxisRule.parse(self.line)

    @property
    def text(self) -> str:
        """The rule as files have it, such as "S0->S0 at 2,4"."""
        return self.line + ("" if self.sizes is None else f" at {','.join(map(str, self.sizes))}")

    @staticmethod
    def parse(text: object) -> "SplitRule":
        """The rule of a `text`.

        Raises:
            ValueError: if it is none.
        """
        parts = _RULE.fullmatch(text) if isinstance(text, str) else None
        if parts is None:
            raise ValueError(f"expected a rule such as 'S0,R->S0', got {shown(text)}")
        sizes = None if parts["sizes"] is None else tuple(map(int, parts["sizes"].split(",")))
        return SplitRule(parts["line"], sizes)


_RULE = re.compile(r"(?P<line>.*?)( at (?P<sizes>[0-9]+(,[0-9]+)*))?")

Part = tuple[tuple[int, ...], tuple[str, ...]]
"""A part of an operator: the sizes of the axes along which devices do different work, the outer one
first, and the operator's rule on each of them."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """The time of a part of an operator, which was measured at its local shapes, over that of the
    whole operator, which was measured beside it.

    Attributes:
        mesh: sizes of the axes along which devices do different work, the outer one first.
        rule: the rule on each of these axes, such as "S0,R->S0".
        forward: share of the forward time.
        backward: share of the backward time.

    Raises:
        ValueError: if there is no axis, a size is below 2, a rule is none, or a share is negative
            or absurdly large.
    """

    mesh: tuple[int, ...]
    rule: tuple[str, ...]
    forward: float
    backward: float

    def __post_init__(self) -> None:
        if not self.mesh or min(self.mesh) < 2 or len(self.rule) != len(self.mesh):
            raise ValueError(
                f"expected sizes of at least 2, and a rule for each, got {self.mesh} and"
                f" {self.rule}"
            )
        rule_of(self.rule)
        _raise(_outside((("forward", self.forward), ("backward", self.backward)), 0, 1e6))

    @property
    def part(self) -> Part:
        """The part that it is the time of."""
        return self.mesh, self.rule


_TIMES = ("forward_s", "backward_s", "host_forward_s", "host_backward_s")
"""The times of operators and losses."""
FIXED = ("fixed_forward_s", "fixed_backward_s", "sums_s")
"""Parts of the times of operators that do not grow with samples."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Costs of one operator for one microbatch.

    Attributes:
        name: the operator's.
        forward_s: time of its forward pass on the device, in s; a host may start it too late.
        backward_s: time of its backward pass, gradient accumulation included, in s.
        output_bytes: size of the tensors that it makes.
        parameter_bytes: size of the weights, buffers and constants that it reads.
        flops: floating-point operations of the forward pass.
        bytes_moved: bytes that the forward pass reads and writes.
        stash_tensors: names of its own inputs and outputs that autograd keeps for the backward
            pass. A view is named itself; `Profile.views` has the tensor behind it.
        stash_private_bytes: other bytes that autograd keeps, parameters left out.
        workspace_bytes: most that it holds for itself while it runs; 0 where that was not measured.
        interval: how sure the time is: half the width of the 95 % confidence interval of the median
            of forward and backward together, over it; 0 where nothing was measured.
        rules: the ways to split it over one axis of a mesh; it can always run whole. Files leave
            out none.
        parts: times of parts of it, each part once; files leave out none.
        backward_weight_s: part of `backward_s` in which it computes the gradients of its trained
            parameters, in s; the rest computes those of its inputs. Files leave out None, where
            that was not measured: `backward_weight_share` has it of every operator.
        host_forward_s: time in which the host starts the kernels of its forward pass, while the
            device runs those before, in s; files leave out 0, where the host is the device or
            nothing is known of it.
        host_backward_s: the same of its backward pass.
        fixed_forward_s, fixed_backward_s: parts of `forward_s` and `backward_s` in kernels that
            read and write trained parameters or their gradients alone, such as casts, but for
            `sums_s`: they take as long for one sample as for many. As all three, 0 where nothing
            is known of it, and in files where it follows from `Profile.growth`.
        sums_s: part of `backward_s` in which the gradients of trained parameters are added to those
            of other microbatches.

    Raises:
        ValueError: if a figure is negative or absurdly large, a part is there twice, or a part of a
            pass takes more than the pass.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int
    flops: int
    bytes_moved: int
    stash_tensors: tuple[str, ...]
    stash_private_bytes: int
    workspace_bytes: int = 0
    interval: float = 0.0
    rules: tuple[SplitRule, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    parts: tuple[PartTime, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    backward_weight_s: float | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    host_forward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    host_backward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    fixed_forward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    fixed_backward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    sums_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        times = [(name, getattr(self, name)) for name in (*_TIMES, *FIXED)]
        sizes = (
            ("output_bytes", self.output_bytes),
            ("parameter_bytes", self.parameter_bytes),
            ("bytes_moved", self.bytes_moved),
            ("stash_private_bytes", self.stash_private_bytes),
            ("workspace_bytes", self.workspace_bytes),
        )
        _raise(
            (
                *_outside(times, 0, MAX_SECONDS),
                *self._weights(),
                *_outside(sizes, 0, MAX_BYTES),
                *_outside((("flops", self.flops),), 0, MAX_FLOPS),
                *_outside((("interval", self.interval),), 0),
                *(
                    ("parts: expected each part once",)
                    if len({one.part for one in self.parts}) < len(self.parts)
                    else ()
                ),
            )
        )

    def _weights(self) -> Iterator[str]:
        """What is wrong with the times of weights."""
        if self.fixed_forward_s > max(0.0, self.forward_s):
            yield f"fixed_forward_s: expected at most forward_s ({self.forward_s})"
        if self.fixed_backward_s + self.sums_s > max(0.0, self.backward_s) * (1 + 1e-9):
            yield f"fixed_backward_s + sums_s: expected at most backward_s ({self.backward_s})"
        of_weight_s = self.backward_weight_s
        if of_weight_s is not None and not 0 <= of_weight_s <= self.backward_s:
            yield (
                "backward_weight_s: expected at least 0 and at most backward_s"
                f" ({self.backward_s}), got {of_weight_s}"
            )


def with_times(
    cost: OperatorCost, forward_s: float, backward_s: float,
    host_s: tuple[float, float] | None = None,
) -> OperatorCost:  # fmt: skip
    """The costs of an operator with other times; the gradients of its parameters, and what does
    not grow with samples, take the same shares of its passes.

    Args:
        host_s: forward and backward of the host; None keeps them.
    """
    of_weight_s = cost.backward_weight_s
    if of_weight_s:
        share = of_weight_s / cost.backward_s
        of_weight_s = min(backward_s, round(share * backward_s, 9))
    host_forward_s, host_backward_s = host_s or (cost.host_forward_s, cost.host_backward_s)
    there = forward_s / cost.forward_s if cost.fixed_forward_s else 0.0
    back = backward_s / cost.backward_s if cost.fixed_backward_s + cost.sums_s else 0.0
    return replace(
        cost, forward_s=forward_s, backward_s=backward_s, backward_weight_s=of_weight_s,
        host_forward_s=host_forward_s, host_backward_s=host_backward_s,
        fixed_forward_s=there * cost.fixed_forward_s,
        fixed_backward_s=back * cost.fixed_backward_s, sums_s=back * cost.sums_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossCost:
    """Times of a loss of one microbatch, which the device computes that makes its output.

    Attributes:
        output: the output that it is computed from.
        forward_s: time of the loss, in s.
        backward_s: time of its gradient, in s.
        host_forward_s, host_backward_s: as of `OperatorCost`.

    Raises:
        ValueError: if a time is negative or absurdly large.
    """

    output: str
    forward_s: float
    backward_s: float
    host_forward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)
    host_backward_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        times = [(name, getattr(self, name)) for name in _TIMES]
        _raise(_outside(times, 0, MAX_SECONDS))


@dataclass(frozen=True, slots=True)
class WholeStep:
    """Forward and backward of the whole model in one piece.

    Attributes:
        before_s: median time before the operators were timed one by one.
        after_s: the same, afterwards; a drift says that the machine was busy.
        alone_s: time of a step of the operators by their times one by one. Their times in the
            profile are those in the whole step, where they find the memory that they write to in no
            cache: they make it up, forward and backward apart. Files leave out None, with which the
            times are those of the operators alone.
    """

    before_s: float
    after_s: float
    alone_s: float | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        times = (
            ("before_s", self.before_s),
            ("after_s", self.after_s),
            ("alone_s", self.alone_s or 0.0),
        )
        _raise(_outside(times, 0, MAX_SECONDS))


@dataclass(frozen=True, slots=True)
class Contention:
    """How much processes slow each other that compute at the same time on the profiled machine.

    Attributes:
        cores: cores of the machine.
        slowdown: by number of processes, from 2 on: time of a step in each of them over the time of
            a step that runs alone.
        turns: by number of processes that share the cores, more than run at a time: the same where
            one computes while the others wait. None where it was not measured.

    Raises:
        ValueError: if there are no cores, no numbers, or a number or slowdown is too small.
    """

    cores: int
    slowdown: dict[int, float]
    turns: dict[int, float] | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        tables = {"slowdown": self.slowdown, "turns": self.turns or {}}
        numbers = [
            (f"{name}.{n}: number of processes", n) for name, some in tables.items() for n in some
        ]
        factors = [(f"{name}.{n}", s) for name, some in tables.items() for n, s in some.items()]
        _raise(
            (
                *_outside((("cores", self.cores),), 1),
                *(() if self.slowdown else ("slowdown: expected one at least, got none",)),
                *_outside(numbers, 2),
                *_outside(factors, 1, 1e6),
            )
        )


def slowdown_of(contention: Contention, num_processes: int) -> float:
    """The slowdown of each of some processes that compute at the same time. Between two measured
    numbers it is on a straight line; beyond the largest the processes share the time.

    Args:
        num_processes: at least 1.

    >>> some = Contention(2, {2: 1.25, 4: 2.75})
    >>> [slowdown_of(some, n) for n in (1, 2, 3, 4, 8)]
    [1.0, 1.25, 2.0, 2.75, 5.5]
    """
    known = {1: 1.0, **contention.slowdown}
    return _between(known, num_processes, num_processes / max(known))


def slowdown_among(contention: Contention, num_computing: int, num_processes: int) -> float:
    """The slowdown of some processes that compute while others of their number wait.

    Waiting ones cost what they cost where one computes. All cost no more than if none waited.

    Args:
        num_computing: at least 1.
        num_processes: with the waiting ones.

    >>> some = Contention(2, {2: 1.25, 4: 2.75}, turns={4: 1.2})
    >>> [slowdown_among(some, n, 4) for n in (1, 2, 3, 4)]
    [1.2, 1.5, 2.4, 2.75]
    >>> slowdown_among(some, 1, 2)
    1.0
    """
    beside = 1.0
    if contention.turns and num_processes >= min(contention.turns):
        beside = _between(contention.turns, num_processes, 1.0)
    slow = slowdown_of(contention, num_computing)
    # `turns` was measured with one process computing, and is taken to slow each of several alike.
    # Both limits are of `slowdown`, where none waits: waiting ones do not make others faster than
    # with the computing ones alone, nor slower than if they computed, too.
    return max(slow, min(beside * slow, slowdown_of(contention, num_processes)))


def _between(known: dict[int, float], num_processes: int, beyond: float) -> float:
    """A measured value, or one on the straight line between two.

    Args:
        known: by number of processes.
        num_processes: at least the smallest of the numbers.
        beyond: beyond the largest number, the value over that of this number.
    """
    above = min((n for n in known if n >= num_processes), default=None)
    below = max(n for n in known if n <= num_processes)
    if above is None:
        return known[below] * beyond
    share = (num_processes - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that planning needs to know of a model.

    Attributes:
        graph: the model's operators and tensors, for one microbatch.
        operators: one per operator of the graph, in its order.
        views: tensors that share another one's storage.
        gradient_views: tensors whose gradient an operator that reads them takes from the storage of
            the gradient of its output; none where that is not known.
        model_path: the ONNX file, relative to the folder that `planner profile` ran in; None
            where there is none (imported profiles).
        model_hash: content hash of the ONNX model; None where there is none.
        dimensions: sizes that the symbolic dimensions were bound to.
        microbatch_size: samples in one microbatch.
        dtype: of the floating-point work.
        device_type: name of the type of device that the times are for.
        source: how they were obtained.
        threads: CPU threads, None on other devices.
        repetitions: how often an operator was timed, median over the operators; 0 where none was.
        spread: median over the operators of (slowest - fastest) / median of the repetitions.
        whole_step: None where nothing was measured in one piece.
        versions: of the software that made it.
        engine: source of the times, such as "torch", "onnxruntime (CPUExecutionProvider)",
            "roofline" or "roofline, compiled"; "" where the file does not say.
        warnings: why the times may be wrong, for people; none on a quiet machine.
        modules: per operator, the path of the module of the network that it came from, "" for the
            whole network; () where the model does not say any.
        tie: initializers that the user wants to be one parameter; files leave out none.
        untie: initializers that the user wants to be several; files leave out none.
        batch_norm: the form of the batch normalizations that was measured; files leave out
            `FROZEN`, which is also that of models without any.
        contention: slowdown of processes that compute at the same time; files leave out None, where
            it was not measured or devices have their own processors.
        loss_costs: of the outputs with a loss, each once at most; none where they are not known.
        growth: the costs of microbatches of other sizes, of a computed profile; files leave out
            None, where they are not known.
        parameter_dtype: type of the trained parameters where that is not the file's; the optimizer
            steps float32 copies of them. Files leave out None.
        casts_once: whether copies of weights in the type of autocast are left out of the stash, as
            a step makes them once (`costs/casts.py`). Files leave out False, which older ones have.
        fused_loss: whether each loss is one kernel each way, which reads its output as it is and
            keeps nothing as large as that. Files leave out False.
        launch_blocking: whether the host waits for each kernel before it starts the next one
            (`artefacts/clocks.py`). Files leave out False.

    Raises:
        ValueError: if a figure is out of range or contradicts the graph; all of them.
    """

    graph: Graph
    operators: tuple[OperatorCost, ...]
    views: tuple[View, ...]
    model_path: str | None
    model_hash: str | None
    dimensions: dict[str, int]
    microbatch_size: int
    dtype: str
    device_type: str
    source: Source
    threads: int | None
    repetitions: int
    spread: float
    whole_step: WholeStep | None
    versions: dict[str, str]
    engine: str = ""
    warnings: tuple[str, ...] = ()
    gradient_views: tuple[View, ...] = ()
    modules: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    tie: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    untie: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    batch_norm: BatchNorm = field(default=BatchNorm.FROZEN, metadata=LEFT_OUT_AS_DEFAULT)
    contention: Contention | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    loss_costs: tuple[LossCost, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    growth: Growth | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    parameter_dtype: str | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    casts_once: bool = field(default=False, metadata=LEFT_OUT_AS_DEFAULT)
    fused_loss: bool = field(default=False, metadata=LEFT_OUT_AS_DEFAULT)
    launch_blocking: bool = field(default=False, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        if [o.name for o in self.operators] != [o.name for o in self.graph.operators]:
            raise ValueError(
                "operators: expected one per operator of the graph, by its name and in its order,"
                " got others"
            )
        if self.modules and len(self.modules) != len(self.operators):
            raise ValueError(
                f"modules: expected one per operator ({len(self.operators)}), got"
                f" {len(self.modules)}"
            )
        _raise(
            (
                *self._figures(),
                *self._stashes((o.name, o.stash_tensors) for o in self.operators),
                *self._views(self.views),
                *self._gradient_views(self.gradient_views),
                *self._sizes(),
                *self._losses("loss_costs", self.loss_costs),
                *(self._growing(self.growth) if self.growth is not None else ()),
            )
        )
        if not any(o.forward_s + o.backward_s > 0 for o in self.operators):
            raise ValueError("operators: expected at least one that takes time, got none")

    def _figures(self) -> Iterator[str]:
        if self.dtype not in FLOAT_DTYPES:
            known = ", ".join(sorted(FLOAT_DTYPES))
            yield f"dtype: expected one of {known}, got {self.dtype!r}"
        if self.parameter_dtype not in (None, SHORT_PARAMETERS):
            yield f"parameter_dtype: expected {SHORT_PARAMETERS}, got {self.parameter_dtype!r}"
        yield from _outside((("microbatch_size", self.microbatch_size),), 1)
        yield from _outside(((f"dimensions.{k}", v) for k, v in self.dimensions.items()), 1)
        if self.threads is not None:
            yield from _outside((("threads", self.threads),), 1, MAX_THREADS)
        yield from _outside((("repetitions", self.repetitions), ("spread", self.spread)), 0)

    def _losses(
        self, field_name: str, costs: Sequence[LossCost] | Sequence[GrowingLoss]
    ) -> Iterator[str]:
        named = [one.output for one in costs]
        for i, name in enumerate(named):
            if name not in self.graph.outputs or name in named[:i]:
                yield (
                    f"{field_name}[{i}].output: expected outputs of the graph, each once, got"
                    f" {name!r}"
                )

    def _stashes(
        self, stashes: Iterable[tuple[str, tuple[str, ...]]], prefix: str = "operators"
    ) -> Iterator[str]:
        """What is wrong with the stash tensors of operators, by name."""
        known = {operator.name: (i, operator) for i, operator in enumerate(self.graph.operators)}
        for name, tensors in stashes:
            if name not in known:
                yield f"{prefix}: expected operators, got {name!r}"
                continue
            i, operator = known[name]
            for tensor in tensors:
                if tensor not in operator.inputs and tensor not in operator.outputs:
                    yield (
                        f"{prefix}[{i}].stash_tensors: expected inputs and outputs of"
                        f" {operator.name!r}, got {tensor!r}"
                    )

    def _views(self, views: Sequence[View], prefix: str = "views") -> Iterator[str]:
        made_by = producers(self.graph)
        seen = set()
        for i, view in enumerate(views):
            if view.tensor in seen:
                yield f"{prefix}[{i}].tensor: expected each tensor once, got {view.tensor!r} again"
            seen.add(view.tensor)
            if view.tensor not in made_by:
                yield f"{prefix}[{i}].tensor: expected an operator's output, got {view.tensor!r}"
                continue
            operator = self.graph.operators[made_by[view.tensor]]
            if view.base not in operator.inputs and view.base not in operator.parameters:
                yield (
                    f"{prefix}[{i}].base: expected an input or parameter of {operator.name!r},"
                    f" got {view.base!r}"
                )

    def _gradient_views(
        self, views: Sequence[View], prefix: str = "gradient_views"
    ) -> Iterator[str]:
        made_by = producers(self.graph)
        seen = set()
        for i, view in enumerate(views):
            if view in seen:
                yield f"{prefix}[{i}]: expected each pair once, got {view.tensor!r} again"
            seen.add(view)
            if view.base not in made_by:
                yield f"{prefix}[{i}].base: expected an operator's output, got {view.base!r}"
                continue
            operator = self.graph.operators[made_by[view.base]]
            if view.tensor not in operator.inputs:
                yield (
                    f"{prefix}[{i}].tensor: expected an input of {operator.name!r},"
                    f" got {view.tensor!r}"
                )

    def _growing(self, growth: Growth) -> Iterator[str]:
        """What is wrong with the growth."""
        yield from (f"growth.{line}" for line in mismatches(growth, self.graph))
        for name in sorted(growth.dimensions.keys() - self.dimensions.keys()):
            yield f"growth.dimensions: expected dimensions of the profile, got {name!r}"
        yield from self._losses("growth.losses", growth.losses)
        yield from self._stashes(growth.stash_tensors.items(), "growth.stash_tensors")
        yield from self._views(growth.views or (), "growth.views")
        yield from self._gradient_views(growth.gradient_views or (), "growth.gradient_views")
        for i, one in enumerate(growth.classes):
            for text in one.rules:
                try:
                    SplitRule.parse(rule_at(text, LEAST))
                except ValueError as error:
                    yield f"growth.classes[{i}].rules: {error}"

    def _sizes(self) -> Iterator[str]:
        if self.source is not Source.MEASURED:
            return
        tensors, parameters = tensors_by_name(self.graph), parameters_by_name(self.graph)
        for i, (cost, operator) in enumerate(
            zip(self.operators, self.graph.operators, strict=True)
        ):
            for name, given, due in (
                (
                    "output_bytes",
                    cost.output_bytes,
                    sum(tensors[n].bytes for n in operator.outputs),
                ),
                (
                    "parameter_bytes",
                    cost.parameter_bytes,
                    sum(parameters[n].bytes for n in operator.parameters),
                ),
            ):
                if given != due:
                    yield f"operators[{i}].{name}: expected {due} as in the graph, got {given}"


ALIKE = (
    "model_hash", "device_type", "dtype", "source", "batch_norm", "tie", "untie", "parameter_dtype",
    "casts_once", "fused_loss", "launch_blocking",
)  # fmt: skip
"""The fields in which profiles of one model for microbatches of several sizes agree."""


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """Profiles of one model for microbatches of several sizes.

    Attributes:
        profiles: ascending by size.

    Raises:
        ValueError: if they are not of one model on one device, or sizes are not ascending.
    """

    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        sizes = [profile.microbatch_size for profile in self.profiles]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"profiles: expected ascending microbatch sizes, got {sizes}")
        for name in ALIKE:
            if len({getattr(profile, name) for profile in self.profiles}) > 1:
                raise ValueError(f"profiles: expected one {name} for all")


def is_computed(profile: Profile) -> bool:
    """Whether times are computed from FLOPs and bytes, at one size of the microbatch or at two
    between which they are interpolated, for this device or one whose times are rescaled.
    """
    return profile.source is Source.ANALYTIC or profile.engine.split(", ")[0] == ROOFLINE


def step_is_compiled(profile: Profile) -> bool:
    """Whether times are those of a step that `torch.compile` has compiled."""
    return profile.engine.startswith(COMPILED)


def has_rules(profile: Profile) -> bool:
    """Whether it is known of any operator how to split it."""
    return any(one.rules for one in profile.operators)


@remembered
def view_bases(profile: Profile) -> Mapping[str, str]:
    """The base of each view; other tensors are left out."""
    return {view.tensor: view.base for view in profile.views}


@remembered
def gradient_bases(profile: Profile) -> Mapping[tuple[int, str], str]:
    """By operator and input, the output of whose gradient it makes a view."""
    made_by = producers(profile.graph)
    return {(made_by[view.base], view.tensor): view.base for view in profile.gradient_views}


def storage_owner(profile: Profile, tensor: str, inside: Iterable[int]) -> str:
    """The tensor or parameter that owns the storage of `tensor` where only the operators `inside`
    run.

    A view that comes from another device is a copy there, and its own owner.

    Args:
        tensor: a name.
        inside: indices of operators; pass a set.
    """
    bases, made_by = view_bases(profile), producers(profile.graph)
    while tensor in bases and made_by[tensor] in inside:
        tensor = bases[tensor]
    return tensor


def stash_bytes(profile: Profile, operators: Iterable[int]) -> int:
    """Exact bytes that autograd keeps from forward to backward of one microbatch, for a set of
    operators on one device: every storage once, parameters left out.

    Args:
        operators: indices into the graph's operators.
    """
    inside = frozenset(operators)
    tensors = tensors_by_name(profile.graph)
    owners = {
        storage_owner(profile, name, inside)
        for v in inside
        for name in profile.operators[v].stash_tensors
    }
    private = sum(profile.operators[v].stash_private_bytes for v in inside)
    # A parameter's storage is there anyway.
    return private + sum(tensors[name].bytes for name in owners if name in tensors)
