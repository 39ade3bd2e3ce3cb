"""Translations of torch operators that replace those of torch's exporter.

- Batch normalization: the exporter writes the evaluation form whatever the module's mode is, and
  computes the statistics of a batch with other operators where there are no running ones. Here it
  is ONNX's training form: the statistics are those of the batch, and the second and third output
  of the node are the running statistics afterwards.
- `torch.normal`: the exporter fails without a deviation, and draws one number for all elements
  where only the deviation is a tensor.
- EmbeddingBag: the exporter writes a loop over the bags. Here rows are added up by ScatterND.
- The cross-entropy: the exporter leaves smoothed labels out, and takes probabilities of classes for
  classes.
- The matrix exponential and products of reflections, of orthogonal weights: the exporter has none.
- An operator of a library of the user's own, such as `torch.library.custom_op` makes, becomes one
  node: its type is the operator's name, its domain the library's, its attributes the arguments that
  are no tensors.
"""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from math import inf
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import evaluator, opset18
from torch._ops import OpOverload

from planner.model.export.special_points import AT_SPECIAL_POINTS

op: Any = opset18  # its types are those of its own front end
aten = torch.ops.aten
INT64 = ir.DataType.INT64.value


def batch_norm_with_statistics(
    input: ir.Value,
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    running_mean: ir.Value | None = None,
    running_var: ir.Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """`_native_batch_norm_legit_functional`: (output, mean, 1 / deviation, running mean, running
    variance). The second and third are read by the backward pass alone, which is not exported, so
    any value does.
    """
    weight, bias = _affine(input, weight, bias)
    made = op.BatchNormalization(
        input,
        weight,
        bias,
        running_mean,
        running_var,
        epsilon=eps,
        momentum=1 - momentum,  # ONNX weighs the old statistics, torch the new ones
        training_mode=int(training),
    )
    if not training:
        return made, running_mean, running_var, op.Identity(running_mean), op.Identity(running_var)
    output, mean, variance = made
    return output, mean, variance, mean, variance


def _batch_norm_without_statistics(
    input: ir.Value,
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """`_native_batch_norm_legit.no_stats`: the same with the statistics of the batch in both modes;
    the running ones that the operator wants are constants, and what becomes of them is not used.
    """
    mean, variance = _per_channel(input, 0.0), _per_channel(input, 1.0)
    made = batch_norm_with_statistics(
        input, weight, bias, mean, variance, training=True, momentum=momentum, eps=eps
    )
    return made[:3]


def _affine(
    input: ir.Value, weight: ir.Value | None, bias: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    return (
        _per_channel(input, 1.0) if weight is None else weight,
        _per_channel(input, 0.0) if bias is None else bias,
    )


def _per_channel(input: ir.Value, value: float) -> Any:
    """A vector of one value for each channel, dimension 1 of the input."""
    scalar = op.CastLike(op.Constant(value_float=value), input)
    return op.Expand(scalar, op.Shape(input, start=1, end=2))


def normal(mean: Any, deviation: Any = 1.0) -> Any:
    """`normal` with a tensor as mean, deviation, or both: one draw for each element.

    Tensors of different shapes are broadcast.
    """
    if isinstance(mean, float | int):
        wide: Any = deviation
    elif isinstance(deviation, float | int):
        wide = mean
    else:
        wide = op.Add(mean, deviation)
    draws = op.RandomNormalLike(wide)
    return op.Add(op.Mul(draws, op.CastLike(deviation, draws)), op.CastLike(mean, draws))


SUM, MEAN, MAX = range(3)  # torch's modes of an EmbeddingBag


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, ...]:
    """`embedding_bag`: (output, bag of each index, size of each bag, largest index). All but the
    first are read by the backward pass alone, so any value does.

    Args:
        weight: (rows, columns).
        indices: (N,) rows.
        offsets: (B,) first index of each bag; with `include_last_offset` one more, N.
        per_sample_weights: (N,) factors of the rows, or None.
        padding_idx: the row that counts for nothing; None or -1 for none.
    """

    def of(value: float, shape: Any) -> Any:
        return op.Expand(op.CastLike(op.Constant(value_float=value), weight), shape)

    one = op.Constant(value_ints=[1])
    zero = op.Constant(value_int=0)
    number = op.Squeeze(op.Shape(indices))
    positions = op.Range(zero, number, op.Constant(value_int=1))
    begun = op.LessOrEqual(op.Unsqueeze(op.CastLike(offsets, positions), one), positions)  # (B, N)
    bag = op.ReduceSum(op.Cast(begun, to=INT64), op.Constant(value_ints=[0]), keepdims=0)
    bag = op.Unsqueeze(op.Sub(bag, one), one)  # (N, 1)
    num_bags = op.Shape(offsets)
    if include_last_offset:
        num_bags = op.Sub(num_bags, one)
    shape = op.Concat(num_bags, op.Shape(weight, start=1, end=2), axis=0)

    rows = op.Gather(weight, indices)
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, one))
    counts = of(1.0, op.Shape(indices))
    if padding_idx is not None and padding_idx >= 0:
        padding = op.Equal(indices, op.CastLike(op.Constant(value_int=padding_idx), indices))
        nothing = op.CastLike(op.Constant(value_float=-inf if mode == MAX else 0.0), weight)
        rows = op.Where(op.Unsqueeze(padding, one), nothing, rows)
        counts = op.CastLike(op.Not(padding), weight)
    if mode == MAX:
        made = _largest(rows, bag, positions, number, of(-inf, shape))
    else:
        made = op.ScatterND(of(0.0, shape), bag, rows, reduction="add")
    if mode == MEAN:
        size = op.ScatterND(of(0.0, num_bags), bag, counts, reduction="add")
        made = op.Div(made, op.Unsqueeze(op.Max(size, of(1.0, num_bags)), one))
    return made, op.Identity(offsets), op.Identity(offsets), op.Identity(offsets)


def _embedding_bag_counted_back(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`embedding_bag.padding_idx`, in which a negative row counts back from the last one."""
    given = signature(embedding_bag).bind(*args, **kwargs).arguments
    if (given["padding_idx"] or 0) < 0:
        given["padding_idx"] += given["weight"].shape[0]
    return embedding_bag(**given)


def _largest(rows: Any, bag: Any, positions: Any, number: Any, nothing: Any) -> Any:
    """The largest numbers of each bag; the first of equals gets the gradient. Zero without rows.

    Args:
        rows: (N, columns).
        bag: (N, 1) of each row.
        positions: (N,) from zero on.
        number: N.
        nothing: (B, columns) of minus infinity.
    """
    largest = op.ScatterND(nothing, bag, rows, reduction="max")
    is_largest = op.Equal(rows, op.GatherND(largest, bag))
    candidates = op.Where(is_largest, op.Unsqueeze(positions, op.Constant(value_ints=[1])), number)
    behind = op.Expand(number, op.Shape(nothing))
    first = op.ScatterND(behind, bag, candidates, reduction="min")
    last = op.Sub(number, op.Constant(value_int=1))
    made = op.GatherElements(rows, op.Min(first, last), axis=0)
    return op.Where(op.IsInf(largest), _like(0.0, rows), made)


NONE, AVERAGE = range(2)  # torch's reductions of a loss; 2 is the sum


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int = AVERAGE,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """`cross_entropy_loss` with smoothed labels, and with probabilities in place of classes.

    With a share e of smoothing and C classes, it is 1 - e of the usual loss and e / C of the sum
    over all classes.

    Args:
        input: (N, C, ...) scores.
        target: (N, ...) classes, or (N, C, ...) probabilities.
        weight: (C,) of the classes, or None.
    """
    if target.dtype.is_floating_point():
        return _of_probabilities(input, target, weight, reduction, label_smoothing)
    kind = ("none", "mean", "sum")[reduction]
    usual, _ = op.SoftmaxCrossEntropyLoss(
        input, target, weight, reduction=kind, ignore_index=ignore_index
    )
    if not label_smoothing:
        return usual
    ignored = op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target))
    counted = op.CastLike(op.Not(ignored), input)
    # A choice, not a product: without any sample the mean is no number, and its gradient zero.
    over_classes = op.Where(ignored, _like(0.0, input), _over_classes(input, None, weight))
    if reduction == AVERAGE:
        if weight is not None:
            zero = op.CastLike(op.Constant(value_int=0), target)
            counted = op.Mul(counted, op.Gather(weight, op.Where(ignored, zero, target)))
        total = op.ReduceSum(over_classes, keepdims=0)
        over_classes = op.Div(total, op.ReduceSum(counted, keepdims=0))
    elif reduction != NONE:
        over_classes = op.ReduceSum(over_classes, keepdims=0)
    share = op.Div(_like(label_smoothing, input), _num_classes(input))
    return op.Add(op.Mul(usual, _like(1 - label_smoothing, input)), op.Mul(over_classes, share))


def _of_probabilities(
    input: Any, target: Any, weight: Any, reduction: int, label_smoothing: float
) -> Any:
    """The cross-entropy of probabilities; its mean is over samples, whatever their weights."""
    if label_smoothing:
        share = op.Div(_like(label_smoothing, input), _num_classes(input))
        target = op.Add(op.Mul(target, _like(1 - label_smoothing, input)), share)
    made = _over_classes(input, target, weight)
    if reduction == NONE:
        return made
    return (op.ReduceMean if reduction == AVERAGE else op.ReduceSum)(made, keepdims=0)


def _over_classes(input: Any, factors: Any, weight: Any) -> Any:
    """Minus the sum over classes of the logarithms of their probabilities, times factors."""
    terms = op.LogSoftmax(input, axis=1)
    if factors is not None:
        terms = op.Mul(terms, factors)
    if weight is not None:
        behind = op.Constant(value_ints=list(range(1, len(input.shape) - 1)))
        terms = op.Mul(terms, op.Unsqueeze(weight, behind) if len(input.shape) > 2 else weight)
    return op.Neg(op.ReduceSum(terms, op.Constant(value_ints=[1]), keepdims=0))


def _num_classes(input: Any) -> Any:
    return op.CastLike(op.Squeeze(op.Shape(input, start=1, end=2)), input)


def _like(value: float, tensor: Any) -> Any:
    """A number in the type of a tensor."""
    return op.CastLike(op.Constant(value_float=value), tensor)


def grouped_mm(input: Any, weight: Any, offs: Any, *others: Any, **options: Any) -> Any:
    """`grouped_mm`: rows of the input in groups, each multiplied by a matrix of its own.

    The rows of all other groups are set to zero and the products added up, which is one
    multiplication of (S, E K) and (E K, N): E times the work, and no matrix is copied per row.

    Args:
        input: (S, K) rows, those of one group after the other.
        weight: (E, K, N) matrices.
        offs: (E,) the end of each group; rows behind the last one give zero.
    """
    if any(one is not None for one in (*others, *options.values())):
        raise NotImplementedError("grouped_mm with a bias or a type of its own")
    zero, one, two, minus = (op.Constant(value_ints=[value]) for value in (0, 1, 2, -1))
    number = op.Squeeze(op.Shape(input, start=0, end=1))
    positions = op.Range(op.Constant(value_int=0), number, op.Constant(value_int=1))
    ends = op.Unsqueeze(op.Cast(offs, to=INT64), zero)  # (1, E)
    inside = op.Cast(op.Less(op.Unsqueeze(positions, one), ends), to=INT64)  # (S, E): before an end
    others_ends = op.Slice(inside, zero, minus, one)
    own = op.Sub(inside, op.Pad(others_ends, op.Constant(value_ints=[0, 1, 0, 0])))
    rows = op.Mul(op.Unsqueeze(input, one), op.Unsqueeze(op.CastLike(own, input), two))  # (S, E, K)
    wide = op.Reshape(rows, op.Concat(op.Shape(input, start=0, end=1), minus, axis=0))
    tall = op.Reshape(weight, op.Concat(minus, op.Shape(weight, start=2, end=3), axis=0))
    return op.MatMul(wide, tall)


TERMS, SQUARINGS = 18, 8


def _matrix_exp(input: Any) -> Any:
    """`linalg_matrix_exp`: a Taylor polynomial of input / 256, squared eight times. Its error is
    that of rounding in float64 up to a norm of 256.

    Args:
        input: (..., n, n).
    """
    n = op.Shape(input, start=-1)
    eye = _eye(n, n, input)
    small = op.Div(input, _like(2.0**SQUARINGS, input))
    made = eye
    for k in range(TERMS, 0, -1):
        made = op.Add(eye, op.Div(op.MatMul(small, made), _like(float(k), input)))
    for _ in range(SQUARINGS):
        made = op.MatMul(made, made)
    return made


def _householder_product(input: Any, tau: Any) -> Any:
    """`linalg_householder_product`: the first columns of the product of reflections
    I - tau v v^T, in one matrix (the UT transform):

        I - V T V^T    with T = (I + diag(tau) striu(V^T V))^-1 diag(tau)

    What is inverted is I + N with N^n = 0, so (I + N)^-1 = (I - N) (I + N^2) (I + N^4) ..

    Args:
        input: (..., m, n), below its diagonal the vectors v, which are 1 on it.
        tau: (..., n).

    Source: Joffrain et al., ACM TOMS 2006.
    """
    n = input.shape[-1]
    if not isinstance(n, int) or tau.shape[-1] != n:
        raise NotImplementedError("householder_product of fewer reflections than columns")
    rank = len(input.shape)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    rows, columns = op.Shape(input, start=-2, end=-1), op.Shape(input, start=-1)
    vectors = op.Add(
        op.Trilu(input, op.Constant(value_int=-1), upper=0), _eye(rows, columns, input)
    )
    products = op.MatMul(op.Transpose(vectors, perm=perm), vectors)
    above = op.Trilu(products, op.Constant(value_int=1), upper=1)
    eye = _eye(columns, columns, input)
    power = op.Mul(op.Unsqueeze(tau, op.Constant(value_ints=[-1])), above)
    inverse = op.Sub(eye, power)
    for _ in range(1, max(n - 1, 1).bit_length()):
        power = op.MatMul(power, power)
        inverse = op.MatMul(inverse, op.Add(eye, power))
    middle = op.Mul(inverse, op.Unsqueeze(tau, op.Constant(value_ints=[-2])))
    zero, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[rank - 2])
    top = op.Transpose(op.Slice(vectors, zero, columns, axis), perm=perm)
    taken = op.MatMul(op.MatMul(vectors, middle), top)
    return op.Sub(_eye(rows, columns, input), taken)


def _eye(rows: Any, columns: Any, tensor: Any) -> Any:
    """An identity matrix in the type of a tensor."""
    return op.CastLike(op.EyeLike(op.ConstantOfShape(op.Concat(rows, columns, axis=0))), tensor)


TRANSLATED = frozenset({"aten", "onnx", "onnx_symbolic", "prim", "prims", "torchvision"})
"""Libraries whose operators torch's exporter translates."""


def own_operators(targets: Iterable[object]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations of operators that torch's exporter does not know.

    Args:
        targets: what the nodes of a trace call.
    """
    return {
        one: partial(_node_of, one)
        for one in targets
        if isinstance(one, OpOverload) and one.namespace not in TRANSLATED
    }


def _node_of(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A node of the operator's own domain."""
    named = dict(zip((one.name for one in operator._schema.arguments), args, strict=False)) | kwargs
    inputs: list[ir.Value | None] = []
    attributes: dict[str, Any] = {}
    for one in operator._schema.arguments:
        value = named.get(one.name, one.default_value)
        if str(one.type) in ("Tensor", "Optional[Tensor]"):
            inputs.append(value)
        elif isinstance(value, bool | int | float | str) or _is_plain_list(value):
            attributes[one.name] = int(value) if isinstance(value, bool) else value
        elif value is not None:
            raise NotImplementedError(f"its argument {one.name}, of type {one.type}")
    while inputs and inputs[-1] is None:
        inputs.pop()
    node = ir.Node(
        operator.namespace,
        operator._schema.name.partition("::")[2],
        inputs,
        ir.convenience.convert_attributes(attributes),
        num_outputs=len(operator._schema.returns),
        version=1,
    )
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)
    return node.outputs[0] if len(node.outputs) == 1 else node.outputs


def _is_plain_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """All translations; those of operators of other libraries only where these are loaded."""
    table = dict(TRANSLATIONS)
    for library, name in (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")):
        operator = getattr(getattr(torch.ops, library), name, None)
        if operator is not None:
            table[operator.default] = grouped_mm
    return table


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **AT_SPECIAL_POINTS,
    aten._native_batch_norm_legit_functional.default: batch_norm_with_statistics,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.embedding_bag.padding_idx: _embedding_bag_counted_back,
    aten.linalg_householder_product.default: _householder_product,
    aten.linalg_matrix_exp.default: _matrix_exp,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
}
