"""`Kernel`: what torch's elementary functions do, by kind of work."""

from dataclasses import dataclass
from enum import StrEnum


class Work(StrEnum):
    """Kinds of kernels, by what bounds them and how well they are tuned."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    SMALL_WINDOW = "convolution with a window of 3 or 5 and stride 1"
    FEW_CHANNELS = "convolution with less than 32 channels per group"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    UPDATE = "elementwise in place"
    TRANSCENDENTAL = "transcendental"
    COPY = "copy"
    REDUCTION = "reduction"
    NORMALIZATION = "normalization"
    MAX_POOLING = "pooling of maxima"
    MEAN_POOLING = "pooling of means, resizing"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of an elementary function.

    Attributes:
        work: its kind.
        flops: floating-point operations, as torch counts them. Where it counts none: one per
            element of every window of a pooling (one per window of the gradient of maxima), one
            per element that a reduction or normalization reads, and one per element that is made
            by all others.
        bytes: that it reads and writes.
    """

    work: Work
    flops: int
    bytes: int
