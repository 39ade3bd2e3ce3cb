"""The options that several functions of the library and several commands share, in the words of the
command line. Options of one function only are its keyword arguments.

Sizes are bytes, or text with a unit such as "8 GiB". Choices are given by their names; an unknown
one is an `OptionError` that lists the known ones, raised where the options are used.
"""

from dataclasses import dataclass

from planner.support.errors import OptionError


def _is_whole(value: object) -> bool:
    """Whether a value is a whole number, which True is not meant as."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Training:
    """How the model is trained.

    Attributes:
        microbatches: M, microbatches of the profile's largest size per iteration; None gives 4 per
            device.
        global_batch: samples per iteration, instead of `microbatches`.
        microbatch_size: samples in a microbatch, as profiled or between two profiled sizes; None
            leaves the choice to `solve`, and takes the largest elsewhere.
        schedule: "1f1b", "gpipe" or "pipedream", which is asynchronous.
        vertical_sync: whether a minibatch meets equally old parameters in all stages; of the
            schedule pipedream only.
        optimizer: "sgd", "momentum", "adam" or "adamw".
        objective: the figure to minimise: "iteration", "bottleneck" or "latency".
        recompute: whether forward passes run twice instead of stashing: "auto", "none" or "full".
        device_memory: memory of each device, instead of the topology's; None keeps that.
        reserve: memory of each device that plans leave free.
    """

    microbatches: int | None = None
    global_batch: int | None = None
    microbatch_size: int | None = None
    schedule: str = "1f1b"
    optimizer: str = "sgd"
    objective: str = "iteration"
    recompute: str = "auto"
    device_memory: int | str | None = None
    reserve: int | str = "1 GiB"
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        """Raises an OptionError where a number is out of range."""
        for name in ("microbatches", "global_batch", "microbatch_size"):
            count = getattr(self, name)
            if count is not None and (not _is_whole(count) or count < 1):
                raise OptionError(f"{name}: expected a positive whole number, got {count!r}")
        for name in ("device_memory", "reserve"):
            size = getattr(self, name)
            text = isinstance(size, str) or (size is None and name == "device_memory")
            if not text and (not _is_whole(size) or size < 0):
                raise OptionError(f"{name}: expected a number of bytes, got {size!r}")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes of a cluster. Hosts are added first, then figures are set, then devices are dropped.

    Attributes:
        set: figures such as "links.nic.bandwidth=200Gbps" or "devices.gpu3.type=T4".
        drop: devices and hosts to leave out, by name.
        add_host: hosts of the topology to have once more, or topologies whose hosts join.
    """

    set: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    add_host: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """How strategies are searched for.

    Attributes:
        max_downsets: operators are merged until the graph has at most this many downsets; None
            leaves the number to the solver.
        exact: whether no operators are merged, however long the search takes.
        seed: of everything that is drawn at random.
        pins: operators that have to be on a device: pairs of their names.
        switches: solvers' own options, such as `planner.solvers.netsplit.options.NetSplit`.
    """

    max_downsets: int | None = None
    exact: bool = False
    seed: int = 0
    pins: tuple[tuple[str, str], ...] = ()
    switches: tuple[object, ...] = ()
