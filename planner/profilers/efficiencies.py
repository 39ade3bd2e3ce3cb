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
from dataclasses import dataclass, replace

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
        host_forward_s, host_backward_s: as of `Rates`.
        host_source: origin of these two.
    """

    launch_s: float
    launch_source: str
    efficiencies: Mapping[Work, Efficiency]
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    host_source: str = "the host is the device"


_VECTOR = "compute: from memory, some 20 instructions per element, which seldom bounds; "
_PIPEDREAM = "profiles published with PipeDream (float32, V100 by the paper), "
_LAUNCH = "from memory: what passes between two kernels of a stream"
_HOST_S = 11e-6, 18e-6
_HOST = (
    "measured 2026-11-27 on the host of an H100-SXM (16 cores of a virtual machine, PyTorch 2.11,"
    " with autograd): forward 10.6 to 11.3 us for an addition, a product of elements and a gelu;"
    " backward 17.2 to 19.5 us a kernel for a product of elements, a softmax and a gelu"
)

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

_ALL_PRODUCTS = Work.PRODUCT, Work.BATCHED_PRODUCT, Work.UNALIGNED_PRODUCT

SINGLE = DeviceFamily(
    launch_s=2e-6,
    launch_source=_LAUNCH,
    host_forward_s=_HOST_S[0],
    host_backward_s=_HOST_S[1],
    host_source=_HOST,
    efficiencies={
        **_STREAMING,
        **dict.fromkeys(_ALL_PRODUCTS, Efficiency(0.68, 0.8, "compute: measured, " + _PIPEDREAM
            + "largest Linear of VGG-16 at batch 128: 10.6 of 15.7 TFLOP/s; memory: as"
            " elementwise")),
        Work.CONVOLUTION: Efficiency(0.67, 0.8, "compute: measured, " + _PIPEDREAM + "windows of 1"
            " in ResNeXt-50: 10.5 of 15.7 TFLOP/s both ways; memory: as elementwise"),
        Work.SMALL_WINDOW: Efficiency(1.3, 0.8, "compute: measured, " + _PIPEDREAM + "windows of 3"
            " in VGG-16 and ResNet-18: 19 to 22 of 15.7 TFLOP/s both ways, by Winograd's"
            " algorithm; memory: as elementwise"),
        Work.FEW_CHANNELS: Efficiency(0.1, 0.8, "compute: measured, " + _PIPEDREAM
            + "32 groups in ResNeXt-50: 2.0 forward, 1.3 backward of 15.7 TFLOP/s, and the first"
            " convolutions of five models: 1.0 to 3.0 forward; memory: as elementwise"),
        Work.ATTENTION: Efficiency(0.5, 0.8, "from memory"),
        Work.CAUSAL_ATTENTION: Efficiency(1.0, 0.8, "twice attention's: half is skipped"),
        Work.CAUSAL_ATTENTION_BACKWARD: Efficiency(1.0, 0.8, "twice attention's: half is skipped"),
    },
)  # fmt: skip
"""GPUs in single and double precision, without tensor cores."""

_SIMUMAX = "measured by SimuMax (github.com/MooreThreads/SimuMax, configs/system/"
_SIMUMAX_A100 = f"{_SIMUMAX}a100_pcie.json) on an A100-PCIe, "
_SIMUMAX_B200 = f"{_SIMUMAX}b200_bf16_ceperm.json) on a B200, "
_COOKBOOK = "measured by EleutherAI (github.com/EleutherAI/cookbook, sizing/results/"
_SCORES = (
    f"memory: {_COOKBOOK}transformer_data/h_sweep.out) on an A100, 1.56 TB/s as of AWS p4d (from"
    " memory): 64 products of 2,048 tokens, one of three into scores, with heads of {}; compute: "
)


def _products(compute: float, source: str) -> Mapping[Work, Efficiency]:
    """Shares of products of matrices, by that of large ones, and its source."""
    whole, cut = "128: 0.75 into scores and 0.51 ms from them", "130 to 142: 1.0 and 0.82 ms"
    return {
        Work.PRODUCT: Efficiency(compute, 0.9, f"compute: {source}; memory: as copy"),
        Work.BATCHED_PRODUCT: Efficiency(
            compute, 0.66, f"{_SCORES.format(whole)}as product; heads of 496 are within 9 % of that"
        ),
        Work.UNALIGNED_PRODUCT: Efficiency(
            0.6 * compute, 0.44, f"{_SCORES.format(cut)}0.6 of products, heads of 490 to 510 there"
        ),
    }


_SKIPPED = "compute, of all products, of which a causal kernel skips half: "

HALF = DeviceFamily(
    launch_s=2e-6,
    launch_source=_LAUNCH,
    host_forward_s=_HOST_S[0],
    host_backward_s=_HOST_S[1],
    host_source=_HOST,
    efficiencies={
        **_STREAMING,
        **_products(0.79, "measured on an H200, an 8192-cubed bfloat16 product: 770 to 798 of 989"
            " TFLOP/s"),
        Work.CONVOLUTION: Efficiency(0.5, 0.8, "from memory"),
        Work.SMALL_WINDOW: Efficiency(0.5, 0.8, "from memory: tensor cores multiply directly"),
        Work.FEW_CHANNELS: Efficiency(0.02, 0.8, "from memory: too few channels per group"
            " for tensor cores, so about twice the speed in single precision"),
        Work.ATTENTION: Efficiency(0.5, 0.8, "from memory: fused kernels reach 0.4 to 0.7"),
        Work.CAUSAL_ATTENTION: Efficiency(0.96, 0.8, _SKIPPED + _SIMUMAX_A100
            + "mean of 12 shapes of 4,096 tokens, 0.51 to 1.19; memory: from memory"),
        Work.CAUSAL_ATTENTION_BACKWARD: Efficiency(0.84, 0.8, _SKIPPED + _SIMUMAX_A100
            + "mean of 12 shapes of 4,096 tokens, 0.67 to 1.01; memory: from memory"),
    },
)  # fmt: skip
"""GPUs in half precision, on tensor cores."""

_TABLE = "table of Maximum Achievable Matmul FLOPS, github.com/stas00/ml-engineering"
_BEST = (
    "the best product of many shapes ({}) times 0.875, the mean over the best shape on an"
    f" A100-PCIe: 0.71 (SimuMax, a100_pcie.json) of 0.811 ({_TABLE})"
)
_H100: Mapping[Work, Efficiency] = {
    **_products(0.7, _BEST.format(f"bfloat16, H100-SXM: 794 of 989 TFLOP/s, {_TABLE}")),
    Work.CAUSAL_ATTENTION: Efficiency(0.62, 0.8, _SKIPPED + "FlashAttention-3's paper, figure 5,"
        " H100-SXM5: FlashAttention-2, which torch runs, 298 to 319 of 989 TFLOP/s without what is"
        " skipped, at 2,048 and 4,096 tokens and a head of 128; memory: from memory"),
    Work.CAUSAL_ATTENTION_BACKWARD: Efficiency(0.54, 0.8, "forward's, by the A100's ratio of the"
        " two"),
}  # fmt: skip

OWN_SHARES: Mapping[str, Mapping[Work, Efficiency]] = {
    "V100": _products(0.63, _COOKBOOK + "gemm_data/mm/ksweep_high/v100.out): mean of 73 shapes in"
        " float16, 79.2 of 125 TFLOP/s"),
    "A100": _products(0.76, _BEST.format(f"bfloat16, A100-SXM: 271 of 312 TFLOP/s, {_TABLE}")),
    "H100": _H100,
    "H200": _H100,
    "B200": {
        **_products(0.49, _SIMUMAX_B200 + "mean of all shapes"),
        Work.CAUSAL_ATTENTION: Efficiency(0.71, 0.8, _SKIPPED + _SIMUMAX_B200
            + "mean of all shapes, 0.17 to 1.20; memory: from memory"),
        Work.CAUSAL_ATTENTION_BACKWARD: Efficiency(0.69, 0.8, _SKIPPED + _SIMUMAX_B200
            + "mean of all shapes, 0.34 to 0.95; memory: from memory"),
    },
}  # fmt: skip
"""Shares in half precision that differ from `HALF`'s, by the beginning of a device type's name."""

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
        **dict.fromkeys(_ALL_PRODUCTS, Efficiency(1.3, 0.66, _FITTED)),
        Work.CONVOLUTION: Efficiency(1.05, 0.2, _FITTED),
        Work.SMALL_WINDOW: Efficiency(1.25, 0.05, _FITTED),
        Work.FEW_CHANNELS: Efficiency(0.92, 0.19, _FITTED),
        Work.ATTENTION: Efficiency(0.8, 0.5, "from memory"),
        Work.CAUSAL_ATTENTION: Efficiency(1.6, 0.5, "twice attention's: half is skipped"),
        Work.CAUSAL_ATTENTION_BACKWARD: Efficiency(1.6, 0.5, "twice attention's: half is skipped"),
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
    if dtype not in ("float16", "bfloat16") or dtype not in kind.flops:
        return SINGLE
    own = [shares for name, shares in OWN_SHARES.items() if kind.name.startswith(name)]
    return replace(HALF, efficiencies={**HALF.efficiencies, **own[0]}) if own else HALF


def rates_of(kind: DeviceType, dtype: str, *, compiled: bool = False) -> Rates:
    """The speeds that kernels reach on a device type that works in a dtype.

    Args:
        compiled: whether a compiled step starts them, so that launches take no time.
    """
    family = device_family(kind, dtype)
    if compiled:
        family = replace(family, launch_s=0.0, host_forward_s=0.0, host_backward_s=0.0)
    return family_rates(family, kind.peak_flops(dtype), kind.memory_bandwidth_bytes_per_s)


def family_rates(
    family: DeviceFamily, peak_flops: float, bandwidth_bytes_per_s: float
) -> Rates:  # fmt: skip
    """The speeds that kernels reach on a device of a family with these peaks."""
    shares = family.efficiencies.items()
    return Rates(
        family.launch_s,
        {work: share.compute * peak_flops for work, share in shares},
        {work: share.memory * bandwidth_bytes_per_s for work, share in shares},
        family.host_forward_s,
        family.host_backward_s,
    )
