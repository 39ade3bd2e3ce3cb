"""Translations of torch operators that replace those of torch's exporter in training mode.

The exporter writes `BatchNormalization` in evaluation form whatever the module's mode is, and
computes the statistics of a batch with other operators where there are no running ones. Here it is
ONNX's training form: the statistics are those of the batch, and the node's second and third output
are the running statistics afterwards.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18

op: Any = opset18  # its types are those of its own front end
aten = torch.ops.aten


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


def batch_norm_without_statistics(
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


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_with_statistics,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
}
