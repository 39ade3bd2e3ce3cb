"""Random numbers that do not depend on how a model is split.

Each random operator (Dropout, RandomNormal, ...) draws from a generator of its own, which is made
for the draw and seeded with the run's seed, the step, the microbatch and the operator's name. So a
plan's numbers are the same on one process and on many, for every placement and replication, and
where a forward pass is run again. They are the same on all CPUs; a CUDA device draws on the device,
so its numbers differ from those of a CPU.

The launcher says which numbers are due with `random_operators`. Elsewhere (profiling, shapes) the
numbers are those of seed 0, step 0 and microbatch 0.

A loop of one's own gets the numbers of a launch from the same functions:

    with random_operators(seed=plan.seed, step=0, microbatch=3):
        noise = standard_normal("node_randn", (8, 16))
        mask = dropout_mask("node_dropout", (8, 16), ratio=0.1)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from planner.support.contexts import holding
from planner.support.errors import OperatorError

_draws: ContextVar[tuple[int, int, int]] = ContextVar("draws", default=(0, 0, 0))

UNIFORM, NORMAL, PICKED = "uniform", "normal", "picked"
"""Kinds of draws: uniform in [0, 1), standard normal, and indices of classes."""


class Draw(NamedTuple):
    """Numbers that a random operator of a module drew.

    Attributes:
        kind: see `UNIFORM`.
        numbers: in float64; of indices int64.
    """

    kind: str
    numbers: Tensor


_fed: ContextVar[Callable[[str, Sequence[int]], Tensor] | None] = ContextVar("fed", default=None)


@contextmanager
def fed(draws: Sequence[Draw]) -> Iterator[None]:
    """A context in which operators do not draw: each gets the first of these numbers that is left
    of its kind and shape.

    Args:
        draws: in the order in which operators of one kind and shape run.

    Raises:
        OperatorError: in the context, if an operator finds none.
    """
    waiting: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    for kind, numbers in reversed(draws):
        waiting.setdefault((kind, tuple(numbers.shape)), []).append(numbers)

    def take(kind: str, shape: Sequence[int]) -> Tensor:
        left = waiting.get((kind, tuple(shape)))
        if not left:
            raise OperatorError(f"no {kind} numbers of shape {list(shape)} are left to feed")
        return left.pop()

    with holding(_fed, take):
        yield


def _given(kind: str, shape: Sequence[int], device: torch.device | str) -> Tensor | None:
    """The numbers that are fed here; None where operators draw, and on meta tensors."""
    take = _fed.get()
    return None if take is None or torch.device(device).type == "meta" else take(kind, shape)


@contextmanager
def random_operators(seed: int, step: int, microbatch: int) -> Iterator[None]:
    """A context in which operators draw the numbers of one microbatch.

    Args:
        seed: of the whole run.
        step: index of the optimizer step.
        microbatch: index among all microbatches of the step, over all replicas.
    """
    with holding(_draws, (seed, step, microbatch)):
        yield


def seeded(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose seed follows from the parts.

    Args:
        parts: numbers and names.
        device: the device that draws; on "meta", which has no numbers, a CPU's.
    """
    # A CUDA device draws by itself, because a mask from the CPU would have to be copied. Making a
    # generator takes some 15 us on a CPU.
    digest = sha256(" ".join(map(str, parts)).encode()).digest()
    kind = "cpu" if torch.device(device).type == "meta" else device
    return torch.Generator(kind).manual_seed(int.from_bytes(digest[:7], "big"))


def generator(
    node: str, own_seed: float | None = None, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The generator of an operator in the current context, at its first number.

    Args:
        node: the operator's name.
        own_seed: the attribute `seed` of its ONNX node, which gives other numbers; None has none.
        device: the device that draws.
    """
    own = () if own_seed is None else (own_seed,)
    return seeded(*_draws.get(), node, *own, device=device)


def standard_normal(
    node: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    own_seed: float | None = None,
) -> Tensor:
    """Standard normal numbers, as RandomNormal and RandomNormalLike draw them before they scale.

    Args:
        node: the operator's name.
        shape: size of each dimension.
        dtype: type of floats.
        device: the device that draws and holds them.
        own_seed: as for `generator`.
    """
    if (given := _given(NORMAL, shape, device)) is not None:
        return given.to(dtype)
    drawn = generator(node, own_seed, device)
    return torch.randn(tuple(shape), generator=drawn, dtype=dtype, device=device)


def standard_uniform(
    node: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    own_seed: float | None = None,
) -> Tensor:
    """Numbers uniform in [0, 1), as RandomUniform and RandomUniformLike draw them before they
    scale. The arguments are those of `standard_normal`.
    """
    if (given := _given(UNIFORM, shape, device)) is not None:
        return given.to(dtype)
    drawn = generator(node, own_seed, device)
    return torch.rand(tuple(shape), generator=drawn, dtype=dtype, device=device)


def dropout_mask(
    node: str,
    shape: Sequence[int],
    ratio: float,
    device: torch.device | str = "cpu",
    own_seed: float | None = None,
) -> Tensor:
    """The mask of a Dropout: booleans, True where an element is kept, with probability 1 - ratio.

    Elements are drawn in the order of their indices, however the data lies in memory.

    Args:
        node: the operator's name.
        shape: of the data.
        ratio: probability in [0, 1] that an element is dropped.
        device: the device that draws and holds it.
        own_seed: as for `generator`.
    """
    if (given := _given(UNIFORM, shape, device)) is not None:
        return given < 1 - ratio
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=device)
    return mask.bernoulli_(1 - ratio, generator=generator(node, own_seed, device))


def classes(
    node: str, log_chances: Tensor, num_samples: int, own_seed: float | None = None
) -> Tensor:
    """Indices of classes, drawn with replacement, as Multinomial draws them.

    Args:
        node: the operator's name.
        log_chances: (B, C) logarithm of the probability of each class, up to a constant per row.
        num_samples: of each row.
        own_seed: as for `generator`.

    Returns:
        (B, num_samples) int64.
    """
    shape = (log_chances.shape[0], num_samples)
    if (given := _given(PICKED, shape, log_chances.device)) is not None:
        return given
    drawn = generator(node, own_seed, log_chances.device)
    chances = torch.softmax(log_chances, 1)
    return torch.multinomial(chances, num_samples, replacement=True, generator=drawn)
