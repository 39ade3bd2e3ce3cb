"""The networks that were trained, as ONNX models without weights: GPT, also with a mixture of
experts, Llama, BERT, ResNet-50, and Alpa's wide residual networks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tests.support.experts import Experts, mixed_by_experts
from tests.support.models import Flow, light, llama
from tests.support.thesis_models import widened_resnet

PREDICTED_SHARE = 0.15
"""Tokens of a sequence that BERT predicts, by its paper: only for these are there logits."""


class Kind(StrEnum):
    """The families of networks."""

    GPT = "gpt"
    LLAMA = "llama"
    BERT = "bert"
    RESNET50 = "resnet50"
    WIDE_RESNET = "wide-resnet"


@dataclass(frozen=True)
class Network:
    """A network by its sizes; a ResNet-50 has none.

    Attributes:
        kind: its family.
        layers: number of blocks; of a wide residual network 50, 101 or 152, its name.
        width: of the hidden state; of a wide residual network the channels of its stem.
        heads: of the attention.
        kv_heads: heads of keys and values.
        inner: width of the feed-forward part.
        vocabulary: number of tokens.
        sequence: tokens in a sample.
        experts: number of experts in every other layer of a GPT; 0 for none.
        group: tokens that share the room of the experts.
        widening: of the 3 x 3 convolutions of a wide residual network.
        frozen: whether its batch normalizations keep their statistics, as in inference.
        dtype: of its weights and activations.
        fused: whether attention is one kernel; otherwise a GPT makes, keeps and reads its scores.
        dropped: whether a GPT pays for dropout behind each branch, and in unfused attention.
        masked: whether unfused attention scales and masks scores in float32, a kernel each.
    """

    kind: Kind
    layers: int = 0
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    inner: int = 0
    vocabulary: int = 0
    sequence: int = 0
    experts: int = 0
    group: int = 0
    widening: int = 1
    frozen: bool = False
    dtype: str = "float32"
    fused: bool = True
    dropped: bool = False
    masked: bool = False

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of its symbolic dimensions, besides the batch."""
        return {"seq": self.sequence} if self.kind is Kind.LLAMA else {}

    @property
    def onnx_type(self) -> int:
        """ONNX's number for the type of its weights."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))


def model(network: Network) -> ModelProto:
    """The network in training form; its batch is symbolic, its logits are its output. Operators
    say which layer they are in, as torch's exporter writes it.
    """
    proto = _BUILDERS[network.kind](network)
    for node in proto.graph.node:
        scope = node.name.rpartition(".")[0]
        path = ["", *filter(None, (scope.rpartition(".")[0], scope)), node.op_type]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(path))
    return proto


def _llama(network: Network) -> ModelProto:
    return llama(
        network.layers,
        network.width,
        network.heads,
        network.inner,
        network.vocabulary,
        kv_heads=network.kv_heads,
        dtype=network.onnx_type,
    )


def _gpt(network: Network) -> ModelProto:
    """A decoder with learned positions, normalization before each branch, and one table for tokens
    and logits (Radford et al. 2019). With experts, every other layer from the first one has them in
    place of the feed-forward part.
    """
    flow, width = Flow("gpt", opset=23, dtype=network.onnx_type), network.width
    table = flow.weight("embedding", network.vocabulary, width)
    hidden = flow.add("Gather", table, "tokens")
    hidden = flow.add("Add", hidden, flow.weight("positions", network.sequence, width))
    for layer in range(network.layers):
        flow.scope = f"h.{layer}."
        for name, branch in (
            ("ln1", _attention if network.fused else _unfused_attention),
            ("ln2", _experts if network.experts and layer % 2 == 0 else _feed_forward),
        ):
            made = branch(flow, _norm(flow, hidden, name, width), network)
            hidden = flow.add("Add", hidden, _dropped(flow, made, network))
    flow.scope = ""
    return _with_logits(flow, _norm(flow, hidden, "norm", width), table, network)


def _bert(network: Network) -> ModelProto:
    """An encoder with normalization behind each branch, and logits of the tokens that it predicts,
    which are the first ones here (Devlin et al. 2018). The loss of the next sentence is left out.
    """
    flow, width = Flow("bert", opset=23), network.width
    table = flow.weight("embedding", network.vocabulary, width)
    hidden = flow.add("Gather", table, "tokens")
    hidden = flow.add("Add", hidden, flow.weight("positions", network.sequence, width))
    hidden = _norm(flow, hidden, "norm", width)
    for layer in range(network.layers):
        flow.scope = f"layer.{layer}."
        hidden = flow.add("Add", hidden, _attention(flow, hidden, network, is_causal=0))
        hidden = _norm(flow, hidden, "ln1", width)
        hidden = flow.add("Add", hidden, _feed_forward(flow, hidden, network))
        hidden = _norm(flow, hidden, "ln2", width)
    flow.scope = ""
    predicted = -(-int(100 * PREDICTED_SHARE) * network.sequence // 100)
    ends = ("begin", 0), ("end", predicted), ("axis", 1)
    bounds = [flow.constant(name, np.array([value])) for name, value in ends]
    hidden = flow.add("Slice", hidden, *bounds)
    hidden = flow.add("Gelu", _linear(flow, hidden, "transform", width, width))
    return _with_logits(flow, _norm(flow, hidden, "head", width), table, network)


def _resnet50(network: Network) -> ModelProto:
    return light("resnet50", train=True)


def _wide_resnet(network: Network) -> ModelProto:
    return widened_resnet(
        network.layers, network.width, network.widening, trains=not network.frozen
    )


_BUILDERS: Mapping[Kind, Callable[[Network], ModelProto]] = {
    Kind.GPT: _gpt,
    Kind.LLAMA: _llama,
    Kind.BERT: _bert,
    Kind.RESNET50: _resnet50,
    Kind.WIDE_RESNET: _wide_resnet,
}


def _norm(flow: Flow, hidden: str, name: str, width: int) -> str:
    weights = (flow.weight(f"{name}.{part}", width) for part in ("weight", "bias"))
    return flow.add("LayerNormalization", hidden, *weights, axis=-1)


def _linear(flow: Flow, hidden: str, name: str, width_in: int, width_out: int) -> str:
    """Without a bias: torch adds that inside of the product, in the product's type."""
    return flow.add("MatMul", hidden, flow.weight(name, width_in, width_out))


def _attention(flow: Flow, hidden: str, network: Network, is_causal: int = 1) -> str:
    width, heads = network.width, network.heads
    three = (_linear(flow, hidden, name, width, width) for name in ("q", "k", "v"))
    mixed = flow.add(
        "Attention", *three, q_num_heads=heads, kv_num_heads=heads, is_causal=is_causal
    )
    return _linear(flow, mixed, "o", width, width)


def _unfused_attention(flow: Flow, hidden: str, network: Network) -> str:
    """Products and a softmax, as Megatron-LM runs them without flash attention: scale and mask are
    part of other kernels (class ParallelAttention of its version 2.5), or kernels of their own, for
    which a product and a LeakyRelu stand (class FusedScaleMaskSoftmax).
    """
    width, heads = network.width, network.heads
    apart = flow.constant("apart", np.array([0, 0, heads, width // heads]))
    query, key, value = (
        flow.add("Transpose", flow.add("Reshape", _linear(flow, hidden, name, width, width), apart),
                 perm=perm)
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )  # fmt: skip
    scores = flow.add("MatMul", query, key)
    if network.masked:
        scores = flow.add("Cast", scores, to=TensorProto.FLOAT)
        scale = flow.constant("scale", np.array(0.1, np.float32))
        scores = flow.add("LeakyRelu", flow.add("Mul", scores, scale))
    shares = flow.add("Softmax", scores, axis=-1)
    if network.masked:
        shares = flow.add("Cast", shares, to=network.onnx_type)
    mixed = flow.add("MatMul", _dropped(flow, shares, network), value)
    mixed = flow.add("Transpose", mixed, perm=[0, 2, 1, 3])
    joined = flow.constant("joined", np.array([0, 0, width]))
    return _linear(flow, flow.add("Reshape", mixed, joined), "o", width, width)


def _dropped(flow: Flow, hidden: str, network: Network) -> str:
    """The tensor, after an operator that costs what dropping out elements does.

    A Dropout cannot be split over devices. With n elements of two bytes it moves 5 n bytes each
    way, with its mask; a LeakyRelu 4 n and 6 n, and it is there where a Dropout is, so layers that
    run again move 14 n bytes in place of 15 n.
    """
    return flow.add("LeakyRelu", hidden) if network.dropped else hidden


def _feed_forward(flow: Flow, hidden: str, network: Network) -> str:
    inner = flow.add("Gelu", _linear(flow, hidden, "up", network.width, network.inner))
    return _linear(flow, inner, "down", network.inner, network.width)


def _experts(flow: Flow, hidden: str, network: Network) -> str:
    sizes = Experts(network.experts, network.group, network.width, network.inner)
    return mixed_by_experts(flow, hidden, sizes, network.sequence)


def _with_logits(flow: Flow, hidden: str, table: str, network: Network) -> ModelProto:
    logits = flow.add("MatMul", hidden, flow.add("Transpose", table, perm=[1, 0]))
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", network.sequence])
    shape = ["batch", None, network.vocabulary]
    return flow.model(tokens, helper.make_tensor_value_info(logits, flow.dtype, shape))
