"""Clean-ups of an exported graph that leave every parameter and buffer as it is.

The exporter's own optimizer merges initializers of equal value and transposes weights. Here only
values that depend on no parameter, buffer or input are computed in advance: shapes, indices,
masks, positions.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass
from onnxscript.optimizer import fold_constants_ir

from planner.artefacts.operator_types import facts
from planner.model.scopes import MARKS, PADDING_MARK, STATE_MARK, STOP_MARK, padding_in

# Metadata of nodes that is kept: the modules that a node comes from, and their classes. The
# exporter also writes stack traces, with the paths of files on this machine.
KEPT_METADATA = frozenset({
    "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy", *MARKS,
})  # fmt: skip


def tidy(model: ir.Model, held: frozenset[str], scalars: Collection[float] = ()) -> None:
    """Cleans the graph up, in place.

    Args:
        held: names of the initializers that are parameters or buffers.
        scalars: numbers among the arguments of the module's operators.
    """
    InlinePass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    _train_dropout(model.graph)
    _remove_dead(model.graph)
    fold_constants_ir(
        model, onnx_shape_inference=True, should_fold=lambda node: _foldable(node, held)
    )
    _remove_identities(model.graph)
    _remove_decided(model.graph)
    _remove_dead(model.graph)
    _lengthen_scalars(model.graph, held, scalars)
    _keep_module_names(model)
    _mark_stops(model.graph)
    RemoveUnusedOpsetsPass()(model)


def _train_dropout(graph: ir.Graph) -> None:
    """Gives a Dropout without a mode the training mode.

    The exporter translates `scaled_dot_product_attention` with a dropout probability to a Dropout
    without a mode, which ONNX takes for evaluation; torch drops whatever the module's mode is.
    """
    for node in tuple(graph.all_nodes()):
        if node.op_type == "Dropout" and not node.domain and len(node.inputs) < 3:
            mode = ir.Node(
                "", "Constant", [], [ir.AttrTensor("value", ir.tensor(True))],
                name=f"{node.name}_mode",
            )  # fmt: skip
            mode.outputs[0].name = f"{node.outputs[0].name}_mode"
            mode.metadata_props.update(node.metadata_props)
            graph_of_node = node.graph
            assert graph_of_node is not None
            graph_of_node.insert_before(node, mode)
            ratio = node.inputs[1] if len(node.inputs) > 1 else None
            node.resize_inputs(3)
            node.replace_input_with(1, ratio)
            node.replace_input_with(2, mode.outputs[0])


def _foldable(node: ir.Node, held: frozenset[str]) -> bool | None:
    """False for nodes that read a parameter or buffer or draw numbers, which are others in every
    step; None leaves the choice to the pass.
    """
    reads = any(value is not None and value.name in held for value in node.inputs)
    return False if reads or facts(node.op_type).random else None


def _remove_identities(graph: ir.Graph) -> None:
    """Removes copies. Those of loop bodies and branches stay: a body's output may be the copy of a
    value from outside, which cannot be an output itself (onnx-ir's IdentityEliminationPass makes it
    one, and onnx.checker refuses the graph).
    """
    for node in tuple(graph):
        if node.op_type == "Identity" and not node.domain and not _is_marked(node):
            (source,), (copy,) = node.inputs, node.outputs
            if source is not None and not copy.is_graph_output():
                ir.convenience.replace_all_uses_with(copy, source)
                graph.remove(node, safe=True)


def _remove_decided(graph: ir.Graph) -> None:
    """Removes choices whose condition always holds, such as whether a query sees any key."""
    for node in tuple(graph):
        if node.op_type != "Where" or node.domain:
            continue
        (condition, taken, _), (made,) = node.inputs, node.outputs
        if condition is None or taken is None or taken.shape is None or made.is_graph_output():
            continue
        holds = ir.convenience.get_const_tensor(condition)
        if holds is not None and holds.numpy().all() and taken.shape == made.shape:
            ir.convenience.replace_all_uses_with(made, taken)
            graph.remove(node, safe=True)


def _is_marked(node: ir.Node) -> bool:
    return not node.metadata_props.keys().isdisjoint(MARKS)


def _remove_dead(graph: ir.Graph) -> None:
    """Removes nodes, and initializers, that no output and no state depends on.

    All outputs of a node that is kept stay: those of a BatchNormalization in training form are its
    running statistics.
    """
    states = {node.metadata_props.get(STATE_MARK) for node in graph}
    for node in reversed(tuple(graph)):
        is_read = any(value.uses() or value.is_graph_output() for value in node.outputs)
        if not is_read and STATE_MARK not in node.metadata_props:
            graph.remove(node, safe=True)
    for name, value in tuple(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and name not in states:
            del graph.initializers[name]


def _lengthen_scalars(graph: ir.Graph, held: frozenset[str], scalars: Collection[float]) -> None:
    """Gives constants in float64 all digits of the module's numbers.

    The exporter takes every number for a float32 before it gives it the type of the tensor beside
    it: a module in float64 that multiplies by 0.1 would multiply by 0.10000000149.
    """
    exact = {float(np.float32(one)): one for one in scalars}
    exact = {short: one for short, one in exact.items() if short != one}

    def lengthened(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
        if tensor is None or tensor.dtype is not ir.DataType.DOUBLE or tensor.size != 1:
            return None
        value = exact.get(float(tensor.numpy().reshape(())))
        return None if value is None else ir.tensor(np.full_like(tensor.numpy(), value))

    for name, one in graph.initializers.items():
        longer = None if name in held else lengthened(one.const_value)
        if longer is not None:
            longer.name = name
            one.const_value = longer
    for node in graph.all_nodes():
        value = node.attributes.get("value")
        if node.op_type in ("Constant", "ConstantOfShape") and value is not None:
            longer = lengthened(value.as_tensor())
            if longer is not None:
                node.attributes["value"] = ir.AttrTensor("value", longer)


def _mark_stops(graph: ir.Graph) -> None:
    """Makes marked Identities of the operator that a trace stops gradients by. Before this it is an
    operator that no pass knows, and so none removes or looks through.
    """
    for node in graph.all_nodes():
        if (node.domain, node.op_type) == ("planner", "stop_gradient"):
            node.domain, node.op_type, node.version = "", "Identity", None
            node.metadata_props[STOP_MARK] = "1"


def _keep_module_names(model: ir.Model) -> None:
    """Drops metadata that only serves to debug the exporter, and marks embeddings whose padding
    gets no gradient, which ONNX cannot express.
    """
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        values += node.outputs
        padding = padding_in(node.metadata_props) if node.op_type == "Gather" else None
        for key in tuple(node.metadata_props):
            if key not in KEPT_METADATA:
                del node.metadata_props[key]
        if padding is not None:
            node.metadata_props[PADDING_MARK] = str(padding)
        node.doc_string = None
    for value in values:
        value.metadata_props.clear()
