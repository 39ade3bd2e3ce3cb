"""A microbatch's data from outside the model: graph inputs and the targets of losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.artefacts import graph as graphs


def torch_dtype(tensor: graphs.Tensor) -> torch.dtype:
    """The torch dtype of a tensor of the graph."""
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one microbatch that a process needs, on its device.

    Attributes:
        inputs: graph inputs, by name.
        targets: targets of losses, by the output that they are compared with.
        counted: graph inputs that denominators of the model's own losses are counted in, whole,
            where `inputs` may have parts of them.
    """

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    counted: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The data of a step that a process needs.

    Attributes:
        num_microbatches: of the step, over all replicas; None where this process reads no data, and
            does not know.
        by_microbatch: the data of the microbatches that it runs; where it does not know their
            number, of all those that it would run in a whole step.
    """

    num_microbatches: int | None
    by_microbatch: Mapping[int, Batch]
