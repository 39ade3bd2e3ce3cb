"""PipeDream's own options."""

from dataclasses import dataclass

from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class PipeDream(Options):
    """The plans of PipeDream's optimizer, and the costs that it counts.

    The stash is PipeDream's own count of activations and parameters.
    """

    straight_pipeline: bool = option("pipedream: replicate no stage.", False)
    memory_constraint: bool = option(
        "pipedream: limit the stash to --device-memory, or to 16 GB without it.", False
    )
    fewer_machines: bool = option("pipedream: leave machines out where that is faster.", False)
    activation_compression: float | None = option(
        "pipedream: count transfers of activations, which are compressed R times (1: not at all).",
        above=0, metavar="R", shown="transfers are not counted",
    )  # fmt: skip
