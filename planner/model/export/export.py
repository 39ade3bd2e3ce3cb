"""A module as an ONNX file: trace, tie, tidy, check, record, write."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from planner.artefacts.graph import ITEM_BYTES
from planner.model.export import recording
from planner.model.export.check import Check, GradientCheck
from planner.model.export.check import check as compared
from planner.model.export.inputs import Inputs, dynamic_shapes_of, inputs_of
from planner.model.export.modes import mark_dropout, mark_modes, mark_norms
from planner.model.export.state import mark_state, returning_state
from planner.model.export.tidy import tidy
from planner.model.export.trace import quiet, scalars_of, settings_for_export, traced, translated
from planner.model.export.write import write_model
from planner.model.record import METADATA_KEY, Checked, ModuleRecord, record_text
from planner.support.errors import ExportError
from planner.support.printable import few

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
    examples = inputs_of(inputs, "inputs").without_cache()
    shapes = dynamic_shapes_of(module, examples, dynamic_shapes)
    with settings_for_export(module) as settings, torch.random.fork_rng(), quiet(not verbose):
        model, changed, assumed = _graph_of(module, examples, shapes)
        graph = model.graph
        unlike = _mark_evaluation(module, examples, shapes, graph, changed)
        record = replace(recording.record_of(module, graph), unlike=unlike)
        outputs = gradients = None
        if check is not None:
            outputs = compared(module, examples, model)
            gradients = _gradients(check, module, examples, model, record)
    stopped = () if gradients is None else gradients.stopped
    unlike = unlike or ("" if gradients is None else gradients.unlike)
    checked = _checked(outputs, gradients)
    record = replace(record, checked=checked, stopped=stopped, unlike=unlike)
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
            *_notes(module, changed, unlike),
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


def _graph_of(
    module: nn.Module, inputs: Inputs, shapes: object
) -> tuple[ir.Model, tuple[str, ...], tuple[str, ...]]:
    """The module as ONNX in the mode in which it is, the buffers that forward changes, and what was
    assumed about values.
    """
    with returning_state(module):
        program, assumed = traced(module, inputs, shapes)
    model, program = translated(program, shapes, type(module).__name__)
    recording.tie(model.graph, module)
    changed = mark_state(model.graph, module)
    tidy(model, recording.held_names(module), scalars_of(program))
    mark_norms(model.graph, recording.held_names(module))
    _name_outputs(model.graph, program)
    return model, changed, assumed


def _mark_evaluation(
    module: nn.Module, inputs: Inputs, shapes: object, graph: ir.Graph, changed: Sequence[str]
) -> str:
    """Marks what the module computes in evaluation in the graph of its own mode; gives why that
    cannot be said, else "".

    Args:
        changed: buffers that forward changes in its own mode.
    """
    modes = {one: one.training for one in module.modules()}
    if not any(modes.values()):
        mark_dropout(graph.all_nodes())
        return _of_changed(changed)
    module.eval()
    try:
        model, changed, _ = _graph_of(module, inputs, shapes)
    except ExportError as error:
        return str(error)
    finally:
        for one, training in modes.items():
            one.training = training
    return _of_changed(changed) or mark_modes(graph, model.graph, recording.held_names(module))


def _of_changed(changed: Sequence[str]) -> str:
    return f"forward changes {', '.join(changed)} in evaluation, too" if changed else ""


def _notes(module: nn.Module, changed: Sequence[str], unlike: str) -> Iterator[str]:
    """State, what the file cannot evaluate, and what its training leaves out."""
    own = [
        name
        for name in changed
        if not isinstance(module.get_submodule(name.rpartition(".")[0]), _NormBase)
    ]
    if own:
        yield (
            f"forward changes {few(own)}: a launch updates them with every microbatch, and each"
            " replica has its own"
        )
    if unlike:
        yield f"the file trains, and cannot be evaluated as the module: {unlike}"
    if any(isinstance(one, nn.SyncBatchNorm) and one.training for one in module.modules()):
        yield (
            "SyncBatchNorm is written as BatchNormalization: a launch normalizes by the statistics"
            " of each microbatch, and replicas do not synchronize them"
        )


def _name_outputs(graph: ir.Graph, program: ExportedProgram) -> None:
    """Names outputs after the fields of the object that the module returns, such as "logits"."""
    spec = program.call_spec.out_spec
    assert spec is not None
    own, _ = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)  # and state
    fields = [_dotted(path) for path, _ in pytree.tree_flatten_with_path(own)[0]]
    specs = program.graph_signature.output_specs
    made = [one.arg for one in specs if one.kind is OutputKind.USER_OUTPUT][: len(fields)]
    both = zip(fields, made, strict=True)
    tensors = [field for field, arg in both if not isinstance(arg, ConstantArgument)]
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
