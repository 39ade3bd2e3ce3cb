"""Small models in float64 for operators that are split, and rules of their operators by hand.

The rules are those that hold by the mathematics of an operator, a line for one axis; which of them
an operator has was read off its definition and not found out by running it.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.sharding import Sharding, reads, rule_of
from planner.model.load import load

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 8, 16, 4, 24
_FLOAT = TensorProto.DOUBLE


class Net:
    """A graph that grows operator by operator."""

    def __init__(self, seed=0):
        self.random, self.nodes, self.held = np.random.default_rng(seed), [], {}

    def add(self, kind, *inputs, outputs=1, **attributes):
        made = [f"{kind.lower()}{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, f"n_{made[0]}", **attributes))
        return made[0] if outputs == 1 else made

    def weight(self, name, *shape):
        scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 0.3
        self.held[name] = scale * self.random.standard_normal(shape) + (len(shape) == 1)
        return name

    def constant(self, name, value):
        self.held[name] = np.asarray(value)
        return name

    def save(self, path, given, *outputs, dtype=_FLOAT, version=20):
        """Writes the model.

        Args:
            given: shape and type of the only input, which is called x.
            outputs: (name, shape) of each.
            dtype: of the outputs and of weights.
            version: of ONNX's operators.
        """
        shape, kind = given
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", kind, shape)],
            [helper.make_tensor_value_info(name, dtype, shape) for name, shape in outputs],
            [numpy_helper.from_array(_in(value, dtype), name) for name, value in self.held.items()],
        )
        opset = [helper.make_opsetid("", version)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
        return path


def _in(value, dtype):
    if value.dtype != np.float64:
        return value
    return value.astype(helper.tensor_dtype_to_np_dtype(dtype))


def mlp(path, norm=True):
    """(B, W) -> classes, with a norm, a Gemm, a Gelu and a mean."""
    net = Net()
    h = "x"
    if norm:
        h = net.add("LayerNormalization", h, net.weight("g", WIDTH), net.weight("b", WIDTH))
    h = net.add("Gemm", h, net.weight("w1", WIDTH, 4 * WIDTH), net.weight("b1", 4 * WIDTH))
    h = net.add("Gelu", h)
    h = net.add("MatMul", h, net.weight("w2", 4 * WIDTH, WIDTH))
    h = net.add("Add", h, "x")
    h = net.add("MatMul", h, net.weight("w3", WIDTH, WORDS))
    return net.save(path, ((8, WIDTH), _FLOAT), (h, (8, WORDS)))


def attention(net, h, name, mask):
    """Causal attention of several heads."""
    split = net.constant("split", np.array([BATCH, LENGTH, HEADS, WIDTH // HEADS]))
    joint = net.constant("joint", np.array([BATCH, LENGTH, WIDTH]))

    def heads(which, perm):
        made = net.add("MatMul", h, net.weight(f"{name}{which}", WIDTH, WIDTH))
        made = net.add("Add", made, net.weight(f"{name}{which}b", WIDTH))
        return net.add("Transpose", net.add("Reshape", made, split), perm=perm)

    scores = net.add("MatMul", heads("q", [0, 2, 1, 3]), heads("k", [0, 2, 3, 1]))
    scores = net.add("Mul", scores, net.constant("scale", np.array((WIDTH // HEADS) ** -0.5)))
    shares = net.add("Softmax", net.add("Add", scores, mask), axis=-1)
    mixed = net.add("MatMul", shares, heads("v", [0, 2, 1, 3]))
    mixed = net.add("Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), joint)
    return net.add("MatMul", mixed, net.weight(f"{name}o", WIDTH, WIDTH))


def gpt(path, blocks=1, tied=True):
    """Tokens -> logits, with an embedding that the head shares."""
    net = Net()
    h = net.add("Gather", net.weight("words", WORDS, WIDTH), "x")
    h = net.add("Add", h, net.weight("places", LENGTH, WIDTH))
    mask = net.constant("mask", np.triu(np.full((LENGTH, LENGTH), -1e4), 1))
    for i in range(blocks):
        normed = net.add(
            "LayerNormalization", h, net.weight(f"{i}g1", WIDTH), net.weight(f"{i}c1", WIDTH)
        )
        h = net.add(
            "Add",
            h,
            net.add("Add", attention(net, normed, f"{i}", mask), net.weight(f"{i}ob", WIDTH)),
        )
        normed = net.add(
            "LayerNormalization", h, net.weight(f"{i}g2", WIDTH), net.weight(f"{i}c2", WIDTH)
        )
        up = net.add(
            "Add",
            net.add("MatMul", normed, net.weight(f"{i}u", WIDTH, 4 * WIDTH)),
            net.weight(f"{i}ub", 4 * WIDTH),
        )
        h = net.add(
            "Add", h, net.add("MatMul", net.add("Gelu", up), net.weight(f"{i}d", 4 * WIDTH, WIDTH))
        )
    head = net.add("Transpose", "words", perm=[1, 0]) if tied else net.weight("head", WIDTH, WORDS)
    h = net.add("MatMul", h, head)
    tokens = (BATCH, LENGTH), TensorProto.INT64
    return net.save(path, tokens, (h, (BATCH, LENGTH, WORDS)))


def cnn(path):
    """(B, C, H, W) -> classes: convolutions, a pool over all places, a Gemm."""
    net = Net()
    h = net.add("Conv", "x", net.weight("k1", 8, 4, 3, 3), net.weight("c1", 8), pads=[1, 1, 1, 1])
    h = net.add("Relu", h)
    h = net.add("Conv", h, net.weight("k2", 8, 8, 1, 1), net.weight("c2", 8))
    h = net.add("Add", h, net.add("Conv", "x", net.weight("k3", 8, 4, 1, 1)))
    h = net.add("GlobalAveragePool", h)
    h = net.add("Flatten", h)
    h = net.add("Gemm", h, net.weight("w", 8, WORDS), net.weight("b", WORDS))
    return net.save(path, ((8, 4, 6, 6), _FLOAT), (h, (8, WORDS)))


MODELS = {"mlp": mlp, "gpt": gpt, "cnn": cnn}


def loaded(path):
    return load(path)


# ------------------------------------------------------------------------------------- rules


def lines(model, operator):
    """The rules of an operator for one axis, as lines; that all devices run it whole is one."""
    graph = model.graph
    described = {**tensors_by_name(graph), **parameters_by_name(graph)}
    shape = {name: described[name].shape for name in (*reads(operator), *operator.outputs)}
    node = next(one for one in model.nodes if one.name == operator.name)
    names = reads(operator)
    whole = dict.fromkeys(names, "R")

    def line(outputs, local="", **cut):
        inputs = ",".join({**whole, **cut}[name] for name in names)
        return f"{inputs}->{outputs}" + (f" {local}" if local else "")

    found = [line(",".join("R" for _ in operator.outputs))]
    found += list(_RULES[operator.type](node, shape, names, line))
    return found


def _pointwise(node, shape, names, line):
    (output,) = (name for name in node.outputs if name)
    rank = len(shape[output])
    for d, size in enumerate(shape[output]):
        if size == 1:
            continue
        cut = {}
        for name in names:
            own = d - rank + len(shape[name])
            if own >= 0 and shape[name][own] == size:
                cut[name] = f"S{own}"
        yield line(f"S{d}", **cut)


def _add(node, shape, names, line):
    yield from _pointwise(node, shape, names, line)
    yield line("P", **dict.fromkeys(names, "P"))


def _mul(node, shape, names, line):
    yield from _pointwise(node, shape, names, line)
    for name in names:
        yield line("P", **{name: "P"})


def _matmul(node, shape, names, line):
    a, b = node.inputs
    (output,) = node.outputs
    if a == b:
        return
    rank, left, right = len(shape[output]), len(shape[a]), len(shape[b])
    for d in range(rank - 2):
        cut = {}
        for name, own in ((a, d - rank + left), (b, d - rank + right)):
            if own >= 0 and shape[name][own] > 1:
                cut[name] = f"S{own}"
        yield line(f"S{d}", **cut)
    yield line(f"S{rank - 2}", **{a: f"S{left - 2}"})
    yield line(f"S{rank - 1}", **{b: f"S{right - 1}"})
    yield line("P", **{a: f"S{left - 1}", b: f"S{right - 2}"})
    yield line("P", **{a: "P"})
    yield line("P", **{b: "P"})


def _gemm(node, shape, names, line):
    a, b, c = node.inputs
    yield line("S0", **{a: "S0"})
    yield line("S1", **{b: "S1", c: "S0"})
    yield line("P", **{a: "S1", b: "S0", c: "P"})


def _norm(node, shape, names, line):
    for d in range(len(shape[node.inputs[0]]) - 1):
        yield line(f"S{d}", **{node.inputs[0]: f"S{d}"})


def _softmax(node, shape, names, line):
    for d in range(len(shape[node.inputs[0]]) - 1):
        yield line(f"S{d}", **{node.inputs[0]: f"S{d}"})


def _transpose(node, shape, names, line):
    for d, source in enumerate(node.attributes["perm"]):
        yield line(f"S{d}", **{names[0]: f"S{source}"})
    yield line("P", **{names[0]: "P"})


def _reshape(node, shape, names, line):
    """Only the two of heads: (B, T, W) to (B, T, H, W / H), and back."""
    for d in range(3):
        yield line(f"S{d}", f"shape[{d}]", **{names[0]: f"S{d}"})
    yield line("P", **{names[0]: "P"})


def _gather(node, shape, names, line):
    table, ids = node.inputs
    rank = len(shape[ids])
    for d in range(rank):
        yield line(f"S{d}", **{ids: f"S{d}"})
    yield line(f"S{rank}", **{table: "S1"})
    yield line("P", **{table: "P"})


def _conv(node, shape, names, line):
    x, w, *bias = node.inputs
    yield line("S0", **{x: "S0"})
    yield line("S1", **{w: "S0", **dict.fromkeys(bias, "S0")})
    yield line("P", **{x: "S1", w: "S1", **dict.fromkeys(bias, "P")})


def _pool(node, shape, names, line):
    for d in range(2):
        yield line(f"S{d}", **{names[0]: f"S{d}"})
    for d in (2, 3):
        yield line("A", **{names[0]: f"S{d}"})
    yield line("P", **{names[0]: "P"})


def _flatten(node, shape, names, line):
    yield line("S0", **{names[0]: "S0"})
    yield line("S1", **{names[0]: "S1"})
    yield line("P", **{names[0]: "P"})


def megatron(model, size, sequence=False):
    """Megatron-LM's split of the blocks of `gpt` (Shoeybi et al. 2019, section 3), and with
    `sequence` that of Korthikanti et al. 2022, section 4.2.2. Embedding and head run whole.
    """
    graph = model.graph
    rules, lies = {}, {}
    products = {p: o for o in graph.operators for p in o.parameters if o.type == "MatMul"}
    feeds = {name: o for o in graph.operators for name in o.outputs}
    for name, operator in products.items():
        if name[0].isdigit() and name[1:] in "qkvu":
            rules[operator.name], lies[name] = "R,S1->S2", ("S1",)
        elif name[0].isdigit():
            rules[operator.name], lies[name] = "S2,S0->P", ("S0",)
    for operator in graph.operators:
        if operator.type == "Add" and operator.parameters:
            (bias,) = operator.parameters
            if bias[1:] in ("qb", "kb", "vb", "ub"):
                rules[operator.name], lies[bias] = "S2,S0->S2", ("S0",)
        elif operator.type == "Reshape":
            rules[operator.name] = "S2->S2 shape[2]"
        elif operator.type == "Gelu":
            rules[operator.name] = "S2->S2"
    for operator in graph.operators:
        made_by = [feeds.get(name) for name in operator.inputs] or [None]
        if operator.type == "Transpose" and made_by[0] is not None:
            node = next(one for one in model.nodes if one.name == operator.name)
            before = made_by[0].type == "Reshape"
            cut = (2, 1) if before else (1, list(node.attributes["perm"]).index(1))
            rules[operator.name] = f"S{cut[0]}->S{cut[1]}"
        elif operator.type == "MatMul" and not operator.parameters and len(operator.inputs) == 2:
            if all(one is not None and one.type != "Add" for one in made_by):
                rules[operator.name] = "S1,S1->S1"
        elif operator.type in ("Mul", "Softmax"):
            rules[operator.name] = "S1->S1"
        elif operator.type == "Add" and "mask" in operator.parameters:
            rules[operator.name] = "S1,R->S1"
    if sequence:
        for operator in graph.operators:
            if operator.type == "LayerNormalization":
                rules[operator.name] = "S1,R,R->S1"
            elif operator.type == "Add" and operator.name not in rules:
                places = "places" in operator.parameters
                second = ["S0" if places else "R"] if operator.parameters else ["S1"]
                rules[operator.name] = ",".join(["S1", *second]) + "->S1"
            elif operator.type == "Gather":
                rules[operator.name] = "S1,R->S1"
    made = {name: rule_of([line]) for name, line in rules.items()}
    return Sharding((size,), made, lies, {}, {})


_RULES = {
    "Add": _add, "Mul": _mul, "Gelu": _pointwise, "Relu": _pointwise, "MatMul": _matmul,
    "Gemm": _gemm, "LayerNormalization": _norm, "Softmax": _softmax, "Transpose": _transpose,
    "Reshape": _reshape, "Gather": _gather, "Conv": _conv, "GlobalAveragePool": _pool,
    "Flatten": _flatten,
}  # fmt: skip


def whole_line(operator):
    return f"{','.join('R' for _ in reads(operator))}->{','.join('R' for _ in operator.outputs)}"
