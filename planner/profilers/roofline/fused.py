"""The kernels of a compiled step: those of `torch.compile`, from the kernels of eager operators.

- An operator is heavy if it multiplies, convolves, pools or looks up rows; its own such kernels
  stay, as they come from libraries. All others stream: they read, compute and write each element.
- Streaming operators with the same number of heavy ones before them, at most, are one kernel with
  those that they read from. It reads what others made, and writes what others read. Each operator
  has its part of it. The backward pass computes again what was not written.
- Casts of tensors are done where the tensor is made; casts of weights are kernels of their own.
- Gradients are added up where they are read; a weight's gradient is cast and added in one kernel.
- A loss is one kernel each way, and so is its gradient's cast.
- Kernels start without the host, so Python and launches take no time.

The memory of a step is that of the eager one; a compiler keeps less.

Source: Ansel et al., "PyTorch 2", ASPLOS 2024, section 4 (what Inductor fuses) and section 3.4
(what is kept for the backward pass).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Operator,
    Parameter,
    Tensor,
    consumers,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.growth import Kernel, Work
from planner.artefacts.losses import losses
from planner.profilers.roofline.times import PassKernels

if TYPE_CHECKING:
    from planner.profilers.runnable import Stash

_STREAMING = frozenset({
    Work.ELEMENTWISE, Work.UPDATE, Work.TRANSCENDENTAL, Work.COPY, Work.REDUCTION,
    Work.NORMALIZATION,
})  # fmt: skip
_OVER_ROWS = frozenset({Work.REDUCTION, Work.NORMALIZATION})
_MERGED = _STREAMING - _OVER_ROWS
"""Kernels of heavy operators that are computed where their input is made."""


def fused(
    graph: Graph, eager: Sequence[PassKernels], stashes: "Sequence[Stash]", dtype: str
) -> tuple[PassKernels, ...]:
    """The kernels of each operator in a compiled step.

    Args:
        graph: with the types that its tensors have under autocast.
        eager: the kernels of each operator alone.
        stashes: what autograd keeps for each.
        dtype: that heavy kernels compute in.
    """
    step = _Step(graph, eager, stashes, int(ITEM_BYTES[dtype]))
    return tuple(step.kernels(v) for v in range(len(graph.operators)))


def fused_losses(graph: Graph, eager: Mapping[str, PassKernels]) -> dict[str, PassKernels]:
    """The kernels of the losses in a compiled step, by output.

    Args:
        graph: with the types that its tensors have under autocast.
        eager: the kernels of each loss alone.
    """
    made: dict[str, PassKernels] = {}
    for loss in losses(graph):
        output = loss.output
        if output.name in eager:
            elements = prod(output.shape)
            forward, backward = (
                (Kernel(Work.NORMALIZATION, elements, times * output.bytes),) for times in (1, 2)
            )
            made[output.name] = PassKernels(forward, backward)
    return made


class _Step:
    """A step whose kernels are fused.

    Attributes:
        base: the tensor that owns the storage of a view.
        heavy: whether an operator is.
        depth: the largest number of heavy operators on a way to each operator.
        readers: by tensor that is no view, the operators that read it or a view of it.
    """

    def __init__(
        self,
        graph: Graph,
        eager: Sequence[PassKernels],
        stashes: "Sequence[Stash]",
        computed_bytes: int,
    ) -> None:
        self.graph, self.eager, self.stashes = graph, eager, stashes
        self.computed_bytes = computed_bytes
        self.tensors, self.parameters = tensors_by_name(graph), parameters_by_name(graph)
        self.made_by = producers(graph)
        self.base = {view.tensor: view.base for one in stashes for view in one.views}
        self.heavy = [_is_heavy(one) for one in eager]
        self.depth: list[int] = []
        for operator in graph.operators:
            before = [self.made_by[name] for name in operator.inputs if name in self.made_by]
            self.depth.append(max((self.depth[u] + self.heavy[u] for u in before), default=0))
        self.readers: dict[str, list[int]] = {}
        for name, readers in consumers(graph).items():
            real = [v for v in readers if eager[v].forward or eager[v].backward]
            self.readers.setdefault(self.owner(name), []).extend(real)

    def owner(self, name: str) -> str:
        """The tensor in whose storage a tensor lies."""
        while name in self.base:
            name = self.base[name]
        return name

    def kernels(self, v: int) -> PassKernels:
        """The kernels of an operator."""
        one = self.eager[v]
        if self.heavy[v]:
            forward = [*_own(one.forward), *self._casts(v, one.forward)]
            backward = [*_own(one.backward), *self._updates(v, one.backward)]
            return PassKernels(tuple(forward), tuple(backward))
        return PassKernels(
            _one(one.forward, self._forward_bytes(v)), _one(one.backward, self._backward_bytes(v))
        )

    # ---- heavy operators

    def _casts(self, v: int, eager: Sequence[Kernel]) -> Iterator[Kernel]:
        """Casts of the parameters of a heavy operator."""
        if not any(kernel.work is Work.COPY for kernel in eager):
            return
        for one in self._parameters(self.graph.operators[v]):
            elements, size = _elements_and_size(one)
            if one.trainable and size > self.computed_bytes:
                yield Kernel(Work.COPY, elements, elements * (size + self.computed_bytes))

    def _updates(self, v: int, eager: Sequence[Kernel]) -> Iterator[Kernel]:
        """Sums of the gradients of its parameters, with their casts."""
        if not any(kernel.work is Work.UPDATE for kernel in eager):
            return
        for one in self._parameters(self.graph.operators[v]):
            if one.trainable:
                elements, size = _elements_and_size(one)
                moved = min(size, self.computed_bytes) + 2 * size
                yield Kernel(Work.UPDATE, elements, elements * moved)

    def _parameters(self, operator: Operator) -> list[Parameter]:
        held = {self.owner(name) for name in (*operator.inputs, *operator.parameters)}
        return [one for name, one in self.parameters.items() if name in held]

    # ---- streaming operators

    def _together(self, u: int, v: int) -> bool:
        """Whether two operators, of which one reads from the other, are one kernel."""
        return not self.heavy[u] and not self.heavy[v] and self.depth[u] == self.depth[v]

    def _forward_bytes(self, v: int) -> int:
        operator = self.graph.operators[v]
        read = sum(self._parameter_bytes(operator))
        for name in {self.owner(name) for name in operator.inputs} & self.tensors.keys():
            if name not in self.made_by or not self._together(self.made_by[name], v):
                read += self.tensors[name].bytes
        return read + sum(self._written_bytes(v, name) for name in operator.outputs)

    def _written_bytes(self, v: int, name: str) -> int:
        """Of an output, in the types that others read it in."""
        if name in self.base:
            return 0
        tensor, others = self.tensors[name], self._others(v, name)
        sizes = {self._cast_bytes(tensor) if self.heavy[u] else tensor.bytes for u in others}
        if name in self.graph.outputs:
            sizes.add(tensor.bytes)
        return sum(sizes)

    def _backward_bytes(self, v: int) -> int:
        operator, stash = self.graph.operators[v], self.stashes[v]
        moved = 2 * sum(self._parameter_bytes(operator, trainable=True))
        for name in {self.owner(name) for name in stash.tensors} & self.tensors.keys():
            moved += self._stashed_bytes(name)
        for name in operator.outputs:
            tensor = self.tensors[name]
            for u in self._others(v, name):
                moved += self._cast_bytes(tensor) if self.heavy[u] else tensor.bytes
        for name in {self.owner(name) for name in operator.inputs} & self.tensors.keys():
            tensor = self.tensors[name]
            if tensor.gradient and not self._together(self.made_by[name], v):
                moved += tensor.bytes
        return moved

    def _stashed_bytes(self, name: str) -> int:
        """Of a tensor that the backward pass needs; none if it is computed again."""
        own, maker = self.tensors[name].bytes, self.made_by.get(name)
        if maker is None or self.heavy[maker]:
            return own
        return min(own, self._written_bytes(maker, name))

    def _others(self, v: int, name: str) -> list[int]:
        """The operators that read an output in other kernels."""
        return [u for u in self.readers.get(name, ()) if not self._together(v, u)]

    def _cast_bytes(self, tensor: Tensor) -> int:
        """Of a tensor in the type of heavy kernels, if that is the shorter one."""
        elements, size = _elements_and_size(tensor)
        return elements * min(size, self.computed_bytes)

    def _parameter_bytes(self, operator: Operator, *, trainable: bool = False) -> Iterator[int]:
        for one in self._parameters(operator):
            if one.trainable or not trainable:
                yield one.bytes


def _is_heavy(eager: PassKernels) -> bool:
    """Whether an operator has kernels of libraries; the rows that it looks up may be few beside its
    other work, such as those of a rotary embedding.
    """
    kernels = (*eager.forward, *eager.backward)
    if any(kernel.work not in _STREAMING | {Work.GATHER} for kernel in kernels):
        return True
    moved = [kernel.bytes for kernel in eager.forward if kernel.work is Work.GATHER]
    return 2 * sum(moved) > sum(kernel.bytes for kernel in eager.forward)


def _own(eager: Iterable[Kernel]) -> list[Kernel]:
    """The kernels of a heavy operator that stay."""
    return [kernel for kernel in eager if kernel.work not in _MERGED]


def _one(eager: Sequence[Kernel], moved: int) -> tuple[Kernel, ...]:
    """The part of a streaming operator in its kernel; none if nothing is moved for it."""
    if not eager or not moved:
        return ()
    over_rows = any(kernel.work in _OVER_ROWS for kernel in eager)
    work = Work.NORMALIZATION if over_rows else Work.ELEMENTWISE
    return (Kernel(work, sum(kernel.flops for kernel in eager), moved),)


def _elements_and_size(value: Tensor | Parameter) -> tuple[int, int]:
    """The number of elements, and the size of one in bytes."""
    elements = prod(value.shape)
    return elements, value.bytes // elements if elements else 0
