"""The sizes of the microbatch that are measured where the user names none: 1, the largest that
fits, and their geometric middle. `interpolate.py` has the sizes between them.

All are powers of two, which divide usual batches. The largest is

- at most `LARGEST`;
- at most one whose step takes `LONGEST_STEP_S`, by the time per sample of the smallest, which is
  measured first; but at least twice the smallest, because one size says nothing of others;
- at most one whose step needs `FREE_SHARE` of the memory that is free on the device.

The three sizes take two to three times as long as the largest alone (docs/profiles.md).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log2

from planner.artefacts.profile import OperatorCost, Profile
from planner.model.load import Model
from planner.profilers.interpolate import interpolated
from planner.profilers.reliability import free_bytes, training_bytes
from planner.support.errors import OperatorError, OptionError
from planner.support.units import format_bytes, format_seconds

LARGEST = 64
LONGEST_STEP_S = 4.0
FREE_SHARE = 0.75
"""The rest is for what a profile holds beside a step; see docs/profiles.md, "Memory"."""

Read = Callable[[int | None], Model]
"""The model at a size of the microbatch; None is the size in the file."""
Measure = Callable[[Model], Profile]


@dataclass(frozen=True, slots=True)
class SizedProfiles:
    """Profiles of a model for microbatches of one or several sizes.

    Attributes:
        profiles: ascending by size.
        model: at the largest size.
        choice: which sizes were chosen, and why, as a sentence; None where the user named them.
        warnings: what these sizes cannot be used for, as sentences.
    """

    profiles: tuple[Profile, ...]
    model: Model
    choice: str | None = None
    warnings: tuple[str, ...] = ()


def profiles_at(sizes: Iterable[int | None], read: Read, measure: Measure) -> SizedProfiles:
    """The profiles at sizes that are named.

    Args:
        sizes: ascending, at least one.
        read: gives the model.
        measure: gives its profile.
    """
    profiles = []
    for size in sizes:
        model = read(size)
        profiles.append(measure(model))
    return SizedProfiles(tuple(profiles), model)


def profiles_at_usual_sizes(read: Read, measure: Measure, device: str) -> SizedProfiles:
    """The profiles at the sizes that this module's first lines describe.

    Args:
        read: gives the model.
        measure: gives its profile.
        device: that measures: "cpu", "cuda" or "cuda:N".

    Raises:
        OperatorError: if an operator runs neither on one sample nor on two.
    """
    first, smallest, warnings = _smallest(read, measure)
    largest, reason = _largest(first, smallest, read, device)
    middle = middle_size(first.batch, largest.batch)
    models = [read(middle)] if first.batch < middle < largest.batch else []
    models += [largest] if largest is not first else []
    profiles = (smallest, *map(measure, models))
    return SizedProfiles(
        profiles,
        largest,
        f"profiled microbatches of {_listed(one.microbatch_size for one in profiles)}: {reason};"
        " --batch names other sizes",
        (*warnings, *_not_between(profiles)),
    )


def _smallest(read: Read, measure: Measure) -> tuple[Model, Profile, tuple[str, ...]]:
    """The model at one sample, its profile, and no warning; at two and why, where an operator needs
    more, as a BatchNormalization does that normalises vectors by the statistics of the microbatch.
    """
    try:
        model = read(1)
        return model, measure(model), ()
    except OperatorError as error:
        model = read(2)
        return model, measure(model), (f"a microbatch of 1 sample cannot be measured: {error}",)


def _largest(first: Model, smallest: Profile, read: Read, device: str) -> tuple[Model, str]:
    """The model at the largest size, and why it is no larger, in words.

    Args:
        first: the model at the smallest size.
        smallest: its profile.
        read, device: see `profiles_at_usual_sizes`.
    """
    size, reason = _most_in_time(smallest)
    while size > first.batch:
        model = read(size)
        needed_bytes, limit_bytes = step_bytes(model, smallest), FREE_SHARE * free_bytes(device)
        if needed_bytes <= limit_bytes:
            return model, reason
        reason = (
            f"a step of {size} needs up to {format_bytes(needed_bytes)}, and the limit is"
            f" {format_bytes(limit_bytes)}, {FREE_SHARE:.0%} of the free memory"
        )
        size //= 2
    return first, reason


def _most_in_time(smallest: Profile) -> tuple[int, str]:
    """The largest size if memory were no limit, and why it is no larger, in words."""
    sample_s = step_s(smallest) / smallest.microbatch_size
    if LARGEST * sample_s <= LONGEST_STEP_S:
        return LARGEST, f"{LARGEST} is the limit"
    in_time = 1 << floor(log2(max(1.0, LONGEST_STEP_S / sample_s)))
    size = max(2 * smallest.microbatch_size, in_time)
    return size, (
        f"a step of {2 * size} would take up to {format_seconds(2 * size * sample_s)}, and the"
        f" limit is {format_seconds(LONGEST_STEP_S)}"
    )


def step_s(profile: Profile) -> float:
    """The time of a step of the whole model, without its losses, in s; the sum of its operators
    where it was not measured in one piece.
    """
    whole = profile.whole_step
    if whole is not None:
        return (whole.before_s + whole.after_s) / 2
    return sum(one.forward_s + one.backward_s for one in profile.operators)


def step_bytes(model: Model, smaller: Profile) -> int:
    """The most memory that a training step may need: `training_bytes`, and in proportion to the
    samples what operators keep besides tensors, and need while they run.

    Args:
        model: at the size that is asked for.
        smaller: its profile at a smaller size.
    """
    times = model.batch / smaller.microbatch_size
    private = sum(one.stash_private_bytes for one in smaller.operators)
    workspaces = [_workspace_bytes(one, times) for one in smaller.operators]
    return training_bytes(model.graph) + ceil(times * private) + max(workspaces, default=0)


def _workspace_bytes(cost: OperatorCost, times: float) -> int:
    """The workspace of an operator for `times` as many samples. Where it is as large as its
    weights, their new gradient is part of it, which does not grow.
    """
    weights = cost.parameter_bytes if cost.workspace_bytes >= cost.parameter_bytes else 0
    return weights + ceil(times * (cost.workspace_bytes - weights))


def middle_size(least: int, most: int) -> int:
    """The power of two next to the geometric mean of two of them, the larger of two.

    >>> [middle_size(1, most) for most in (1, 2, 4, 8, 16, 32, 64)], middle_size(2, 32)
    ([1, 2, 2, 4, 4, 8, 8], 8)
    """
    return 1 << ceil(log2(least * most) / 2)


def _listed(sizes: Iterable[int]) -> str:
    """Sizes as text.

    >>> _listed([1]), _listed([1, 2]), _listed([1, 8, 64])
    ('1 sample', '1 and 2 samples', '1, 8 and 64 samples')
    """
    *others, last = sizes
    before = f"{', '.join(map(str, others))} and " if others else ""
    return f"{before}{last} sample{'s' * (last > 1)}"


def _not_between(profiles: Sequence[Profile]) -> Iterator[str]:
    """Why sizes between two that were profiled cannot be interpolated, as sentences."""
    for low, high in pairwise(one.microbatch_size for one in profiles):
        if 2 * low < high:
            try:
                interpolated(profiles, 2 * low)
            except OptionError as error:
                yield str(error)
