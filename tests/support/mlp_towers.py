"""A network of towers of MatMul and Relu side by side, which anyone's CPUs can train."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper


def write_mlp_towers(
    path: Path, depths: Sequence[int], width: int, batch: int, joint: int = 0
) -> None:
    """Writes the network: towers over one input, their sum, and layers on the sum.

    Args:
        depths: layers of each tower.
        width: of every layer.
        batch: samples; part of the model.
        joint: layers on the sum.
    """
    random = np.random.default_rng(0)
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []

    def layers(x: str, scope: str, count: int) -> str:
        for i in range(count):
            name = f"{scope}{i}"
            values = random.normal(size=(width, width)) / width**0.5
            weights.append(numpy_helper.from_array(values.astype(np.float32), f"w_{name}"))
            nodes.append(helper.make_node("MatMul", [x, f"w_{name}"], [f"h_{name}"], name=name))
            nodes.append(helper.make_node("Relu", [f"h_{name}"], [name], name=f"relu_{name}"))
            x = name
        return x

    ends = [layers("x", chr(ord("a") + t), depth) for t, depth in enumerate(depths)]
    nodes.append(helper.make_node("Sum", ends, ["sum"], name="sum"))
    y = layers("sum", "joint", joint)
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, width]) for name in ("x", y)
    )
    graph = helper.make_graph(nodes, "towers", [given], [made], weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
