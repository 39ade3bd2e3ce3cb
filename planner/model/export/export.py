"""A module as an ONNX file: trace, tie, tidy, check, record, write."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from planner.artefacts.graph import ITEM_BYTES
from planner.model.export import recording
from planner.model.export.check import Check, GradientCheck
from planner.model.export.check import check as compared
from planner.model.export.inputs import Inputs, dynamic_shapes_of, inputs_of
from planner.model.export.quiet import quiet
from planner.model.export.settings import settings_for_export
from planner.model.export.tidy import tidy
from planner.model.export.trace import scalars_of, traced, translated
from planner.model.export.write import write_model
from planner.model.record import METADATA_KEY, Checked, ModuleRecord, record_text
from planner.support.errors import ExportError

GradientChecker = Callable[[nn.Module, Sequence[object], Mapping[str, object], Path], GradientCheck]
"""Compares a module with its file on example inputs; see `check_gradients`."""


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output of the file.

    Attributes:
        name: its name.
        dtype: ONNX's name of the element type, such as "FLOAT".
        shape: a size or a name for each dimension.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """A module that was written as ONNX.

    Attributes:
        path: of the file.
        files: all that was written: the file, and its external data where there is some.
        record: the module's parameters and buffers, as in the file's metadata.
        operators: the number of nodes of each type, constants not counted.
        inputs: of the file.
        outputs: of the file, the one that a loss is computed from first among the floats.
        settings: what was set during the export, such as "use_cache=False".
        notes: what the file does not do that the module does.
        check: the comparison of outputs with the module's; None where it was not asked for.
        gradients: the comparison of gradients with the module's; None where it was not asked for.
    """

    path: Path
    files: tuple[Path, ...]
    record: ModuleRecord
    operators: dict[str, int]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    settings: tuple[str, ...]
    notes: tuple[str, ...]
    check: Check | None = None
    gradients: GradientCheck | None = None


def export_module(
    module: nn.Module,
    inputs: object,
    path: Path,
    dynamic_shapes: object = None,
    *,
    check: GradientChecker | None = None,
    verbose: bool = False,
) -> Exported:
    """Writes a module as ONNX, in the mode in which it is.

    Args:
        module: left as it was.
        inputs: a tensor, a tuple of tensors, or tensors by argument; their shapes are the file's.
        path: the file to write.
        dynamic_shapes: as torch.onnx.export takes them; arguments may be left out of a mapping.
        check: compares gradients before the file is written; outputs are compared, too. None
            compares nothing.
        verbose: whether what torch prints is shown.

    Raises:
        ExportError: if the inputs do not fit, torch cannot trace or translate the module, or the
            graph computes something else, or has other gradients.
        FileError: if the file cannot be written.
    """
    _check_tensors(module)
    _check_batch_norms(module)
    examples = inputs_of(inputs, "inputs").without_cache()
    shapes = dynamic_shapes_of(module, examples, dynamic_shapes)
    with settings_for_export(module) as settings, torch.random.fork_rng(), quiet(not verbose):
        program, assumed = traced(module, examples, shapes)
        model, program = translated(program, shapes, type(module).__name__)
        graph = model.graph
        recording.tie(graph, module)
        tidy(model, recording.held_names(module), scalars_of(program))
        _name_outputs(graph, program)
        record = recording.record_of(module, graph)
        outputs = gradients = None
        if check is not None:
            outputs = compared(module, examples, model)
            gradients = _gradients(check, module, examples, model, record)
    stopped = () if gradients is None else gradients.stopped
    record = replace(record, checked=_checked(outputs, gradients), stopped=stopped)
    model.metadata_props[METADATA_KEY] = record_text(record)
    return Exported(
        path=path,
        files=write_model(model, path),
        record=record,
        operators=dict(
            sorted(Counter(n.op_type for n in graph.all_nodes() if n.op_type != "Constant").items())
        ),
        inputs=tuple(_value(value) for value in graph.inputs),
        outputs=tuple(_value(value) for value in graph.outputs),
        settings=settings,
        notes=(
            *(f"assumed that {one}" for one in assumed),
            *_notes(module, program, graph),
            *(() if gradients is None else gradients.notes),
        ),
        check=outputs,
        gradients=gradients,
    )


def _gradients(
    check: GradientChecker, module: nn.Module, inputs: Inputs, model: ir.Model, record: ModuleRecord
) -> GradientCheck:
    """The comparison of gradients, of a file that is gone afterwards."""
    model.metadata_props[METADATA_KEY] = record_text(record)
    with tempfile.TemporaryDirectory(prefix="planner-export-") as folder:
        path = Path(folder) / "model.onnx"
        write_model(model, path)
        return check(module, inputs.positional, inputs.named, path)


def _checked(outputs: Check | None, gradients: GradientCheck | None) -> Checked:
    """What was compared, for the record."""
    if gradients is not None and gradients.difference is not None:
        return Checked.GRADIENTS
    if outputs is not None and outputs.difference is not None:
        return Checked.OUTPUTS
    return Checked.NOTHING


def _check_tensors(module: nn.Module) -> None:
    """Refuses parameters and buffers of types that the planner does not train."""
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        dtype = str(one.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise ExportError(
                f"{type(module).__name__}: {name} is {dtype}; expected one of"
                f" {', '.join(ITEM_BYTES)}: convert the module"
            )


def _check_batch_norms(module: nn.Module) -> None:
    """Refuses normalizations in training mode whose running statistics ONNX cannot express."""
    for name, one in module.named_modules():
        if (
            isinstance(one, nn.modules.batchnorm._BatchNorm)
            and one.training
            and one.track_running_stats
            and one.momentum is None
        ):
            raise ExportError(
                f"{type(module).__name__}: {name or 'the module'} averages its statistics over all"
                " batches (momentum=None), which ONNX cannot express; give it a momentum, or call"
                " eval() on it"
            )


def _notes(module: nn.Module, program: ExportedProgram, graph: ir.Graph) -> tuple[str, ...]:
    """Buffers that the module changes in every step and the file does not."""
    changed = program.graph_signature.buffers_to_mutate.values()
    running = {
        value.name
        for node in graph.all_nodes()
        if node.op_type == "BatchNormalization"
        for value in node.inputs[3:]
        if value is not None
    }
    lost = [
        name for name in changed if name not in running and not name.endswith("num_batches_tracked")
    ]
    lost += [
        f"{name}.running_mean"
        for name, one in module.named_modules()
        if isinstance(one, nn.modules.instancenorm._InstanceNorm)
        and one.training
        and one.track_running_stats
    ]
    if not lost:
        return ()
    return (
        f"forward changes {', '.join(lost)}, which ONNX cannot express; in the file they stay as"
        " they are",
    )


def _name_outputs(graph: ir.Graph, program: ExportedProgram) -> None:
    """Names outputs after the fields of the object that the module returns, such as "logits"."""
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    fields = [_dotted(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    made = [
        one.arg
        for one in program.graph_signature.output_specs
        if one.kind is OutputKind.USER_OUTPUT
    ]
    tensors = [
        field
        for field, arg in zip(fields, made, strict=True)
        if not isinstance(arg, ConstantArgument)
    ]
    taken = {value.name for node in graph.all_nodes() for value in node.outputs}
    taken |= {value.name for value in graph.inputs} | set(graph.initializers)
    if len(tensors) != len(graph.outputs):
        return
    for value, name in zip(graph.outputs, tensors, strict=True):
        if name and name not in taken:
            value.name = name
            taken.add(name)


def _dotted(path: pytree.KeyPath) -> str:
    """The field that a path leads to; empty where it is only a position."""
    parts = []
    for key in path:
        match key:
            case pytree.MappingKey():
                parts.append(str(key.key))
            case pytree.GetAttrKey():
                parts.append(key.name)
            case pytree.SequenceKey() if parts:
                parts.append(str(key.idx))
            case _:
                return ""
    return ".".join(parts)


def _value(value: ir.Value) -> Value:
    """An input or output, described."""
    dims = () if value.shape is None else value.shape
    sizes = tuple(one if isinstance(one, int) else str(one.value) for one in dims)
    return Value(str(value.name), str(value.dtype), sizes)
