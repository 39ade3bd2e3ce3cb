"""Models of any size on the disk, which are never in memory: a chain of square products.

python -m tests.support.large_models FOLDER RANK    loads the part of a rank; what it took
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper

MIB = 2**20


def name_of(layer):
    return f"layers.{layer}.weight"


def write_chain(path, num_layers, width, *, external=False):
    """x -> x @ w0 -> .. -> y, all of (1, width). The first number of each matrix is its index.

    Args:
        external: whether the matrices are in a file beside the model, `weights.bin`.
    """
    block = np.random.default_rng(0).standard_normal((width, width), np.float32) / width
    names = ["x", *(f"x{i}" for i in range(1, num_layers)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[i], name_of(i)], [names[i + 1]], name=f"product{i}")
        for i in range(num_layers)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name in "xy"]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if external:
        _write_external(path, model, num_layers, block)
    else:
        _write_inline(path, model, num_layers, block)


def _matrices(num_layers, block):
    for layer in range(num_layers):
        block[0, 0] = layer
        yield memoryview(block).cast("B")


def _empty(layer, block):
    return TensorProto(name=name_of(layer), dims=block.shape, data_type=TensorProto.FLOAT)


def _write_external(path, model, num_layers, block):
    with path.with_name("weights.bin").open("wb") as file:
        for layer, content in enumerate(_matrices(num_layers, block)):
            tensor = _empty(layer, block)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": "weights.bin", "offset": file.tell(), "length": len(content)}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
            file.write(content)
    path.write_bytes(model.SerializeToString())


def _write_inline(path, model, num_layers, block):
    """Field by field: protobuf itself would need the file several times in memory."""
    number_of = {
        message: {one.name: one.number for one in message.DESCRIPTOR.fields}
        for message in (ModelProto, GraphProto, TensorProto)
    }
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    raw = _head(number_of[TensorProto]["raw_data"], block.nbytes)
    heads = []
    for layer in range(num_layers):
        tensor = _empty(layer, block).SerializeToString() + raw
        size = len(tensor) + block.nbytes
        heads.append(_head(number_of[GraphProto]["initializer"], size) + tensor)
    size = len(graph) + sum(map(len, heads)) + num_layers * block.nbytes
    with path.open("wb") as file:
        file.write(model.SerializeToString() + _head(number_of[ModelProto]["graph"], size) + graph)
        for head, content in zip(heads, _matrices(num_layers, block), strict=True):
            file.write(head)
            file.write(content)


def _head(number, length):
    """The tag and the length of a field."""
    return _varint(8 * number + 2) + _varint(length)


def _varint(value):
    low = [(value >> shift) & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(byte | 0x80 for byte in low[:-1]), low[-1]])


def peak_bytes():
    """The largest resident size that this process ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def load_part(folder, rank):
    """Loads the part of a rank of strategy.json, as a launch does; its share and what it took."""
    from planner.artefacts.files import read_plan
    from planner.artefacts.options import LossOptions
    from planner.launcher.device_part import make_part
    from planner.launcher.job import prepare
    from planner.launcher.rendezvous import ProcessRank

    begun_s = time.perf_counter()
    path = folder / "strategy.json"
    plan = read_plan(path)
    seat = ProcessRank(rank, len(plan.ranks), rank, len(plan.ranks))
    job = prepare(plan, path, None, seat, (LossOptions(), "cpu"))
    known_s = time.perf_counter()
    part = make_part(job, SimpleNamespace(device=plan.ranks[rank]))
    read_s = time.perf_counter()
    return {
        "names": sorted(part.values),
        "first": [part.values[name][0, 0].item() for name in sorted(part.values)],
        "share_bytes": sum(value.nbytes for value in part.values.values()),
        "peak_bytes": peak_bytes(),
        "prepare_s": known_s - begun_s,
        "read_s": read_s - known_s,
    }


if __name__ == "__main__":
    print(json.dumps(load_part(Path(sys.argv[1]), int(sys.argv[2]))))
