"""The options of NetSplit and of Pesto."""

from dataclasses import dataclass

from planner.solvers.engines.engine import Engine
from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class NetSplit(Options):
    """NetSplit's constraint model, and the engine that solves it.

    Attributes:
        gap: (latency - bound) / bound at which the search for the least latency may end; the
            command line has no option for it.
    """

    relaxed: bool = option(
        "netsplit: solve the model as published, in which a device runs any number of operators at"
        " once and a link carries any number of transfers.",
        False,
    )
    engine: Engine | None = option(
        "netsplit: engine that solves the model.", shown="cp-sat; highs for the bottleneck"
    )
    contiguous: bool = option(
        "netsplit and --cost-model dnn-partitioning: search for the smallest bottleneck among"
        " contiguous stages only.",
        True,
    )
    gap: float = option("", 0.0, least=0)


@dataclass(frozen=True, slots=True)
class Pesto(Options):
    """The program that `pesto` solves."""

    pesto_printed: bool = option(
        "pesto: solve the program as NetSplit's paper prints it, without congestion and memory.",
        False,
    )
