"""Random inputs and targets that a model accepts, the same for the same seed on every machine.

Each tensor has its own generator, seeded with (seed, microbatch, name), so that ranks which need
different tensors of one microbatch agree without talking to each other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from planner import graph as graphs
from planner.errors import OptionError
from planner.model import Model, Node
from planner.operators.randomness import seeded

LOSSES = ("cross-entropy", "mse")

# Operators whose first output holds elements of their first input, and nothing else.
_REARRANGING = frozenset({
    "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
    "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip


def inputs(model: Model, *, seed: int, microbatch: int, device: str = "cpu") -> dict[str, Tensor]:
    """One microbatch of inputs by name.

    Floats are standard normal. Integers that index tables (embeddings) are uniform below the rows
    of the smallest one. Every other integer and boolean is one, since a mask of ones hides
    nothing.

    Args:
        seed: of the whole run.
        microbatch: index; each has its own values.
        device: where the tensors are put. The values are those of the CPU everywhere.
    """
    tensors = graphs.tensors_by_name(model.graph)
    return {
        name: _input(model, tensors[name], seeded(seed, microbatch, name)).to(device)
        for name in model.graph.inputs
    }


def target(model: Model, *, loss: str, seed: int, microbatch: int, device: str = "cpu") -> Tensor:
    """The target that the loss compares the model's first output with.

    For "cross-entropy" these are classes, which lie on `class_dim` of the output; for "mse"
    standard normal values of its shape.

    Raises:
        OptionError: if the loss is unknown, or needs a dimension that the output does not have.
    """
    output = graphs.tensors_by_name(model.graph)[model.graph.outputs[0]]
    generator = seeded(seed, microbatch, f"target of {output.name}")
    if loss == "mse":
        return _normal(output, generator).to(device)
    if loss != "cross-entropy":
        raise OptionError(f"--loss: expected one of {', '.join(LOSSES)}, got {loss!r}")
    others = list(output.shape)
    if len(others) < 2:
        raise OptionError(
            f"--loss cross-entropy: expected an output with classes, but {output.name!r} has the "
            f"shape {output.shape}; use mse"
        )
    num_classes = others.pop(class_dim(len(others)))
    return torch.randint(num_classes, others, generator=generator).to(device)


def class_dim(rank: int) -> int:
    """Where the classes of an output lie: last for tokens (rank 3), else on dimension 1."""
    return 2 if rank == 3 else 1


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
    """Rows of every table that elements of the tensor index."""
    holding = {name}
    for node in model.nodes:
        if node.type == "Gather" and node.inputs[1] in holding:
            yield _num_rows(model, node)
        if node.type in _REARRANGING and node.inputs[0] in holding:
            holding.update(node.outputs)


def _num_rows(model: Model, gather: Node) -> int:
    table, axis = gather.inputs[0], gather.attributes.get("axis", 0)
    assert isinstance(axis, int)
    tensor = graphs.tensors_by_name(model.graph).get(table)
    shape = tensor.shape if tensor else model.values[table].shape
    return shape[axis]
