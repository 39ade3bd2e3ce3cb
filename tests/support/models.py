"""Models for tests, benchmarks and the demo: nine light CNNs of the onnx package, GPT-2 and BERT of
two sizes, a Llama of 7 billion parameters, and a transformer of any depth.

    python -m tests.support.models --list
    python -m tests.support.models resnet50 resnet50.onnx
    python -m tests.support.models resnet50 resnet50.onnx --train

All give logits, with random weights that depend on the seed only and keep activations near 1; the
last two have no weights, only their shapes.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

_LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
_RESIDUAL_SCALE = 0.5  # of a branch before it is added, so that 16 blocks keep the variance


def light(name: str, batch: int | None = None, seed: int = 0, *, train: bool = False) -> ModelProto:
    """One of the onnx package's CNNs with random weights in place of its ConstantOfShape nodes.

    Args:
        name: the file's, without "light_".
        batch: written into the model; None leaves the dimension symbolic, as "N".
        seed: of the weights.
        train: whether its batch normalizations are in training form.
    """
    proto = onnx.load(_LIGHT / f"light_{name}.onnx")
    graph = proto.graph
    shapes = _weight_shapes(graph)
    _delete_nodes(graph, "ConstantOfShape")
    _drop_softmax(graph)
    _free_batch(graph)
    kept = {t.name: t for t in graph.initializer if t.name not in shapes}
    read = {tensor for node in graph.node for tensor in node.input}
    weights = [_weight(graph, tensor, shape, seed) for tensor, shape in shapes.items()]
    integers = [t for t in kept.values() if t.data_type == onnx.TensorProto.INT64]
    inputs = [value for value in graph.input if value.name not in {*shapes, *kept}]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(t for t in (*weights, *integers) if t.name in read)
    graph.input.extend(value for value in inputs if value.name in read)
    for value in (*graph.input, *graph.output):
        _set_batch(value, batch)
    proto.ir_version = 8  # 3 wants every initializer among the inputs
    if train:
        _train_batch_norms(proto)
    return proto


def _weight_shapes(graph: GraphProto) -> dict[str, tuple[int, ...]]:
    """Of every float that the model holds or makes with ConstantOfShape."""
    held = {t.name: t for t in graph.initializer}
    made = {
        node.output[0]: tuple(numpy_helper.to_array(held[node.input[0]]).tolist())
        for node in graph.node
        if node.op_type == "ConstantOfShape"
    }
    floats = {n: tuple(t.dims) for n, t in held.items() if t.data_type == onnx.TensorProto.FLOAT}
    return floats | made


def _delete_nodes(graph: GraphProto, kind: str) -> None:
    """Delete the nodes of that type, and leave what they made undefined."""
    left = [node for node in graph.node if node.op_type != kind]
    del graph.node[:]
    graph.node.extend(left)


def _drop_softmax(graph: GraphProto) -> None:
    last = graph.node[-1]
    if last.op_type == "Softmax":
        graph.output[0].name = last.input[0]
        del graph.node[-1]


def _free_batch(graph: GraphProto) -> None:
    """Reshape to [-1, ...] where the file says [1, ...]."""
    targets = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    for tensor in graph.initializer:
        shape = numpy_helper.to_array(tensor)
        if tensor.name in targets and shape[0] == 1:
            tensor.CopyFrom(numpy_helper.from_array(np.array([-1, *shape[1:]]), tensor.name))


def _train_batch_norms(proto: ModelProto) -> None:
    """Gives each BatchNormalization the outputs by which versions 7 to 13 say that it trains."""
    [version] = [one.version for one in proto.opset_import]
    assert 7 <= version < 14
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization":
            statistics = ("mean", "var", "saved_mean", "saved_var")
            node.output.extend(f"{node.output[0]}_{one}" for one in statistics)


def _set_batch(value: onnx.ValueInfoProto, batch: int | None) -> None:
    dim = value.type.tensor_type.shape.dim[0]
    if batch is None:
        dim.dim_param = "N"
    else:
        dim.dim_value = batch


def _weight(graph: GraphProto, name: str, shape: tuple[int, ...], seed: int) -> onnx.TensorProto:
    random = np.random.Generator(np.random.SFC64([seed, crc32(name.encode())]))
    mean, deviation = _distribution(graph, name, shape)
    values = random.standard_normal(shape, dtype=np.float32)
    values *= deviation
    values += mean
    return numpy_helper.from_array(values, name)


def _distribution(graph: GraphProto, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation for a weight, by the first node that uses it."""
    node, position = _user(graph, name)
    match node.op_type if node else "", position:
        case ("Conv", 1):
            return 0.0, float(np.sqrt(_gain(graph, node) / np.prod(shape[1:])))
        case ("Gemm", 1):
            return 0.0, float(np.sqrt(1 / np.prod(shape[1:])))
        case ("BatchNormalization", 1):
            return (_RESIDUAL_SCALE if _is_added(graph, node) else 1.0), 0.02
        case ("BatchNormalization", 4) | ("Mul", _):
            return 1.0, 0.02
        case _:
            return 0.0, 0.02


def _user(graph: GraphProto, name: str) -> tuple[NodeProto | None, int]:
    for node in graph.node:
        if name in node.input:
            if node.op_type in ("Reshape", "Unsqueeze"):
                return _user(graph, node.output[0])
            return node, list(node.input).index(name)
    return None, 0


def _gain(graph: GraphProto, node: NodeProto | None) -> int:
    """2 makes up for the half that a Relu before the node takes away."""
    normalised = {n.output[0] for n in graph.node if n.op_type == "BatchNormalization"}
    return 1 if node is not None and node.input[0] in normalised else 2


def _is_added(graph: GraphProto, node: NodeProto | None) -> bool:
    return node is not None and any(
        node.output[0] in user.input for user in graph.node if user.op_type == "Sum"
    )


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, seed: int = 0) -> ModelProto:
    """GPT-2 with a language-model head that shares the embedding; batch and length symbolic.

    Args:
        layers: 12 in GPT-2 small.
        width: of the hidden state, 64 per head.
        vocabulary: number of tokens.
        seed: of the weights.
    """
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=vocabulary,
        use_cache=False, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _exported(transformers.GPT2LMHeadModel, config, seed)


def bert(layers: int = 12, width: int = 768, vocabulary: int = 30522, seed: int = 0) -> ModelProto:
    """BERT with a masked-language-model head; batch and length symbolic. Arguments as `gpt2`."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=width // 64, vocab_size=vocabulary, attn_implementation="eager",
    )  # fmt: skip
    return _exported(transformers.BertForMaskedLM, config, seed)


def _exported(architecture: Callable[..., object], config: object, seed: int) -> ModelProto:
    """Export with initializers as they are: the exporter's optimizer would merge equal ones."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = architecture(config)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # of operators that are of no use here
        torch.manual_seed(seed)
        program = torch.onnx.export(
            Logits().eval(),
            (torch.zeros((2, 16), dtype=torch.long),),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}},
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        logging.disable(logging.NOTSET)
        return program.model_proto


def deep_transformer(
    layers: int = 200, width: int = 1024, sequence: int = 512, vocabulary: int = 32_000
) -> ModelProto:
    """A decoder with pre-norm blocks of 50 elementary operators each, to see what scales.

    The weights are external data in `deep-transformer.data`, which nobody has to write: planning
    reads their shapes only.

    Args:
        layers: blocks; 200 make 10,000 operators.
        width: of the hidden state, 64 per head.
        sequence: tokens in a sample.
        vocabulary: number of tokens.
    """
    flow = Flow("deep-transformer")
    hidden = flow.add("Gather", flow.weight("embedding", vocabulary, width), "tokens")
    mask = flow.constant("mask", np.triu(np.full((sequence, sequence), -1e4, np.float32), 1))
    for layer in range(layers):
        flow.scope = f"h.{layer}."
        hidden = flow.add("Add", hidden, _attention(flow, _normed(flow, hidden, "ln1", width),
                                                    mask, width, sequence))  # fmt: skip
        inner = _linear(flow, _normed(flow, hidden, "ln2", width), "up", width, 4 * width)
        gate = flow.add("Erf", flow.add("Div", inner, flow.constant("root2", np.float32(2**0.5))))
        gate = flow.add("Mul", inner, flow.add("Add", gate, flow.constant("one", np.float32(1))))
        gate = flow.add("Mul", gate, flow.constant("half", np.float32(0.5)))
        hidden = flow.add("Add", hidden, _linear(flow, gate, "down", 4 * width, width))
    flow.scope = ""
    logits = flow.add("MatMul", hidden, flow.weight("head", width, vocabulary))
    return flow.model(
        helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, ["batch", sequence]),
        helper.make_tensor_value_info(
            logits, onnx.TensorProto.FLOAT, ["batch", sequence, vocabulary]
        ),
    )


def llama(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    inner: int = 11_008,
    vocabulary: int = 32_000,
    seed: int | None = None,
    kv_heads: int | None = None,
    dtype: int = onnx.TensorProto.FLOAT,
) -> ModelProto:
    """A decoder as Llama's: RMS normalization, rotary embeddings, causal attention, SwiGLU, and a
    head of its own; batch and length symbolic. Sixteen operators in a layer, as ONNX has them since
    version 23; angles are computed from the length, so they fold to constants.

    Args:
        layers: 32 make 6.7 billion parameters.
        width: of the hidden state.
        heads: of the attention.
        inner: width of the feed-forward part.
        vocabulary: number of tokens.
        seed: of the weights; None names external data in `llama.data`, which nobody has to write.
        kv_heads: heads of keys and values, each shared by as many heads of queries; None for all.
        dtype: ONNX's type of weights and activations; angles are computed in float32.
    """
    flow = Flow("llama", opset=24, seed=seed, dtype=dtype)
    hidden = flow.add("Gather", flow.weight("embedding", vocabulary, width), "tokens")
    angles = _angles(flow, width // heads)
    kv_heads = kv_heads or heads
    narrow = width // heads * kv_heads

    def turned(name: str, normed: str, out: int, count: int) -> str:
        product = flow.add("MatMul", normed, flow.weight(name, width, out))
        return flow.add("RotaryEmbedding", product, *angles, num_heads=count)

    for layer in range(layers):
        flow.scope = f"layers.{layer}."
        normed = flow.add("RMSNormalization", hidden, flow.weight("norm1", width), epsilon=1e-5)
        mixed = flow.add(
            "Attention",
            turned("q", normed, width, heads),
            turned("k", normed, narrow, kv_heads),
            flow.add("MatMul", normed, flow.weight("v", width, narrow)),
            q_num_heads=heads,
            kv_num_heads=kv_heads,
            is_causal=1,
        )
        mixed = flow.add("MatMul", mixed, flow.weight("o", width, width))
        hidden = flow.add("Add", hidden, mixed)
        normed = flow.add("RMSNormalization", hidden, flow.weight("norm2", width), epsilon=1e-5)
        gate = flow.add("Swish", flow.add("MatMul", normed, flow.weight("gate", width, inner)))
        up = flow.add("MatMul", normed, flow.weight("up", width, inner))
        down = flow.add("MatMul", flow.add("Mul", gate, up), flow.weight("down", inner, width))
        hidden = flow.add("Add", hidden, down)
    flow.scope = ""
    hidden = flow.add("RMSNormalization", hidden, flow.weight("norm", width), epsilon=1e-5)
    logits = flow.add("MatMul", hidden, flow.weight("head", width, vocabulary))
    return flow.model(
        helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, ["batch", "seq"]),
        helper.make_tensor_value_info(logits, dtype, ["batch", "seq", vocabulary]),
    )


def _angles(flow: "Flow", head_width: int) -> tuple[str, str, str]:
    """Cosine and sine by position and frequency, (seq, width / 2) each, and the position of every
    token, (batch, seq).
    """
    shape = flow.add("Shape", "tokens")
    length = flow.add("Gather", shape, flow.constant("second", np.int64(1)))
    positions = flow.add(
        "Range", flow.constant("zero", np.int64(0)), length, flow.constant("step", np.int64(1))
    )
    frequencies = 10_000.0 ** -(np.arange(0, head_width, 2, dtype=np.float32) / head_width)
    column = flow.add("Unsqueeze", positions, flow.constant("last", np.array([-1])))
    column = flow.add("Cast", column, to=onnx.TensorProto.FLOAT)
    # Made by a node, not held: what is held is trained.
    made = flow.add("Constant", value=numpy_helper.from_array(frequencies))
    angles = flow.add("Mul", column, made)
    turns = [flow.add("Cos", angles), flow.add("Sin", angles)]
    if flow.dtype != onnx.TensorProto.FLOAT:
        turns = [flow.add("Cast", one, to=flow.dtype) for one in turns]
    return turns[0], turns[1], flow.add("Expand", positions, shape)


class Flow:
    """A graph that grows operator by operator; names carry the scope.

    Args:
        name: of the graph; weights are external data in a file of that name.
        opset: version of ONNX's operators.
        seed: puts random weights into the graph instead, in float32.
        dtype: ONNX's type of the weights.
    """

    def __init__(
        self,
        name: str,
        opset: int = 18,
        seed: int | None = None,
        dtype: int = onnx.TensorProto.FLOAT,
    ) -> None:
        self.name, self.opset, self.seed, self.dtype = name, opset, seed, dtype
        self.scope = ""
        self.nodes: list[NodeProto] = []
        self.held: dict[str, onnx.TensorProto] = {}
        self.offset = 0

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        """One more operator; its output."""
        name = f"{self.scope}{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """A float parameter: (in, out) of a product, (tokens, width), or one near 1 per channel."""
        if self.seed is not None:
            random = np.random.Generator(np.random.SFC64([self.seed, len(self.held)]))
            values = random.standard_normal(shape, dtype=np.float32)
            values = values / np.sqrt(shape[0]) if len(shape) > 1 else 1 + 0.02 * values
            return self.constant(self.scope + name, values.astype(np.float32))
        tensor = onnx.TensorProto(
            name=self.scope + name, dims=shape, data_type=self.dtype,
            data_location=onnx.TensorProto.EXTERNAL,
        )  # fmt: skip
        length = helper.tensor_dtype_to_np_dtype(self.dtype).itemsize * int(np.prod(shape))
        for key, value in (
            ("location", f"{self.name}.data"), ("offset", self.offset), ("length", length),
        ):  # fmt: skip
            tensor.external_data.add(key=key, value=str(value))
        self.offset += length
        self.held[tensor.name] = tensor
        return tensor.name

    def constant(self, name: str, value: np.ndarray | np.generic) -> str:
        """A value in the graph; the scope is not put before its name."""
        self.held.setdefault(name, numpy_helper.from_array(np.asarray(value), name))
        return name

    def model(self, given: onnx.ValueInfoProto, result: onnx.ValueInfoProto) -> ModelProto:
        """All of it."""
        graph = helper.make_graph(
            self.nodes, self.name, [given], [result], list(self.held.values())
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(graph, ir_version=10, opset_imports=[opset])


def _normed(flow: Flow, hidden: str, name: str, width: int) -> str:
    """Layer normalization in nine operators."""
    axes = flow.constant("last", np.array([-1]))
    off = flow.add("Sub", hidden, flow.add("ReduceMean", hidden, axes))
    square = flow.add("ReduceMean", flow.add("Mul", off, off), axes)
    scale = flow.add("Sqrt", flow.add("Add", square, flow.constant("tiny", np.float32(1e-5))))
    scaled = flow.add("Mul", flow.add("Div", off, scale), flow.weight(f"{name}.weight", width))
    return flow.add("Add", scaled, flow.weight(f"{name}.bias", width))


def _linear(flow: Flow, hidden: str, name: str, width_in: int, width_out: int) -> str:
    product = flow.add("MatMul", hidden, flow.weight(f"{name}.weight", width_in, width_out))
    return flow.add("Add", product, flow.weight(f"{name}.bias", width_out))


def _attention(flow: Flow, hidden: str, mask: str, width: int, sequence: int) -> str:
    """Causal self-attention in 21 operators."""
    split = flow.constant("split", np.array([-1, sequence, width // 64, 64]))
    joined = flow.constant("joined", np.array([-1, sequence, width]))
    query, key, value = (
        flow.add("Transpose", flow.add("Reshape", _linear(flow, hidden, name, width, width), split),
                 perm=perm)
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )  # fmt: skip
    scores = flow.add("MatMul", query, key)
    scores = flow.add("Mul", scores, flow.constant("eighth", np.float32(1 / 8)))
    shares = flow.add("Softmax", flow.add("Add", scores, mask), axis=-1)
    mixed = flow.add("Transpose", flow.add("MatMul", shares, value), perm=[0, 2, 1, 3])
    return _linear(flow, flow.add("Reshape", mixed, joined), "o", width, width)


MODELS: Mapping[str, Callable[..., ModelProto]] = {
    "resnet50": partial(light, "resnet50"),
    "inception_v1": partial(light, "inception_v1"),
    "inception_v2": partial(light, "inception_v2"),
    "densenet121": partial(light, "densenet121"),
    "vgg19": partial(light, "vgg19"),
    "alexnet": partial(light, "bvlc_alexnet"),
    "squeezenet": partial(light, "squeezenet"),
    "shufflenet": partial(light, "shufflenet"),
    "zfnet512": partial(light, "zfnet512"),
    "gpt2": gpt2,
    "bert": bert,
}
# Too large to be built in every test.
LARGE: Mapping[str, Callable[..., ModelProto]] = {
    "gpt2-medium": partial(gpt2, layers=24, width=1024),
    "bert-large": partial(bert, layers=24, width=1024),
}
# Without weights.
SYNTHETIC: Mapping[str, Callable[..., ModelProto]] = {
    "llama7b": llama,
    "deep-transformer": deep_transformer,
}
LIGHT_MODELS = tuple(name for name in MODELS if name not in ("gpt2", "bert"))


def cached(name: str, folder: Path, build: Callable[[], ModelProto] | None = None) -> Path:
    """The model as a file in `folder`, built if it is not there or older than this module.

    Args:
        name: a key of `MODELS`, or a new name with `build`.
        folder: made if it does not exist.
        build: makes the model; `MODELS[name]` if left out.
    """
    path = folder / f"{name}.onnx"
    if not path.exists() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{name}.{os.getpid()}.part"
        unfinished.write_bytes((build or MODELS[name])().SerializeToString())
        unfinished.rename(path)
    return path


def main() -> None:
    """Write one model to a file, or list them."""
    known = {**MODELS, **LARGE, **SYNTHETIC}
    parser = argparse.ArgumentParser(description="Write one of the test models to a file.")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("name", nargs="?", choices=known)
    parser.add_argument("out", nargs="?", type=Path, help="such as resnet50.onnx")
    parser.add_argument("--batch", type=int, help="write the batch into a CNN instead of a name")
    parser.add_argument(
        "--train", action="store_true", help="write a CNN's batch normalizations in training form"
    )
    options = parser.parse_args()
    changed = {"batch": options.batch, "train": options.train or None}
    changed = {name: value for name, value in changed.items() if value is not None}
    if options.list:
        print("\n".join(known))
    elif options.out is None:
        parser.error("expected NAME OUT.onnx, or --list")
    elif changed and options.name not in LIGHT_MODELS:
        parser.error(f"--{min(changed)} is for CNNs: {', '.join(LIGHT_MODELS)}")
    else:
        options.out.write_bytes(known[options.name](**changed).SerializeToString())


if __name__ == "__main__":
    main()
