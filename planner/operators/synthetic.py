"""Random inputs and targets that a model accepts, the same for the same seed on every machine.

Each tensor has its own generator, seeded with (seed, microbatch, name), so that ranks which need
different tensors of one microbatch agree without talking to each other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from planner.artefacts import graph as graphs
from planner.artefacts.losses import Loss, LossName
from planner.artefacts.operator_types import Indices, facts
from planner.model.load import Model, Node
from planner.operators.randomness import seeded
from planner.support.errors import ModelError
from planner.support.units import format_bytes


def inputs(model: Model, *, seed: int, microbatch: int, device: str = "cpu") -> dict[str, Tensor]:
    """One microbatch of inputs by name.

    Floats are standard normal. Integers that index tables (embeddings) or classes (labels of a loss
    that the model computes) are uniform below the smallest number of rows or classes. Every other
    integer and boolean is one, since a mask of ones hides nothing.

    Args:
        seed: of the whole run.
        microbatch: index; each has its own values.
        device: where the tensors are put. The values are those of the CPU everywhere.

    Raises:
        ModelError: if one does not fit into memory.
    """
    tensors = graphs.tensors_by_name(model.graph)
    made = {}
    for name in model.graph.inputs:
        tensor = tensors[name]
        try:
            made[name] = _input(model, tensor, seeded(seed, microbatch, name)).to(device)
        except (MemoryError, RuntimeError) as error:
            if not _is_too_large(error):
                raise
            raise ModelError(
                f"{model.path}: input {name!r}: expected dimensions that fit into memory, got"
                f" {list(tensor.shape)}, {format_bytes(tensor.bytes)}; give smaller ones"
            ) from error
    return made


def _is_too_large(error: Exception) -> bool:
    """Whether an error says that a tensor does not fit; on the CPU torch has no type for that."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(word in str(error) for word in ("allocate", "overflow"))


def target(loss: Loss, *, seed: int, microbatch: int, device: str = "cpu") -> Tensor:
    """The target that a loss compares its output with: classes; zeros and ones for the binary
    cross-entropy; else standard normal values of the output's shape.
    """
    generator = seeded(seed, microbatch, f"target of {loss.output.name}")
    if loss.class_dim is not None:
        made = torch.randint(loss.num_classes, loss.target_shape, generator=generator)
    elif loss.function == LossName.BCE:
        made = torch.randint(2, loss.target_shape, generator=generator)
        made = made.to(getattr(torch, loss.target_dtype))
    else:
        made = _normal(loss.output, generator)
    return made.to(device)


def _input(model: Model, tensor: graphs.Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype in graphs.FLOAT_DTYPES:
        return _normal(tensor, generator)
    dtype = getattr(torch, tensor.dtype)
    num_rows = min(_indexed_rows(model, tensor.name), default=None)
    if num_rows is None or tensor.dtype == "bool":
        return torch.ones(tensor.shape, dtype=dtype)
    return torch.randint(num_rows, tensor.shape, generator=generator).to(dtype)


def _normal(tensor: graphs.Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype))


def _indexed_rows(model: Model, name: str) -> Iterator[int]:
    """Rows of every table, and numbers of classes, that elements of the tensor index."""
    holding = {name}
    for node in model.nodes:
        known = facts(node.kind)
        # Positions of tokens stay one: a single one is where a whole sequence begins.
        if known.indices is not None and node.type != "RotaryEmbedding":
            given = node.inputs[known.indices.position : known.indices.position + 1]
            if not holding.isdisjoint(given):
                yield _num_rows(model, node, known.indices)
        moved = known.moved or range(len(node.inputs))
        if known.moves and any(node.inputs[i] in holding for i in moved if i < len(node.inputs)):
            holding.update(node.outputs)


def _num_rows(model: Model, node: Node, indices: Indices) -> int:
    """The number of indices that an indexing operator allows."""
    table = node.inputs[indices.table]
    if node.type == "OneHot":
        return int(model.values[table].reshape(-1)[0])
    shape = _shape(model, table)
    if indices.axis is None:
        # An index is a tuple of elements; all are drawn alike, so below the shortest dimension.
        skipped = node.attributes.get("batch_dims", 0)
        assert isinstance(skipped, int)
        return min(shape[skipped : skipped + _shape(model, node.inputs[indices.position])[-1]])
    axis = node.attributes.get("axis", indices.axis)
    assert isinstance(axis, int)
    return shape[axis]


def _shape(model: Model, name: str) -> tuple[int, ...]:
    tensor = graphs.tensors_by_name(model.graph).get(name)
    return tensor.shape if tensor else model.values[name].shape
