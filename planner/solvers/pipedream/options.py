"""PipeDream's own options."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PipeDream:
    """What PipeDream's optimizer may do, and what it counts.

    Attributes:
        straight_pipeline: whether no stage is replicated.
        memory_constraint: whether the activations and parameters that it stashes, by its own count,
            are limited: to `Options.device_memory_bytes`, 16 GB where that is not given.
        fewer_machines: whether machines may be left out where that is faster.
        activation_compression: by how much activations are compressed before they are sent, 1 for
            not at all; None leaves transfers out.

    Raises:
        ValueError: if the compression is not above 0.
    """

    straight_pipeline: bool = field(
        default=False, metadata={"help": "PipeDream: replicate no stage."}
    )
    memory_constraint: bool = field(
        default=False,
        metadata={"help": "PipeDream: limit its stash to --device-memory.  [16 GB without it]"},
    )
    fewer_machines: bool = field(
        default=False, metadata={"help": "PipeDream: leave machines out where that is faster."}
    )
    activation_compression: float | None = field(
        default=None,
        metadata={
            "help": "PipeDream: count transfers, with activations compressed R times; 1 for not"
            " at all.",
            "metavar": "R",
        },
    )

    def __post_init__(self) -> None:
        ratio = self.activation_compression
        if ratio is not None and not 0 < ratio < float("inf"):
            raise ValueError(f"expected a number above 0 such as 2, got {ratio}")
