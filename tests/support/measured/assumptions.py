"""What the rows do not say, or the planner cannot express: one list for all rows.

- GPT has learned positions, also where a row had others. Products have no biases. GPT and BERT
  have one table for tokens and logits, Llama has two. BERT has logits of 15 % of its tokens, and
  its loss of the next sentence is left out.
- Attention is one kernel that makes no scores, but in the runs of `UNFUSED`, which are older than
  such kernels in their systems: there two products and a softmax read and write the scores of all
  pairs of tokens, with scale and mask inside of other kernels; but in those of `MASKED` kernels of
  their own, in float32, where matrices of scores are no multiple of `TOGETHER`.
- Elements of hidden states and of attention are dropped out in the runs of `DROPPED`. A LeakyRelu,
  which moves about as many bytes, stands for each Dropout, because that cannot be split.
- GPT and Llama have parameters, activations and gradients in the row's type, and float32 copies of
  the parameters in the optimizer, as Megatron-LM, DeepSpeed and FSDP's mixed precision have them;
  gradients are added up in float32 in the runs of `FLOAT32_GRADIENTS`. BERT, ResNet-50 and the runs
  of `AUTOCAST` have float32 parameters and autocast.
- Adam, also for LAMB; momentum for ResNet-50.
- Operators are split along the sequence, too, between the products of a tensor degree, in the runs
  of `SEQUENCE_PARALLEL`.
- vTrain's and Megatron-LM's runs recompute every layer (`rows`), as their paper has it.
- Full recomputation is of every layer, and so is that of selected blocks, for which share of them
  was not published. Selective recomputation is of the scores of attention; per operator, as in
  torchtitan, of all but attention and the product of the gate (`recomputed`).
- ZeRO-1 and the distributed optimizer keep optimizer state in parts over all copies, FSDP
  parameters and gradients, too, HSDP those over the copies of a host.
- The schedule is 1F1B with its usual depths. Stages have the same number of layers, as Megatron-LM
  and DeepSpeed deal them, the embedding and the logits at the ends; these count as a layer each
  where layers alone cannot be dealt evenly. Each device of a tensor degree sends a part of what
  crosses stages, where that is faster.
- All-reduces of a tensor degree run beside products, but not in the runs of `IN_LINE`, whose
  Megatron-LM is of before 2022.
- Hosts: NVLink and its all-reduces as in the shipped topologies (`HOSTS`), at a part of their
  bandwidth where hosts have that part of the links (`NVLINKS`). Between hosts each device has the
  bandwidth of the row, or of `RATES` (Jean Zay's A100 50 Gbps, Selene 200 Gbps, H100 and GH200 as
  the file says), and 5 us; an all-reduce over whole hosts uses `WHOLE_HOSTS` of all cards.
- Steps are compiled where the rows say so, and else eager. Losses are fused in the runs of
  `FUSED_LOSSES`, and the host waits for each kernel in those of `LAUNCH_BLOCKING`.
- The host of Megatron-LM starts kernels in `HOST` of the times that computed profiles have.
- Devices have the memory that CUDA reports of them (`REPORTED`), 5 to 6 % more than the data
  sheet's figure, which plans are made for.
- Cards of `CARDS` have memory, bandwidth and power of their own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.artefacts.calibration import Calibration
from planner.artefacts.options import Optimizer, Recompute
from tests.support.measured.networks import Kind, Network
from tests.support.measured.rows import Row

UNFUSED = frozenset({
    "vtrain-single", "vtrain-multi", "megatron-lm", "bloom", "bigscience-1.3B", "bigscience-V100",
    "mt-nlg", "korthikanti", "nemo-launcher", "gpt-neox", "sailor-gh200",
})  # fmt: skip
"""Sources that ran Megatron-LM, or a system made from it, of before 2023: flash attention is an
option there since January 2023, and part of its kernels for training (Transformer Engine's) since
later that year. NeMo's row with selective recomputation of attention had none, either. Sailor's
models are written with two products and a softmax (github.com/eth-easl/sailor, class
GPTNeoParallelAttention of its Megatron-DeepSpeed).
"""
DROPPED = UNFUSED - {"gpt-neox", "sailor-gh200"}
"""Megatron-LM's default; GPT-NeoX's configuration has none (arXiv 2204.06745), and Sailor's models
drop out no shares of attention.
"""

MASKED, TOGETHER = UNFUSED - {"sailor-gh200"}, 4
"""Sources whose kernel for scale, mask and softmax takes so many matrices of scores at a time, and
else leaves them to PyTorch's kernels, in float32 (Megatron-LM, class FusedScaleMaskSoftmax, and its
argument `attention_softmax_in_fp32`, which is on by default).
"""

FLOAT32_GRADIENTS = frozenset({"mt-nlg", "nemo-launcher", "megatron-core-h100", "simumax-b200"})
"""Megatron-LM trains in bfloat16 so, and its arguments say it."""

IN_LINE = frozenset({"megatron-lm", "bloom", "bigscience-1.3B", "bigscience-V100", "mt-nlg",
                     "gpt-neox"})  # fmt: skip
"""Asynchronous all-reduces of the gradients of inputs came into Megatron-LM in January 2022."""

AUTOCAST = frozenset({"llm-foundry"})
"""Its table says so: precision amp_bf16, and Composer's mixed precision DEFAULT, which gathers
float32 parameters (github.com/mosaicml/llm-foundry, training benchmarks).
"""

OPTIMIZERS: Mapping[Kind, Optimizer] = {Kind.RESNET50: Optimizer.MOMENTUM}
"""All others are trained by Adam."""

SEQUENCE_PARALLEL = frozenset({"nemo-launcher", "megatron-core-h100", "torchtitan", "simumax-b200"})
"""Sources whose systems split along the sequence where they have a tensor degree."""

RECOMPUTE: Mapping[str, Recompute] = {
    "none": Recompute.NONE,
    "full": Recompute.FULL,
    "selective": Recompute.NONE,
    "selective per operator": Recompute.NONE,
    "selective blocks": Recompute.FULL,
}

LEVELS: Mapping[str, int] = {
    "": 0,
    "ZeRO-1": 1,
    "distributed optimizer": 1,
    "FSDP": 3,
    "HSDP": 3,
}
"""`Stage.zero`, by the words of the rows."""

SHARING: Mapping[str, str] = {"nemo-launcher": "distributed optimizer"}
"""Of rows that do not say it: NeMo's configurations have distributed_fused_adam (from memory)."""

HOSTS: Mapping[tuple[str, int], str] = {
    ("V100-SXM2-16GB", 4): "p3-8xlarge",
    ("V100-SXM2-32GB", 4): "p3-8xlarge",
    ("V100-SXM2-16GB", 8): "p3",
    ("V100-SXM2-32GB", 8): "p3dn",
    ("A100-SXM4-40GB", 8): "p4d",
    ("A100-SXM4-80GB", 8): "dgx-a100",
    ("H100-SXM", 4): "dgx-h100",
    ("H100-SXM", 8): "dgx-h100",
    ("B200", 8): "gb200-nvl72",
}
"""By type and number of the devices, a topology whose first devices make a host."""

REPORTED: Mapping[str, int] = {
    "A100-SXM4-40GB": 40_514 * 2**20,
    "A100-SXM4-80GB": 81_158 * 2**20,
    "H100-SXM": 81_106 * 2**20,
}
"""Memory in bytes: deviceQuery of the two with 80 GB (github.com/thamada/nvidia-smi, nvsim), and
PyTorch's total_memory of an A100-SXM4-40GB, as Ultralytics prints it in many public logs.
"""

NVLINKS: Mapping[str, float] = {"bloom": 4 / 12}
"""Of the links that the preset's GPUs have, those of a source: BLOOM's model card has 8 GPUs per
node "using NVLink 4 inter-gpu connects", and an A100 may have 12.
"""

FUSED_LOSSES = frozenset({"llm-foundry", "tinyllama"})
"""Sources whose code has flash-attn's cross-entropy: `loss_fn: fused_crossentropy` is llm-foundry's
default, and TinyLlama's README names a fused cross-entropy among its kernels.
"""
LAUNCH_BLOCKING = frozenset({"bloom"})
"""CUDA_LAUNCH_BLOCKING=1 is in the script of BLOOM's training (tr11-176B-ml.slurm), because it hung
without. By its README that "makes a tiny impact or no impact at all to the throughput".
"""
HOST = 2.1
"""Megatron-LM's host over that of computed profiles, which is of PyTorch's own modules: Python,
states of random numbers, custom functions of autograd. Fitted to 24 of vTrain's runs that nobody is
judged by here, with each model left out in turn (`python -m tests.bench.truth_factors`).
"""

USUAL_RATE = "200 Gbps per GPU"
RATES: Mapping[str, str] = {"bigscience-1.3B": "measured 10.6 GB/s over hosts"}
"""Of rows without a rate: the usual one, or that of the same cluster in another source."""
WHOLE_HOSTS = 0.9
LINK_LATENCY = "2.5 us"


@dataclass(frozen=True)
class Card:
    """What cards of a source have that the device table does not.

    Attributes:
        memory_bytes: of a device.
        bandwidth_bytes_per_s: of its memory; None as in the table.
        speed: its FLOP/s, over the table's, with less power than that type has.
    """

    memory_bytes: int
    bandwidth_bytes_per_s: float | None = None
    speed: float = 1.0


CARDS: Mapping[str, Card] = {
    "torchtitan": Card(96 * 10**9, 2.4e12, speed=0.8),
    "sailor-gh200": Card(96 * 10**9),
}
"""Torchtitan's cards have 500 of 700 W; the public mean of products there is 0.56 of the peak, and
0.70 with all power (`profilers/efficiencies.py`).
"""


@dataclass(frozen=True)
class Ran:
    """How a step ran: the options of a computed profile, by their names."""

    compiled: bool = False
    fused_loss: bool = False
    launch_blocking: bool = False


EAGER = Ran()


def ran(row: Row) -> Ran:
    """How the steps of a row ran."""
    return Ran(row.compiled, row.source in FUSED_LOSSES, row.source in LAUNCH_BLOCKING)


def network(row: Row) -> Network:
    """The network of a row, as its system ran it."""
    assert row.network is not None
    if row.network.kind not in (Kind.GPT, Kind.LLAMA) or row.source in AUTOCAST:
        return row.network
    heads = row.network.heads // row.degrees[0]
    return replace(
        row.network,
        dtype=row.dtype,
        fused=row.source not in UNFUSED,
        dropped=row.source in DROPPED,
        masked=row.source in MASKED and heads * row.microbatch % TOGETHER > 0,
    )


def calibration(row: Row) -> Calibration:
    """What is known of the program that ran, beside a computed profile's times."""
    slow = HOST if row.source in UNFUSED - {"sailor-gh200"} else 1.0
    return Calibration(device_type=row.device, host=slow)


def level(row: Row) -> int:
    """What the copies of a row's stages keep in parts, as `Stage.zero`."""
    return LEVELS[row.sharing or SHARING.get(row.source, "")]


def optimizer(row: Row) -> Optimizer:
    """The optimizer that a row is predicted with."""
    assert row.network is not None
    return OPTIMIZERS.get(row.network.kind, Optimizer.ADAM)


def rate_bytes_per_s(row: Row) -> float:
    """The bandwidth of each device to other hosts.

    Raises:
        ValueError: if the words of the row are not known.
    """
    words = row.network_rate or RATES.get(row.source, USUAL_RATE)
    if one := re.fullmatch(r"(\d+) Gbps per GPU", words):
        return float(one[1]) * 1e9 / 8
    if one := re.fullmatch(r"(\d+) x (\d+) Gbps per host", words):
        return float(one[1]) * float(one[2]) * 1e9 / 8 / row.per_host
    if one := re.fullmatch(r"measured ([\d.]+) GB/s over hosts", words):
        return float(one[1]) * 1e9
    raise ValueError(f"{row.name}: expected a rate per GPU or host, got {words!r}")
