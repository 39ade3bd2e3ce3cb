"""The options that several functions of the library and several commands share.

Sizes are bytes, or text with a unit such as "8 GiB". Choices are given by their names. A wrong
value is an `OptionError`. Options of one room stand there: `planner.launcher.options`,
`planner.training.options`, `planner.profilers.options`, and the options of each solver.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from planner.artefacts.graph import LossChoice
from planner.artefacts.strategy import ScheduleName
from planner.support.errors import OptionError
from planner.support.options import Options, option
from planner.support.units import parse_bytes, parse_rate, parse_seconds

DEFAULT_RESERVE_BYTES = 1024**3
SIZE = 'a size such as "8 GiB"'
SIZE_ABOVE_0 = 'a size above 0 such as "8 GiB"'


class Objective(StrEnum):
    """The figure that is minimised."""

    ITERATION = "iteration"
    BOTTLENECK = "bottleneck"
    LATENCY = "latency"


class Optimizer(StrEnum):
    """The optimizers, which differ in the state that they keep."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"

    @property
    def num_moments(self) -> int:
        """Tensors of state per trainable parameter."""
        return {Optimizer.SGD: 0, Optimizer.MOMENTUM: 1}.get(self, 2)


class Recompute(StrEnum):
    """Whether stages may or must run their forward pass twice instead of stashing it; selective
    keeps attention and every second product.
    """

    AUTO = "auto"
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"

    @property
    def is_everywhere(self) -> bool:
        """Whether every stage must."""
        return self in (Recompute.SELECTIVE, Recompute.FULL)


class Offload(StrEnum):
    """Whether activations may or must wait in the host's memory for their backward."""

    NO = "no"
    AUTO = "auto"
    YES = "yes"


@dataclass(frozen=True, slots=True)
class Devices(Options):
    """The devices of a topology that are taken."""

    gpus: int | None = option("Take only the first N devices.", least=1, shown="all")


@dataclass(frozen=True, slots=True)
class Asking(Options):
    """The solvers that are asked, and the limit of their work."""

    solvers: tuple[str, ...] = option(
        "Solver to ask. May be repeated.", (), flag="--solver", metavar="NAME"
    )
    time_limit_s: float = option(
        "Limit of work, in seconds of an ordinary core. solve gives it to all solvers together,"
        " compare to each. Reading files and compiling the search do not count. With --cost-model"
        " iopddl it is time since the start of the command.",
        7.0, flag="--time-limit", parse=partial(parse_seconds, example="30 s"),
        words='a time such as "30 s"', least=0,
        metavar="TIME", shown="7s",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Solving(Options):
    """How plans are compared, and what else is asked of them."""

    model: Path | None = option("ONNX file, if it is not where the profile says.")
    cost_model: str = option(
        "Cost model by which plans are compared.", "planner",
        choices=("planner", "pipedream", "dnn-partitioning", "piper", "iopddl"),
    )  # fmt: skip
    bandwidth: float | None = option(
        'Bandwidth between devices for --cost-model piper, such as "25 GiB/s".',
        parse=parse_rate, words='a rate such as "25 GiB/s"', above=0, metavar="RATE",
        shown="the file's",
    )  # fmt: skip
    refine: bool = option(
        "Measure the split operators of the best plan on this machine at their local shapes, until"
        " no plan is better by these times. The times are added to the profile.",
        False,
    )
    sensitivity: bool = option("Show which link or type of device limits the plan.", False)


@dataclass(frozen=True, slots=True)
class Training(Options):
    """How the model is trained."""

    microbatches: int | None = option(
        "Microbatches per iteration, in units of the profile's largest microbatch.",
        least=1, metavar="M", shown="4 per device",
    )  # fmt: skip
    global_batch: int | None = option(
        "Samples per iteration, instead of --microbatches.", least=1, metavar="B"
    )
    microbatch_size: int | None = option(
        "Samples in a microbatch. Where a size was not profiled, its times are computed,"
        " interpolated, or scaled from the nearest one.",
        least=1, metavar="N", shown="the best",
    )  # fmt: skip
    schedule: ScheduleName = option(
        "Order of forward and backward passes. pipedream is asynchronous: it steps after every"
        " microbatch, with older versions of the parameters.",
        ScheduleName.ONE_F_ONE_B,
    )
    vertical_sync: bool = option(
        "With --schedule pipedream, use equally old parameters in all stages for a microbatch.",
        False,
    )
    optimizer: Optimizer = option(
        "Optimizer of the training, which decides the memory of its state.", Optimizer.SGD
    )
    objective: Objective = option("Figure to minimise.", Objective.ITERATION)
    recompute: Recompute = option(
        "Run forward passes twice instead of stashing activations: where memory needs it, nowhere,"
        " everywhere but for attention and every second product, or everywhere.",
        Recompute.AUTO,
    )
    offload: Offload = option(
        "Keep activations in the host's memory from forward to backward: nowhere, where memory"
        " needs it, or of every layer. The solvers single, data-parallel, even, pipedream, manual"
        " and those of split stages do; others keep them on the devices.",
        Offload.NO,
    )
    overlap: bool = option(
        "Run the collectives inside split stages beside their computations.", True
    )
    prefetch: int | None = option(
        "Memory of each device for parameters that are gathered ahead of the operators that read"
        " them, and for gradients that wait to be scattered.",
        parse=parse_bytes, words=SIZE, least=0, metavar="SIZE", shown="as much as hides something",
    )  # fmt: skip
    device_memory: int | None = option(
        'Memory of each device, such as "8 GiB".', parse=parse_bytes, words=SIZE_ABOVE_0, above=0,
        metavar="SIZE", shown="as in the topology",
    )  # fmt: skip
    reserve: int = option(
        "Memory of each device that plans leave free.", DEFAULT_RESERVE_BYTES,
        parse=parse_bytes, words=SIZE, least=0, metavar="SIZE", shown="1 GiB",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.microbatches is not None and self.global_batch is not None:
            raise OptionError("give either --microbatches or --global-batch, not both")
        if self.vertical_sync and not self.schedule.is_asynchronous:
            raise OptionError("--vertical-sync is for --schedule pipedream; give that, too")


@dataclass(frozen=True, slots=True)
class WhatIf(Options):
    """Changes of a cluster: hosts are added first, then figures set, then devices dropped."""

    set: tuple[str, ...] = option(
        "What if: change a figure, such as links.nic.bandwidth=200Gbps. May be repeated. PATH is"
        " links.NAME.bandwidth or .latency, where NAME is a kind of links or a pair of ends, a-b;"
        " levels.NAME.bandwidth or .latency; devices.NAME.type; hosts.NAME.cores, .memory,"
        " .host_link.bandwidth, .host_link.devices or .host_link.memory; or"
        " device_types.NAME.memory, .memory_bandwidth or .flops.DTYPE.",
        (), metavar="PATH=VALUE",
    )  # fmt: skip
    drop: tuple[str, ...] = option(
        "What if: remove a device or host. May be repeated.", (), metavar="NAME"
    )
    add_host: tuple[str, ...] = option(
        "What if: add a copy of a host, or all hosts of another topology. May be repeated.",
        (), metavar="NAME",
    )  # fmt: skip

    @property
    def words(self) -> tuple[str, ...]:
        """The options as they are typed.

        >>> WhatIf(set=("levels.host.latency=5 us",), drop=("gpu7",)).words
        ("--set 'levels.host.latency=5 us'", '--drop gpu7')
        """
        options = (("--add-host", self.add_host), ("--set", self.set), ("--drop", self.drop))
        return tuple(f"{flag} {shlex.quote(one)}" for flag, values in options for one in values)


def pin(text: str) -> tuple[str, str]:
    """The names of an operator, which may hold an equals sign, and of a device."""
    operator, _, device = text.rpartition("=")
    if not operator or not device:
        raise ValueError(f"expected NAME=DEVICE such as conv1=gpu0, got {text!r}")
    return operator, device


@dataclass(frozen=True, slots=True)
class Search(Options):
    """How strategies are searched for.

    Attributes:
        switches: the solvers' own options, such as `planner.solvers.netsplit.options.NetSplit`, at
            most one of each type.
    """

    max_downsets: int | None = option(
        "Merge operators until the graph has at most N downsets.",
        least=2, metavar="N", shown="as many as some seconds allow",
    )  # fmt: skip
    exact: bool = option(
        "Merge no operators, however long the search takes; for graphs of up to 200,000 downsets.",
        False,
    )
    seed: int = option("Seed of the searches that draw random numbers.", 0, metavar="N")
    pins: tuple[tuple[str, str], ...] = option(
        "Keep operator NAME on DEVICE. May be repeated.", (), flag="--pin", metavar="NAME=DEVICE",
        parse=pin, words="a pair of an operator and a device",
    )  # fmt: skip
    switches: tuple[Options, ...] = option("", ())

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.exact and self.max_downsets is not None:
            raise OptionError("give either --exact or --max-downsets, not both")
        if len({type(one) for one in self.switches}) < len(self.switches):
            raise OptionError(f"switches: expected one of each type, got {self.switches}")


@dataclass(frozen=True, slots=True)
class ModelOptions(Options):
    """How an ONNX file is read: its sizes, and what is trained."""

    batch: int | None = option(
        "Samples per microbatch, for a model whose first dimension is symbolic.",
        least=1, metavar="N",
    )  # fmt: skip
    dims: Mapping[str, int] | None = option(
        "Size of a symbolic dimension. May be repeated.",
        flag="--dim", least=1, metavar="NAME=N",
    )  # fmt: skip
    train: tuple[str, ...] = option(
        "Train an initializer that would be frozen. May be repeated.", (), metavar="NAME"
    )
    freeze: tuple[str, ...] = option("Freeze an initializer. May be repeated.", (), metavar="NAME")
    tie: tuple[str, ...] = option(
        "Keep an initializer one parameter, although several modules read it; or make OTHER, an"
        " initializer of equal values, the same parameter. May be repeated.",
        (), metavar="NAME[=OTHER]",
    )  # fmt: skip
    untie: tuple[str, ...] = option(
        "Give each module that reads an initializer a parameter of its own. May be repeated.",
        (), metavar="NAME",
    )  # fmt: skip
    batch_norm: str | None = option(
        "Whether BatchNormalization uses the statistics of the microbatch (training) or its running"
        " statistics (frozen).",
        choices=("training", "frozen"), shown="as in the file",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossOptions(Options):
    """The outputs that have a loss, and its function.

    A function or dimension holds for all outputs, or for each output by its name.
    """

    output: tuple[str, ...] = option(
        "Output of the model that has a loss. May be repeated.", (), metavar="NAME",
        shown="the loss that the model computes, or its first output of floats",
    )  # fmt: skip
    loss: str | Mapping[str, str] | None = option(
        "Loss: auto, cross-entropy, nll, mse, l1, smooth-l1, huber, bce, own (the output is the"
        " loss), or your module:function (output, target) -> scalar tensor. May be repeated for"
        " several outputs.",
        metavar="[OUTPUT=]LOSS", shown="auto",
    )  # fmt: skip
    class_dim: int | Mapping[str, int] | None = option(
        "Dimension of the output that the classes lie on.",
        metavar="[OUTPUT=]N", shown="1; of rank 3, 2",
    )  # fmt: skip

    @classmethod
    def of(cls, choices: Sequence[LossChoice]) -> "LossOptions":
        """The options that give these choices."""
        return cls(
            output=tuple(one.output for one in choices),
            loss={one.output: one.function for one in choices},
            class_dim={one.output: one.class_dim for one in choices if one.class_dim is not None},
        )
