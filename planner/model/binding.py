"""Symbolic dimensions of a model's inputs -> sizes."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from onnx import TensorProto, TypeProto, ValueInfoProto, helper

from planner.support.errors import ModelError


def batch_is_open(inputs: Sequence[ValueInfoProto], sizes: Mapping[str, int]) -> bool:
    """Whether the batch of a model is symbolic and has no size: so the first dimension of its first
    input is. A first dimension of another name that has no size either may be no batch, and then
    the answer is no.

    Args:
        inputs: of the graph, without initializers.
        sizes: by name of the dimension.
    """
    first = next((name for value in inputs[:1] for name, _ in _dims(value)), None)
    unbound = {
        name
        for name, places in _uses(inputs).items()
        if name not in sizes and any(axis == 0 for _, axis in places)
    }
    return first is not None and unbound == {first}


def bind(
    inputs: Sequence[ValueInfoProto], batch: int | None, sizes: Mapping[str, int]
) -> tuple[dict[str, TypeProto], dict[str, int]]:
    """Give every dimension a size.

    A dimension without a name is called "tensor.axis", such as "x.2". `sizes` goes before
    `batch`.

    Args:
        inputs: of the graph, without initializers.
        batch: for each first dimension that is symbolic.
        sizes: by name of the dimension.

    Returns:
        The static type of each input, and the size of each symbolic dimension.

    Raises:
        ModelError: one line for each size that is missing, unknown or contradicts the model.
    """
    problems = [
        f"{value.name}: expected a tensor with a known rank as input, got "
        f"{value.type.WhichOneof('value') or 'no type'}; export the model with shapes"
        for value in inputs
        if not value.type.tensor_type.HasField("shape")
    ]
    problems += [
        f"{value.name}: expected an input with an element type, got none; export the model again"
        for value in inputs
        if value.type.tensor_type.elem_type == TensorProto.UNDEFINED
    ]
    if problems:
        raise ModelError("\n".join(problems))
    uses = _uses(inputs)
    bound = _bound(uses, batch, sizes)
    problems = [
        *_unknown(uses, sizes), *_contradictions(inputs, batch, sizes), *_unbound(uses, bound),
        *_not_positive(batch, sizes),
    ]  # fmt: skip
    if problems:
        raise ModelError("\n".join(problems))
    types = {
        value.name: helper.make_tensor_type_proto(
            value.type.tensor_type.elem_type,
            [size if name is None else bound[name] for name, size in _dims(value)],
        )
        for value in inputs
    }
    return types, bound


def batch_dimensions(
    inputs: Sequence[ValueInfoProto], sizes: Collection[str]
) -> frozenset[str]:  # fmt: skip
    """The symbolic dimensions that have the size of the batch; none where the first dimension of
    the first input is fixed, or not there.

    Args:
        sizes: the dimensions whose sizes are given by name.
    """
    first = next((name for value in inputs[:1] for name, _ in _dims(value)), None)
    if first is None:
        return frozenset()
    bound = _bound(_uses(inputs), 1, dict.fromkeys(sizes, 0))
    return frozenset({first, *(name for name, size in bound.items() if size == 1)})


def _dims(value: ValueInfoProto) -> Iterator[tuple[str | None, int]]:
    """Name (None if it is static) and size (if it is) of each dimension."""
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        static = dim.dim_value > 0
        yield None if static else dim.dim_param or f"{value.name}.{axis}", dim.dim_value


def _uses(inputs: Sequence[ValueInfoProto]) -> dict[str, list[tuple[str, int]]]:
    """The (tensor, axis) pairs of each symbolic dimension."""
    uses: dict[str, list[tuple[str, int]]] = {}
    for value in inputs:
        for axis, (name, _) in enumerate(_dims(value)):
            if name is not None:
                uses.setdefault(name, []).append((value.name, axis))
    return uses


def _bound(
    uses: Mapping[str, Sequence[tuple[str, int]]], batch: int | None, sizes: Mapping[str, int]
) -> dict[str, int]:
    bound = {}
    for name, places in uses.items():
        if name in sizes:
            bound[name] = sizes[name]
        elif batch is not None and any(axis == 0 for _, axis in places):
            bound[name] = batch
    return bound


def _unknown(uses: Mapping[str, object], sizes: Mapping[str, int]) -> Iterator[str]:
    known = ", ".join(uses) or "none"
    for name in sizes:
        if name not in uses:
            yield f"--dim {name}={sizes[name]}: no dimension of that name; known: {known}"


def _contradictions(
    inputs: Sequence[ValueInfoProto], batch: int | None, sizes: Mapping[str, int]
) -> Iterator[str]:
    dims = list(_dims(inputs[0])) if inputs else []
    if batch is None:
        return
    if not dims:
        yield "--batch: the model has no input with a first dimension; leave it out"
        return
    name, size = dims[0]
    if name is None and size != batch:
        yield (
            f"{inputs[0].name}: --batch is {batch}, but the model has the batch size {size} "
            f"written into it; give --batch {size} or export it with a symbolic first dimension"
        )
    if name is not None and sizes.get(name, batch) != batch:
        yield f"--batch is {batch}, but --dim gives the same dimension: {name}={sizes[name]}"


def _unbound(
    uses: Mapping[str, Sequence[tuple[str, int]]], bound: Mapping[str, int]
) -> Iterator[str]:
    for name, places in uses.items():
        if name not in bound:
            where = ", ".join(f"{tensor}[{axis}]" for tensor, axis in places)
            first = any(axis == 0 for _, axis in places)
            option = "--batch" if first else "--dim"
            example = "--batch 8" if first else f"--dim {name}=128"
            yield (
                f"dimension {name!r} of {where} has no size; give {option} with a number,"
                f" such as {example}"
            )


def _not_positive(batch: int | None, sizes: Mapping[str, int]) -> Iterator[str]:
    if batch is not None and batch < 1:
        yield f"--batch: expected a positive number, got {batch}"
    for name, size in sizes.items():
        if size < 1:
            yield f"--dim {name}: expected a positive number, got {size}"
