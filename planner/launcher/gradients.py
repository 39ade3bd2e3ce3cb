"""The gradients of one device in flat buffers, and the optimizers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from planner.artefacts.options import Optimizer as OptimizerName
from planner.artefacts.strategy import GradientSum

DEFAULT_LEARNING_RATES: Mapping[OptimizerName, float] = {
    OptimizerName.SGD: 0.01, OptimizerName.MOMENTUM: 0.01,
    OptimizerName.ADAM: 1e-3, OptimizerName.ADAMW: 1e-3,
}  # fmt: skip


class GradientBuffers:
    """The gradients of a device's parameters, in one flat buffer per bucket and dtype.

    Every parameter's gradient is a view into its buffer, so that microbatches accumulate in place
    and an all-reduce needs no copy.

    Args:
        parameters: the device's trainable parameters, by name.
        sums: the buckets of the whole program, each once (`buckets`); those of other devices are
            left out.
        device: index of the device in the topology.
        shards: by name, tensors that have the gradients of their parts of parameters besides.
        silent: names of parameters whose gradients another device gives to their sums.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sums: Sequence[GradientSum],
        device: int,
        shards: Mapping[str, Tensor] = {},
        silent: Collection[str] = (),
    ) -> None:
        sum_of = {
            name: index
            for index, one in enumerate(sums)
            if device in one.devices
            for name in one.parameters
        }
        self._kept_in_parts = frozenset(i for i, one in enumerate(sums) if one.keep)
        self._silent: dict[int, list[Tensor]] = {}
        for name in sorted(sum_of.keys() & {*silent}):
            self._silent.setdefault(sum_of[name], []).append(parameters[name])
        # Also on one device. A plain loop lets autograd keep the first gradient, which saves
        # zeroing a buffer and adding to it; it was not faster on a CPU, because new memory is
        # mapped in each step.
        self._buffers: dict[int | None, list[Tensor]] = {}
        self._parameters: dict[int | None, list[Tensor]] = {}
        self._listeners: dict[int, Callable[[Tensor], None]] = {}
        self._bucket_of = {parameters[name]: index for name, index in sum_of.items()}
        # All members of an all-reduce lay out its buffers alike, by dtype and then by name, though
        # each has parameters besides that the others do not have.
        for index, some in _in_buckets(parameters, sum_of):
            self._buffers.setdefault(index, []).append(_flat(some))
            self._parameters.setdefault(index, []).extend(some)
        self._parts: dict[int | None, list[Tensor]] = {}
        for index, some in _in_buckets(shards, sum_of):
            self._parts.setdefault(index, []).append(_flat(some))

    def buffers(self, index: int) -> Sequence[Tensor]:
        """The buffers of a bucket, one per dtype, in the same order on all devices that have it."""
        return self._buffers[index]

    def parts(self, index: int) -> Sequence[Tensor]:
        """The buffers of the shards whose parameters are in a bucket, one per dtype."""
        return self._parts.get(index, ())

    def is_kept_in_parts(self, index: int) -> bool:
        """Whether each device keeps a part of the sum of a bucket."""
        return index in self._kept_in_parts

    def silence(self, index: int) -> None:
        """Sets the gradients of a bucket to zero that another device gives to the sum."""
        for parameter in self._silent.get(index, ()):
            if parameter.grad is not None:
                parameter.grad.zero_()

    def parameters(self, index: int) -> Sequence[Tensor]:
        """The parameters whose gradients are in a bucket."""
        return self._parameters[index]

    def listen(self, index: int, listener: Callable[[Tensor], None]) -> None:
        """Calls a function whenever a backward has added up a gradient of a bucket."""
        self._listeners[index] = listener
        for parameter in self._parameters[index]:
            _call_after(parameter, listener)

    def adopt(self, parameter: Tensor, leaf: Tensor) -> None:
        """Adds up the gradients of another tensor in the place of a parameter's.

        Args:
            leaf: stands for the parameter in forward and backward passes.
        """
        leaf.grad = parameter.grad
        listener = self._listeners.get(self._bucket_of.get(parameter, -1))
        if listener is not None:
            _call_after(leaf, listener)

    def everything(self) -> Iterator[Tensor]:
        """All buffers."""
        for buffers in (*self._buffers.values(), *self._parts.values()):
            yield from buffers

    def clear(self) -> None:
        """Sets all gradients to zero, in place."""
        for buffer in self.everything():
            buffer.zero_()


def _in_buckets(
    parameters: Mapping[str, Tensor], sum_of: Mapping[str, int]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Parameters by bucket and dtype."""
    kinds = sorted(parameters, key=lambda n: (sum_of.get(n, -1), str(parameters[n].dtype), n))
    for (index, _), names in groupby(kinds, key=lambda n: (sum_of.get(n), parameters[n].dtype)):
        yield index, [parameters[name] for name in names]


def buckets(sums: Sequence[GradientSum]) -> tuple[GradientSum, ...]:
    """The buckets that all-reduces sum, each once, in the order in which they come first.

    >>> one, two = GradientSum((0, 1), ("w",), 4), GradientSum((2, 3), ("v",), 4)
    >>> buckets([one, two, one, two]) == (one, two)
    True
    """
    return tuple(dict.fromkeys(sums))


def _call_after(leaf: Tensor, listener: Callable[[Tensor], None]) -> None:
    leaf.register_post_accumulate_grad_hook(listener)  # type: ignore[no-untyped-call]


def _flat(parameters: Sequence[Tensor]) -> Tensor:
    """A buffer of zeros; the gradients of the parameters become views of it."""
    buffer = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    start = 0
    for parameter in parameters:
        parameter.grad = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return buffer


def make_optimizer(
    name: OptimizerName,
    parameters: Sequence[Tensor],
    learning_rate: float | None,
    weight_decay: float | None = None,
) -> Optimizer | None:
    """The optimizer of one device; None if it trains nothing.

    Adam's steps are fused, because these take no memory. Other steps of Adam take the memory of two
    copies of a parameter on a CPU, and of one copy of all parameters on CUDA.

    Args:
        name: name of the optimizer.
        parameters: the device's trainable parameters.
        learning_rate: None takes that of `DEFAULT_LEARNING_RATES`.
        weight_decay: None takes torch's usual one.
    """
    if not parameters:
        return None
    rate = DEFAULT_LEARNING_RATES[name] if learning_rate is None else learning_rate
    usual = 0.01 if name is OptimizerName.ADAMW else 0.0
    decay = usual if weight_decay is None else weight_decay
    match name:
        case OptimizerName.SGD:
            return SGD(parameters, lr=rate, weight_decay=decay)
        case OptimizerName.MOMENTUM:
            return SGD(parameters, lr=rate, momentum=0.9, weight_decay=decay)
        case OptimizerName.ADAM:
            return Adam(parameters, lr=rate, weight_decay=decay, fused=True)
        case OptimizerName.ADAMW:
            return AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
