"""`Measuring`: how the costs of operators are found."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from planner.support.options import Options, option
from planner.support.units import parse_seconds


class ProfileEngine(StrEnum):
    """The origin of a profile's times."""

    TORCH = "torch"
    ONNXRUNTIME = "onnxruntime"
    ANALYTIC = "analytic"


@dataclass(frozen=True, slots=True)
class Measuring(Options):
    """How to measure. The analytic engine takes only device, types of numbers, and how a step runs
    (compiled, fused_loss, launch_blocking) from it.
    """

    device: str = option(
        "Device to measure here (cpu, cuda or cuda:N), or a type of device to compute times for,"
        " such as V100-SXM2-16GB.",
        "cpu", metavar="DEVICE",
    )  # fmt: skip
    engine: ProfileEngine | None = option(
        "Source of the times.", shown="torch; analytic for a type of device"
    )
    dtype: str | None = option(
        "Type of the computation, where autocast changes it.",
        choices=("float32", "bfloat16", "float16"), shown="the model's",
    )  # fmt: skip
    parameters: str | None = option(
        "Type of the trained parameters. bfloat16 needs --dtype bfloat16; the optimizer then steps"
        " float32 copies of them.",
        choices=("float32", "bfloat16"), shown="the model's",
    )  # fmt: skip
    gradients: str | None = option(
        "Type in which gradients of bfloat16 parameters are added up, over microbatches and"
        " devices.",
        choices=("float32", "bfloat16"), shown="the parameters'",
    )  # fmt: skip
    compiled: bool = option(
        "Compute the times of a step that torch.compile has compiled: elementwise work is done"
        " where its input is made, a loss is one kernel, and launches take no time.",
        False,
    )
    fused_loss: bool = option(
        "Compute the costs of a fused loss, such as flash-attn's cross-entropy: one kernel each"
        " way, without float32 copies of the output.",
        False,
    )
    launch_blocking: bool = option(
        "Compute the times of a run with CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel, so"
        " the times of both add up, and collectives run alone.",
        False,
    )
    threads: int = option(
        "CPU threads. One is the usual number, because torchrun gives each rank one.", 1, least=1
    )
    repetitions: int | None = option(
        "Minimum number of timed runs per operator.", least=1, shown="3; onnxruntime: 10"
    )
    budget_s: float = option(
        "Longest time for the runs of one operator. The runs end when its time is known to 3 %.",
        1.0, flag="--budget", parse=partial(parse_seconds, example="3 s"),
        words='a time such as "3 s"', least=0,
        metavar="TIME", shown="1s",
    )  # fmt: skip
    cache: bool = option("Reuse measurements made on this machine, and store new ones.", True)
    contention: bool = option(
        "Measure how much processes on this CPU slow each other, which takes some 12 s once per"
        " machine.",
        True,
    )
    seed: int = option("Seed of the synthetic inputs.", 0)
