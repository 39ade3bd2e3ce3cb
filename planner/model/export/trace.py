"""torch.export and torch.onnx.export with the right options, and their failures in one sentence.

The trace and its translation are two calls, so that what cannot be traced and what has no
translation are told apart, and so that the trace can be mended between them.
"""

import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.model.export.composed import Composed
from planner.model.export.inputs import Inputs
from planner.model.export.stops import FlagChanges, keep_stops, modes_traced
from planner.model.export.translations import own_operators, translations
from planner.support.errors import ExportError

DATA_DEPENDENT = (
    "a branch or a size depends on the value of a tensor, which a graph cannot have; use"
    " torch.where, or take the decision out of forward"
)


def traced(
    module: nn.Module, inputs: Inputs, dynamic_shapes: object
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The module as a graph of torch operators, and what was assumed about values.

    Args:
        module: in the mode that is exported.
        inputs: example inputs.
        dynamic_shapes: as torch.onnx.export takes them.

    Raises:
        ExportError: if torch cannot trace it, it writes into a tensor whose gradient it stops, or
            it changes which of its parameters are trained.
    """
    assumptions, flags = Assumptions(), FlagChanges(module)
    try:
        with assumptions, flags, Composed(), modes_traced():
            program = torch.export.export(
                module,
                inputs.positional,
                inputs.named,
                dynamic_shapes=_unnamed(dynamic_shapes),
                strict=False,
            )
    except Exception as error:
        raise ExportError(f"{type(module).__name__}: {_untraceable(error)}") from error
    if flags.names:
        raise ExportError(
            f"{type(module).__name__}: forward changes requires_grad of {', '.join(flags.names)},"
            " but what a plan trains is fixed; freeze parameters before the export, or use their"
            " detach()"
        )
    keep_stops(program, module)
    _copy_before_views(program)
    return program, tuple(assumptions.made)


def translated(
    program: ExportedProgram, dynamic_shapes: object, title: str
) -> tuple[ir.Model, ExportedProgram]:
    """A traced module as an ONNX graph, before any clean-up, and its trace in simpler operators, in
    which changes of buffers are outputs.

    `optimize=False` leaves each initializer a tensor of the module: the exporter's optimizer merges
    those of equal value, such as the weights of all fresh normalizations.

    Args:
        dynamic_shapes: as torch.onnx.export takes them; their names become those of dimensions.
        title: the module, for messages.

    Raises:
        ExportError: if an operator has no translation.
    """
    graphs = [one.graph for one in program.graph_module.modules() if isinstance(one, GraphModule)]
    targets = {node.target for one in graphs for node in one.nodes if node.op == "call_function"}
    try:
        made = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            dynamic_shapes=dynamic_shapes,  # type: ignore[arg-type]
            custom_translation_table=own_operators(targets) | translations(),
        )
    except Exception as error:
        raise ExportError(f"{title}: {_untranslatable(error)}") from error
    assert made is not None and made.exported_program is not None
    return made.model, made.exported_program


def scalars_of(program: ExportedProgram) -> frozenset[float]:
    """The numbers among the arguments of a trace's operators."""
    return frozenset(
        one
        for node in program.graph.nodes
        for one in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(one, float)
    )


def _unnamed(shapes: Any) -> Any:
    """Dynamic shapes as torch.export takes them: without names of dimensions.

    >>> _unnamed({"x": {0: "batch"}, "y": None})
    {'x': {0: DimHint(DYNAMIC)}, 'y': None}
    """
    if isinstance(shapes, str):
        return Dim.DYNAMIC
    if isinstance(shapes, Mapping):
        return {key: _unnamed(one) for key, one in shapes.items()}
    if isinstance(shapes, list | tuple):
        return type(shapes)(_unnamed(one) for one in shapes)
    return shapes


def _copy_before_views(program: ExportedProgram) -> None:
    """Puts a copy where a tensor is made contiguous, and before each view of a transposed one.

    The exporter evaluates the trace again, where attention may give its output other strides (it
    does in training mode); views of the trace may then be impossible. In the ONNX graph the copies
    are identities, which `tidy` removes.
    """
    aten = torch.ops.aten
    contiguous = {"memory_format": torch.contiguous_format}
    graph = program.graph_module.graph
    for node in tuple(graph.nodes):
        if node.target is aten.contiguous.default:
            node.target, node.kwargs = aten.clone.default, contiguous
        elif node.target in (aten.view.default, aten.reshape.default):
            source = node.args[0]
            assert isinstance(source, Node)
            if source.target in (aten.transpose.int, aten.permute.default):
                with graph.inserting_before(node):
                    copy = graph.call_function(aten.clone.default, (source,), contiguous)
                copy.meta = dict(node.meta) | {"val": source.meta["val"]}
                node.replace_input_with(source, copy)
    program.graph_module.recompile()


def _untraceable(error: Exception) -> str:
    """Why torch.export failed, and where."""
    line = _line_of_user(error)
    where = f"; at {line}" if line else ""
    if "DataDependent" in type(error).__name__ or "DynamicOutputShape" in type(error).__name__:
        return f"cannot be traced: {DATA_DEPENDENT} ({_first_line(error)}){where}"
    if "fake tensor in the exported program constant" in str(error):
        return f"torch.export cannot trace the .data of a tensor; write .detach(){where}"
    if "Constraints violated" in str(error):
        fixed = re.search(r"You marked (.*?constant \(\d+\))", str(error), re.DOTALL)
        detail = " ".join(fixed[1].split()) if fixed else _first_line(error)
        return f"forward fixes a dimension that should be symbolic: {detail}; leave it fixed"
    return f"torch.export cannot trace it: {type(error).__name__}: {_first_line(error)}{where}"


def _untranslatable(error: Exception) -> str:
    """Why torch.onnx.export failed."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for one in causes:
        if found := re.search(r"No ONNX function found for (.*?)\. Failure", str(one)):
            return (
                f"torch has no ONNX translation of {_operator(found[1])}; write it with other"
                " operators of torch"
            )
    nodes = (re.search(r"target=([\w.]+)", str(one)) for one in causes)
    target = next((found[1] for found in nodes if found), "")
    what = f"the translation of {target.removeprefix('torch.ops.')}" if target else "torch.onnx"
    return f"{what} failed: {type(causes[-1]).__name__}: {_first_line(causes[-1])}"


def _operator(text: str) -> str:
    """The name of an operator, from its repr.

    >>> _operator("<OpOverload(op='aten.rrelu', overload='default')>")
    'aten.rrelu.default'
    """
    overload = re.fullmatch(r"<OpOverload\(op='(.*?)', overload='(.*?)'\)>", text)
    return ".".join(overload.groups()) if overload else text


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _line_of_user(error: Exception) -> str:
    """The innermost line of code that is neither torch's nor the planner's, with its place."""
    roots = [Path(torch.__file__).parent, Path(__file__).resolve().parents[2]]
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if frame.line and not any(root in path.parents for root in roots):
            place = f"{path.name}:{frame.lineno}: {frame.line.strip()}"
    return place


# ---- what surrounds the exporter

FINITE = "all values are finite: branches on torch.isfinite(...).all() are taken so"


class Assumptions(TorchFunctionMode):
    """While a module is traced under it, `torch.isfinite(x).all()` is True.

    Some models of transformers clamp what overflows. A graph cannot branch on that.

    Attributes:
        made: what was assumed, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, None] = {}
        self._known: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors, so that ids are unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        first = args[0] if args else None
        state = self._known[id(first)][0] if id(first) in self._known else ""
        if state == "all" and func is Tensor.__bool__:
            self.made[FINITE] = None
            return True
        made = func(*args, **(kwargs or {}))
        if func in (torch.isfinite, Tensor.isfinite):
            self._known[id(made)] = ("elements", made)
        elif state == "elements" and func in (torch.all, Tensor.all) and made.ndim == 0:
            self._known[id(made)] = ("all", made)
        return made


@contextmanager
def settings_for_export(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Turns off what makes outputs that a graph cannot have, for as long as it is entered.

    Models of transformers return the keys and values of their attention for later tokens
    (`use_cache`). Training has no use for them.

    Yields:
        what was set, such as "use_cache=False".
    """
    changed = [one for one in _configurations(module) if getattr(one, "use_cache", False) is True]
    for one in changed:
        one.use_cache = False  # type: ignore[attr-defined]
    try:
        yield ("use_cache=False",) if changed else ()
    finally:
        for one in changed:
            one.use_cache = True  # type: ignore[attr-defined]


def _configurations(module: nn.Module) -> list[object]:
    """The `config` of each submodule, and the configurations in these."""
    waiting = [one.config for one in module.modules() if hasattr(one, "config")]
    seen: dict[int, object] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and hasattr(one, "__dict__"):
            seen[id(one)] = one
            waiting += [part for part in vars(one).values() if hasattr(part, "use_cache")]
    return list(seen.values())


# Loggers of the exporter and of what it calls.
LOGGERS = frozenset({"torch", "onnxscript", "onnx_ir"})


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Hides what is printed, warned and logged for as long as it is entered.

    Args:
        wanted: otherwise nothing is hidden.
    """
    if not wanted:
        yield
        return
    known = {**logging.root.manager.loggerDict, **dict.fromkeys(LOGGERS)}
    loggers = [logging.getLogger(name) for name in known if name.split(".")[0] in LOGGERS]
    levels = [one.level for one in loggers]
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)
