"""Operators that ONNX Runtime's optimisers write (`com.microsoft`), as differentiable functions.

A parameter before the star is an input, in the operator's order; one behind it is an attribute. B
samples, S positions, T positions that are looked at, N heads.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators import attention as attentions
from planner.operators import convolution
from planner.operators.recurrent import ACTIVATIONS
from planner.operators.shape import Integers, Numbers
from planner.support.errors import OperatorError

_HIDDEN = -10000.0  # what ONNX Runtime adds to a score that is hidden

# Name -> function, and the defaults of its parameters.
_ACTIVATIONS: Mapping[str, tuple[Callable[..., Tensor], Numbers]] = {
    "Clip": (torch.clamp, (float("-inf"), float("inf"))),
    **{
        name: ACTIVATIONS[name.lower()]
        for name in (
            *("Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign"),
            *("Tanh", "ThresholdedRelu"),
        )
    },
}


def _activated(x: Tensor, activation: str, given: tuple[float | None, ...]) -> Tensor:
    """The activation with the parameters that are given, by its defaults else."""
    if not activation:
        return x
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise OperatorError(f"activation: expected one of {known}, got {activation!r}")
    function, defaults = _ACTIVATIONS[activation]
    given = (*given, *(None,) * len(defaults))
    return function(x, *(d if g is None else g for d, g in zip(defaults, given, strict=False)))


# ---- activations


def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu by tanh, after the bias."""
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


def bias_gelu(a: Tensor, b: Tensor) -> Tensor:
    """Gelu after the bias."""
    return functional.gelu(a + b)


def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """Computes x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """The first half of the last dimension times the Gelu of the second."""
    left, right = (x + bias).chunk(2, -1)
    return left * functional.gelu(right)


def bias_add(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    """The sum of all three."""
    return x + bias + skip


# ---- products


def fused_mat_mul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transa: int = 0,
    transb: int = 0,
    transbatcha: int = 0,
    transbatchb: int = 0,
) -> Tensor:
    """Alpha times the product; a batch transposition moves the first dimension before the last."""
    y = _turned(a, transa, transbatcha) @ _turned(b, transb, transbatchb)
    return y if alpha == 1 else alpha * y


def _turned(x: Tensor, swap: int, batch: int) -> Tensor:
    x = x.movedim(0, -2) if batch and x.dim() > 2 else x
    return x.transpose(-1, -2) if swap and x.dim() > 1 else x


def gemm_fast_gelu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """FastGelu of the product."""
    return fast_gelu(x @ w, bias)


def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transa: int = 0,
    transb: int = 0,
) -> Tensor:
    """Gemm and an activation."""
    y = convolution.gemm(a, b, c, alpha, beta, transa, transb)
    return _activated(y, activation, (activation_alpha, activation_beta, activation_gamma))


def fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Numbers = (),
    auto_pad: str = "NOTSET",
    dilations: Integers | None = None,
    group: int = 1,
    kernel_shape: Integers | None = None,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """Conv, the sum with z, and an activation."""
    y = convolution.conv(x, w, b, auto_pad, dilations, group, kernel_shape, pads, strides)
    return _activated(y if z is None else y + z, activation, activation_params)


# ---- normalizations


def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """LayerNormalization without a mean."""
    shape = x.shape[axis:]
    return functional.rms_norm(x, shape, scale.expand(shape), epsilon)


# Mean and deviation are outputs 1 and 2 of the next two. `planner/model/output_types.py` refuses a
# node that has readers for them.
Skipped = Tensor | tuple[Tensor | None, ...]


def skip_layer_normalization(
    input: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    num_outputs: int,
) -> Skipped:
    """LayerNormalization of a sum, and the sum."""
    total = input + skip if bias is None else input + skip + bias
    y = functional.layer_norm(total, gamma.shape, gamma, beta, epsilon)
    return y if num_outputs == 1 else (y, None, None, total)[:num_outputs]


def skip_simplified_layer_normalization(
    input: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    num_outputs: int,
) -> Skipped:
    """SkipLayerNormalization without a mean."""
    total = input + skip if bias is None else input + skip + bias
    y = functional.rms_norm(total, gamma.shape, gamma, epsilon)
    return y if num_outputs == 1 else (y, None, None, total)[:num_outputs]


def embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """LayerNormalization of the sum of embeddings, the length of each sample, and the sum."""
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    total = functional.embedding(input_ids, word_embedding)
    total = total + functional.embedding(position_ids, position_embedding)
    if segment_ids is not None and segment_embedding is not None:
        total = total + functional.embedding(segment_ids, segment_embedding)
    y = functional.layer_norm(total, gamma.shape, gamma, beta, epsilon)
    if num_outputs == 1:
        return y
    counted = torch.zeros_like(input_ids) if mask is None else mask
    return (y, counted.sum(1).to(torch.int32), total)[:num_outputs]


def group_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    activation: int = 0,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> Tensor:
    """GroupNormalization of channels in the last dimension, and SiLU if `activation` is 1."""
    y = x.movedim(-1, 1) if channels_last else x
    y = torch.group_norm(y, groups, gamma.to(x.dtype), beta.to(x.dtype), epsilon)
    y = functional.silu(y) if activation else y
    return y.movedim(1, -1) if channels_last else y


def skip_group_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    skip: Tensor,
    bias: Tensor | None = None,
    *,
    activation: int = 0,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """GroupNorm of a sum, and the sum."""
    if skip.dim() == 2:  # (B, channels)
        skip = skip[:, None, None] if channels_last else skip[..., None, None]
    total = x + skip
    if bias is not None:
        total = total + (bias if channels_last else bias.reshape(-1, 1, 1))
    y = group_norm(
        total, gamma, beta, activation=activation, channels_last=channels_last, epsilon=epsilon,
        groups=groups,
    )  # fmt: skip
    return (y, total) if num_outputs > 1 else y


# ---- attention


def rotary_embedding(
    input: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Pairs of numbers turned by the angle of their position; one position is that of the first."""
    if is_packed_batching or scale != 1:
        raise OperatorError(
            f"is_packed_batching, scale: expected 0 and 1, got {is_packed_batching} and {scale}"
        )
    length = input.shape[2] if input.dim() == 4 else input.shape[1]
    if position_ids.dim() == 1:
        position_ids = position_ids + torch.arange(length, device=input.device).unsqueeze(0)
    heads = num_heads or input.shape[-1] // (2 * cos_cache.shape[-1])
    return attentions.rotary_embedding(
        input, cos_cache, sin_cache, position_ids, interleaved, heads, rotary_embedding_dim
    )


def attention(
    input: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = _HIDDEN,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Integers | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """One product for queries, keys and values, and their attention."""
    if do_rotary or past_present_share_buffer:
        raise OperatorError(
            "do_rotary, past_present_share_buffer: expected 0, got "
            f"{do_rotary} and {past_present_share_buffer}"
        )
    made = functional.linear(input, weights.t(), bias)
    sizes = qkv_hidden_sizes or (made.shape[-1] // 3,) * 3
    q, k, v = (attentions.in_heads(one, num_heads) for one in torch.split(made, list(sizes), -1))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    hidden = _hidden(mask_index, q, k, mask_filter_value)
    y = _attended(q, k, v, hidden, attention_bias, scale, unidirectional, mask_filter_value)
    return (y, torch.stack([k, v])) if num_outputs > 1 else y


def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    mask_filter_value: float = _HIDDEN,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """The attention of queries, keys and values (B, S, D); or of all in one tensor
    (B, S, N, 3, width), of keys and values in one (B, T, N, 2, width), or of those in heads.
    """
    q, k, v = _unpacked(query, key, value, num_heads)
    if bias is not None:
        flat = [one.shape[1] * one.shape[3] for one in (q, k, v)]
        parts = (one.reshape(num_heads, 1, -1) for one in torch.split(bias, flat))
        inner = key is not None and key.dim() == 4  # keys and values of an encoder have theirs
        q, k, v = (
            one if inner and i else one + part
            for i, (one, part) in enumerate(zip((q, k, v), parts, strict=True))
        )
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    hidden = _hidden(key_padding_mask, q, k, mask_filter_value)
    y = _attended(q, k, v, hidden, attention_bias, scale, unidirectional, mask_filter_value)
    return (y, k, v)[:num_outputs] if num_outputs > 1 else y


def _unpacked(
    query: Tensor, key: Tensor | None, value: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (B, N, S, width)."""
    if key is None:
        q, k, v = (one.transpose(1, 2) for one in query.unbind(3))
        return q, k, v
    q = attentions.in_heads(query, heads)
    if value is None:
        k, v = (one.transpose(1, 2) for one in key.unbind(3))
    else:
        k, v = (one if one.dim() == 4 else attentions.in_heads(one, heads) for one in (key, value))
    return q, k, v


def _hidden(mask: Tensor | None, q: Tensor, k: Tensor, value: float) -> Tensor | None:
    """What is added to the scores: `value` where a mask hides a key.

    A mask has the number of keys of each sample (B,), their ends and then their starts (2 B,), or
    ones for keys that are seen: (B, T), (B, S, T), or (B, 1, M, M) of the longest sequence.
    """
    if mask is None:
        return None
    size, length = k.shape[2], q.shape[2]
    key = torch.arange(size, device=k.device)
    if mask.dim() == 1 and len(mask) in (len(q), 2 * len(q)):
        seen = key < mask[: len(q), None]
        seen = seen & (key >= mask[len(q) :, None]) if len(mask) > len(q) else seen
        seen = seen[:, None, None]
    elif mask.dim() in (2, 3):
        seen = mask.bool()
        seen = seen[:, None, None] if mask.dim() == 2 else seen[:, None]
    elif mask.dim() == 4:
        seen = mask[:, :, size - length : size, :size].bool()
    else:
        raise OperatorError(f"mask: expected one of B, 2 B, (B, T), (B, S, T), got {mask.shape}")
    return torch.where(seen, 0.0, value).to(q.dtype)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    bias: Tensor | None,
    scale: float,
    causal: int,
    value: float,
) -> Tensor:
    """(B, S, N * width) of the values, by torch's fused function.

    Args:
        hidden, bias: added to the scores.
        scale: of the scores; 0 takes one over the root of the width.
        causal: whether a query sees only the keys up to its own place.
        value: added to the scores of keys behind it.
    """
    alone = causal and hidden is None and bias is None and q.shape[2] == k.shape[2]
    if causal and not alone:
        size, length = k.shape[2], q.shape[2]
        query = torch.arange(size - length, size, device=k.device).unsqueeze(1)
        later = torch.where(torch.arange(size, device=k.device) > query, value, 0.0).to(q.dtype)
        hidden = later if hidden is None else hidden + later
    added = hidden if bias is None else bias if hidden is None else bias + hidden
    y = functional.scaled_dot_product_attention(
        q, k, v, added, is_causal=bool(alone), scale=scale or None
    )
    return y.transpose(1, 2).flatten(2)


def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Attention in which several heads of queries share one of keys and values, without a past: a
    cache of keys is for generating.

    `seqlens_k` is one less than the number of keys of each sample.
    """
    if past_key is not None and past_key.shape[2]:
        raise OperatorError("past_key: expected none, because a step of training has no past")
    if key is None or value is None:
        width = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        sizes = [num_heads * width, kv_num_heads * width, kv_num_heads * width]
        query, key, value = torch.split(query, sizes, -1)
    q, k, v = (
        attentions.in_heads(query, num_heads),
        attentions.in_heads(key, kv_num_heads),
        attentions.in_heads(value, kv_num_heads),
    )
    length = q.shape[2]
    if do_rotary and cos_cache is not None and sin_cache is not None:
        place = torch.arange(length, device=q.device).unsqueeze(0)
        place = place if position_ids is None else position_ids
        turned = 2 * cos_cache.shape[-1]
        q, k = (
            attentions.rotary_embedding(
                x, cos_cache, sin_cache, place, rotary_interleaved, None, turned
            )
            for x in (q, k)
        )
    added = _within(length, seqlens_k, bool(causal), local_window_size).to(q.dtype)
    added = added if attention_bias is None else added + attention_bias
    sink = q.new_zeros(num_heads) if smooth_softmax > 0 else head_sink
    if softcap or sink is not None:
        y = _with_sink(q, k, v, added, scale or q.shape[-1] ** -0.5, softcap, sink)
    else:
        y = functional.scaled_dot_product_attention(
            q, k, v, added, scale=scale or None, enable_gqa=num_heads != kv_num_heads
        )
    y = y.transpose(1, 2).flatten(2)
    return (y, k, v)[:num_outputs] if num_outputs > 1 else y


def _within(length: int, seqlens_k: Tensor, causal: bool, window: int) -> Tensor:
    """(B, 1, S, T): zero where a query sees a key, else minus infinity.

    Args:
        length: S and T.
        seqlens_k: one less than the number of keys of each sample.
        causal: whether a query sees only the keys up to its own place.
        window: number of keys that it sees up to there; all where it is not positive.
    """
    position = torch.arange(length, device=seqlens_k.device)
    before = position.unsqueeze(1) - position
    seen = position < seqlens_k.reshape(-1, 1, 1, 1) + 1
    seen = seen & (before >= 0) if causal else seen
    seen = seen & (before < window) if window > 0 else seen
    return torch.where(seen, 0.0, float("-inf"))


def _with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor,
    scale: float,
    softcap: float,
    sink: Tensor | None,
) -> Tensor:
    """Attention step by step: scores held by a cap, a softmax with one more score per head."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scale * (q @ k.transpose(-1, -2))
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + added
    if sink is None:
        return torch.softmax(scores, -1) @ v
    more = sink.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1] @ v


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """One more dimension of size 1."""
    return x.unsqueeze(axis)
