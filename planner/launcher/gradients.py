"""The gradients of one device in flat buffers, and the optimizers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from planner.problem import Optimizer as OptimizerName
from planner.strategy import GradientSum

DEFAULT_LEARNING_RATES: Mapping[OptimizerName, float] = {
    OptimizerName.SGD: 0.01, OptimizerName.MOMENTUM: 0.01,
    OptimizerName.ADAM: 1e-3, OptimizerName.ADAMW: 1e-3,
}  # fmt: skip


class Gradients:
    """Every parameter's gradient is a view into one flat buffer per sum and dtype, so that
    microbatches accumulate in place and a sum needs no copy.

    Args:
        parameters: the device's trainable parameters, by name.
        sums: of the whole program.
        device: index into the topology; sums that it is not in are left out.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], sums: Sequence[GradientSum], device: int
    ) -> None:
        sum_of = {
            name: index
            for index, one in enumerate(sums)
            if device in one.devices
            for name in one.parameters
        }
        self._buffers: dict[int | None, list[Tensor]] = {}
        # All members of a sum lay out its buffers alike: by dtype, then by name.
        kinds = sorted(parameters, key=lambda n: (sum_of.get(n, -1), str(parameters[n].dtype), n))
        for (index, _), names in groupby(kinds, key=lambda n: (sum_of.get(n), parameters[n].dtype)):
            buffer = _flat([parameters[name] for name in names])
            self._buffers.setdefault(index, []).append(buffer)

    def buffers(self, index: int) -> Sequence[Tensor]:
        """What the members of a sum add up; one buffer per dtype, in one order everywhere."""
        return self._buffers[index]

    def everything(self) -> Iterator[Tensor]:
        """All buffers."""
        for buffers in self._buffers.values():
            yield from buffers

    def clear(self) -> None:
        """Sets all gradients to zero, in place."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.zero_()


def _flat(parameters: Sequence[Tensor]) -> Tensor:
    """A buffer of zeros that the gradients of the parameters become views of."""
    buffer = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    start = 0
    for parameter in parameters:
        parameter.grad = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return buffer


def make_optimizer(
    name: OptimizerName, parameters: Sequence[Tensor], learning_rate: float | None
) -> Optimizer | None:
    """The optimizer of one device; None where it trains nothing. Adam's steps are fused, as they
    take no memory then; else a parameter twice on a CPU, and all of them once on CUDA.

    Args:
        learning_rate: None takes `DEFAULT_LEARNING_RATES`.
    """
    if not parameters:
        return None
    rate = DEFAULT_LEARNING_RATES[name] if learning_rate is None else learning_rate
    match name:
        case OptimizerName.SGD:
            return SGD(parameters, lr=rate)
        case OptimizerName.MOMENTUM:
            return SGD(parameters, lr=rate, momentum=0.9)
        case OptimizerName.ADAM:
            return Adam(parameters, lr=rate, fused=True)
        case OptimizerName.ADAMW:
            return AdamW(parameters, lr=rate, fused=True)
