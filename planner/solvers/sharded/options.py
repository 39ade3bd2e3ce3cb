"""The options of the planners that split operators; apart, because the registry reads them."""

from dataclasses import dataclass, field


def _option(text: str, metavar: str = "N") -> int | None:
    made: int | None = field(default=None, metadata={"help": text, "metavar": metavar})
    return made


@dataclass(frozen=True, slots=True)
class Megatron:
    """Degrees of `megatron`; what is not given is searched.

    Raises:
        ValueError: if a degree is below 1.
    """

    tensor_degree: int | None = _option("Devices that operators are split over, in megatron plans.")
    data_degree: int | None = _option("Copies of the model in megatron plans.")
    pipeline_degree: int | None = _option("Stages of megatron plans.")
    sequence_parallel: bool | None = field(
        default=None,
        metadata={
            "help": "Split what lies between products along the sequence in megatron plans, or do"
            " not.  [default: both are tried]"
        },
    )

    def __post_init__(self) -> None:
        for name in ("tensor_degree", "data_degree", "pipeline_degree"):
            degree = getattr(self, name)
            if degree is not None and degree < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: expected at least 1, got {degree}")


@dataclass(frozen=True, slots=True)
class Zero:
    """What `zero` splits over the devices: the optimizer's state (1), gradients too (2), parameters
    too (3).

    Raises:
        ValueError: if it is another number.
    """

    zero_stage: int = field(
        default=3,
        metadata={
            "help": "Split over devices by zero: optimizer state (1), gradients too (2),"
            " parameters too (3).",
            "metavar": "1|2|3",
        },
    )

    def __post_init__(self) -> None:
        if self.zero_stage not in (1, 2, 3):
            raise ValueError(f"--zero-stage: expected 1, 2 or 3, got {self.zero_stage}")
