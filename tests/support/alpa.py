"""The networks of Alpa's evaluation (Zheng et al., OSDI 2022), by the number of GPUs: GPT, GShard's
mixture of experts, and wide residual networks; and how they were trained.

Sizes are those of the benchmarks in Alpa's repository: `paper_auto_gpt_suite` and its siblings for
figure 7, `exp_intra_ablation` for figure 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.artefacts.options import Optimizer, Recompute
from tests.support.measured.networks import Kind, Network


@dataclass(frozen=True)
class Family:
    """A family of networks, and how it is trained.

    Attributes:
        name: for tables.
        dtype: of the computation; parameters are float32.
        optimizer: by Alpa's benchmarks.
        recompute: whether forwards run twice: Alpa recomputes the layers of language models, and
            nothing of residual networks.
        batch: samples of an iteration of the ablation.
        weak_scaling: networks of figure 7, by the number of GPUs.
        ablation: networks of figure 8, by the number of GPUs.
    """

    name: str
    dtype: str
    optimizer: Optimizer
    recompute: Recompute
    batch: int
    weak_scaling: Mapping[int, Network]
    ablation: Mapping[int, Network]


def _gpt(layers: int, width: int, heads: int, vocabulary: int) -> Network:
    return Network(Kind.GPT, layers, width, heads, heads, 4 * width, vocabulary, 1024)


def _mixture(
    layers: int, width: int, heads: int, experts: int, *, vocabulary: int, group: int
) -> Network:
    """With feed-forward parts of eight times the width."""
    return Network(
        Kind.GPT, layers, width, heads, heads, 8 * width, vocabulary, 1024, experts, group
    )


def _resnet(channels: int, widening: int = 2, layers: int = 50) -> Network:
    return Network(Kind.WIDE_RESNET, layers, channels, widening=widening)


_FIGURE_7 = {"vocabulary": 32_000, "group": 2048}
_FIGURE_8 = {"vocabulary": 51_200, "group": 1024}

GPT = Family(
    name="GPT",
    dtype="float16",
    optimizer=Optimizer.ADAM,
    recompute=Recompute.FULL,
    batch=8,
    weak_scaling={
        1: _gpt(24, 1024, 16, 51_200),
        2: _gpt(24, 1536, 16, 51_200),
        4: _gpt(24, 2048, 32, 51_200),
        8: _gpt(32, 2560, 32, 51_200),
        16: _gpt(32, 4096, 32, 51_200),
        32: _gpt(48, 5120, 40, 51_200),
        64: _gpt(48, 8192, 64, 51_200),
    },
    ablation={
        1: _gpt(8, 2048, 16, 25_600),
        2: _gpt(8, 3072, 24, 25_600),
        4: _gpt(8, 4096, 32, 25_600),
        8: _gpt(8, 5760, 40, 25_600),
    },
)
MIXTURE = Family(
    name="mixture of experts",
    dtype="float16",
    optimizer=Optimizer.ADAM,
    recompute=Recompute.FULL,
    batch=8,
    weak_scaling={
        1: _mixture(8, 768, 16, 8, **_FIGURE_7),
        2: _mixture(8, 768, 16, 16, **_FIGURE_7),
        4: _mixture(16, 768, 16, 16, **_FIGURE_7),
        8: _mixture(16, 1024, 16, 16, **_FIGURE_7),
        16: _mixture(16, 1536, 16, 32, **_FIGURE_7),
        32: _mixture(16, 2048, 32, 48, **_FIGURE_7),
        64: _mixture(32, 2048, 32, 64, **_FIGURE_7),
    },
    ablation={
        1: _mixture(8, 1024, 32, 8, **_FIGURE_8),
        2: _mixture(8, 1280, 40, 16, **_FIGURE_8),
        4: _mixture(8, 1536, 24, 16, **_FIGURE_8),
        8: _mixture(8, 1536, 24, 32, **_FIGURE_8),
    },
)
WIDE_RESNET = Family(
    name="wide ResNet",
    dtype="float32",
    optimizer=Optimizer.MOMENTUM,
    recompute=Recompute.NONE,
    batch=32,
    weak_scaling={
        1: _resnet(160),
        2: _resnet(224),
        4: _resnet(320),
        8: _resnet(448),
        16: _resnet(640),
        32: _resnet(320, 16),
        64: _resnet(320, 16, 101),
    },
    ablation={1: _resnet(160), 2: _resnet(224), 4: _resnet(320), 8: _resnet(448)},
)
FAMILIES: Mapping[str, Family] = {"gpt": GPT, "moe": MIXTURE, "wresnet": WIDE_RESNET}
