"""State of a module that its forward changes, in an exported graph.

While a module is traced, its forward returns its buffers beside its own outputs: what a buffer
holds afterwards is then a value of the graph. Of each buffer that changes, a marked node makes the
next value (`model/marks.py`), and the output goes again.

Some normalizations change statistics in ways that ONNX and torch's exporter have no words for.
While they are traced, they compute the same in plain operators.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from planner.model.export.recording import named_once
from planner.model.scopes import STATE_MARK


@contextmanager
def returning_state(module: nn.Module) -> Iterator[None]:
    """A context in which forward gives a pair: its outputs, and what its buffers hold then."""
    own = module.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        made = own(*args, **kwargs)
        return made, [module.get_buffer(name).clone() for name in _buffers(module)]

    with ExitStack() as stack:
        for one in module.modules():
            if plain := _plain_forward(one):
                stack.enter_context(_forward(one, plain))
        stack.enter_context(_forward(module, forward))
        yield


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward of a module, for as long as it is entered."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _buffers(module: nn.Module) -> list[str]:
    return list(named_once(module.named_buffers(remove_duplicate=False)))


def mark_state(graph: ir.Graph, module: nn.Module) -> tuple[str, ...]:
    """Takes the buffers from the outputs of a graph, and puts a marked node behind the new value of
    each that changes.

    A normalization updates its running statistics itself. How many batches it has seen is left out
    where nothing depends on it.

    Args:
        graph: exported in `returning_state`, after `recording.tie`.

    Returns:
        Names of the buffers that change, also of those that an operator updates itself.
    """
    names = _buffers(module)
    values = {name: graph.outputs.pop() for name in reversed(names)}
    changed = []
    for name in names:
        value = values[name]
        source = _source(value)
        held = graph.initializers.get(name) or _unread(graph, name, module.get_buffer(name))
        if source is held or _is_lone_count(module, name, held, source):
            continue
        changed.append(name)
        if not _updates(source, held):
            node = ir.Node(
                "", "Identity", [source], name=f"next_value_of_{name}",
                metadata_props={STATE_MARK: name},
            )  # fmt: skip
            node.outputs[0].name = f"{name}/next"
            node.outputs[0].shape, node.outputs[0].type = held.shape, held.type
            graph.append(node)
    return tuple(changed)


def _unread(graph: ir.Graph, name: str, buffer: Tensor) -> ir.Value:
    """An initializer for a buffer that is changed and never read."""
    tensor = TorchTensor(buffer.detach().cpu(), name)
    held = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
    graph.initializers[name] = held
    return held


def _source(value: ir.Value) -> ir.Value:
    """The value that copies were made of."""
    while (node := value.producer()) is not None and node.op_type == "Identity":
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def _updates(value: ir.Value, held: ir.Value) -> bool:
    """Whether a value is a running statistic as BatchNormalization leaves it."""
    node = value.producer()
    return (
        node is not None
        and node.op_type == "BatchNormalization"
        and value.index() in (1, 2)
        and node.inputs[2 + (value.index() or 0)] is held
    )


def _is_lone_count(module: nn.Module, name: str, held: ir.Value, value: ir.Value) -> bool:
    """Whether a buffer counts the batches of a normalization, and only its next value follows from
    it.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf != "num_batches_tracked" or not isinstance(module.get_submodule(owner), _BatchNorm):
        return False
    readers = [node for node, _ in held.uses()]
    return all(value in node.outputs and len(value.uses()) <= 1 for node in readers)


def _plain_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The forward of a normalization in operators that can be exported; None for all others."""
    if not (getattr(module, "training", False) and getattr(module, "track_running_stats", False)):
        return None
    if isinstance(module, _InstanceNorm):
        return partial(_instance_norm, module)
    if isinstance(module, _BatchNorm) and module.momentum is None:
        return partial(_averaging_batch_norm, module)
    return None


def _averaging_batch_norm(norm: _BatchNorm, input: Tensor) -> Tensor:
    """A batch normalization without a momentum: statistics are means over all batches."""
    norm._check_input_dim(input)  # type: ignore[no-untyped-call]
    assert norm.num_batches_tracked is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        others = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(input.detach(), others)
        _follow(norm, mean, variance, 1 / norm.num_batches_tracked.to(mean.dtype))
    return functional.batch_norm(
        input, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
    )


def _instance_norm(norm: _InstanceNorm, input: Tensor) -> Tensor:
    """An instance normalization whose running statistics are means over the samples."""
    norm._check_input_dim(input)  # type: ignore[no-untyped-call]
    batched = input.dim() == norm._get_no_batch_dim() + 1  # type: ignore[no-untyped-call]
    x = input if batched else input.unsqueeze(0)
    with torch.no_grad():
        variance, mean = torch.var_mean(x.detach(), list(range(2, x.dim())))
        _follow(norm, mean.mean(0), variance.mean(0), norm.momentum or 0.0)
    made = functional.instance_norm(x, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    return made if batched else made.squeeze(0)


def _follow(
    norm: _BatchNorm | _InstanceNorm, mean: Tensor, variance: Tensor, share: Tensor | float
) -> None:
    """Moves running statistics by a share of the way."""
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert running is not None
        running.copy_((1 - share) * running + share * new)
