"""The losses of a training step: of which outputs, by which functions, over which classes.

A `LossChoice` is what was chosen; a `Loss` is what follows from it for one graph. Nothing here
computes: `operators/losses.py` does. The training loss is the sum of all losses.

The rules of "auto", which every output without a chosen function has:

    a scalar, or the reduced result of a loss operator  own: the output is the loss
    made by Sigmoid, HardSigmoid or Tanh                mse
    rank 2, at least two elements on dimension 1        cross-entropy over dimension 1
    rank 3, at least two elements on dimension 2        cross-entropy over dimension 2 (tokens)
    anything else, such as images                       mse
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, TypeVar

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    Graph,
    LossChoice,
    Tensor,
    losses_of,
    producers,
    tensors_by_name,
)
from planner.artefacts.options import LossOptions
from planner.support.errors import ModelError, OptionError
from planner.support.named import check_named

if TYPE_CHECKING:
    from onnx import NodeProto

T = TypeVar("T", str, int)

AUTO = "auto"


class LossName(StrEnum):
    """A function of an output and a target; each is a mean over the elements of the target, those
    over classes over its counted elements.
    """

    CROSS_ENTROPY = "cross-entropy"
    NLL = "nll"
    MSE = "mse"
    L1 = "l1"
    SMOOTH_L1 = "smooth-l1"
    HUBER = "huber"
    BCE = "bce"
    OWN = "own"


_OF_CLASSES = frozenset({LossName.CROSS_ENTROPY, LossName.NLL})
_LOSS_OPERATORS = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
_NO_CLASSES = frozenset({"HardSigmoid", "Sigmoid", "Tanh"})  # makers of single bounded values
_PROBABILITIES = {"Softmax": "probabilities", "LogSoftmax": "log-probabilities"}


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one output on one microbatch.

    Attributes:
        function: a `LossName`, or the user's "module:function".
        output: the tensor of the graph that it is computed from.
        operator: type of the operator that makes this tensor; "" for an input of the graph. After
            Softmax the cross-entropy takes the logarithm; after LogSoftmax it does not normalise
            again; after Sigmoid the binary cross-entropy takes probabilities.
        class_dim: the dimension that classes lie on; None where the target has the output's shape.
        automatic: whether the rules chose the function.
    """

    function: str
    output: Tensor
    operator: str
    class_dim: int | None
    automatic: bool

    @property
    def has_target(self) -> bool:
        """Whether the output is compared with a target."""
        return self.function != LossName.OWN

    @property
    def is_users(self) -> bool:
        """Whether the user's own function computes it."""
        return self.function not in tuple(LossName)

    @property
    def counts_targets(self) -> bool:
        """Whether it is a mean over those class indices of a target that are not to be ignored."""
        return self.class_dim is not None and not self.is_users

    @property
    def compares_parts(self) -> bool:
        """Whether it can be computed over classes that are cut: a cross-entropy of scores."""
        return self.function == LossName.CROSS_ENTROPY and self.operator not in _PROBABILITIES

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of a target: that of the output, without the classes."""
        shape, at = self.output.shape, self.class_dim
        return shape if at is None else (*shape[:at], *shape[at + 1 :])

    @property
    def target_dtype(self) -> str:
        """The type of a target: integers for class indices, else that of the output."""
        return self.output.dtype if self.class_dim is None else "int64"

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 where there are none."""
        return 0 if self.class_dim is None else self.output.shape[self.class_dim]


def default_choice(
    outputs: Sequence[str],
    inputs: Sequence[str],
    nodes: "Sequence[NodeProto]",
    shapes: Mapping[str, tuple[int, ...]],
    has_gradient: Callable[[str], bool],
) -> LossChoice:
    """The loss of a model whose user chose no output: its first float output, or the loss that it
    computes itself.

    A scalar behind the first output counts as the model's loss if a loss operator makes it, if it
    is called "loss", or if it depends on an input that the first output does not depend on (the
    labels). An auxiliary scalar, which does none of these, does not.

    Args:
        outputs: float outputs, in the file's order.
        inputs: names of the graph's inputs.
        nodes: in topological order.
        shapes: of the outputs.
        has_gradient: whether a gradient flows from an output to a value that may be trained.
    """
    if not outputs:
        raise ModelError("expected a float output to compute a loss from, got none")
    first, *others = outputs
    made_by = {name: node.op_type for node in nodes for name in node.output}
    if not _is_own(made_by.get(first, ""), shapes[first]):
        others = [name for name in others if _is_own(made_by.get(name, ""), shapes[name])]
        read = _inputs_read(inputs, nodes) if others else {}
        for name in others:
            labelled = bool(read[name] - read[first])
            known = made_by.get(name) in _LOSS_OPERATORS or name == "loss"
            if (known or labelled) and has_gradient(name):
                return LossChoice(name, LossName.OWN.value)
    return LossChoice(first)


def _inputs_read(
    inputs: Sequence[str], nodes: "Sequence[NodeProto]"
) -> Mapping[str, frozenset[str]]:
    """The inputs of the graph that each tensor depends on."""
    read = {name: frozenset([name]) for name in inputs}
    for node in nodes:
        before = frozenset[str]().union(*(read.get(name, ()) for name in node.input))
        read.update(dict.fromkeys(node.output, before))
    return read


def _is_own(operator: str, shape: tuple[int, ...]) -> bool:
    return not shape or (operator in _LOSS_OPERATORS and prod(shape) == 1)


def check_outputs(given: Sequence[str], outputs: Sequence[str], floats: Sequence[str]) -> None:
    """Whether outputs that the user names can have a loss.

    Args:
        given: names of the option.
        outputs: names of the model's outputs that are no constants.
        floats: those of them that are floats.

    Raises:
        OptionError: naming the first one that cannot.
    """
    for i, name in enumerate(given):
        if name not in outputs:
            known = ", ".join(map(repr, outputs))
            raise OptionError(
                f"--output {name}: expected an output of the model, {known}; a profile's file is"
                " given by -o"
            )
        if name not in floats:
            raise OptionError(
                f"--output {name}: expected an output of floats, because a loss needs them, got one"
                f" of another type; those of floats: {', '.join(map(repr, floats)) or 'none'}"
            )
        if name in given[:i]:
            raise OptionError(f"--output {name}: expected each output once, got it twice")


def chosen(choices: Sequence[LossChoice], options: LossOptions) -> tuple[LossChoice, ...]:
    """The choices with the functions and dimensions that options give.

    A new function keeps the dimension of the classes that was chosen before if it has classes.

    Raises:
        OptionError: if a function is unknown, or an output has no loss.
    """
    functions = _by_output("--loss", options.loss, choices)
    class_dims = _by_output("--class-dim", options.class_dim, choices)
    for function in functions.values():
        _check_function(function)
        if ":" in function:
            check_named(function, "--loss", OptionError)
    changed = []
    for one in choices:
        if one.output in functions:
            function = functions[one.output]
            keeps = function in _OF_CLASSES or ":" in function
            one = replace(one, function=function, class_dim=one.class_dim if keeps else None)
        changed.append(replace(one, class_dim=class_dims.get(one.output, one.class_dim)))
    return tuple(changed)


def _by_output(
    option: str, given: T | Mapping[str, T] | None, choices: Sequence[LossChoice]
) -> Mapping[str, T]:
    """The values of an option by output."""
    if given is None:
        return {}
    names = [one.output for one in choices]
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            raise OptionError(
                f"{option} {name}={given[name]}: expected an output with a loss,"
                f" {', '.join(map(repr, names))}, got {name!r}; planner profile --output"
                f" {shlex.quote(name)} gives it one"
            )
    return given


def _check_function(function: str) -> None:
    module, _, name = function.partition(":")
    if function != AUTO and function not in tuple(LossName) and not (module and name):
        known = ", ".join((AUTO, *LossName))
        raise OptionError(f"--loss: expected one of {known}, or module:function, got {function!r}")


def losses(graph: Graph) -> tuple[Loss, ...]:
    """The losses of a graph, in the order of its choices.

    Raises:
        OptionError: if a choice does not fit its output.
    """
    return tuple(_loss(graph, choice) for choice in losses_of(graph))


def _loss(graph: Graph, choice: LossChoice) -> Loss:
    _check_function(choice.function)
    output = tensors_by_name(graph)[choice.output]
    maker = producers(graph).get(output.name)
    operator = "" if maker is None else graph.operators[maker].type
    if output.dtype not in FLOAT_DTYPES:
        raise OptionError(
            f"output {output.name!r} is {output.dtype}, a loss needs floats; choose another output"
            " with planner profile --output NAME"
        )
    if not prod(output.shape):
        raise OptionError(
            f"output {output.name!r} is empty, {list(output.shape)}, and a loss is a mean over its"
            " elements; choose another output with planner profile --output NAME, or give larger"
            " dimensions"
        )
    usual, usual_dim = _automatic(output.shape, operator)
    function: str = choice.function
    if function == AUTO:
        function = usual if choice.class_dim is None else LossName.CROSS_ENTROPY
    loss = Loss(function, output, operator, None, choice.function == AUTO)
    if function in _OF_CLASSES:
        usual_dim = 2 if len(output.shape) == 3 else 1
    elif function in tuple(LossName):
        _check_without_classes(loss, choice)
        return loss
    if choice.class_dim is None and usual_dim is None:  # of the user's function
        return loss
    return replace(loss, class_dim=_class_dim(loss, choice.class_dim, usual_dim))


def _automatic(shape: tuple[int, ...], operator: str) -> tuple[LossName, int | None]:
    """The rules of "auto": the function, and the dimension of its classes."""
    if _is_own(operator, shape):
        return LossName.OWN, None
    if len(shape) in (2, 3) and shape[-1] > 1 and operator not in _NO_CLASSES:
        return LossName.CROSS_ENTROPY, len(shape) - 1
    return LossName.MSE, None


def _check_without_classes(loss: Loss, choice: LossChoice) -> None:
    output = loss.output
    if choice.class_dim is not None:
        raise OptionError(
            f"--class-dim {choice.class_dim}: {loss.function} of {output.name!r} has no classes;"
            " leave it out, or use --loss cross-entropy"
        )
    if loss.function == LossName.OWN and prod(output.shape) != 1:
        raise OptionError(
            f"--loss own: expected an output of one element, {output.name!r} has the shape"
            f" {list(output.shape)}; choose another loss"
        )


def _class_dim(loss: Loss, given: int | None, usual: int | None) -> int:
    """The dimension of the classes, counted from the front."""
    name, shape = loss.output.name, loss.output.shape
    at = usual if given is None else given
    if len(shape) < 2:
        raise OptionError(
            f"--loss {loss.function}: expected an output of rank 2 or more, {name!r} has the shape"
            f" {list(shape)}; use --loss mse"
        )
    assert at is not None
    if not -len(shape) <= at < len(shape):
        raise OptionError(
            f"--class-dim {at}: expected from {-len(shape)} to {len(shape) - 1}, because {name!r}"
            f" has the shape {list(shape)}"
        )
    if shape[at] < 1:
        raise OptionError(
            f"--loss {loss.function}: expected classes on dimension {at} of {name!r}, which has the"
            f" shape {list(shape)}; choose another with --class-dim"
        )
    return at % len(shape)


def loss_lines(used: Sequence[Loss], outputs: Sequence[str] = ()) -> tuple[str, ...]:
    """Losses as sentences, and the outputs that have none.

    Args:
        used: the losses that are trained.
        outputs: names of all outputs of the graph; without, nothing is said about the others.
    """
    lines = [f"loss: {_described(loss)}{_why(loss)}" for loss in used]
    if len(used) > 1:
        lines.append(f"trained is the sum of the {len(used)} losses")
    lost = [loss.output.name for loss in used]
    without = [name for name in outputs if name not in lost]
    if without:
        lines.append(
            f"outputs without a loss: {', '.join(map(repr, without))};"
            " planner profile --output NAME chooses"
        )
    return tuple(lines)


def _described(loss: Loss) -> str:
    named = f"{loss.output.name!r} {list(loss.output.shape)}"
    if loss.function == LossName.OWN:
        return f"{named} itself, which the model computes"
    if loss.is_users:
        targets = "targets of the same shape"
        if loss.class_dim is not None:
            targets = f"targets are classes on dimension {loss.class_dim}"
        return f"{loss.function} of {named}, {targets}"
    mean = f"mean over {prod(loss.target_shape)} elements"
    if loss.class_dim is None:
        return f"{loss.function} of {named}, {mean}"
    kind = _PROBABILITIES.get(loss.operator, "") if loss.function != LossName.NLL else ""
    what = f"the {kind} {named}" if kind else named
    return f"{loss.function} of {what} over dimension {loss.class_dim} (classes), {mean}"


def _why(loss: Loss) -> str:
    if not loss.automatic:
        return ""
    if loss.function == LossName.MSE and len(loss.output.shape) > 3:
        return " (chosen automatically; classes per pixel: --loss cross-entropy --class-dim 1)"
    return " (chosen automatically)"


def loss_json(used: Sequence[Loss]) -> list[dict[str, object]]:
    """Losses as `profile --json` and `launch --json` print them."""
    return [
        {
            "output": loss.output.name,
            "shape": list(loss.output.shape),
            "function": str(loss.function),
            "class_dim": loss.class_dim,
            "automatic": loss.automatic,
        }
        for loss in used
    ]
