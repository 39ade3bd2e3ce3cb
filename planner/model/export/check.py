"""The exported graph run by ONNX Runtime beside the module itself, on the example inputs.

Random numbers differ between any two runs, so Dropout is off in both: the draws of torch's dropout
are replaced by their expectation, which makes it the identity, and the nodes are taken out. A graph
with other random operators is not compared. ONNX Runtime has no training form of
BatchNormalization; it gets the same in simple operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.artefacts.operator_types import facts
from planner.model.export.eager import Eagerly, UnseenError
from planner.model.export.forms import normalized_by_batch, ranks_in
from planner.model.export.inputs import Inputs
from planner.support.draws import ELSEWHERE, drawn_elsewhere
from planner.support.errors import ExportError, words_of
from planner.support.units import format_bytes

MAX_BYTES = 1_800_000_000
"""Models with more weights are not run: ONNX Runtime holds them a second time."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""The largest difference that rounding explains, of the largest magnitude of an output; in float64
that of ONNX's attributes, which are float32."""


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of an exported graph with its module.

    Attributes:
        difference: the largest difference of an output, of its largest magnitude; None where
            nothing was compared.
        reason: why nothing was compared, else empty.
    """

    difference: float | None
    reason: str = ""


def check(module: nn.Module, inputs: Inputs, model: ir.Model) -> Check:
    """Runs the graph and the module, and compares their outputs.

    Raises:
        ExportError: if an output differs by more than rounding, or the module's run fails.
    """
    values = model.graph.initializers.values()
    size = sum(one.const_value.nbytes for one in values if one.const_value is not None)
    kinds = {node.op_type for node in model.graph.all_nodes()} - {"Dropout"}  # it is taken out
    random = sorted(kind for kind in kinds if facts(kind).random)
    if size > MAX_BYTES:
        return Check(None, f"the model holds {format_bytes(size)}")
    if random:
        return Check(None, f"{', '.join(random)} draw other numbers in every run")
    before = drawn_elsewhere()
    try:
        expected = outputs_of(module, inputs)
    except UnseenError as error:
        return Check(None, str(error))
    made = _run(_runnable(ir.to_proto(model)), inputs)
    if isinstance(made, str):
        return Check(None, f"ONNX Runtime cannot run it: {made}")
    names = [str(value.name) for value in model.graph.outputs]
    advice = advice_on_difference(draws=drawn_elsewhere() != before)
    differences = (_difference(*one, advice) for one in zip(names, expected, made, strict=False))
    return Check(max(differences, default=0.0))


def advice_on_difference(*, draws: bool) -> str:
    """What to do about a file that computes something else than its module.

    Args:
        draws: whether the module draws numbers that no trace shows.
    """
    if draws:
        return (
            f"forward draws {ELSEWHERE}, and the file has what came of them when it was traced;"
            " draw them by torch"
        )
    return "please report it with the module; --no-check writes the file nevertheless"


def outputs_of(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that a module returns, without dropout; its buffers are left as they were.

    Raises:
        ExportError: if the module raises.
        UnseenError: if an operator of higher order hides dropout.
    """
    copies = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    positional, named = pytree.tree_map_only(
        Tensor, lambda one: one.detach().clone(), (inputs.positional, inputs.named)
    )
    # With gradients: what forward does without them may be something else, or fail.
    try:
        with torch.enable_grad(), torch.random.fork_rng(), Eagerly(), _WithoutDropout():  # type: ignore[no-untyped-call]
            made = torch.func.functional_call(module, copies, positional, named)
    except UnseenError:
        raise
    except Exception as error:  # the module is the user's: its code raises what it likes
        raise ExportError(
            f"{type(module).__name__}: it can be traced, but its run on the example inputs, to"
            f" compare the file with, fails: {type(error).__name__}: {words_of(error)};"
            " --no-check writes the file nevertheless"
        ) from error
    return [one.detach() for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]


class _WithoutDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout as the identity.

    On CPUs it is input * (draws / (1 - p)), the draws of a Bernoulli distribution of 1 - p: with
    draws equal to 1 - p the factor is 1.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator of torch."""
        if isinstance(func, HigherOrderOperator):
            raise UnseenError(func)
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)  # torch leaves the default out
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


def _run(proto: ModelProto, inputs: Inputs) -> list[np.ndarray] | str:
    """The outputs of a model in ONNX Runtime, or the reason why it has none."""
    import onnxruntime

    examples = [
        one for one in (*inputs.positional, *inputs.named.values()) if isinstance(one, Tensor)
    ]
    names = [value.name for value in proto.graph.input]
    unknown = {one.dtype for one in examples} & {torch.bfloat16}
    if unknown:
        return "inputs in bfloat16"
    feed = {name: one.detach().cpu().numpy() for name, one in zip(names, examples, strict=True)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    content = proto.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        made: list[np.ndarray] = session.run(None, feed)
    except Exception as error:  # its exceptions have no type in common
        return str(error).splitlines()[0]
    return made


def _runnable(proto: ModelProto) -> ModelProto:
    """The model with nodes that ONNX Runtime has, and without dropout."""
    _make_runnable(proto.graph, {})
    return proto


def _make_runnable(graph: GraphProto, around: Mapping[str, int]) -> None:
    """Replaces the nodes of a graph, and of those within it, such as the branches of an If.

    Args:
        around: ranks of the tensors of the graphs that it is in.
    """
    ranks = {**around, **ranks_in(graph)}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _make_runnable(attribute.g, ranks)
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        if node.op_type == "Dropout":
            nodes += _nothing_dropped(node)
        elif node.op_type == "BatchNormalization" and attributes.get("training_mode"):
            nodes += normalized_by_batch(node, ranks[node.input[0]])
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _nothing_dropped(node: NodeProto) -> Sequence[NodeProto]:
    """Dropout that keeps everything, and its mask where it has one."""
    x = node.input[0]
    kept = [helper.make_node("Identity", [x], node.output[:1])]
    if not "".join(node.output[1:]):
        return kept
    shape, mask = f"{node.output[1]}/shape", node.output[1]
    true = helper.make_tensor("true", TensorProto.BOOL, [1], [True])
    return [
        *kept,
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("ConstantOfShape", [shape], [mask], value=true),
    ]


def _difference(name: str, expected: Tensor, made: np.ndarray, advice: str) -> float:
    """The largest difference of an output, of its largest magnitude.

    Args:
        advice: on a file that computes something else.

    Raises:
        ExportError: if rounding does not explain it.
    """
    wanted = expected.detach().cpu()
    got = torch.from_numpy(np.asarray(made))
    wrong = f"the exported file computes another {name!r} than the module"
    if got.shape != wanted.shape:
        raise ExportError(
            f"{wrong}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}; {advice}"
        )
    if not wanted.is_floating_point():
        if not torch.equal(got, wanted):
            raise ExportError(f"{wrong}: other integers; {advice}")
        return 0.0
    finite = wanted.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        raise ExportError(f"{wrong}: other infinite elements; {advice}")
    if not finite.any():
        return 0.0
    apart = float((got[finite].double() - wanted[finite].double()).abs().max())
    scale = float(wanted[finite].double().abs().max())
    difference = apart / scale if scale else apart
    if not difference <= TOLERANCE[wanted.dtype]:
        raise ExportError(
            f"{wrong}: they differ by {difference:.1e} of its largest magnitude, rounding explains"
            f" {TOLERANCE[wanted.dtype]:.0e}; {advice}"
        )
    return difference


__all__ = ["Check", "check", "outputs_of"]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """A comparison of the gradients of a file with those of its module.

    Attributes:
        difference: the largest of a parameter, of the largest magnitude of its gradient; None where
            nothing was compared.
        dtype: in which both ran.
        num_parameters: gradients that were compared.
        reason: why nothing was compared, else empty.
        notes: what the module does to its backward pass without another result, and what else is
            to be known.
        stopped: outputs of floats through which the module lets no gradient flow.
        unlike: an output that the file computes otherwise than the module in evaluation, in words;
            empty without any, and where that was not compared.
    """

    difference: float | None
    dtype: str = "float64"
    num_parameters: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    unlike: str = ""
