"""`Graph`: the operators of a training step in topological order, their tensors and parameters.

A graph knows names, shapes and who feeds whom. It knows no times (`profile.py`) and no ONNX
(`model/`). Folded constants and shape arithmetic are not in it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from planner.support.memo import remembered

ITEM_BYTES: Mapping[str, float] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


LEFT_OUT_AS_DEFAULT: Mapping[str, bool] = {"left_out_as_default": True}
"""Metadata of a field that files leave out where it has its default, because it is younger than
their format: files with nothing new in them stay as they are."""

MAX_BYTES = 10**15
"""No tensor and no operator has more; it keeps every sum within 64 bits."""
MAX_TENSOR_BYTES = 10**14
"""No tensor of a model has more: a thousand devices of 80 GB hold less. An operator moves some
tensors several times, and may not come to more than `MAX_BYTES` thereby."""


def _check(shape: tuple[int, ...], dtype: str) -> None:
    problems = []
    if dtype not in ITEM_BYTES:
        problems.append(f"dtype: expected one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    if any(size < 0 for size in shape):
        problems.append(f"shape: expected sizes of at least 0, got {list(shape)}")
    elif prod(shape) > MAX_BYTES:
        problems.append(f"shape: expected at most {MAX_BYTES:.0e} elements, got {list(shape)}")
    if problems:
        raise ValueError("\n".join(problems))


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(prod(shape) * ITEM_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that flows between operators.

    Attributes:
        name: unique in the graph.
        shape: static; of one microbatch.
        dtype: a key of `ITEM_BYTES`.
        gradient: whether a gradient flows back over it: it is a float, depends on a trainable
            parameter, and reaches the loss differentiably.

    Raises:
        ValueError: if the shape or the dtype is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    gradient: bool

    def __post_init__(self) -> None:
        _check(self.shape, self.dtype)

    @property
    def bytes(self) -> int:
        """Size of the tensor for one microbatch."""
        return _size_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value that every device with one of its users holds: a weight, a buffer or a constant.

    Attributes:
        name: the initializer's name in the model (or the folded tensor's).
        trainable: whether it is trained; the others have no gradient and no optimizer state.
        state: whether an operator gives it another value in every microbatch. All operators that
            read it are in one stage.
        gradient_dtype: type in which its gradients are added up, over microbatches and devices;
            None for its own.

    Raises:
        ValueError: if the shape or the dtype is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    state: bool = field(default=False, metadata=LEFT_OUT_AS_DEFAULT)
    gradient_dtype: str | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        _check(self.shape, self.dtype)
        if self.gradient_dtype not in (None, *FLOAT_DTYPES):
            known = ", ".join(sorted(FLOAT_DTYPES))
            raise ValueError(
                f"gradient_dtype: expected one of {known}, got {self.gradient_dtype!r}"
            )

    @property
    def bytes(self) -> int:
        """Size of the value itself, without gradient and optimizer state."""
        return _size_bytes(self.shape, self.dtype)

    @property
    def gradient_item_bytes(self) -> float:
        """Size of an element of its gradient."""
        return ITEM_BYTES[self.gradient_dtype or self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Size of its gradient."""
        return _size_bytes(self.shape, self.gradient_dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in the storage of the tensor or parameter that its operator made it from. Of
    gradients: that of an input, made from that of an output.
    """

    tensor: str
    base: str


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the model that is left after folding.

    Attributes:
        name: unique; made up where the model leaves it empty.
        type: the ONNX operator type, with its domain in front if that is not ONNX's own.
        inputs: names of the tensors that it reads, each once, in order; parameters left out.
        outputs: names of the tensors that it makes.
        parameters: names of the parameters that it reads, each once.
    """

    name: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossChoice:
    """A loss of a training step, as it was chosen; `artefacts/losses.py` says what follows from it.

    Attributes:
        output: the output of the graph that it is computed from.
        function: "auto", a name among `model.losses.LossName`, or the user's "module:function".
        class_dim: the dimension of the output that classes lie on; None leaves it to the rules.
    """

    output: str
    function: str = "auto"
    class_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A model as the planner sees it.

    Attributes:
        operators: in topological order.
        tensors: every input of the graph and every output of an operator.
        parameters: every value that an operator holds.
        inputs: tensors that come from outside, on every device that reads them.
        outputs: tensors that the model returns.
        losses: the losses, whose sum is trained; empty for one of the first output, chosen
            automatically. `losses_of` gives them all.

    Raises:
        ValueError: if names repeat, are unknown, operators are out of order, or there is no output.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[LossChoice, ...] = field(default=(), metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        for what, names in (
            ("operator", [o.name for o in self.operators]),
            ("tensor", [t.name for t in self.tensors]),
            ("parameter", [p.name for p in self.parameters]),
        ):
            if len(set(names)) < len(names):
                twice = sorted(name for name, times in Counter(names).items() if times > 1)
                raise ValueError(f"{what}s: expected each name once, got {twice[0]!r} twice")
        tensors = {t.name for t in self.tensors}
        parameters = {p.name for p in self.parameters}
        ready = set(self.inputs)
        for operator in self.operators:
            if not ready.issuperset(operator.inputs):
                raise ValueError(
                    f"{operator.name} reads {sorted(set(operator.inputs) - ready)}"
                    " before it is made"
                )
            if not parameters.issuperset(operator.parameters):
                raise ValueError(f"{operator.name} reads an unknown parameter")
            ready.update(operator.outputs)
        if ready != tensors:
            raise ValueError(f"tensors without a maker or undescribed: {sorted(ready ^ tensors)}")
        if not self.outputs:
            raise ValueError("outputs: expected the tensor of the loss, got none")
        if not ready.issuperset(self.outputs):
            raise ValueError("an output of the graph is no tensor of it")
        lost = [one.output for one in self.losses]
        if len(set(lost)) < len(lost) or not set(lost).issubset(self.outputs):
            raise ValueError(f"losses: expected outputs of the graph, each once, got {lost}")
        if self.losses == (LossChoice(self.outputs[0]),):  # one way to say it
            object.__setattr__(self, "losses", ())


def losses_of(graph: Graph) -> tuple[LossChoice, ...]:
    """The losses of a training step, whose sum is trained; at least one."""
    return graph.losses or (LossChoice(graph.outputs[0]),)


def loss_outputs(graph: Graph) -> tuple[str, ...]:
    """The outputs that a loss is computed from, where gradients begin."""
    return tuple(one.output for one in losses_of(graph))


@remembered
def tensors_by_name(graph: Graph) -> Mapping[str, Tensor]:
    """The tensors of the graph by name."""
    return {t.name: t for t in graph.tensors}


@remembered
def parameters_by_name(graph: Graph) -> Mapping[str, Parameter]:
    """The parameters of the graph by name."""
    return {p.name: p for p in graph.parameters}


@remembered
def producers(graph: Graph) -> Mapping[str, int]:
    """The index of the operator that makes each tensor; inputs of the graph are left out."""
    return {name: i for i, operator in enumerate(graph.operators) for name in operator.outputs}


@remembered
def consumers(graph: Graph) -> Mapping[str, tuple[int, ...]]:
    """The indices of the operators that read each tensor, ascending; unread ones have ()."""
    readers: dict[str, list[int]] = {t.name: [] for t in graph.tensors}
    for i, operator in enumerate(graph.operators):
        for name in operator.inputs:
            readers[name].append(i)
    return {name: tuple(indices) for name, indices in readers.items()}


@remembered
def unread_tensors(graph: Graph) -> frozenset[str]:
    """Tensors that no operator reads and the graph does not return: new values of state."""
    read_by = consumers(graph)
    made = (name for operator in graph.operators for name in operator.outputs)
    return frozenset(name for name in made if not read_by[name]) - {*graph.outputs}


@remembered
def holders(graph: Graph) -> Mapping[str, tuple[int, ...]]:
    """The indices of the operators that read each parameter, ascending."""
    readers: dict[str, list[int]] = {p.name: [] for p in graph.parameters}
    for i, operator in enumerate(graph.operators):
        for name in operator.parameters:
            readers[name].append(i)
    return {name: tuple(indices) for name, indices in readers.items()}


@remembered
def differentiated(graph: Graph) -> frozenset[int]:
    """The indices of the operators that have a backward: an output of theirs carries a gradient, or
    has a loss. The launcher runs all others without autograd, which stashes nothing for them.
    """
    carrying = {t.name for t in graph.tensors if t.gradient}.union(loss_outputs(graph))
    return frozenset(
        i for i, operator in enumerate(graph.operators) if not carrying.isdisjoint(operator.outputs)
    )


@remembered
def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Per operator, the indices of the operators that feed it, ascending."""
    made_by = producers(graph)
    return tuple(
        tuple(sorted({made_by[name] for name in operator.inputs if name in made_by}))
        for operator in graph.operators
    )


def _before_and_after(graph: Graph) -> tuple[list[int], list[int]]:
    """Per operator, the set of those that it needs, and of those that need it; as bits."""
    before, after = [0] * len(graph.operators), [0] * len(graph.operators)
    for v, feeds in enumerate(predecessors(graph)):
        for u in feeds:
            before[v] |= before[u] | 1 << u
    for v, feeds in reversed([*enumerate(predecessors(graph))]):
        for u in feeds:
            after[u] |= after[v] | 1 << v
    return before, after


@remembered
def joint_operators(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Sets of operators that have to be in one stage, disjoint and ascending: those that read or
    make the values of a state, and those between them. In a later stage, the state of a microbatch
    would come too late for the next one.
    """
    users = holders(graph)
    sets = [_bits(users[one.name]) for one in graph.parameters if one.state]
    if all(one.bit_count() < 2 for one in sets):
        return ()
    before, after = _before_and_after(graph)
    closed: list[int] = []
    while sets:
        one = sets.pop()
        inside = [v for v in range(len(before)) if one >> v & 1]
        behind, ahead = one, one
        for v in inside:
            behind |= after[v]
            ahead |= before[v]
        grown = one | behind & ahead
        for other in [each for each in closed if each & grown]:
            closed.remove(other)
            grown |= other
        (closed if grown == one else sets).append(grown)
    members = (tuple(v for v in range(len(before)) if one >> v & 1) for one in closed)
    return tuple(sorted(one for one in members if len(one) > 1))


def _bits(indices: Iterable[int]) -> int:
    return sum(1 << v for v in indices)


def main_dtype(graph: Graph) -> str:
    """The float dtype of most parameter bytes; of most tensor bytes where there are none."""
    for held in (graph.parameters, graph.tensors):
        sizes: Counter[str] = Counter()
        for one in held:
            if one.dtype in FLOAT_DTYPES:
                sizes[one.dtype] += one.bytes
        if sizes:
            return sizes.most_common(1)[0][0]
    raise ValueError("a model without floats")


def retyped(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """The graph with other types of elements of some tensors, as autocast makes them.

    Args:
        dtypes: by tensor; others stay.
    """
    if all(dtypes.get(tensor.name, tensor.dtype) == tensor.dtype for tensor in graph.tensors):
        return graph
    tensors = (replace(t, dtype=dtypes.get(t.name, t.dtype)) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def with_parameters_in(graph: Graph, dtype: str, gradient_dtype: str | None = None) -> Graph:
    """The graph with another type of all trained parameters of floating-point numbers.

    Args:
        dtype: of the parameters.
        gradient_dtype: in which their gradients are added up; None for the same.
    """
    own = None if gradient_dtype in (None, dtype) else gradient_dtype
    parameters = (
        replace(one, dtype=dtype, gradient_dtype=own)
        if one.trainable and one.dtype in FLOAT_DTYPES
        else one
        for one in graph.parameters
    )
    return replace(graph, parameters=tuple(parameters))


def gradient_dtype(graph: Graph) -> str | None:
    """The type in which gradients are added up that is not that of their parameters; None if it is
    for all.
    """
    return next((p.gradient_dtype for p in graph.parameters if p.gradient_dtype is not None), None)
