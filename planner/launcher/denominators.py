"""The denominators of a loss that the model computes itself: counts of labels, sums of masks.

A mean over the labels that count is a sum A over a number D, and both depend on the samples. Over
microbatches m of one batch,

    mean of A_m / D_m  !=  sum of A_m / sum of D_m

and the right side is the loss of the batch. It is the mean of A_m / D over the microbatches, with
the mean of D_m as D in all of them. Here D_m is found in the graph, where it depends on the model's
inputs and on constants alone, so that it is known before the first forward pass.

From a loss, a walk goes back through operators that are linear in what they read: sums, products
with numbers and with weights of elements, shapes. It ends at

    NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss   with the mean over labels that count
    Div, Reciprocal                                      by a sum or mean over the whole microbatch

A denominator may be held above a number, as by clamp(min=1), or have one added, as against division
by zero: then D is that function of the batch's sum. All other parts of a loss are left as they are:
a mean over a fixed number of elements is the same both ways.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    Graph,
    loss_outputs,
    parameters_by_name,
    predecessors,
    producers,
    tensors_by_name,
)
from planner.artefacts.losses import Loss
from planner.artefacts.operator_types import VIEW, facts
from planner.model.load import Model, Node
from planner.operators.losses import IGNORED_CLASS
from planner.support.memo import remembered

_KNOWN = frozenset({
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Div", "Equal", "Exp",
    "Expand", "Flatten", "Floor", "Gather", "GatherElements", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Pad", "Pow", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Relu", "Reshape", "Round", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tile",
    "Transpose", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
"""Operators between inputs and a denominator: all others, such as those that draw numbers, hide
it."""
_LINEAR = frozenset({"Cast", "Expand", "Neg", "ReduceMean", "ReduceSum"})
"""Operators that are linear in their first input, beside views."""

Step = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Denominator:
    """A number in the graph that the elements of a microbatch are divided by.

    Attributes:
        name: among the totals of a step, after the operator that divides.
        operator: its index.
        summed: names of the tensors that D_m follows from: the labels of a loss operator and the
            weights of its classes, or the sum itself, of one element.
        ignored: the label that a loss operator does not count; None for other operators.
        is_mean: whether the sum is divided by the number of elements of a microbatch.
        steps: functions of the sum, in their order, such as a bound; they give the denominator.
    """

    name: str
    operator: int
    summed: tuple[str, ...]
    ignored: int | None = None
    is_mean: bool = False
    steps: tuple[Step, ...] = ()

    def of_step(self, total: float, num_microbatches: int) -> float:
        """The denominator of all microbatches of a step.

        Args:
            total: the sum of their counts.
            num_microbatches: of the step.

        Returns:
            Infinity where nothing counts, so that what is divided adds zero.
        """
        value = total / num_microbatches if self.is_mean else total
        for step in self.steps:
            value = step(value)
        return (value if self.is_mean else value / num_microbatches) or inf


@dataclass(frozen=True, slots=True)
class Denominators:
    """The denominators of one loss.

    Attributes:
        of: themselves, in the order of their operators.
        complete: whether the loss has no other part, so that it is nothing if nothing counts.
    """

    of: tuple[Denominator, ...] = ()
    complete: bool = False


@remembered
def denominators(model: Model, loss: Loss) -> Denominators:
    """The denominators of a loss; none if it has a target, or the graph does not show them."""
    if loss.has_target:
        return Denominators()
    walk = _Walk(model).back(loss.output.name)
    if not walk.found or _leaves(walk, model.graph):
        return Denominators()
    return Denominators(tuple(one for _, one in sorted(walk.found.items())), not walk.has_rest)


def makers(summed: Iterable[str], graph: Graph) -> tuple[int, ...]:
    """The indices of all operators that tensors follow from, ascending."""
    made_by, before = producers(graph), predecessors(graph)
    open_, found = [made_by[name] for name in summed if name in made_by], set[int]()
    while open_:
        operator = open_.pop()
        if operator not in found:
            found.add(operator)
            open_ += before[operator]
    return tuple(sorted(found))


def inputs_of(summed: Iterable[str], graph: Graph) -> frozenset[str]:
    """The inputs of the model that tensors follow from."""
    read = {name for v in makers(summed, graph) for name in graph.operators[v].inputs}
    return frozenset({*summed, *read}.intersection(graph.inputs))


def _leaves(walk: "_Walk", graph: Graph) -> bool:
    """Whether another operator of a loss reads a quotient, or what follows from one on the path:
    then the loss is not linear in it.
    """
    needed, before = {*makers(loss_outputs(graph), graph)}, predecessors(graph)
    divided = {*walk.found}
    for v in sorted(walk.path):
        if not divided.isdisjoint(before[v]):
            divided.add(v)
    return any(v not in walk.path and not divided.isdisjoint(before[v]) for v in needed)


@dataclass(slots=True)
class _Walk:
    """Back from a loss.

    Attributes:
        found: the denominators, by their operators.
        path: the operators between them and the loss, and they themselves.
        has_rest: whether the loss has a part without denominator, which is no constant.
        open: tensors that the loss is linear in, to go back from.
        branches: walks that begin elsewhere, by tensor.
    """

    model: Model
    branches: dict[str, "_Walk"] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    found: dict[int, Denominator] = field(default_factory=dict)
    path: set[int] = field(default_factory=set)
    has_rest: bool = False

    def back(self, name: str) -> "_Walk":
        """Goes back from a tensor, with all that it leads to."""
        made_by = producers(self.model.graph)
        self.open.append(name)
        while self.open:
            name = self.open.pop()
            operator = made_by.get(name)
            if operator in self.path or _number(self.model, name) is not None:
                continue
            if operator is None or not self._passes(operator, name):
                self.has_rest = True
        return self

    def _passes(self, operator: int, name: str) -> bool:
        """Whether the maker of a tensor divides by a denominator, or the walk goes on behind it."""
        node = self.model.nodes[operator]
        if node.domain or name != node.outputs[0]:
            return False
        match node.type:
            case "NegativeLogLikelihoodLoss" | "SoftmaxCrossEntropyLoss":
                return self._end(operator, _of_labels(self.model, operator))
            case "Reciprocal":
                return self._end(operator, _of_sum(self.model, operator, node.inputs[0]))
            case "Div" if _is_fixed(self.model, node.inputs[1]):
                return self._goes_on(operator, node.inputs[:1])
            case "Div":
                nested = self._branch(node.inputs[0]).found
                found = None if nested else _of_sum(self.model, operator, node.inputs[1])
                return self._end(operator, found)
            case "Mul":
                return self._product(operator, node)
            case "Where":
                element = _size(self.model, node.inputs[0]) == _size(self.model, node.outputs[0])
                chosen = element and _size(self.model, node.outputs[0]) > 1
                guards = _asks_for_zero(self.model, node.inputs[0])
                return (chosen or guards) and self._goes_on(operator, node.inputs[1:])
            case "Add" | "Sub" | "Sum" | "Mean":
                return self._goes_on(operator, node.inputs)
            case kind if _is_linear(kind) and _is_float(self.model, name):
                return self._goes_on(operator, node.inputs[:1])
        return False

    def _end(self, operator: int, found: Denominator | None) -> bool:
        if found is None:
            return False
        self.found[operator] = found
        self.path.add(operator)
        return True

    def _goes_on(self, operator: int, names: Iterable[str]) -> bool:
        self.path.add(operator)
        self.open += names
        return True

    def _branch(self, name: str) -> "_Walk":
        """A walk of its own, which is made once."""
        if name not in self.branches:
            self.branches[name] = _Walk(self.model, self.branches).back(name)
        return self.branches[name]

    def _product(self, operator: int, node: Node) -> bool:
        """A product with a number, with weights of elements, or of a sum and 1 / D."""
        first, second = node.inputs
        for factor, other in ((first, second), (second, first)):
            if _is_fixed(self.model, other):
                return self._goes_on(operator, [factor])
        branches = self._branch(first), self._branch(second)
        with_some = [one for one in branches if one.found]
        if len(with_some) != 1:
            return False
        (branch,) = with_some
        other = second if branch is branches[0] else first
        size = _size(self.model, node.outputs[0])
        of_elements = size > 1 and _size(self.model, other) == size
        if not of_elements and not all(map(self._is_inverse, branch.found)):
            return False
        self.found |= branch.found
        self.path |= {operator, *branch.path}
        self.has_rest |= branch.has_rest
        return True

    def _is_inverse(self, operator: int) -> bool:
        """Whether an operator divides a number alone."""
        node = self.model.nodes[operator]
        return node.type == "Reciprocal" or (
            node.type == "Div" and _number(self.model, node.inputs[0]) is not None
        )


# ---- what is divided by


def _of_labels(model: Model, operator: int) -> Denominator | None:
    """The number of labels of a loss operator that count, or the weights of their classes."""
    node = model.nodes[operator]
    summed = tuple(name for name in node.inputs[1:] if name)
    if node.attributes.get("reduction", "mean") not in ("mean", b"mean"):
        return None
    if not _is_of_samples(model, summed[0]):
        return None
    if any(not (_is_constant(model, one) or _is_of_samples(model, one)) for one in summed[1:]):
        return None
    ignored = node.attributes.get("ignore_index", IGNORED_CLASS)
    assert isinstance(ignored, int)
    labels = _before_moves(model, summed[0])
    return Denominator(_title(node), operator, (labels, *summed[1:]), ignored)


def _before_moves(model: Model, name: str) -> str:
    """The tensor with the same elements that a tensor is made of by operators that move them: to
    count in it takes less time.
    """
    operator = producers(model.graph).get(name)
    while operator is not None and facts(model.nodes[operator].type).moves is VIEW:
        name = model.nodes[operator].inputs[0]
        operator = producers(model.graph).get(name)
    return name


def _of_sum(model: Model, operator: int, divisor: str) -> Denominator | None:
    """A divisor that follows from one sum or mean over all elements of a tensor."""
    found = _sum_of(model, divisor)
    if found is None:
        return None
    name, is_mean, steps = found
    return Denominator(_title(model.nodes[operator]), operator, (name,), None, is_mean, steps)


def _title(node: Node) -> str:
    return f"denominator of {node.name}"


def _sum_of(model: Model, name: str) -> tuple[str, bool, tuple[Step, ...]] | None:
    """The sum or mean over all elements of something in the inputs that a scalar follows from:
    its name, whether it is a mean, and the functions of it.
    """
    steps: list[Step] = []
    while True:
        operator = producers(model.graph).get(name)
        node = None if operator is None else model.nodes[operator]
        if node is None or node.domain or _size(model, node.outputs[0]) != 1:
            return None
        if node.type in ("ReduceSum", "ReduceMean"):
            whole = _axes(model, node) == {*range(_rank(model, node.inputs[0]))}
            if not whole or not _adds_up(model, node.inputs[0]):
                return None
            return name, node.type == "ReduceMean", (*reversed(steps),)
        step = _step(model, node)
        if step is None:
            return None
        name, function = step
        steps += [function] if function else []


def _adds_up(model: Model, name: str) -> bool:
    """Whether the sum over a tensor's elements is that over the samples."""
    operator = producers(model.graph).get(name)
    node = None if operator is None else model.nodes[operator]
    if node is not None and node.type == "ReduceSum" and not node.domain:
        return _adds_up(model, node.inputs[0])
    return _is_of_samples(model, name)


def _step(model: Model, node: Node) -> tuple[str, Step | None] | None:
    """The scalar that a scalar follows from, and how; None if that is not simple. No function is
    the same number.
    """
    number = partial(_number, model)
    dtype = tensors_by_name(model.graph)[node.outputs[0]].dtype
    match node.type, node.inputs:
        case kind, (name, *_) if facts(kind).moves is VIEW:
            return name, None
        case "Cast", (name,) if dtype in FLOAT_DTYPES or not _is_float(model, name):
            return name, None
        case "Clip", (name, *bounds):
            ends = [node.attributes.get(end) for end in ("min", "max")]
            for i, bound in enumerate(bounds):
                ends[i] = number(bound) if bound else None
                if bound and ends[i] is None:
                    return None
            low, high = (-inf, inf) if ends == [None, None] else (
                -inf if ends[0] is None else float(str(ends[0])),
                inf if ends[1] is None else float(str(ends[1])),
            )  # fmt: skip
            return name, lambda value: min(max(value, low), high)
    return _step_of_two(model, node)


def _step_of_two(model: Model, node: Node) -> tuple[str, Step | None] | None:
    """The same of an operator that reads a scalar and a number."""
    if len(node.inputs) != 2:
        return None
    first, second = node.inputs
    left, right = _number(model, first), _number(model, second)
    if (left is None) == (right is None):
        return None
    name, number = (second, left) if right is None else (first, right)
    assert number is not None
    divides = node.type == "Div" and right is not None and _is_float(model, first)
    steps: Mapping[str, Step] = {
        "Add": lambda value: value + number,
        "Max": lambda value: max(value, number),
        "Min": lambda value: min(value, number),
        "Mul": lambda value: value * number,
        **({"Sub": lambda value: value - number} if right is not None else {}),
        **({"Div": lambda value: value / number} if divides else {}),
    }
    return (name, steps[node.type]) if node.type in steps else None


def _asks_for_zero(model: Model, name: str) -> bool:
    """Whether a condition is that a denominator's sum is not zero."""
    operator = producers(model.graph).get(name)
    if operator is None:
        return False
    node = model.nodes[operator]
    if node.type == "Not":
        inner = producers(model.graph).get(node.inputs[0])
        node = node if inner is None else model.nodes[inner]
        return node.type == "Equal" and _compares_with_zero(model, node)
    return node.type == "Greater" and _compares_with_zero(model, node)


def _compares_with_zero(model: Model, node: Node) -> bool:
    name, other = node.inputs
    return _number(model, other) == 0 and _sum_of(model, name) is not None


# ---- what tensors depend on


@dataclass(frozen=True, slots=True)
class _Sources:
    """What the tensors of a model depend on.

    Attributes:
        fixed: those that follow from parameters alone: the same in all microbatches of a step.
        constant: those of them that follow from no trained parameter: the same in all steps.
        of_samples: those that follow from inputs and constants so that each row depends on one
            sample. Samples lie on dimension 0 in their order, each with as many rows.
    """

    fixed: frozenset[str]
    constant: frozenset[str]
    of_samples: frozenset[str]


@remembered
def _sources(model: Model) -> _Sources:
    known = parameters_by_name(model.graph)
    constant = {name for name in model.values if name not in known}
    constant |= {one.name for one in known.values() if not (one.trainable or one.state)}
    fixed = constant | {one.name for one in known.values() if not one.state}
    samples = {name for name in model.graph.inputs if _has_samples(model, _shape(model, name))}
    for node in model.nodes:
        given = [name for name in node.inputs if name]
        if not node.domain and node.type in _KNOWN and given:
            found = [some for some in (fixed, constant) if some.issuperset(given)]
            found += [samples] if _are_samples(model, node, samples, constant) else []
            for some in found:
                some.update(node.outputs)
    return _Sources(frozenset(fixed), frozenset(constant), frozenset(samples))


def _are_samples(model: Model, node: Node, samples: set[str], constant: set[str]) -> bool:
    """Whether what an operator makes has the samples that it reads."""
    varying = [name for name in node.inputs if name and name not in constant]
    return bool(varying) and samples.issuperset(varying) and _keeps_samples(model, node, varying)


def _has_samples(model: Model, shape: tuple[int, ...]) -> bool:
    """Whether dimension 0 has as many rows for each sample."""
    return bool(shape) and shape[0] % model.batch == 0


def _keeps_samples(model: Model, node: Node, varying: Sequence[str]) -> bool:
    """Whether rows of an operator's outputs depend on the sample that they lie at.

    Args:
        varying: its inputs that are no constants; each has rows of samples.
    """
    made, read = _shape(model, node.outputs[0]), _shape(model, varying[0])
    alone = len(varying) == 1 and varying[0] == node.inputs[0]
    aligned = all(
        len(shape) == len(made) and shape[:1] == made[:1]
        for shape in (_shape(model, one) for one in varying)
    )
    match node.type:
        case "ReduceMax" | "ReduceMean" | "ReduceMin" | "ReduceSum":
            return alone and 0 not in _axes(model, node)
        case "Reshape" | "Flatten":
            return alone and _has_samples(model, made)
        case "Squeeze" | "Unsqueeze":
            return alone and made[:1] == read[:1]
        case "Transpose":
            order = node.attributes.get("perm")
            return isinstance(order, tuple | list) and order[0] == 0
        case "Gather" | "GatherElements":
            return _gathers_samples(node, varying, len(read))
        case "Slice":
            steps = model.values[node.inputs[4]] if len(node.inputs) > 4 else np.ones(1)
            return alone and aligned and bool((steps > 0).all())
    return aligned


def _gathers_samples(node: Node, varying: Sequence[str], rank: int) -> bool:
    """The same of a Gather: rows of a table of constants, or elements within each sample.

    Args:
        rank: of the first input that varies.
    """
    axis = node.attributes.get("axis", 0)
    assert isinstance(axis, int)
    if len(varying) > 1:
        return False
    if varying[0] == node.inputs[0]:
        return bool(axis % rank)
    return node.type == "GatherElements" or not axis


def _is_linear(kind: str) -> bool:
    return kind in _LINEAR or facts(kind).moves is VIEW


def _is_fixed(model: Model, name: str) -> bool:
    return name in _sources(model).fixed


def _is_constant(model: Model, name: str) -> bool:
    return name in _sources(model).constant


def _is_of_samples(model: Model, name: str) -> bool:
    return name in _sources(model).of_samples


def _number(model: Model, name: str) -> float | None:
    """The only element of a constant; None for everything else."""
    if name not in model.values or not _is_constant(model, name):
        return None
    _, shape = model.values.described(name)
    return None if np.prod(shape) != 1 else float(model.values[name].reshape(-1)[0])


def _axes(model: Model, node: Node) -> set[int]:
    """The dimensions that a reduction sums over."""
    given = node.attributes.get("axes")
    if given is None and len(node.inputs) > 1 and node.inputs[1]:
        given = tuple(int(one) for one in model.values[node.inputs[1]].reshape(-1))
    rank = _rank(model, node.inputs[0])
    if not given:
        return set() if node.attributes.get("noop_with_empty_axes") else {*range(rank)}
    assert isinstance(given, tuple | list)
    return {axis % rank for axis in given}


def _shape(model: Model, name: str) -> tuple[int, ...]:
    known = tensors_by_name(model.graph).get(name)
    return known.shape if known is not None else model.values.described(name)[1]


def _size(model: Model, name: str) -> int:
    return int(np.prod(_shape(model, name)))


def _rank(model: Model, name: str) -> int:
    return len(_shape(model, name))


def _is_float(model: Model, name: str) -> bool:
    return tensors_by_name(model.graph)[name].dtype in FLOAT_DTYPES
