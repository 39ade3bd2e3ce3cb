"""The options of the planners that split operators; apart, because the registry reads them."""

from dataclasses import dataclass

from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class Megatron(Options):
    """Degrees of `megatron`; a degree that is not given is searched."""

    tensor_degree: int | None = option(
        "megatron: number of devices that operators are split over.", least=1, metavar="N"
    )
    data_degree: int | None = option(
        "megatron: number of copies of the model.", least=1, metavar="N"
    )
    pipeline_degree: int | None = option("megatron: number of stages.", least=1, metavar="N")
    sequence_parallel: bool | None = option(
        "megatron: split the operators between products along the sequence, or do not.",
        shown="both are tried",
    )
    even_layers: bool | None = option(
        "megatron: give each stage as many layers of the network as any other, as Megatron-LM does,"
        " instead of as much time.",
        shown="as much time",
    )  # fmt: skip
    over_replicas: int | None = option(
        "megatron: split over the copies the optimizer's state (1), gradients too (2), parameters"
        " too (3), or nothing (0).",
        least=0, most=3, metavar="0|1|2|3", shown="0, or 1 where that does not fit",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zero(Options):
    """What `zero` splits over the devices."""

    zero_stage: int = option(
        "zero: split samples alone (0), the optimizer's state (1), gradients too (2), parameters"
        " too (3).", 3, least=0, most=3, metavar="0|1|2|3",
    )  # fmt: skip
