"""The user's own stages, as options."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Manual:
    """The user's own stages.

    Attributes:
        cuts: the last operators of all stages but the last.
        replicas: devices of each stage; empty for one each.
    """

    cuts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Your own stages: the last operators of all but the last stage. The solver"
            " manual is asked too then.",
            "metavar": "NAME,NAME",
        },
    )
    replicas: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "Devices of each of your own stages.  [default: 1 each]",
            "metavar": "N,N",
        },
    )
