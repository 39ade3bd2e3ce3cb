"""Mutations of ONNX models that a random change of a field would not find."""

from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.fuzz.mutations.protobufs import mutate
from tests.fuzz.mutations.values import text

SIZES = (0, -1, 1, 2, 3, 5, 2**31, 10**9, 10**12, 2**62)


def mutate_model(random: Random, model: ModelProto) -> str:
    """Changes a model; says how."""
    if random.random() < 0.4 or not model.graph.node:
        return mutate(random, model)
    name, change = random.choice(CHANGES)
    change(random, model)
    return name


def _node(random: Random, model: ModelProto) -> NodeProto:
    """A node of the graph, or of a graph or function in it."""
    nodes = list(model.graph.node)
    for node in model.graph.node:
        for attribute in node.attribute:
            nodes += attribute.g.node
    for function in model.functions:
        nodes += function.node
    return random.choice(nodes)


def _tensors(model: ModelProto) -> list[str]:
    names = {name for node in model.graph.node for name in (*node.input, *node.output)}
    return sorted(names | {one.name for one in model.graph.initializer}) or ["x"]


@cache
def operator_types() -> tuple[str, ...]:
    """Names of ONNX's own operators."""
    return tuple(sorted({one.name for one in onnx.defs.get_all_schemas() if not one.domain}))


def retype(random: Random, model: ModelProto) -> None:
    """Another operator for a node."""
    _node(random, model).op_type = random.choice(operator_types())


def rewire(random: Random, model: ModelProto) -> None:
    """Another input or output of a node: a tensor of the model, none, or an unknown one."""
    node = _node(random, model)
    names = node.input if node.input and random.random() < 0.7 else node.output
    new = random.choice((*_tensors(model), "", "nobody"))
    if names and random.random() < 0.8:
        names[random.randrange(len(names))] = new
    else:
        names.append(new)


def reattribute(random: Random, model: ModelProto) -> None:
    """Another value of an attribute, of any type, or an attribute of the operator's that was not
    there.
    """
    node = _node(random, model)
    name = random.choice([one.name for one in node.attribute] or ["axis"])
    if onnx.defs.has(node.op_type) and random.random() < 0.5:
        name = random.choice([*onnx.defs.get_schema(node.op_type).attributes, name])
    values = (
        0, 1, -1, 2**31, 2**62, -(2**63), 0.5, float("nan"), float("inf"), "x", "\x1b[2J", b"\xff",
        [0], [-1], [0, 0], [1, 2, 3, 4], [2**40, 2**40], [1.5], ["a"], [1] * 3000,
        numpy_helper.from_array(np.zeros((2, 2), np.float32)), helper.make_graph([], "", [], []),
    )  # fmt: skip
    new = helper.make_attribute(name, random.choice(values))
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, new])


def resize(random: Random, model: ModelProto) -> None:
    """Another shape of an input, an output or a weight."""
    graph = model.graph
    value = random.choice([*graph.input, *graph.output, *graph.initializer])
    if isinstance(value, TensorProto):
        if value.dims and random.random() < 0.7:
            value.dims[random.randrange(len(value.dims))] = random.choice(SIZES)
        else:
            value.dims.append(random.choice(SIZES))
        return
    dims = value.type.tensor_type.shape.dim
    if not dims or random.random() < 0.2:
        dims.add().dim_value = random.choice(SIZES)
    elif random.random() < 0.7:
        dims[random.randrange(len(dims))].dim_value = random.choice(SIZES)
    else:
        dims[random.randrange(len(dims))].dim_param = (
            text(random).encode("utf-8", "replace").decode()
        )


def reweight(random: Random, model: ModelProto) -> None:
    """A weight of other numbers, of another type, or not in one piece."""
    if not model.graph.initializer:
        return
    tensor = random.choice(model.graph.initializer)
    kind = random.randrange(6)
    if kind == 0:
        tensor.data_type = random.choice((*range(-1, 27), 1000))
    elif kind == 1:
        tensor.raw_data = tensor.raw_data[: random.choice((0, 1, 7))]
    elif kind == 2:
        odd = np.array([np.nan, np.inf, -np.inf, 1e38, 0.0], np.float32)
        tensor.raw_data = np.resize(odd, len(tensor.raw_data) // 4).tobytes()
    elif kind == 3:
        tensor.float_data.extend([1.0] * random.choice((1, 1000)))
    elif kind == 4:
        tensor.ClearField("raw_data")
        tensor.data_type = TensorProto.STRING
        tensor.string_data.extend([b"\xff", b"a\x1b[31m"])
    else:
        whole = TensorProto()
        whole.CopyFrom(tensor)
        model.graph.sparse_initializer.add().values.CopyFrom(whole)


LOCATIONS = ("m.data", "../m.data", "/etc/passwd", "/dev/zero", "", ".", "pipe", "nowhere",
             "a/../m.data", "m.onnx", "\x1b[31m", "link", "x" * 5000, "C:\\m.data")  # fmt: skip


def put_outside(random: Random, model: ModelProto) -> None:
    """A weight in a file: of any name, offset and length."""
    if not model.graph.initializer:
        return
    tensor = random.choice(model.graph.initializer)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    entries.setdefault("location", "m.data")
    wrong = ("-1", "3", str(2**62), str(2**64), "x", "", "0x10", "1e3", "\u0661", " 8", "9" * 5000)
    key = random.choice(("location", "offset", "length", "checksum"))
    entries[key] = random.choice(LOCATIONS if key == "location" else wrong)
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def grow(random: Random, model: ModelProto) -> None:
    """A constant, folded before the model runs, that is far too large, or too many turns."""
    size = random.choice((10**5, 10**8, 10**9, 10**12, 2**62))
    graph, many = model.graph, []
    for name, value in (("huge.shape", [size]), ("huge.pads", [0, size]), ("huge.one", [1])):
        many.append(helper.make_node("Constant", [], [name], value_ints=value))
    kind, inputs = random.choice(
        (
            ("ConstantOfShape", ["huge.shape"]),
            ("Expand", ["huge.one", "huge.shape"]),
            ("Pad", ["huge.one", "huge.pads"]),
            ("Tile", ["huge.one", "huge.shape"]),
            ("Range", ["huge.zero", "huge.end", "huge.step"]),
            ("OneHot", ["huge.one", "huge.shape", "huge.pads"]),
            ("EyeLike", ["huge.shape"]),
        )
    )
    for name, value in (("huge.zero", 0), ("huge.end", size), ("huge.step", 1)):
        many.append(helper.make_node("Constant", [], [name], value_int=value))
    many.append(helper.make_node(kind, inputs, ["huge"], "huge"))
    target = random.choice(graph.node)
    if target.input:
        target.input[random.randrange(len(target.input))] = "huge"
    nodes = [*many, *graph.node]
    copies = [NodeProto() for _ in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] == "three":
            node.attribute[0].i = random.choice((-1, 0, 20_000, 10**9, 2**62))


def call(random: Random, model: ModelProto) -> None:
    """A function that calls itself, another one, or the name of an operator."""
    name = random.choice(("linear", "twice", "MatMul", "Relu", "new"))
    domain = random.choice(("own", "", "com.microsoft", "x"))
    if not model.functions or random.random() < 0.3:
        function = helper.make_function(
            domain, name, ["p"], ["q"], [helper.make_node(name, ["p"], ["q"], domain=domain)],
            [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)],
        )  # fmt: skip
        model.functions.append(function)
    else:
        body = random.choice(model.functions).node
        at = random.choice(body)
        at.op_type, at.domain = name, domain
    node = random.choice(model.graph.node)
    node.op_type, node.domain = name, domain


def nest(random: Random, model: ModelProto) -> None:
    """Graphs in graphs; protobuf reads no more than a hundred messages in each other."""
    if any(node.name == "deeper" for node in model.graph.node):
        return
    depth = random.choice((1, 3, 25))
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    del graph.initializer[:]
    for _ in range(depth):
        outer = onnx.GraphProto(name="deeper")
        outer.output.extend(graph.output)
        node = outer.node.add(
            name="deeper", op_type="If", input=["c"], output=[graph.output[0].name]
        )
        for branch in ("then_branch", "else_branch")[: 1 if depth > 3 else 2]:
            node.attribute.add(name=branch, type=AttributeProto.GRAPH).g.CopyFrom(graph)
        graph = outer
    model.graph.node.append(graph.node[0])


def lengthen(random: Random, model: ModelProto) -> None:
    """A chain of many nodes."""
    last = model.graph.node[-1]
    if not last.output:
        return
    name = last.output[0]
    for i in range(random.choice((50, 2000))):
        model.graph.node.append(
            helper.make_node(
                random.choice(("Relu", "Identity", "Add")), [name, name][:2], [f"c{i}"]
            )
        )
        name = f"c{i}"


def version(random: Random, model: ModelProto) -> None:
    """Other versions of the format or of the operators."""
    versions = (0, 1, 3, 7, 12, 19, 25, 99, -1, 2**40)
    if random.random() < 0.3:
        model.ir_version = random.choice((*versions, 2**62))
        return
    del model.opset_import[random.randrange(len(model.opset_import) + 1) :]
    domain = random.choice(("", "ai.onnx", "com.microsoft", "own", "ai.onnx.ml", "x"))
    model.opset_import.add(domain=domain, version=random.choice(versions))


def note(random: Random, model: ModelProto) -> None:
    """Metadata such as exporters write, with anything in it."""
    keys = ("planner.module", "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.fx_node", "namespace",
            "planner.stages", "source")  # fmt: skip
    words = text(
        random, ("['', 'h.0', 'y']", "%p_h_0 : [num_users=1]", '{"parameters": {}}', "[[[[")
    )
    target = random.choice([model, model.graph, *model.graph.node])
    value = words.encode("utf-8", "replace").decode()
    target.metadata_props.add(key=random.choice(keys), value=value)


def rename(random: Random, model: ModelProto) -> None:
    """Another name for a tensor everywhere, or for a node."""
    new = text(random, tuple(_tensors(model))).encode("utf-8", "replace").decode()
    if random.random() < 0.3:
        _node(random, model).name = new
        return
    old = random.choice(_tensors(model))
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        if value.name == old:
            value.name = new


CHANGES: tuple[tuple[str, Callable[[Random, ModelProto], None]], ...] = (
    ("another operator", retype),
    ("another edge", rewire),
    ("another edge", rewire),
    ("another attribute", reattribute),
    ("another attribute", reattribute),
    ("another shape", resize),
    ("another weight", reweight),
    ("a weight in a file", put_outside),
    ("a huge constant", grow),
    ("a call", call),
    ("graphs in graphs", nest),
    ("a long chain", lengthen),
    ("another version", version),
    ("metadata", note),
    ("another name", rename),
)
