"""`Plan`, the content of strategy.json: a strategy with a `Prediction` (how fast, how full) and a
`Certificate` (how far from the best it can be).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    ITEM_BYTES,
    LEFT_OUT_AS_DEFAULT,
    MAX_BYTES,
    LossChoice,
)
from planner.artefacts.options import Objective, Optimizer
from planner.artefacts.problem import Status
from planner.artefacts.profile import MAX_THREADS, SHORT_PARAMETERS, BatchNorm, Source
from planner.artefacts.strategy import Crossing, Strategy, used_devices

MAX_MICROBATCHES = 10**6
"""In an iteration; a device has a list with two actions for each."""
MAX_SEED = 2**63 - 1
"""Of torch's and numpy's generators."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one device when it is fullest.

    Attributes:
        parameter_bytes: weights, buffers and constants.
        gradient_bytes: of the trainable parameters.
        optimizer_bytes: the optimizer's state.
        stash_bytes: activations kept for the backward pass, all microbatches in flight.
        buffer_bytes: tensors received and not yet used, and gradients of tensors that were sent.
        workspace_bytes: activations and their gradients that live only inside a stage's pass.
        reserve_bytes: memory that is no tensor's: what the process takes, or what plans leave free
            (`--reserve`), whichever is more.
        version_bytes: older versions of the trained parameters, which minibatches in flight still
            use under an asynchronous schedule; files leave out 0.
        process_bytes: the part of `reserve_bytes` that the process takes: its context and the
            communicators of its groups; files leave out 0.
        host_bytes: activations that wait in the host's memory, at most, and none on the device;
            files leave out 0.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    stash_bytes: int = 0
    buffer_bytes: int = 0
    workspace_bytes: int = 0
    reserve_bytes: int = 0
    version_bytes: int = field(default=0, metadata=LEFT_OUT_AS_DEFAULT)
    process_bytes: int = field(default=0, metadata=LEFT_OUT_AS_DEFAULT)
    host_bytes: int = field(default=0, metadata=LEFT_OUT_AS_DEFAULT)

    @property
    def total_bytes(self) -> int:
        """The peak of the device."""
        apart = ("process_bytes", "host_bytes")
        return sum(getattr(self, one.name) for one in fields(self) if one.name not in apart)

    @property
    def tensor_bytes(self) -> int:
        """The peak of what the allocator of tensors has."""
        return self.total_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """What a stage sends to another one for one microbatch, on idle links.

    Attributes:
        stage: the one that reads the tensors.
        send_s: time for the tensors.
        return_s: time for their gradients back; 0 where there are none.
    """

    stage: int
    send_s: float
    return_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Times of one microbatch on the slowest replica of a stage, in s.

    Attributes:
        forward_s: of the forward pass.
        backward_s: of the backward pass, recomputation included.
        transfers: to later stages on other devices, ascending. Only plans in which a device runs
            several stages have them: there they decide the order of its stages
            (`schedules/shared.py`).
    """

    forward_s: float
    backward_s: float
    transfers: tuple[StageTransfer, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)


@dataclass(frozen=True, slots=True)
class DevicePrediction:
    """One used device during one iteration.

    Attributes:
        device: index into the topology.
        name: its name there.
        type: its type's name.
        compute_s: time in which it computes.
        communication_s: time in which it does not compute and a transfer or sum of its own runs.
        idle_s: the rest of the iteration.
        memory: its peak.
    """

    device: int
    name: str
    type: str
    compute_s: float
    communication_s: float
    idle_s: float
    memory: MemoryParts


@dataclass(frozen=True, slots=True)
class Prediction:
    """The judge's figures for one strategy.

    Attributes:
        iteration_s: from the first start to the last end of an iteration of M microbatches; under
            an asynchronous schedule, M times the time per minibatch in the steady state.
        bottleneck_s: the largest stage time per microbatch, divided by the stage's replicas.
        latency_s: forward and backward of one microbatch, alone.
        throughput: samples per s.
        bubble_fraction: 1 - compute / (used devices x iteration).
        closed_form_s: the iteration as searches see it: in closed form or, with stages in parts,
            the estimate of `simulator/estimate.py`.
        stages: one per stage.
        devices: one per used device, ascending.
    """

    iteration_s: float
    bottleneck_s: float
    latency_s: float
    throughput: float
    bubble_fraction: float
    closed_form_s: float
    stages: tuple[StagePrediction, ...]
    devices: tuple[DevicePrediction, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a strategy is, for the chosen objective.

    Attributes:
        objective: name of the figure that was minimised.
        lower_bound_s: no strategy on these devices is faster that the cost model can price from the
            profile (`costs/bounds.py`): every placement, replication, recomputation and schedule
            (synchronous, or asynchronous where the plan's is), every mesh, and on it every rule
            that the profile has for an operator, with parameters, gradients and optimizer state
            whole or in parts (ZeRO). Communication is free in it, steps take no time, and memory
            has no limit. It holds for microbatches of all sizes that the search might choose.
        gap: (predicted - bound) / bound.
        space_bound_s: the solver's own bound, for its own space only; None if it has none.
        space: that space, in words.
        peak_bound_s: no kernels are faster, either, however they compute the model on these devices
            (`costs/peak_bound.py`); None where FLOPs are not known.
    """

    objective: str
    lower_bound_s: float
    gap: float
    space_bound_s: float | None
    space: str
    peak_bound_s: float | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy with all that it takes to judge and to run it.

    Attributes:
        strategy: stages, devices and rhythm.
        prediction: the judge's figures.
        certificate: how far from the best it can be.
        solver: name of the solver that found it.
        status: of the solver's own space: optimal or feasible.
        reproducible: False where a wall-clock limit cut the search.
        ranks: device of each rank of a launch: the used devices in host order.
        hosts: host of each rank; empty where all are on one.
        crossings: the tensors that cross stages.
        model_path: the ONNX file, relative to the strategy's folder where it was written.
        model_hash: its content hash.
        train: names of the trained parameters.
        profile_hash: content hash of the profile.
        topology: name of the topology.
        topology_hash: its content hash.
        dimensions: of the model, as bound.
        microbatch_size: samples in a microbatch.
        dtype: of the computation.
        optimizer: its name.
        threads: CPU threads per rank that the profile was measured with.
        seed: of the search, of synthetic data and of the numbers that operators draw.
        notes: approximations, in words.
        versions: of the software that made the plan.
        source: how the profile's times were obtained; None where the file does not say.
        engine: name of the engine that they come from; "" where the file does not say.
        profiled_on: the type of device that they are for; "" where the file does not say.
        profile_path: the profile's file, relative to the strategy's folder where it was written.
        modules: per stage, the modules of the network that its operators came from, by path, in
            order; () where the model does not say any.
        tie: initializers that the user wants to be one parameter; files leave out none.
        untie: initializers that the user wants to be several; files leave out none.
        batch_norm: the form of the batch normalizations that was profiled and is launched; files
            leave out `FROZEN`.
        what_if: the options that changed the topology before it was planned for, such as "--set
            links.nic.bandwidth=200Gbps"; files leave out none.
        parameter_dtype: type of the trained parameters where that is not the file's; the optimizer
            steps float32 copies of them. Files leave out None.
        gradient_dtype: type in which gradients of such parameters are added up; files leave out
            None, which is the parameters' own.
        losses: the losses that it was made for; empty for one of a model's only output, chosen
            automatically.

    Raises:
        ValueError: if a field is out of range, unknown, or contradicts another one; all of them.
    """

    strategy: Strategy
    prediction: Prediction
    certificate: Certificate
    solver: str
    status: str
    reproducible: bool
    ranks: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    model_path: str | None
    model_hash: str | None
    train: tuple[str, ...]
    profile_hash: str
    topology: str
    topology_hash: str
    dimensions: dict[str, int]
    microbatch_size: int
    dtype: str
    optimizer: str
    threads: int | None
    seed: int
    notes: tuple[str, ...]
    versions: dict[str, str]
    source: Source | None = None
    engine: str = ""
    profiled_on: str = ""
    profile_path: str | None = None
    modules: tuple[tuple[str, ...], ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    tie: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    untie: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    batch_norm: BatchNorm = field(default=BatchNorm.FROZEN, metadata=LEFT_OUT_AS_DEFAULT)
    losses: tuple[LossChoice, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    hosts: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    what_if: tuple[str, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)
    parameter_dtype: str | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)
    gradient_dtype: str | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        if text := "\n".join((*self._words(), *self._numbers(), *self._stages())):
            raise ValueError(text)

    def _words(self) -> Iterator[str]:
        """Names of closed sets. Nothing behind this may look up any other one."""
        own: tuple[tuple[str, str, Collection[str]], ...] = (
            ("status", self.status, (Status.OPTIMAL, Status.FEASIBLE)),
            ("optimizer", self.optimizer, tuple(Optimizer)),
            ("certificate.objective", self.certificate.objective, tuple(Objective)),
            ("dtype", self.dtype, sorted(FLOAT_DTYPES)),
        )
        if self.parameter_dtype is not None:
            own += (("parameter_dtype", self.parameter_dtype, (SHORT_PARAMETERS,)),)
        if self.gradient_dtype is not None:
            own += (("gradient_dtype", self.gradient_dtype, ("float32",)),)
        yield from _unknown(own)
        yield from _unknown(
            (f"crossings[{i}].dtype", one.dtype, tuple(ITEM_BYTES))
            for i, one in enumerate(self.crossings)
        )

    def _numbers(self) -> Iterator[str]:
        own: list[tuple[str, int, int, int]] = [
            ("microbatch_size", self.microbatch_size, 1, MAX_BYTES),
            ("strategy.num_microbatches", self.strategy.num_microbatches, 1, MAX_MICROBATCHES),
            ("seed", self.seed, 0, MAX_SEED),
            *((f"dimensions.{name}", n, 1, MAX_BYTES) for name, n in self.dimensions.items()),
            *((f"crossings[{i}].bytes", c.bytes, 0, MAX_BYTES)
              for i, c in enumerate(self.crossings)),
        ]  # fmt: skip
        for i, one in enumerate(self.prediction.devices):
            own += [
                (f"prediction.devices[{i}].memory.{part.name}", getattr(one.memory, part.name), 0,
                 MAX_BYTES)
                for part in fields(one.memory)
            ]  # fmt: skip
        own += [] if self.threads is None else [("threads", self.threads, 1, MAX_THREADS)]
        for name, number, least, most in own:
            if not least <= number <= most:
                yield f"{name}: expected {least} to {most}, got {number!r:.30}"
        if not self.prediction.iteration_s > 0:
            yield (
                "prediction.iteration_s: expected a time above 0, got"
                f" {self.prediction.iteration_s!r}"
            )

    def _stages(self) -> Iterator[str]:
        """Whether the parts speak of the same stages and devices."""
        used = used_devices(self.strategy)
        if not used or used[0] < 0:
            yield "strategy.stages: expected stages on devices from 0 on, got others"
            return
        if tuple(sorted(self.ranks)) != used:
            yield f"ranks: expected each of the devices {used} once, got {self.ranks}"
        if len(self.hosts) not in (0, len(self.ranks)):
            yield f"hosts: expected one per rank ({len(self.ranks)}), got {len(self.hosts)}"
        known = tuple(sorted(one.device for one in self.prediction.devices))
        if known != used:
            yield f"prediction.devices: expected each of the devices {used} once, got {known}"
        num_stages = len(self.strategy.stages)
        for name, count in (
            ("prediction.stages", len(self.prediction.stages)),
            ("modules", len(self.modules) or num_stages),
        ):
            if count != num_stages:
                yield f"{name}: expected one per stage ({num_stages}), got {count}"
        for i, one in enumerate(self.crossings):
            stages = (one.source, *one.targets)
            if any(not 0 <= stage < num_stages for stage in stages):
                yield f"crossings[{i}]: expected stages from 0 to {num_stages - 1}, got {stages}"


def _unknown(words: Iterable[tuple[str, str, Collection[str]]]) -> Iterator[str]:
    for name, word, known in words:
        if word not in known:
            yield f"{name}: expected one of {', '.join(known)}, got {word!r:.60}"


def said_times(plan: Plan) -> str:
    """Where the operator times of a plan come from, such as "measured (torch), of cpu, rescaled to
    T4".
    """
    words = ["of unknown source" if plan.source is None else plan.source.value]
    if plan.engine:
        words[0] += f" ({plan.engine})"
    # Of imported times nothing is known but that: they are taken as they are.
    if plan.profiled_on not in ("", Source.IMPORTED.value):
        words.append(f"of {plan.profiled_on}")
        used = dict.fromkeys(device.type for device in plan.prediction.devices)
        others = [type_ for type_ in used if type_ != plan.profiled_on]
        words += [f"rescaled to {' and '.join(others)}"] if others else []
    return ", ".join(words)
