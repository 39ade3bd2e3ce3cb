"""The options of NetSplit and of Pesto."""

from dataclasses import dataclass, field

from planner.solvers.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class NetSplit:
    """What NetSplit's constraint model says, and who solves it.

    Attributes:
        relaxed: whether it is the published one, in which a device runs any number of operators at
            once and a link carries any number of transfers.
        engine: None leaves it to the solver.
        contiguous: whether the smallest bottleneck is looked for among contiguous stages only.
        gap: (latency - bound) / bound at which the search for the least latency may end; the
            command line has no option for it.
    """

    relaxed: bool = field(
        default=False,
        metadata={
            "help": "NetSplit: solve the model as published, in which a device runs any number of"
            " operators at once."
        },
    )
    engine: Engine | None = field(
        default=None,
        metadata={
            "help": "NetSplit: engine that solves the model.  [default: cp-sat; highs for the"
            " bottleneck]"
        },
    )
    contiguous: bool = field(
        default=True,
        metadata={
            "help": "NetSplit and --cost-model dnn-partitioning: look for the smallest bottleneck"
            " among stages that follow each other."
        },
    )
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Pesto:
    """Which of Pesto's programs is solved.

    Attributes:
        pesto_printed: whether it is the one that NetSplit prints, in which a device runs any number
            of operators at once, a link carries any number of transfers, and memory is no limit.
    """

    pesto_printed: bool = field(
        default=False,
        metadata={
            "help": "Pesto: solve the program as NetSplit prints it, without congestion and memory."
        },
    )
