"""Profiles of models that were never run: every time is the roofline of a device."""

import tempfile
from math import prod
from pathlib import Path

from planner.artefacts.graph import View, parameters_by_name, tensors_by_name
from planner.artefacts.profile import OperatorCost, Profile, Source
from planner.artefacts.roofline import roofline_s
from planner.clusters.yaml.read import device_table
from planner.model.load import ReadOptions, load

# They change no value; their output lies in the storage of their input.
_VIEWS = ("Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def roofline_of_onnx(proto, device, batch=1):
    """A profile of an ONNX model; its external data need not be there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        model = load(path, ReadOptions(batch=batch))
    return roofline_of(model.graph, device, batch, model.hash, model.dimensions)


def roofline_of(graph, device, batch, model_hash=None, dimensions=None):
    """A profile of a graph; a backward takes two forwards."""
    kind = device_table()[device]
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    return Profile(
        graph=graph,
        operators=tuple(_cost(o, tensors, parameters, kind) for o in graph.operators),
        views=tuple(
            View(o.outputs[0], o.inputs[0])
            for o in graph.operators
            if o.type in _VIEWS and o.inputs
        ),
        model_path=None,
        model_hash=model_hash,
        dimensions=dimensions or {},
        microbatch_size=batch,
        dtype="float32",
        device_type=device,
        source=Source.ANALYTIC,
        threads=None,
        repetitions=0,
        spread=0.0,
        whole_step=None,
        versions={},
    )  # fmt: skip


def _cost(operator, tensors, parameters, kind):
    read = [tensors[name] for name in operator.inputs]
    held = [parameters[name] for name in operator.parameters]
    made = [tensors[name] for name in operator.outputs]
    is_view = operator.type in _VIEWS
    flops = (
        0 if is_view else sum(prod(one.shape) for one in made) * _per_value(operator, read, held)
    )
    moved = 0 if is_view else sum(one.bytes for one in (*read, *held, *made))
    cost = OperatorCost(
        operator.name, 0.0, 0.0, sum(one.bytes for one in made), sum(p.bytes for p in held),
        flops, moved, () if is_view else operator.outputs, 0,
    )  # fmt: skip
    forward_s = roofline_s(cost, kind, "float32")
    return OperatorCost(
        cost.name, forward_s, 2 * forward_s, cost.output_bytes, cost.parameter_bytes,
        cost.flops, cost.bytes_moved, cost.stash_tensors, 0,
    )  # fmt: skip


def _per_value(operator, read, held):
    """Floating-point operations for one value of the output."""
    match operator.type:
        case "MatMul" | "Gemm":
            return 2 * read[0].shape[-1]
        case "Conv":
            return 2 * prod(held[0].shape[1:])
    return 1
