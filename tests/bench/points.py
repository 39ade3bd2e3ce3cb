"""Gradients at special points beside PyTorch's: the tables of docs/operators.md (5 minutes).

    python -m tests.bench.points [--write] [NAME ..]

A point of tests/support/special_points.py is computed by torch itself, and by the launcher's
functions: a module is exported and read, a node of ONNX's is read. The gradient is that of the sum
of all outputs, times 1, 2, 3, ... NAMEs are operators; without any, all are run.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import planner
from planner.model.load import load
from planner.operators.convert import parameters, to_torch
from planner.support.errors import ExportError
from tests.bench.solvers import put
from tests.support.special_points import NODES, POINTS, REFUSED, Point

FILE = Path(__file__).parents[2] / "docs" / "operators.md"
TOGETHER = 20
"""Points of one module: an export takes most of a second, however small."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Of a gradient's magnitude: ONNX's attributes are float32."""


@dataclass(frozen=True)
class Computed:
    """The outputs of a point, and the gradients of its floats; None where none flows."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def floats(point: Point, dtype: torch.dtype) -> list[Tensor]:
    """The inputs of a point in a type of floats."""
    return [one.to(dtype) if one.is_floating_point() else one for one in point.inputs]


def sum_of(outputs: Sequence[Tensor]) -> Tensor:
    """The sum that is differentiated."""
    return torch.stack([
        (one * torch.arange(1, one.numel() + 1, dtype=one.dtype).reshape(one.shape)).sum()
        for one in outputs if one.is_floating_point()
    ]).sum()  # fmt: skip


def by_torch(point: Point, dtype: torch.dtype) -> Computed:
    """A point by torch's function."""
    given = [
        one.clone().requires_grad_(one.is_floating_point()) for one in floats(point, dtype)
    ]  # fmt: skip
    outputs = pytree.tree_leaves(point.function(*given))
    sum_of(outputs).backward()
    moved = [one.grad for one in given if one.is_floating_point()]
    return Computed([one.detach() for one in outputs], moved)


# ---- torch's operators, in a module


class AtPoints(nn.Module):
    """Functions of the inputs plus zeros, which are trained."""

    def __init__(self, points: Sequence[Point], dtype: torch.dtype) -> None:
        super().__init__()
        self.functions = [(one.function, len(one.inputs)) for one in points]
        self.shifts = nn.ParameterList(
            nn.ParameterList(torch.zeros_like(x) for x in floats(one, dtype) if is_float(x))
            for one in points
        )

    def forward(self, *given):
        """All outputs of all points."""
        made, left = [], iter(given)
        for (function, count), shifts in zip(self.functions, self.shifts, strict=True):
            inputs, moves = [next(left) for _ in range(count)], iter(shifts)
            moved = [x + next(moves) if is_float(x) else x for x in inputs]
            made.append(pytree.tree_leaves(function(*moved)))
        return made


def is_float(one: Tensor) -> bool:
    return one.is_floating_point()


def by_module(points: Sequence[Point], dtype: torch.dtype, folder: Path) -> list[Computed]:
    """Points by the launcher's functions, after `planner export`.

    Raises:
        ExportError: if one is refused.
    """
    module = AtPoints(points, dtype)
    given = [x for one in points for x in floats(one, dtype)]
    planner.export(module, tuple(given), folder / "points.onnx", check=False)
    names = [
        [f"shifts.{i}.{j}" for j in range(len(shifts))] for i, shifts in enumerate(module.shifts)
    ]
    counts = [len(one) for one in module(*given)]
    return run(folder / "points.onnx", given, names, counts)


def run(path, given, names, counts) -> list[Computed]:
    """A file by the launcher's functions.

    Args:
        given: inputs of the file.
        names: of the parameters of each point.
        counts: outputs of each point.
    """
    model = load(path)
    read = dict.fromkeys(name for node in model.nodes for name in node.inputs)
    held = parameters(model, [name for name in read if name in model.values])
    held |= {name: nn.Parameter(held[name]) for some in names for name in some if name in held}
    module = to_torch(model, values=held)
    by_input = dict(zip([one.name for one in model.proto.graph.input], given, strict=True))
    made = module(*(by_input[name] for name in module.input_names))
    by_output = dict(zip(module.output_names, made, strict=True))
    outputs = iter([by_output[one.name] for one in model.proto.graph.output])
    computed = []
    for some, count in zip(names, counts, strict=True):
        here = [next(outputs) for _ in range(count)]
        total = sum_of(here)
        if total.requires_grad:
            total.backward(retain_graph=True)
        moved = [held[name].grad if name in held else None for name in some]
        computed.append(Computed([one.detach() for one in here], moved))
    return computed


# ---- ONNX's operators, in a file


def by_node(points: Sequence[Point], dtype: torch.dtype, folder: Path) -> list[Computed]:
    """Points by the launcher's functions, after a node of each is read."""
    nodes, values, outputs, held, names = [], [], [], [], []
    for i, point in enumerate(points):
        inputs = []
        for j, one in enumerate(floats(point, dtype)):
            name, kind = f"{i}.{j}", helper.np_dtype_to_tensor_dtype(one.numpy().dtype)
            values.append(helper.make_tensor_value_info(name, kind, one.shape))
            inputs.append(f"{name}.moved" if is_float(one) else name)
            if is_float(one):
                zeros = torch.zeros_like(one).numpy()
                held.append(numpy_helper.from_array(zeros, f"{name}.shift"))
                nodes.append(helper.make_node("Add", [name, f"{name}.shift"], inputs[-1:]))
        attributes = dict(point.attributes)
        schema = onnx.defs.get_schema(point.operator)
        for key in [one for one in attributes if one not in schema.attributes]:
            value = torch.tensor(attributes.pop(key))
            value = value.to(dtype) if is_float(value) else value.reshape(-1)
            held.append(numpy_helper.from_array(value.numpy(), f"{i}.{key}"))
            inputs.append(f"{i}.{key}")
        made = [f"{i}.made.{j}" for j in range(schema.min_output)]
        nodes.append(helper.make_node(point.operator, inputs, made, **attributes))
        outputs.append(onnx.ValueInfoProto(name=made[0]))
        names.append([f"{i}.{j}.shift" for j, one in enumerate(point.inputs) if is_float(one)])
    graph = helper.make_graph(nodes, "points", values, outputs, held)
    opset = [helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    path = folder / "nodes.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset), path)
    given = [x for one in points for x in floats(one, dtype)]
    return run(path, given, names, [1] * len(points))


# ---- both


def close(wanted: Tensor | None, made: Tensor | None) -> bool:
    """Whether two tensors are equal but for rounding; no gradient is zero."""
    if wanted is None or made is None:
        lone = made if wanted is None else wanted
        return lone is None or not lone.any()
    if wanted.shape != made.shape or wanted.dtype != made.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(wanted, made)
    scale = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 1.0
    limit = TOLERANCE[wanted.dtype] * (scale or 1.0)
    return torch.allclose(made, wanted, rtol=0.0, atol=limit, equal_nan=True)


def difference(wanted: Computed, made: Computed) -> str:
    """How far the launcher's results are from torch's; empty where they are equal."""
    found = []
    for what, some, others in (
        ("value", wanted.outputs, made.outputs), ("gradient", wanted.gradients, made.gradients),
    ):  # fmt: skip
        for one, other in zip(some, others, strict=True):
            if not close(one, other):
                found.append(f"{what} {numbers(other)} instead of {numbers(one)}")
    return "; ".join(found)


def numbers(tensor: Tensor | None) -> str:
    """The numbers of a tensor as text.

    >>> numbers(torch.tensor([[1.0, 0.25], [float("nan"), 1e12]]))
    '[1, 0.25, nan, 1e+12]'
    """
    if tensor is None:
        return "none"
    return f"[{', '.join(f'{one:.4g}' for one in tensor.flatten().tolist())}]"


def differences(
    points: Sequence[Point], way, dtype: torch.dtype = torch.float64
) -> list[str]:  # fmt: skip
    """What `difference` says of each point.

    Args:
        way: `by_module` or `by_node`.
    """
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for first in range(0, len(points), TOGETHER):
            some = points[first : first + TOGETHER]
            made = way(some, dtype, Path(folder))
            found += [
                difference(by_torch(one, dtype), other)
                for one, other in zip(some, made, strict=True)
            ]
    return found


def refusal(point: Point) -> str:
    """Why the export refuses a point."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        try:
            by_module([point], torch.float64, Path(folder))
        except ExportError as error:
            return str(error).removeprefix("AtPoints: ").partition("; ")[0]
    return ""


# ---- the tables


def table(points: Sequence[Point], found: Sequence[str]) -> str:
    """One row per operator, and one per point that differs."""
    rows: dict[str, list[str]] = {}
    for point in points:
        rows.setdefault(point.operator, []).append(point.at)
    differ = {point.operator for point, one in zip(points, found, strict=True) if one}
    lines = ["| operator | at | gradient |", "|---|---|---|"]
    lines += [
        f"| {name} | {'; '.join(some)} | {'differs, see below' if name in differ else 'agrees'} |"
        for name, some in sorted(rows.items())
    ]
    lines += ["", "| operator | at | the launcher's | why |", "|---|---|---|---|"]
    lines += [
        f"| {point.operator} | {point.at} | {one} | {point.differs} |"
        for point, one in zip(points, found, strict=True)
        if one
    ]
    return "\n".join(lines)


def text(of_modules: Sequence[str], of_nodes: Sequence[str], refusals: Sequence[str]) -> str:
    """The generated part of the file."""
    equal = sum(not one for one in (*of_modules, *of_nodes))
    names = {one.operator for one in (*POINTS, *NODES)}
    refused = [f"- {point.operator}: {why}" for point, why in zip(REFUSED, refusals, strict=True)]
    return "\n\n".join([
        f"{len(POINTS) + len(NODES)} points of {len(names)} operators; at {equal} of them values"
        " and gradients are PyTorch's.",
        "Operators of PyTorch, in a module that `planner export` writes:",
        table(POINTS, of_modules),
        "Operators of ONNX, in a file that others wrote, beside the function of PyTorch that ONNX's"
        " text describes:",
        table(NODES, of_nodes),
        "Operators that the export refuses:",
        "\n".join(refused),
    ])  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/operators.md")
    parser.add_argument("--float32", action="store_true", help="in float32, which has no table")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    dtype = torch.float32 if options.float32 else torch.float64
    if options.write:
        found = differences(POINTS, by_module), differences(NODES, by_node)
        put(FILE, "special points", text(*found, list(map(refusal, REFUSED))))
        return
    for points, way in ((POINTS, by_module), (NODES, by_node)):
        chosen = [one for one in points if not options.names or one.operator in options.names]
        for point, one in zip(chosen, differences(chosen, way, dtype), strict=True):
            if bool(one) != bool(point.differs):
                print(f"{point.operator}, {point.at}: {one or 'agrees'}")


if __name__ == "__main__":
    main()
