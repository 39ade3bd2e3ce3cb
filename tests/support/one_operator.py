"""Models of one operator, loaded as the planner loads them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from planner.model.load import load
from planner.profilers.rules import split_rules

TYPES = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}


def model_of(kind, *inputs, outputs=1, version=20, domain="", held=(), **attributes):
    """A model of one operator, with a product beside it that is trained.

    Args:
        inputs: shapes of floats; ("i", shape) of integers or ("b", shape) of booleans; an array is
            a constant; None is absent.
        held: positions of inputs that are parameters of the model.
    """
    names, values, constants = [], [], []
    for i, one in enumerate(inputs):
        names.append("" if one is None else f"x{i}")
        if isinstance(one, np.ndarray):
            constants.append(numpy_helper.from_array(one, names[i]))
        elif i in held:
            random = np.random.default_rng(i).normal(size=one).astype(np.float32)
            constants.append(numpy_helper.from_array(random, names[i]))
        elif one is not None:
            letter, shape = one if one and one[0] in ("i", "b") else ("f", one)
            values.append(helper.make_tensor_value_info(names[i], TYPES[letter], shape))
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(kind, names, made, name="it", domain=domain, **attributes)
    beside = helper.make_node("MatMul", ["beside", "trained"], ["product"])
    values.append(helper.make_tensor_value_info("beside", TensorProto.FLOAT, (2, 2)))
    constants.append(numpy_helper.from_array(np.ones((2, 2), np.float32), "trained"))
    graph = helper.make_graph(
        [node, beside],
        "one",
        values,
        [
            helper.make_tensor_value_info("product", TensorProto.FLOAT, None),
            *(onnx.ValueInfoProto(name=name) for name in made),
        ],
        constants,
    )
    sets = [helper.make_opsetid("", version)]
    sets += [helper.make_opsetid(domain, 1)] if domain else []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.onnx"
        path.write_bytes(
            helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
        )
        return load(path)


def rules_of(kind, *inputs, **how):
    """The rules of an operator as text, as files have them."""
    model = model_of(kind, *inputs, **how)
    found = split_rules(model, cached=False)
    place = [operator.name for operator in model.graph.operators].index("it")
    return {
        one.line + ("" if one.sizes is None else f" at {','.join(map(str, one.sizes))}")
        for one in found[place]
    }
