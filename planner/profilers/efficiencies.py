"""Kinds of kernels, and the share of a device's peaks that each kind reaches, with its source.

Sources:
    measured      by the one named, on the device named
    fitted        to measured times; place, time and machine are given
    from memory   not checked against a source; do so before you rely on it

Peaks are those of the device table (topologies/devices.yaml): FLOP/s of a dtype, and bytes per s
of memory. A share may be above 1, where an algorithm needs fewer operations than are counted, or
where the table's figure is itself a measured one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.artefacts.growth import Rates, Work
from planner.artefacts.roofline import EMPTY_KERNEL_S
from planner.artefacts.topology import DeviceType


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The speeds that kernels of one kind reach.

    Attributes:
        compute: FLOP/s over the device's peak.
        memory: bytes per s over the device's memory bandwidth.
        source: origin of the two figures.
    """

    compute: float
    memory: float
    source: str


@dataclass(frozen=True, slots=True)
class DeviceFamily:
    """Devices on which kernels reach the same shares of the peaks.

    Attributes:
        launch_s: time of a kernel that does nothing.
        launch_source: origin of that figure.
        efficiencies: the shares, by kind of kernel.
    """

    launch_s: float
    launch_source: str
    efficiencies: Mapping[Work, Efficiency]


_VECTOR = "compute: from memory, some 20 instructions per element, which seldom bounds; "
_PIPEDREAM = "profiles published with PipeDream (float32, V100 by the paper), "
_LAUNCH = "from memory: what CUDA and torch need to start a kernel while the device is idle"

_STREAMING: Mapping[Work, Efficiency] = {
    Work.ELEMENTWISE: Efficiency(0.05, 0.8, _VECTOR + "memory: measured, " + _PIPEDREAM
        + "Relu of VGG-16 at batch 128: 740 of 900 GB/s where largest, 650 where half of that"),
    Work.UPDATE: Efficiency(0.05, 0.8, "taken as elementwise"),
    Work.TRANSCENDENTAL: Efficiency(0.05, 0.8, "taken as elementwise"),
    Work.COPY: Efficiency(0.05, 0.9, "memory: measured on an H200, 4.3 of 4.8 TB/s; " + _VECTOR),
    Work.REDUCTION: Efficiency(0.05, 0.8, "from memory: nearly as elementwise"),
    Work.NORMALIZATION: Efficiency(0.05, 0.7, "from memory: what is read twice is in a cache"),
    Work.MEAN_POOLING: Efficiency(0.05, 0.7, "taken as pooling of maxima"),
    Work.MAX_POOLING: Efficiency(0.05, 0.7, _VECTOR + "memory: measured, " + _PIPEDREAM
        + "largest MaxPool of VGG-16 at batch 128: 0.84 forward, 0.57 backward"),
    Work.GATHER: Efficiency(0.05, 0.5, "from memory: rows of a table, in any order"),
}  # fmt: skip

SINGLE = DeviceFamily(
    launch_s=EMPTY_KERNEL_S,
    launch_source=_LAUNCH,
    efficiencies={
        **_STREAMING,
        Work.PRODUCT: Efficiency(0.68, 0.8, "compute: measured, " + _PIPEDREAM + "largest Linear of"
            " VGG-16 at batch 128: 10.6 of 15.7 TFLOP/s; memory: as elementwise"),
        Work.CONVOLUTION: Efficiency(0.67, 0.8, "compute: measured, " + _PIPEDREAM + "windows of 1"
            " in ResNeXt-50: 10.5 of 15.7 TFLOP/s both ways; memory: as elementwise"),
        Work.SMALL_WINDOW: Efficiency(1.3, 0.8, "compute: measured, " + _PIPEDREAM + "windows of 3"
            " in VGG-16 and ResNet-18: 19 to 22 of 15.7 TFLOP/s both ways, by Winograd's"
            " algorithm; memory: as elementwise"),
        Work.FEW_CHANNELS: Efficiency(0.1, 0.8, "compute: measured, " + _PIPEDREAM
            + "32 groups in ResNeXt-50: 2.0 forward, 1.3 backward of 15.7 TFLOP/s, and the first"
            " convolutions of five models: 1.0 to 3.0 forward; memory: as elementwise"),
        Work.ATTENTION: Efficiency(0.5, 0.8, "from memory"),
    },
)  # fmt: skip
"""GPUs in single and double precision, without tensor cores."""

HALF = DeviceFamily(
    launch_s=EMPTY_KERNEL_S,
    launch_source=_LAUNCH,
    efficiencies={
        **_STREAMING,
        Work.PRODUCT: Efficiency(0.79, 0.9, "compute: measured on an H200, an 8192-cubed bfloat16"
            " product: 770 to 798 of 989 TFLOP/s; memory: as copy"),
        Work.CONVOLUTION: Efficiency(0.5, 0.8, "from memory"),
        Work.SMALL_WINDOW: Efficiency(0.5, 0.8, "from memory: tensor cores multiply directly"),
        Work.FEW_CHANNELS: Efficiency(0.02, 0.8, "from memory: too few channels per group"
            " for tensor cores, so about twice the speed in single precision"),
        Work.ATTENTION: Efficiency(0.5, 0.8, "from memory: fused kernels reach 0.4 to 0.7"),
    },
)  # fmt: skip
"""GPUs in half precision, on tensor cores."""

_FITTED = (
    "fitted in 2026-11 to 11 models (9 convolutional ones, GPT-2, BERT; batch 2) measured on one"
    " core of a virtual machine with 2 cores (x86-64, AMD EPYC), torch 2.13, one thread, other work"
    " beside it, the least of 8 repetitions: least absolute deviation of log times, with peaks of"
    " 100 GFLOP/s and 18 GB/s"
)

CPU = DeviceFamily(
    launch_s=EMPTY_KERNEL_S,
    launch_source="measured there: median of 897 views forward, which compute nothing, 4.7 us",
    efficiencies={
        Work.PRODUCT: Efficiency(1.3, 0.66, _FITTED),
        Work.CONVOLUTION: Efficiency(1.05, 0.2, _FITTED),
        Work.SMALL_WINDOW: Efficiency(1.25, 0.05, _FITTED),
        Work.FEW_CHANNELS: Efficiency(0.92, 0.19, _FITTED),
        Work.ATTENTION: Efficiency(0.8, 0.5, "from memory"),
        Work.ELEMENTWISE: Efficiency(1.0, 0.77, _FITTED),
        Work.UPDATE: Efficiency(1.0, 0.79, _FITTED),
        Work.TRANSCENDENTAL: Efficiency(1.0, 0.35, _FITTED),
        Work.COPY: Efficiency(1.0, 0.83, _FITTED),
        Work.REDUCTION: Efficiency(1.0, 0.83, _FITTED),
        Work.NORMALIZATION: Efficiency(1.0, 0.72, _FITTED),
        Work.MAX_POOLING: Efficiency(0.003, 0.41, _FITTED),
        Work.MEAN_POOLING: Efficiency(0.01, 0.5, _FITTED),
        Work.GATHER: Efficiency(1.0, 0.26, _FITTED),
    },
)
"""One core of a CPU. Streaming kernels are bound by memory alone (compute 1.0). The memory shares
of convolutions are low because they move more bytes than those of their inputs and outputs."""


def device_family(kind: DeviceType, dtype: str) -> DeviceFamily:
    """The family of a device type that works in a dtype. A device that is no CPU counts as a GPU; a
    GPU without a speed of its own for half precision counts as one without tensor cores.
    """
    if kind.name == "cpu":
        return CPU
    return HALF if dtype in ("float16", "bfloat16") and dtype in kind.flops else SINGLE


def rates_of(kind: DeviceType, dtype: str) -> Rates:
    """The speeds that kernels reach on a device type that works in a dtype."""
    return family_rates(
        device_family(kind, dtype), kind.peak_flops(dtype), kind.memory_bandwidth_bytes_per_s
    )


def family_rates(
    family: DeviceFamily, peak_flops: float, bandwidth_bytes_per_s: float
) -> Rates:  # fmt: skip
    """The speeds that kernels reach on a device of a family with these peaks."""
    shares = family.efficiencies.items()
    return Rates(
        family.launch_s,
        {work: share.compute * peak_flops for work, share in shares},
        {work: share.memory * bandwidth_bytes_per_s for work, share in shares},
    )
