"""Whether a file trains as its module does: the comparison of their gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.errors import ExportError, ModelError, OperatorError
from planner.model import Model, load
from planner.model.load import read_proto
from planner.model.losses import losses
from planner.operators.gradients.events import Suspect
from planner.operators.gradients.graph_run import Value, run_graph
from planner.operators.gradients.module_run import Gradients, ModuleRun, run_module
from planner.operators.gradients.places import Between, between
from planner.operators.running import words_of
from planner.units import format_bytes

TOLERANCE = 1e-6
"""Largest difference of two gradients, of the largest magnitude of the module's: attributes of
ONNX, such as the epsilon of a normalization, are float32."""
FLOOR = 1e-6
"""A gradient whose largest magnitude is less than this part of the largest of all gradients is
compared as if it had that much: those that are zero but for rounding have no magnitude."""
SHORT = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""The same of modules in short types: the file has their numbers, such as a factor of 0.1, in them,
and PyTorch computes with longer ones."""
NATIVE_TOLERANCE = 1e-2
"""The same where the module does not run in float64: rounding adds up."""
MAX_BYTES = 1_000_000_000
"""Models with more weights are not compared: in float64, both runs together take some seven times
as much."""
_FEW = 4


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """A comparison of the gradients of a file with those of its module.

    Attributes:
        difference: the largest of a parameter, of the largest magnitude of its gradient; None where
            nothing was compared.
        dtype: in which both ran.
        num_parameters: gradients that were compared.
        reason: why nothing was compared, else empty.
        notes: what the module does to its backward pass without another result, and what else is
            to be known.
    """

    difference: float | None
    dtype: str = "float64"
    num_parameters: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """What both runs need.

    Attributes:
        module: the module.
        positional: arguments of its forward.
        named: the same by keyword.
        model: the file.
        inputs: tensors among the arguments, in the order of the graph's inputs.
        outputs: positions, among the module's outputs, of those of the graph.
        own: positions, among the module's outputs, of losses.
    """

    module: nn.Module
    positional: Sequence[object]
    named: Mapping[str, object]
    model: Model
    inputs: Sequence[Tensor]
    outputs: Sequence[int]
    own: Sequence[int]

    def of_module(self, *, double: bool, tensors: bool = False) -> ModuleRun:
        """A run of the module."""
        given = (self.module, self.positional, self.named, self.own)
        return run_module(*given, double=double, tensors=tensors)

    def of_graph(
        self, run: ModuleRun, *, double: bool, tensors: bool = False
    ) -> tuple[Gradients, Sequence[Value]]:
        """A run of the graph with the random numbers of a run of the module."""
        at = {position: i for i, position in enumerate(self.outputs)}
        own = [at[i] for i in self.own]
        counted = [at[i] for i in run.counted if i in at]
        usual = [one.output.name for one in losses(self.model.graph)]
        trained = _held_by(self.model)
        if own or [self.model.graph.outputs[i] for i in counted] == usual:
            # The loss is the one that the file is trained by: so are the parameters.
            trained = {one.name for one in self.model.graph.parameters if one.trainable}
        return run_graph(
            self.model, self.inputs, run.draws, trained, own, counted, double=double,
            tensors=tensors,
        )  # fmt: skip


def check_gradients(
    module: nn.Module, positional: Sequence[object], named: Mapping[str, object], path: Path
) -> GradientCheck:
    """Compares the gradients of every parameter: the module's own backward pass against that of the
    file's graph, as the launcher runs it. The loss is the file's own or, where it has none, the sum
    of all outputs of floats times fixed random numbers. Both run in float64, the module in its own
    mode, on the same random numbers.

    Args:
        module: left as it was.
        positional: example arguments of forward.
        named: the same by keyword.
        path: the file that `planner export` made of the module.

    Raises:
        ExportError: if a gradient or an output differs by more than rounding; it names the
            parameters, the calls between which the difference arises, the cause, and what to do.
    """
    size = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    if size > MAX_BYTES:
        return GradientCheck(None, reason=f"the module holds {format_bytes(size)}")
    try:
        case = _case(module, positional, named, path)
    except (ModelError, OperatorError) as error:
        run, _, _ = _run(partial(run_module, module, positional, named, ()))
        _refuse_always(module, run)
        return GradientCheck(None, reason=_without(path, error))
    run, double, why = _run(case.of_module)
    if run is None:
        return GradientCheck(None, reason=why)
    _refuse_always(module, run)
    if run.strange:
        return GradientCheck(None, reason=f"the random numbers of {', '.join(run.strange)}")
    try:
        graph, _ = case.of_graph(run, double=double)
    except OperatorError as error:
        return GradientCheck(None, reason=_without(path, error))
    return _compared(case, run, graph, double)


def _held_by(model: Model) -> set[str]:
    """The initializers that are parameters which the module trains."""
    assert model.record is not None
    return {one.initializer for one in model.record.trained if one.initializer is not None}


def _without(path: Path, error: Exception) -> str:
    return words_of(error).removeprefix(f"{path}: ")


def _case(
    module: nn.Module, positional: Sequence[object], named: Mapping[str, object], path: Path
) -> _Case:
    tensors = [one for one in pytree.tree_leaves((positional, named)) if isinstance(one, Tensor)]
    model = _loaded(path, tensors)
    names = [one.name for one in model.proto.graph.input]
    given = dict(zip(names, tensors, strict=True))
    position = {one.name: i for i, one in enumerate(model.proto.graph.output)}
    return _Case(
        module=module,
        positional=positional,
        named=named,
        model=model,
        inputs=[given[name] for name in model.graph.inputs],
        outputs=[position[name] for name in model.graph.outputs],
        own=[position[one.output.name] for one in losses(model.graph) if not one.has_target],
    )


def _loaded(path: Path, tensors: Sequence[Tensor]) -> Model:
    """The file, its symbolic dimensions those of the example inputs."""
    proto = read_proto(path)
    sizes: dict[str, int] = {}
    for value, tensor in zip(proto.graph.input, tensors, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, tensor.shape, strict=True):
            if dim.dim_param:
                sizes[dim.dim_param] = size
    return load(path, dimensions=sizes, known_hash="")


def _run(of_module: Callable[..., ModuleRun]) -> tuple[ModuleRun | None, bool, str]:
    """A run of the module, whether it is in float64, and why there is none."""
    for double in (True, False):
        try:
            return of_module(double=double), double, ""
        except Exception as error:  # the module is the user's: its code raises what it likes
            why = f"its own backward pass fails: {type(error).__name__}: {words_of(error)}"
    return None, False, why


def _refuse_always(module: nn.Module, run: ModuleRun | None) -> None:
    """Refuses what no comparison on example inputs is sure to see."""
    lost = [one for one in run.suspects if one.always] if run is not None else []
    if lost:
        causes = "\n".join(f"  {one}" for one in lost)
        raise ExportError(
            f"{type(module).__name__}: ONNX cannot express\n{causes}\n  {_advice(lost)}"
        )


def _tolerance(module: nn.Module, double: bool) -> float:
    """The largest difference that rounding explains."""
    tensors = (*module.parameters(), *module.buffers())
    shortest = max((SHORT.get(one.dtype, 0.0) for one in tensors), default=0.0)
    return max(shortest, TOLERANCE if double else NATIVE_TOLERANCE)


def _compared(case: _Case, run: ModuleRun, graph: Gradients, double: bool) -> GradientCheck:
    """The outcome of two runs.

    Raises:
        ExportError: if they differ.
    """
    tolerance = _tolerance(case.module, double)
    _compare_outputs(case, run.gradients, graph, tolerance)
    pairs = _pairs(case, run.gradients, graph)
    floor = FLOOR * max((_largest(own) for own, _ in pairs.values()), default=0.0)
    apart = {name: _apart(own, made, floor) for name, (own, made) in pairs.items()}
    wrong = [name for name, one in apart.items() if not one <= tolerance]
    if wrong:
        raise ExportError(_words(case, {name: apart[name] for name in wrong}, double, floor))
    return GradientCheck(
        difference=max(apart.values(), default=0.0),
        dtype="float64" if double else "the types of the module",
        num_parameters=len(apart),
        notes=tuple(_notes(case, run, graph, floor, tolerance)),
    )


def _pairs(
    case: _Case, module: Gradients, graph: Gradients
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """For each parameter that the module trains, its gradient in the module and in the graph."""
    assert case.model.record is not None
    return {
        one.name: (
            module.parameters[one.name],
            graph.parameters.get(one.initializer) if one.initializer else None,
        )
        for one in case.model.record.parameters
        if one.requires_grad
    }


def _largest(gradient: Tensor | None) -> float:
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().nan_to_num(nan=0.0).max())


def _apart(own: Tensor | None, made: Tensor | None, floor: float) -> float:
    """The largest difference, of the largest magnitude of the module's gradient.

    Args:
        own: of the module; None is zero.
        made: of the graph; None is zero.
        floor: the least magnitude to compare with.
    """
    if own is None or made is None:
        lone = _largest(own if made is None else made)
        return lone / max(lone, floor) if lone > TOLERANCE * floor else 0.0
    if not own.numel():
        return 0.0
    difference = (made - own).abs()
    difference = difference.masked_fill((made == own) | (made.isnan() & own.isnan()), 0.0)
    scale = max(_largest(own), floor)
    largest = float(difference.max())
    return largest / scale if scale else largest


def _compare_outputs(case: _Case, module: Gradients, graph: Gradients, tolerance: float) -> None:
    """Refuses a graph whose outputs are others."""
    for position, made in zip(case.outputs, graph.outputs, strict=True):
        own = module.outputs[position]
        name = case.model.proto.graph.output[position].name
        if own.is_floating_point():
            apart = _apart(own, made.to(own.dtype), 0.0)
            different = not apart <= tolerance
            how = f"they differ by {apart:.1e} of its largest magnitude"
        else:
            different, how = not bool((own == made).all()), "other integers"
        if different:
            raise ExportError(
                f"{type(case.module).__name__}: run by the launcher, the exported file computes"
                f" another {name!r} than the module: {how}; please report it with the module;"
                " --no-check writes the file nevertheless"
            )


def _words(case: _Case, wrong: Mapping[str, float], double: bool, floor: float) -> str:
    """The parameters whose gradients differ, where the difference arises, why, and what to do."""
    run = case.of_module(double=double, tensors=True)
    _, values = case.of_graph(run, double=double, tensors=True)
    tolerance = _tolerance(case.module, double)
    where = between(run.seen, values, run.suspects, lambda a, b: _apart(a, b, floor) <= tolerance)
    count = sum(one.requires_grad for one in case.model.record.parameters)  # type: ignore[union-attr]
    lines = [
        f"{type(case.module).__name__}: the file would train otherwise than the module: the"
        f" gradients of {len(wrong)} of {count} parameters differ:"
        f" {_some([f'{name} by {_percent(one)}' for name, one in wrong.items()])}",
        *_place_lines(where),
    ]
    causes = run.suspects if where is None else where.causes
    lines += [f"cause: {one}" for one in causes[:_FEW]] or ["cause: not known; please report it"]
    lines.append(_advice(causes))
    lines.append("--no-check writes the file nevertheless, to be trained as its operators say")
    return "\n  ".join(lines)


def _percent(apart: float) -> str:
    return f"{apart:.1%}" if apart >= 0.001 else f"{apart:.0e}"


def _place_lines(where: Between | None) -> list[str]:
    if where is None:
        return []
    if where.behind is None:
        return [f"behind {where.before}"]
    if str(where.behind) == str(where.before):
        return [f"at {where.before}"]
    return [f"between {where.before}", f"and {where.behind}"]


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
    return ", ".join(texts[:_FEW]) + more


_ADVICE = (
    ("torch.autograd.Function",
     "make it a torch.library.custom_op, and give its function and its backward pass to the planner"
     " by planner.operators.register"),
    ("torch.library", "give planner.operators.register a function with the same backward pass"),
    ("hook", "take the hook away; planner launch --clip limits the norm of all gradients"),
    ("scale_grad_by_freq", "take it away: give the embedding scale_grad_by_freq=False"),
    ("max_norm", "take it away: give the embedding max_norm=None"),
)  # fmt: skip


def _advice(causes: Sequence[Suspect]) -> str:
    """What to do, by the first cause."""
    what = causes[0].what if causes else ""
    for word, advice in _ADVICE:
        if word in what:
            return advice
    return (
        "a file cannot stop a gradient: freeze parameters by requires_grad=False, or compute what"
        " is not trained outside of the module and make it an input"
    )


def _notes(
    case: _Case, run: ModuleRun, graph: Gradients, floor: float, tolerance: float
) -> Sequence[str]:
    """What makes no difference to the parameters, but is to be known."""
    notes = [
        f"{one}: its gradients agree with the file's on the example inputs"
        for one in run.suspects
        if "hook" in one.what or "Function" in one.what
    ]
    names = [one.name for one in case.model.proto.graph.input]
    inputs = dict(zip(case.model.graph.inputs, graph.inputs, strict=True))
    differing = [
        name
        for name, own in zip(names, run.gradients.inputs, strict=True)
        if name in inputs and not _apart(own, inputs[name], floor) <= tolerance
    ]
    if differing:
        notes.append(
            f"no gradient flows back to {_some(differing)} as it does in the file; training has no"
            " use for it"
        )
    silent = [
        case.model.proto.graph.output[i].name
        for i in case.outputs
        if i not in run.counted and run.gradients.outputs[i].is_floating_point() and not case.own
    ]
    if silent:
        notes.append(
            f"the module computes no gradient of {_some(silent)}; a loss of it would have one in"
            " the file"
        )
    return notes
