"""Attention and rotary embeddings of ONNX 23 and later."""

import torch
from onnx import helper
from torch import Tensor
from torch.nn import functional

from planner.support.errors import OperatorError


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Scaled dot products, by torch's fused function unless a cap or the scores are asked for."""
    flat = q.dim() == 3
    if flat:
        if not q_num_heads or not kv_num_heads:
            raise OperatorError("q_num_heads, kv_num_heads: expected both for inputs of rank 3")
        q, k, v = in_heads(q, q_num_heads), in_heads(k, kv_num_heads), in_heads(v, kv_num_heads)
    offset = _offset(q, past_key, nonpad_kv_seqlen)
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    windows = (left_window_size, 0 if is_causal else right_window_size)
    fused = num_outputs < 4 and not softcap and _precision(q, softmax_precision) == q.dtype
    # By its flag, torch's kernel skips the hidden half, which it computes where there is a mask.
    alone = attn_mask is None and past_key is None and nonpad_kv_seqlen is None
    by_flag = fused and alone and windows == (-1, 0) and q.shape[2] == k.shape[2]
    mask = None if by_flag else _mask(q, k, attn_mask, offset, windows, nonpad_kv_seqlen)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    precision = _precision(q, softmax_precision)
    if fused:
        grouped = q.shape[1] != k.shape[1]
        y = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=by_flag, scale=scale, enable_gqa=grouped
        )
        scores = None
    else:
        y, scores = _explicit(q, k, v, mask, scale, softcap, precision, qk_matmul_output_mode)
    y = y.transpose(1, 2).flatten(2) if flat else y
    outputs = (y, k, v) if scores is None else (y, k, v, scores)
    return outputs[:num_outputs] if num_outputs > 1 else y


def _offset(q: Tensor, past_key: Tensor | None, lengths: Tensor | None) -> int | Tensor:
    """The position of the first query among the keys; of each sample where these have lengths."""
    if past_key is not None:
        return past_key.shape[2]
    return 0 if lengths is None else lengths.reshape(-1, 1, 1, 1) - q.shape[2]


def in_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, position, heads * width) -> (batch, heads, position, width)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _precision(q: Tensor, asked: int | None) -> torch.dtype:
    """The type that the softmax is computed in. Torch's fused function takes single precision for
    half precision by itself, so asking for it changes nothing.
    """
    if asked is None:
        return q.dtype
    name = helper.tensor_dtype_to_np_dtype(asked).name
    wider = name == "float32" and q.dtype in (torch.float16, torch.bfloat16)
    return q.dtype if wider else getattr(torch, name)


def _mask(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offset: int | Tensor,
    windows: tuple[int, int],
    lengths: Tensor | None,
) -> Tensor | None:
    """The mask: added to the scores, or True where a key may be seen.

    Query i stands at position i + offset and sees keys from `left` before to `right` after it;
    -1 is no bound.
    """
    size = k.shape[2]
    if mask is not None and mask.shape[-1] < size:
        hidden = False if mask.dtype == torch.bool else float("-inf")
        mask = functional.pad(mask, (0, size - mask.shape[-1]), value=hidden)
    position = torch.arange(q.shape[2], device=q.device).reshape(-1, 1) + offset
    key = torch.arange(size, device=q.device)
    left, right = windows
    rules = [position - key <= left] if left >= 0 else []
    rules += [key - position <= right] if right >= 0 else []
    rules += [key < lengths.reshape(-1, 1, 1, 1)] if lengths is not None else []
    if not rules:
        return mask
    allowed = rules[0]
    for rule in rules[1:]:
        allowed = allowed & rule
    if mask is None or mask.dtype == torch.bool:
        return allowed if mask is None else allowed & mask
    return torch.where(allowed, mask, torch.full_like(mask, float("-inf")))


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    precision: torch.dtype,
    mode: int,
) -> tuple[Tensor, Tensor]:
    """Step by step; `mode` says which step's scores are returned."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    raw = (q * scale**0.5) @ (k.transpose(-1, -2) * scale**0.5)
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    biased = capped
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        biased = capped + mask
        seen = (mask > float("-inf")).any(-1, keepdim=True)
        # a row that sees nothing has no softmax: it is zero, and so is its gradient
        share = torch.softmax(torch.where(seen, biased, 0.0).to(precision), -1).to(q.dtype)
        share = torch.where(seen, share, 0.0)
    else:
        share = torch.softmax(biased.to(precision), -1).to(q.dtype)
    return share @ v, (raw, capped, biased, share)[mode]


def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Pairs of numbers turned by the angle of their position: (i, i + half) or neighbours."""
    heads = x if x.dim() == 4 else in_heads(x, num_heads or 0)
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    cos, sin = cos_cache.unsqueeze(1), sin_cache.unsqueeze(1)
    width = rotary_embedding_dim or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = torch.cat([turned, rest], -1)
    return y if x.dim() == 4 else y.transpose(1, 2).flatten(2)


def _parts_of(update_rule: str) -> tuple[bool, bool]:
    """Whether the state decays, and whether it takes differences."""
    rules = ("linear", "gated", "delta", "gated_delta")
    if update_rule not in rules:
        raise OperatorError(f"update_rule: expected one of {', '.join(rules)}, got {update_rule!r}")
    return update_rule.startswith("gated"), update_rule.endswith("delta")


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    chunk_size: int = 64,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Attention by a state (samples, heads, key width, value width) that each position changes.

    The state decays, then takes the position's value at its key; with a delta rule only as far as
    the state does not hold it already.
    """
    gated, delta = _parts_of(update_rule)
    if not q_num_heads or not kv_num_heads:
        raise OperatorError(f"expected both numbers of heads, got {q_num_heads} and {kv_num_heads}")
    if (gated and decay is None) or (delta and beta is None):
        raise OperatorError(f"decay, beta: expected those of the rule {update_rule!r}")
    q, k, v = (
        in_heads(query, q_num_heads),
        in_heads(key, kv_num_heads),
        in_heads(value, kv_num_heads),
    )
    state = past_state
    if state is None:
        state = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1]))
    kind, groups = state.dtype, q_num_heads // kv_num_heads
    factor = scale or q.shape[-1] ** -0.5
    share = None if decay is None else torch.exp(in_heads(decay, kv_num_heads).to(kind))
    rate = None if beta is None else beta.to(kind).transpose(1, 2).unsqueeze(-1)
    ys = []
    share, rate = share if gated else None, rate if delta else None
    for t in range(q.shape[2]):
        here, new = k[:, :, t].to(kind), v[:, :, t].to(kind)
        if share is not None:
            state = state * share[:, :, t].unsqueeze(-1)
        if rate is not None:
            new = (new - (here.unsqueeze(-2) @ state).squeeze(-2)) * rate[:, :, t]
        state = state + here.unsqueeze(-1) * new.unsqueeze(-2)
        seen = state.repeat_interleave(groups, 1)
        ys.append(factor * (q[:, :, t].to(kind).unsqueeze(-2) @ seen).squeeze(-2))
    y = torch.stack(ys, 1).flatten(2).to(query.dtype)
    return (y, state) if num_outputs > 1 else y
