"""Facts about every operator of a model that need no run of it: stash, FLOPs, bytes moved.

Each operator's torch code runs once, forward and backward, on fake tensors. They have no numbers
(they are on torch's meta device) but pass for tensors of the CPU, so that torch chooses the same
functions as there. Only shapes, strides and storages are passed on. No weights are read and nothing
is allocated, so a model may be larger than this machine. Operators of one class (the same call on
tensors of the same layouts) share one run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.artefacts.graph import (
    View,
    differentiated,
    loss_outputs,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.growth import Kernel
from planner.model.load import Model
from planner.operators import to_torch
from planner.operators.binding import Call, Read, bind
from planner.operators.running import REFUSALS, autocast
from planner.profilers.kernels import Kernels, listed
from planner.profilers.runnable import RunnableOperator, Stash, address, observe, runnable_of
from planner.support.errors import OperatorError, words_of


@dataclass(frozen=True, slots=True)
class Facts:
    """The work of one operator on one microbatch.

    Attributes:
        stash: the tensors that autograd keeps for it, and those of its outputs that are views.
        flops: floating-point operations of the forward pass, as `Kernel` counts them.
        backward_flops: floating-point operations of the backward pass; 0 where no gradient arrives.
        bytes_moved: bytes that the kernels of the forward pass read and write: inputs, parameters
            and outputs. A view moves nothing; picking by index moves the picked elements.
        backward_bytes: bytes that the kernels of the backward pass read and write: arriving
            gradients, stash, new gradients, and the sums of gradients of one tensor or parameter.
        kernels: kernels of the forward pass.
        backward_kernels: kernels of the backward pass.
        arriving: strides of the gradient that arrives at each output.
        gradient_views: inputs whose gradient lies in the storage of an output's gradient.
        dtypes: element type of each output; under autocast it is not the model's.
    """

    stash: Stash
    flops: int
    backward_flops: int
    bytes_moved: int
    backward_bytes: int
    kernels: tuple[Kernel, ...] = ()
    backward_kernels: tuple[Kernel, ...] = ()
    arriving: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    gradient_views: tuple[View, ...] = ()


def facts(model: Model, dtype: str | None = None) -> tuple[Facts, ...]:
    """The facts about each operator, in the graph's order.

    The backward pass is that of a step that trains the sum of the graph's losses.

    Args:
        dtype: the type that autocast computes in, as it does on a CPU; None computes in the model's
            types.

    Raises:
        OperatorError: if an operator has no conversion, or cannot run without numbers.
    """
    step = _FakeStep(model, dtype)
    forwards = step.forwards()
    backwards = step.backwards(forwards)
    return tuple(
        Facts(
            stash=one.stash,
            flops=sum(kernel.flops for kernel in one.kernels),
            backward_flops=sum(kernel.flops for kernel in backward.kernels),
            bytes_moved=sum(kernel.bytes for kernel in one.kernels),
            backward_bytes=sum(kernel.bytes for kernel in backward.kernels),
            kernels=one.kernels,
            backward_kernels=backward.kernels,
            arriving=backward.arriving,
            gradient_views=backward.views,
            dtypes={
                one.names[name]: str(output.dtype).removeprefix("torch.")
                for name, output in zip(one.unit.outputs, one.outputs, strict=True)
            },
        )
        for one, backward in zip(forwards, backwards, strict=True)
    )


def facts_if_shapes_are_known(model: Model, dtype: str | None) -> tuple[Facts, ...]:
    """The facts; none if the shapes of an operator depend on numbers."""
    try:
        return facts(model, dtype)
    except OperatorError:
        return ()


@dataclass(frozen=True, slots=True)
class _Forward:
    """An operator after its forward pass.

    Attributes:
        unit: the first operator of its class, which ran for all of them.
        names: the operator's own name of each tensor and parameter of the unit.
        key: its class.
        inputs: inputs of the unit.
        outputs: outputs of the unit, in its order.
        stash: the stash, in the operator's own names.
        kernels: kernels of the forward pass.
    """

    unit: RunnableOperator
    names: Mapping[str, str]
    key: object
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    stash: Stash
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class _Backward:
    """The backward pass of a class of operators.

    Attributes:
        kernels: its kernels, without sums with gradients from other operators.
        leaving: gradients of inputs and weights, by the unit's names.
        views: each input or weight whose gradient lies in the storage of an output's gradient, with
            that output.
    """

    kernels: tuple[Kernel, ...]
    leaving: Mapping[str, Tensor]
    views: Mapping[str, str]


NO_BACKWARD = _Backward((), {}, {})


@dataclass(frozen=True, slots=True)
class _OwnBackward:
    """The backward pass of one operator.

    Attributes:
        kernels: its kernels, with sums with gradients from other operators.
        arriving: as `Facts.arriving`.
        views: as `Facts.gradient_views`.
    """

    kernels: tuple[Kernel, ...]
    arriving: Mapping[str, tuple[int, ...]]
    views: tuple[View, ...]


@dataclass
class _FakeStep:
    """A training step of a model on fake tensors.

    Attributes:
        model: the model.
        dtype: the type of autocast.
        fake: the mode in which torch makes tensors without numbers.
        forward_of: by class, the forward pass of its first operator, and the names of the tensors
            and parameters there, in the order in which the class lists them.
        backward_of: backward passes by class and by the layouts of the arriving gradients.
    """

    model: Model
    dtype: str | None = None
    fake: FakeTensorMode = field(default_factory=FakeTensorMode)
    forward_of: dict[object, tuple[_Forward, tuple[str, ...]]] = field(default_factory=dict)
    backward_of: dict[object, _Backward] = field(default_factory=dict)

    def forwards(self) -> list[_Forward]:
        """Every operator's forward pass, in order."""
        graph = self.model.graph
        tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
        values = {n: self.tensor(tensors[n].shape, tensors[n].dtype) for n in graph.inputs}
        for name, one in parameters.items():
            made = self.tensor(one.shape, one.dtype)
            values[name] = nn.Parameter(made) if one.trainable else made
        forwards = []
        for i in range(len(graph.operators)):
            forward = self.forward(i, values)
            for name, output in zip(forward.unit.outputs, forward.outputs, strict=True):
                values[forward.names[name]] = output
            forwards.append(forward)
        return forwards

    def forward(self, operator: int, values: dict[str, Tensor]) -> _Forward:
        """One operator's forward pass, shared with the operators of its class.

        Args:
            values: tensors and parameters by name; constants that the operator reads are added.
        """
        call = self.call(operator)
        for name in call.reads:
            if name not in values:  # a constant that configures it: small, and its type counts
                value = self.model.values[name]
                values[name] = self.tensor(value.shape, value.dtype.name)
        node, own = self.model.nodes[operator], self.model.graph.operators[operator]
        declared = tensors_by_name(self.model.graph)
        names = (*call.reads, *filter(None, node.outputs))
        # Everything that the run of an operator depends on but the names of its tensors. Without a
        # backward it reads detached tensors. The last three say what a value is here (a trained
        # parameter, a tensor of the graph, a parameter at all): from it follow the gradients, the
        # stash, and the unit's inputs and parameters. Names are left out, and correspond by their
        # place in `names`.
        key = (
            _identity(call),
            operator in differentiated(self.model.graph),
            tuple(_layout(values[name]) for name in call.reads),
            tuple((declared[n].shape, declared[n].dtype) if n else None for n in node.outputs),
            tuple(isinstance(values[name], nn.Parameter) for name in call.reads),
            tuple(name in declared for name in call.reads),
            tuple(name in own.parameters for name in call.reads),
        )
        if key not in self.forward_of:
            self.forward_of[key] = self.run(operator, key, values), names
        first, first_names = self.forward_of[key]
        renamed = dict(zip(first_names, names, strict=True))
        return replace(
            first, names=renamed, stash=_in_order(first.stash, renamed, (*own.inputs, *own.outputs))
        )

    def tensor(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor without numbers, contiguous."""
        with self.fake:
            return torch.empty(shape, dtype=getattr(torch, dtype))

    def call(self, operator: int) -> Call:
        """The call that the operator becomes."""
        try:
            return bind(self.model, self.model.nodes[operator], "cpu")
        except (OperatorError, *REFUSALS):
            to_torch(self.model, [operator])  # raises, and names the operator
            raise

    def run(self, operator: int, key: object, values: Mapping[str, Tensor]) -> _Forward:
        """The forward pass of the first operator of a class."""
        unit = self.unit(operator, values)
        inputs = unit.leaves(values)
        kernels = Kernels()

        def forward(*given: Tensor) -> tuple[Tensor, ...]:
            with kernels:
                return unit.forward(*given)

        with self.fake, autocast("cpu", self.dtype):  # copies of weights are there before
            for cast, name in unit.casts:
                cast(values[name])
        try:
            with self.fake:
                outputs, stash = observe(replace(unit, forward=forward), values)
        except REFUSALS as error:
            raise self.needs_numbers(operator, error) from error
        # Without their graph: backward runs the unit again, once for each way gradients may lie.
        outputs = tuple(one.detach().requires_grad_(one.requires_grad) for one in outputs)
        return _Forward(unit, {}, key, inputs, outputs, stash, tuple(kernels.seen))

    def unit(self, operator: int, values: Mapping[str, Tensor]) -> RunnableOperator:
        """The operator as a torch function on fake tensors; its parameters are fake, too."""
        graph = self.model.graph
        module = to_torch(self.model, [operator], values)
        held = {name: values[name] for name in graph.operators[operator].parameters}

        def forward(*given: Tensor) -> tuple[Tensor, ...]:
            with autocast("cpu", self.dtype):
                made: tuple[Tensor, ...] = module.forward(*given)
            return made

        return runnable_of(module, graph, operator, held, forward, casts=self.dtype is not None)

    def backwards(self, forwards: Sequence[_Forward]) -> list[_OwnBackward]:
        """Every operator's backward pass, in the graph's order, with the sums that it makes.

        A gradient is added to the one that arrived before for the same tensor. A weight's gradient
        is complete at the first operator with a backward that reads the weight, because backward
        runs from the end; there it is added to the gradient of the microbatches before.
        """
        first_use = {
            one.names[name]: i
            for i, one in reversed(list(enumerate(forwards)))
            for name in one.unit.weights
            if i in differentiated(self.model.graph)
        }
        lost = loss_outputs(self.model.graph)
        added_in = {
            one.name: getattr(torch, one.gradient_dtype)
            for one in self.model.graph.parameters
            if one.gradient_dtype is not None
        }
        # Gradients that have arrived and that no operator has taken yet, by tensor or weight.
        arriving = {
            one.names[name]: self.tensor(made.shape, str(made.dtype).removeprefix("torch."))
            for one in forwards
            for name, made in zip(one.unit.outputs, one.outputs, strict=True)
            if one.names[name] in lost
        }
        backwards = []
        for i, one in reversed(list(enumerate(forwards))):
            backward = self.backward(i, one, arriving)
            sums = Kernels()
            with self.fake, sums:
                for name, new in backward.leaving.items():
                    own = one.names[name]
                    total = arriving[own] + new if own in arriving else new
                    arriving[own] = total
                    if first_use.get(own) == i:
                        # The empty tensor stands for the gradient of the microbatches before.
                        dtype = added_in.get(own) or total.dtype
                        torch.empty_like(total, dtype=dtype).add_(total)
            own_outputs = [one.names[name] for name in one.unit.outputs]
            strides = {n: arriving.pop(n).stride() for n in own_outputs if n in arriving}
            views = tuple(
                View(one.names[name], one.names[backward.views[name]])
                for name in one.unit.inputs
                if name in backward.views
            )
            backwards.append(_OwnBackward((*backward.kernels, *sums.seen), strides, views))
        return backwards[::-1]

    def backward(
        self, operator: int, forward: _Forward, arriving: Mapping[str, Tensor]
    ) -> _Backward:
        """One operator's backward pass, shared with operators of its class at which gradients of
        the same layouts arrive.
        """
        gradients = {
            name: arriving[forward.names[name]]
            for name, output in zip(forward.unit.outputs, forward.outputs, strict=True)
            if output.requires_grad and forward.names[name] in arriving
        }
        if not gradients:
            return NO_BACKWARD
        layouts = tuple((name, _layout(value)) for name, value in gradients.items())
        key = (forward.key, layouts)
        if key not in self.backward_of:
            try:
                with self.fake:
                    self.backward_of[key] = _differentiated(forward, gradients)
            except REFUSALS as error:
                raise self.needs_numbers(operator, error) from error
        return self.backward_of[key]

    def needs_numbers(self, operator: int, error: Exception) -> OperatorError:
        """The error for an operator that torch cannot run on fake tensors."""
        node = self.model.nodes[operator]
        return OperatorError(
            f"{self.model.path}: {node.type} {node.name!r} (version {node.version}): expected an"
            " operator whose shapes do not depend on numbers, but torch cannot run it without"
            f" them: {words_of(error)}; measure the model on a device of this machine"
        )


def _differentiated(forward: _Forward, gradients: Mapping[str, Tensor]) -> _Backward:
    """The backward pass of a unit.

    Args:
        gradients: the arriving gradients, by output.
    """
    unit = forward.unit
    leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in forward.inputs]
    outputs = dict(zip(unit.outputs, unit.forward(*leaves), strict=True))
    wanted = {n: leaf for n, leaf in zip(unit.inputs, leaves, strict=True) if leaf.requires_grad}
    wanted |= unit.weights
    made: list[Tensor | None] = []

    def run() -> None:
        made.extend(
            torch.autograd.grad(
                [outputs[name] for name in gradients],
                list(wanted.values()),
                list(gradients.values()),
                allow_unused=True,
            )
        )

    kernels = listed(run)
    leaving = {n: one for n, one in zip(wanted, made, strict=True) if one is not None}
    # A gradient in the storage of an arriving one (that of a Reshape, of a sum) took no memory.
    given = {address(one): name for name, one in gradients.items()}
    views = {n: given[address(one)] for n, one in leaving.items() if address(one) in given}
    return _Backward(kernels, leaving, views)


def _in_order(stash: Stash, names: Mapping[str, str], order: Sequence[str]) -> Stash:
    """The stash in other names, sorted by their place in `order`."""
    return Stash(
        tensors=tuple(sorted((names[name] for name in stash.tensors), key=order.index)),
        private_bytes=stash.private_bytes,
        views=tuple(View(names[view.tensor], names[view.base]) for view in stash.views),
    )


def _identity(call: Call) -> object:
    """A call without the names of its node and of the tensors that it reads; equal for calls that
    do the same, apart from the random numbers that they draw.
    """
    places = {name: i for i, name in enumerate(call.reads)}
    kwargs = {name: value for name, value in call.kwargs.items() if name != "node"}

    def plain(values: Iterable[object]) -> tuple[object, ...]:
        return tuple(places[v.name] if isinstance(v, Read) else repr(v) for v in values)

    return call.function, plain(call.args), tuple(kwargs), plain(kwargs.values())


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor lies in its storage, its type, and whether autograd follows it."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.requires_grad,
    )
