"""Whether a measurement can be trusted: the precision of a median, and signs that the machine was
busy or too small.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median

from planner.artefacts.graph import Graph
from planner.artefacts.profile import Profile
from planner.clusters.yaml.schema import available_bytes, available_cores
from planner.profilers.summary import summary

CONFIDENCE = 0.95
"""Confidence of the interval around a median."""
MAX_DRIFT = 0.05
"""Largest change of the time of the whole step, from before to after."""
MAX_WALL_PER_CPU = 1.05
"""Largest ratio of wall time to CPU time; a process with a core to itself has a ratio of 1."""
MAX_UNSURE = 0.1
"""Largest share of the time in operators whose median is less precise than `UNSURE`."""
UNSURE = 0.03
"""Half the width of the confidence interval, over the median."""
MAX_SUM = 1.15
"""Largest ratio of the sum of the operators to the whole step, and of the whole step to the sum."""
AGREEMENT = (0.93, 1.07)
"""The same ratio over its usual value, where operators were measured earlier: beyond these, they
are measured again."""
LEAST_STEP_S = 0.01
"""A shorter step is mostly calls of kernels, whose times vary by more than that."""


def interval(samples: Sequence[float]) -> float:
    """Half the width of the confidence interval of the median, over the median.

    The interval lies between two order statistics, and holds for every distribution: with n
    samples, the r-th smallest and the r-th largest enclose the median unless fewer than r samples
    fall on one side, which has the probability

        2 sum over k < r of C(n, k) / 2^n

    The largest r is taken that keeps this probability below 5 %. Fewer than 6 samples cannot reach
    that, and their whole range is taken. The result for one sample is 1.

    Args:
        samples: at least one, not negative.

    Source: Conover, Practical Nonparametric Statistics, section 3.2.

    >>> interval([1.0, 1.1, 0.9, 1.0, 1.0, 1.2])
    0.15
    """
    n, middle = len(samples), median(samples)
    if n == 1:
        return 1.0
    if middle == 0:
        return 0.0
    # `outside` is the probability that fewer than r samples fall on one side: 0 of none. It stays
    # within 5 %, so the r-th smallest and largest enclose the median well enough.
    outside, r = 0.0, 0
    while True:
        outside += 2 * comb(n, r) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        r += 1
    ordered = sorted(samples)
    r = max(r, 1)  # below six samples not even the smallest and the largest do: 2 / 2^5 is 6.25 %
    return round((ordered[n - r] - ordered[r - 1]) / 2 / middle, 4)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of the machine while it measured.

    Attributes:
        threads: number of CPU threads; None on other devices.
        wall_s: sum of the measured times.
        cpu_s: CPU time of all threads of the process meanwhile.
        too_big: whether the whole model did not fit into memory, and was not timed.
    """

    threads: int | None
    wall_s: float
    cpu_s: float
    too_big: bool


def signs_of_load(profile: Profile, conditions: Conditions) -> tuple[str, ...]:
    """Signs that something else ran on the machine, as sentences."""
    signs = []
    drift = summary(profile).drift
    if drift is not None and abs(drift) > MAX_DRIFT:
        how = "longer" if drift > 0 else "shorter"
        signs.append(
            f"the whole step took {abs(drift):.0%} {how} afterwards than before: the machine was"
            " busy, and the times may be wrong by as much; profile again when it is quiet"
        )
    if conditions.threads is None or not conditions.cpu_s:
        return tuple(signs)
    if conditions.threads == 1:
        ratio = conditions.wall_s / conditions.cpu_s
        if ratio > MAX_WALL_PER_CPU:
            signs.append(
                f"the work took {ratio:.2f} times its own CPU time: other processes had the cores,"
                " and the times are too long; profile again when the machine is quiet"
            )
    elif (load := os.getloadavg()[0]) > (cores := available_cores()):
        signs.append(
            f"{load:.1f} processes wanted to run on {cores} cores: the times may be too long;"
            " profile again when the machine is quiet"
        )
    return tuple(signs)


def warnings(profile: Profile, conditions: Conditions) -> tuple[str, ...]:
    """All reasons why the times may be wrong, as sentences."""
    reasons = [*signs_of_load(profile, conditions)]
    total_s = sum(o.forward_s + o.backward_s for o in profile.operators)
    unsure_s = sum(o.forward_s + o.backward_s for o in profile.operators if o.interval > UNSURE)
    if unsure_s > MAX_UNSURE * total_s:
        reasons.append(
            f"the medians of operators with {unsure_s / total_s:.0%} of the time are less precise"
            f" than {UNSURE:.0%}: repetitions differ too much; profile again when the machine is"
            " quiet, or with a larger --budget"
        )
    ratio = summary(profile).sum_per_whole
    if ratio is not None and not 1 / MAX_SUM < ratio < MAX_SUM:
        reasons.append(
            f"the operators one by one take {ratio:.2f} times as long as the whole step; if some"
            " were measured earlier, while the machine was busy, try --no-cache"
        )
    if conditions.too_big:
        reasons.append(
            "the whole model needs more memory than is free here, and was not timed in one piece:"
            " nothing checks the sum of the operators"
        )
    return tuple(reasons)


def cache_agrees(profile: Profile, usual: float) -> bool:
    """Whether the operators one by one and the whole step of today agree; so they do where the
    whole was not timed, or is too short to tell.

    Args:
        usual: the ratio of their times for this model when its operators were measured; 1 if it is
            not known.
    """
    known = summary(profile)
    if known.sum_per_whole is None or known.whole_s is None or known.whole_s < LEAST_STEP_S:
        return True
    least, most = AGREEMENT
    return least <= known.sum_per_whole / usual <= most


def training_bytes(graph: Graph) -> int:
    """An upper bound on the memory of a training step of the whole model: parameters, gradients of
    the trained ones, every tensor, and two gradients as large as the largest tensor.
    """
    parameters = sum(p.bytes for p in graph.parameters)
    gradients = sum(p.bytes for p in graph.parameters if p.trainable)
    tensors = [t.bytes for t in graph.tensors]
    return parameters + gradients + sum(tensors) + 2 * max(tensors, default=0)


def free_bytes(device: str) -> int:
    """Memory that is free on the device now, or that PyTorch holds there for later tensors."""
    if device != "cpu":
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not on Linux
        return available_bytes()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
