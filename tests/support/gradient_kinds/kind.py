"""`Kind`: a module with a statement on its backward pass, and what may come of its training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
Make = Callable[[], tuple[nn.Module, Inputs]]
Data = Callable[[torch.Generator], Inputs]


class Outcome(StrEnum):
    """What comes of a module that the planner trains beside PyTorch's plain loop."""

    EQUAL = "equal"  # losses and weights are those of the loop
    REFUSED = "refused"  # a PlannerError before the first step names the cause
    UNNAMED = "unnamed"  # a PlannerError before the first step that does not name it
    NOTED = "noted"  # trained to something else, and a note of the export names the cause
    WRONG = "wrong"  # trained to something else in silence
    DRAWS = "draws"  # trained, by draws of numbers that the loop cannot be fed: not compared
    FAILED = "failed"  # another exception, of the planner's or of PyTorch's loop


EQUAL = frozenset({Outcome.EQUAL})
REFUSED = frozenset({Outcome.REFUSED})
TOLD = frozenset({Outcome.REFUSED, Outcome.NOTED})
"""For what the example inputs cannot show, where the module's attributes or program can."""
EITHER = frozenset({Outcome.EQUAL, Outcome.REFUSED})
"""For backward passes that a graph may or may not express."""
DRAWN = frozenset({Outcome.EQUAL, Outcome.DRAWS})
"""For modules that draw numbers: equal where the loop is fed the launcher's."""


@dataclass(frozen=True)
class Kind:
    """A module, the data that it is trained on, and what may come of it.

    Attributes:
        make: gives the module, freshly initialised, and example inputs.
        does: a sentence on its backward pass.
        accepted: outcomes that are right.
        causes: a refusal or a note has to have one of these words; without any, every refusal will
            do, and no note.
        data: the inputs of one microbatch; None draws floats like the example's and shuffles its
            integers.
        loss: "mse" against random targets, or "own", the module's first output.
        outputs: names of the outputs with a loss; without any, the first one has it.
        dtypes: of its parameters and floating inputs.
        optimizers: that are tried.
        training: whether it is trained in training mode.
        draws: whether it draws numbers, which the loop is fed then.
        within: largest relative difference of losses and weights, by dtype.
        rate: the learning rate, by optimizer.
        prepare: called once before the export, as a user's own set-up would be.
    """

    make: Make
    does: str
    accepted: frozenset[Outcome]
    causes: tuple[str, ...] = ()
    data: Data | None = None
    loss: str = "mse"
    outputs: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    training: bool = True
    draws: bool = False
    within: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 1e-5, torch.float64: 1e-9}
    )
    rate: Mapping[str, float] = field(default_factory=lambda: {"sgd": 0.1, "adamw": 1e-2})
    prepare: Callable[[], None] = lambda: None


FLOAT32_ATTRIBUTES = {torch.float32: 1e-5, torch.float64: 1e-6}
"""For numbers that are attributes of ONNX operators, which are float32 whatever the tensors are."""

DOUBLE = (torch.float64,)


def rows(num_rows: int = 4, width: int = 6) -> tuple[Tensor, ...]:
    """Example inputs of `Around`."""
    return (torch.randn(num_rows, width),)


class Around(nn.Module):
    """Two linear layers, and between them what a kind does."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.tanh(self.first(x))))


def around(between: Callable[[], Callable[[Tensor], Tensor]]) -> Make:
    """A module with something between two layers, and its example inputs.

    Args:
        between: makes it, so that every module has parameters of its own.
    """
    return lambda: (Around(between()), rows())


class Growing(nn.Module):
    """A loss of its own that grows with the inputs, and so do its gradients."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.between(self.first(x))).square().mean()}


def growing(between: Callable[[Tensor], Tensor]) -> Make:
    """A module of this kind and small example inputs."""
    return lambda: (Growing(between), (1e-3 * torch.randn(4, 6),))


def large(generator: torch.Generator) -> Inputs:
    """Inputs a million times as large as those of `growing`."""
    return (1e3 * torch.randn(4, 6, generator=generator),)


SMALL_STEPS = {"sgd": 1e-8, "adamw": 1e-2}
"""Learning rates for the gradients of `large` inputs."""
