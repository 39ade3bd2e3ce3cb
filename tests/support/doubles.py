"""Models in double precision: every float32 of an ONNX file becomes a float64, casts included."""

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

_LONG = {TensorProto.FLOAT: TensorProto.DOUBLE}


def doubled(path, target):
    """Writes the model of a file with float64 in the place of float32."""
    proto = onnx.load(path)
    _graph(proto.graph)
    onnx.save(proto, target)
    return target


def _graph(graph):
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type
        kind.elem_type = _LONG.get(kind.elem_type, kind.elem_type)
    for tensor in graph.initializer:
        _tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "stash_type"):
                attribute.i = _LONG.get(attribute.i, attribute.i)
            if attribute.type == onnx.AttributeProto.TENSOR:
                _tensor(attribute.t)
            if attribute.type == onnx.AttributeProto.GRAPH:
                _graph(attribute.g)


def _tensor(tensor):
    if tensor.data_type == TensorProto.FLOAT:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
