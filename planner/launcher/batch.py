"""A microbatch's data from outside the model: graph inputs and the targets of losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    """The data of one microbatch that a process needs. It waits in the memory of the host, and each
    pass that reads it has it `on` the device.

    Attributes:
        inputs: graph inputs, by name.
        targets: targets of losses, by the output that they are compared with.
        counted: graph inputs that denominators of the model's own losses are counted in, whole,
            where `inputs` may have parts of them.
    """

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    counted: Mapping[str, Tensor] = field(default_factory=dict)

    def on(self, device: str) -> "Batch":
        """The same with inputs and targets on a device, where a pass may need them."""
        if device == "cpu":
            return self
        inputs, targets = (
            {name: tensor.to(device) for name, tensor in tensors.items()}
            for tensors in (self.inputs, self.targets)
        )
        return replace(self, inputs=inputs, targets=targets)


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
