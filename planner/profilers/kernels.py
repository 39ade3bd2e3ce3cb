"""The kernels that torch starts while some code runs: kind of work, FLOPs and bytes of each.

Below autograd, torch calls elementary functions; each call is one kernel or a few. A dispatch mode
sees these calls, on tensors with or without numbers. A call that changes nothing and whose results
lie in the storage of its arguments is a view, not a kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from planner.artefacts.growth import Kernel, Work

KINDS: Mapping[Work, frozenset[str]] = {
    Work.PRODUCT: frozenset({
        "mm", "addmm", "mv", "addmv", "dot", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
    }),
    Work.BATCHED_PRODUCT: frozenset({"bmm", "baddbmm", "addbmm"}),
    Work.TRANSCENDENTAL: frozenset({
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "expm1",
        "gelu", "gelu_backward", "log", "log1p", "mish", "mish_backward", "pow", "sigmoid", "silu",
        "silu_backward", "sin", "sinh", "softplus", "softplus_backward", "tan", "tanh", "elu",
        "elu_backward",
    }),
    Work.COPY: frozenset({
        "_to_copy", "cat", "clone", "constant_pad_nd", "copy", "copy_", "flip", "new_zeros",
        "repeat", "select_backward", "slice_backward", "split", "stack", "zeros", "zeros_like",
    }),
    Work.REDUCTION: frozenset({
        "all", "amax", "amin", "any", "argmax", "argmin", "cumprod", "cumsum",
        "linalg_vector_norm", "logsumexp", "max", "mean", "min", "prod", "sort", "std", "sum",
        "topk", "var", "var_mean",
    }),
    Work.NORMALIZATION: frozenset({
        "_log_softmax", "_log_softmax_backward_data", "_safe_softmax", "_softmax",
        "_softmax_backward_data", "_native_batch_norm_legit_no_training", "native_batch_norm",
        "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
        "_fused_rms_norm_backward",
    }),
    Work.MAX_POOLING: frozenset({
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
    }),
    Work.MEAN_POOLING: frozenset({
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
        "_adaptive_avg_pool3d_backward", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d",
        "avg_pool3d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
        "upsample_nearest2d", "upsample_nearest2d_backward",
    }),
    Work.GATHER: frozenset({
        "embedding", "embedding_dense_backward", "gather", "index", "index_add", "index_put",
        "index_put_", "index_select", "index_select_backward", "scatter", "scatter_add",
        "scatter_reduce",
    }),
}  # fmt: skip
"""Names of torch's elementary functions by kind of work; all others are elementwise."""

_WORK = {name: work for work, names in KINDS.items() for name in names}
_READ_BY_INDEX = frozenset({"embedding", "gather", "index", "index_select"})
"""These read only as much of their first input as they return."""
_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})
"""These do not read the tensor that they write to."""
_ALLOCATING = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip
_ENOUGH_CHANNELS = 32
_ALIGNED = 8
"""Elements of 16 bits that a tensor core's kernel loads at once."""
_MATRIX_TIMES_VECTOR = {"mv": 0, "addmv": 1, "dot": 0}
"""Position of the matrix (or the first vector) in products that torch's table of FLOPs lacks."""


class Kernels(TorchDispatchMode):
    """While it is active, lists the kernels that torch starts.

    Attributes:
        seen: the kernels, in the order of their start.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function and lists its kernel."""
        result = func(*args, **(kwargs or {}))
        self.seen.extend(_kernels(func, args, kwargs or {}, result))
        return result


def listed(run: Callable[[], object]) -> tuple[Kernel, ...]:
    """The kernels that `run` starts."""
    with Kernels() as kernels:
        run()
    return tuple(kernels.seen)


def _kernels(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Iterator[Kernel]:
    """The kernel of a call; none if it is a view, an allocation or no work on tensors."""
    name = func.overloadpacket.__name__
    read, written = list(_tensors((*args, *kwargs.values()))), list(_tensors((result,)))
    if not written or name in _ALLOCATING:
        return
    storages = {_storage(tensor) for tensor in read}
    if not func._schema.is_mutable and all(_storage(tensor) in storages for tensor in written):
        return  # a view
    if name in _OVERWRITING or name in _READ_BY_INDEX:
        read = read[1:]  # the first argument is not read, or only at the indices
    if name in _READ_BY_INDEX:
        read += written
    num_bytes = sum(map(_touched_bytes, (*read, *written)))
    if num_bytes:
        yield Kernel(
            _work(func, name, args, kwargs), _flops(func, name, args, kwargs, result), num_bytes
        )


def _work(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    if "attention" in name:
        return _attention(func, args, kwargs)
    if "convolution" in name:
        return _convolution(*args[1:] if "backward" in name else args)
    other = Work.UPDATE if func._schema.is_mutable else Work.ELEMENTWISE
    work = _WORK.get(name, other)
    if work is Work.BATCHED_PRODUCT:
        sizes = {size for one in _tensors(args) for size in one.shape[-2:]} - {1}  # vectors
        return Work.UNALIGNED_PRODUCT if any(size % _ALIGNED for size in sizes) else work
    return work


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    """Causal attention is apart: its kernels skip the half that the flag hides."""
    names = (one.name for one in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("is_causal"):
        return Work.ATTENTION
    backward = "backward" in func.overloadpacket.__name__
    return Work.CAUSAL_ATTENTION_BACKWARD if backward else Work.CAUSAL_ATTENTION


def _convolution(x: Tensor, weight: Tensor, bias: object, stride: Sequence[int], *_: Any) -> Work:
    """The kind of algorithm that libraries have for a convolution. Few channels per group do not
    fill the tiles of a product; Winograd's algorithm serves small windows that move by 1.
    """
    if weight.shape[1] < _ENOUGH_CHANNELS:
        return Work.FEW_CHANNELS
    small = all(size in (3, 5) for size in weight.shape[2:]) and set(stride) == {1}
    return Work.SMALL_WINDOW if small else Work.CONVOLUTION


def _flops(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> int:
    if name == "convolution_backward":
        return _convolution_backward_flops(*args)
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    if name in _MATRIX_TIMES_VECTOR:
        return 2 * int(args[_MATRIX_TIMES_VECTOR[name]].numel())
    if "attention" in name:
        return _attention_flops(name, args)
    if "rnn_layer" in name:
        return _recurrent_flops(name, args)
    made = sum(tensor.numel() for tensor in _tensors((result,)))
    match _WORK.get(name):
        case Work.MAX_POOLING | Work.MEAN_POOLING:
            return _pooling_flops(name, args, next(_tensors((result,))).numel())
        case Work.REDUCTION | Work.NORMALIZATION:
            return max(made, *(tensor.numel() for tensor in _tensors(args)))
    return made


def _pooling_flops(name: str, args: tuple[Any, ...], made: int) -> int:
    """FLOPs of a pooling: one per element of every window; in the backward pass of maxima one per
    window. Where the call has no window: one per element that is read or made.
    """
    given = [tensor.numel() for tensor in _tensors(args)]
    backward = "backward" in name
    if backward and "max" in name:
        return given[0]
    window = args[2 if backward else 1]
    if "adaptive" in name or "upsample" in name or not isinstance(window, list | tuple):
        return max(made, *given)
    return (given[0] if backward else made) * prod(window)


def _convolution_backward_flops(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> int:
    """The FLOPs of the forward pass, once for the gradient of the input and once for that of the
    weight, if they are asked for. Torch's own count is too high where there are groups (2.13).
    """
    transposed, made = options[4], options[7]
    positions = x.numel() if transposed else gradient.numel()
    return int(2 * positions * prod(weight.shape[1:]) * sum(made[:2]))


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    """FLOPs of the CPU's attention, which torch's table lacks. Forward multiplies queries with keys
    and scores with values; backward has five such products, because it makes the scores again.
    """
    query, key, value = args[1:4] if "backward" in name else args[:3]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    width, width_out = query.shape[-1], value.shape[-1]
    times = (3, 2) if "backward" in name else (1, 1)
    return int(2 * pairs * (times[0] * width + times[1] * width_out))


def _recurrent_flops(name: str, args: tuple[Any, ...]) -> int:
    """FLOPs of the CPU's LSTM layer: every position is multiplied with both weights; backward makes
    the gradients of the positions and of the weights.
    """
    x, inputs, states = args[:3]
    times = 2 if "backward" in name else 1
    return int(2 * times * prod(x.shape[:-1]) * (inputs.numel() + states.numel()))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _touched_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; an element that is repeated (stride 0) counts once."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or not size) * tensor.element_size()
