"""Whether a file trains as its module does: the comparison of their gradients."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.artefacts.losses import losses
from planner.model.export.check import GradientCheck, advice_on_difference
from planner.model.export.eager import UnseenError
from planner.model.load import Model, ReadOptions, load, read_proto
from planner.model.record import TensorRecord
from planner.operators.gradients.distance import FLOOR, TOLERANCE, apart, largest
from planner.operators.gradients.events import Suspect
from planner.operators.gradients.graph_run import Value, run_graph, run_graph_in_evaluation
from planner.operators.gradients.module_run import (
    Gradients,
    ModuleRun,
    run_evaluation,
    run_module,
)
from planner.operators.gradients.places import Between, between
from planner.support.draws import ELSEWHERE
from planner.support.errors import ExportError, ModelError, OperatorError, words_of
from planner.support.printable import few
from planner.support.units import format_bytes

SHORT = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""`TOLERANCE` of modules in short types: the file has their numbers, such as a factor of 0.1, in
these types, and PyTorch computes with longer ones."""
SMALL, ROUNDINGS = 1e-2, 10
"""A difference up to the first is rounding, too, if it is at most the second times what another
rounding of the file's constants to float32 makes: tables of sines multiply it by positions."""
EVALUATION = 1e-4
"""The largest difference of an output in evaluation that rounding explains: constants in float32
add up, and what computes something else is much further off."""
NATIVE_TOLERANCE = 1e-2
"""The same where the module does not run in float64: rounding adds up."""
MAX_BYTES = 1_000_000_000
"""Models with more weights are not compared: in float64, both runs together take some seven times
as much."""
_FEW = 4


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

    def of_module(self, **how: bool) -> ModuleRun:
        """A run of the module, see `run_module`."""
        return run_module(self.module, self.positional, self.named, self.own, **how)

    def of_graph(self, run: ModuleRun, **how: bool) -> tuple[Gradients, Sequence[Value]]:
        """A run of the graph with the random numbers of a run of the module; see `run_graph`."""
        at = {position: i for i, position in enumerate(self.outputs)}
        own = [at[i] for i in self.own]
        counted = [at[i] for i in run.counted if i in at]
        usual = [one.output.name for one in losses(self.model.graph)]
        is_usual = bool(own) or [self.model.graph.outputs[i] for i in counted] == usual
        trained = {one.initializer for one in _trained(self.model) if one.initializer is not None}
        if is_usual:
            # The loss is the one that the file is trained by: so are the parameters.
            trained = {one.name for one in self.model.graph.parameters if one.trainable}
        return run_graph(
            self.model, self.inputs, run.draws, trained, own, counted, usual=is_usual,
            rounding=run.rounding, **how,
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
    # The module runs in float64 as it is. A module exported in float64 would make another file than
    # the one that is written.
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


def _trained(model: Model) -> list[TensorRecord]:
    """The parameters that the module trains, also those that the file has not."""
    assert model.record is not None
    return [one for one in model.record.parameters if one.requires_grad]


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
    return load(path, ReadOptions(dimensions=sizes), known_hash="")


def _run(of_module: Callable[..., ModuleRun]) -> tuple[ModuleRun | None, bool, str]:
    """A run of the module, whether it is in float64, and why there is none. Some modules run in
    their own types only, or take no inputs that have a gradient.
    """
    for double, of_inputs in product((True, False), (True, False)):
        try:
            return of_module(double=double, of_inputs=of_inputs), double, ""
        except UnseenError as error:
            return None, False, str(error)
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


class _Named(NamedTuple):
    """What a module and its file have in common.

    Attributes:
        outputs: by their names in the file, and new values of state by those of the buffers.
        gradients: of the parameters that the module trains, by their names in the module.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]

    def apart_from(
        self, other: "_Named", floor: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        """How far the outputs and the gradients of another run are from these.

        Args:
            floor: the least magnitude to compare a gradient with.
        """
        outputs = {
            name: apart(one, other.outputs[name].to(one.dtype), 0.0)
            if one.is_floating_point()
            else 0.0 if torch.equal(one, other.outputs[name]) else math.inf
            for name, one in self.outputs.items()
        }  # fmt: skip
        gradients = {
            name: apart(one, other.gradients[name], floor) for name, one in self.gradients.items()
        }
        return outputs, gradients


def _module_named(case: _Case, module: Gradients, states: Collection[str]) -> _Named:
    outputs = {_output_name(case, at): module.outputs[at] for at in case.outputs}
    outputs |= {name: module.states[name] for name in states}
    return _Named(outputs, {one.name: module.parameters[one.name] for one in _trained(case.model)})


def _graph_named(case: _Case, graph: Gradients) -> _Named:
    names = [_output_name(case, at) for at in case.outputs]
    return _Named(
        {**dict(zip(names, graph.outputs, strict=True)), **graph.states},
        {one.name: graph.parameters.get(one.initializer or "") for one in _trained(case.model)},
    )


def _compared(case: _Case, run: ModuleRun, graph: Gradients, double: bool) -> GradientCheck:
    """The outcome of two runs.

    Raises:
        ExportError: if they differ.
    """
    tolerance = _tolerance(case.module, double)
    own = _module_named(case, run.gradients, graph.states)
    made = _graph_named(case, graph)
    floor = FLOOR * max(map(largest, own.gradients.values()), default=0.0)
    outputs, gradients = own.apart_from(made, floor)
    outputs_limit, gradients_limit = (dict.fromkeys(one, tolerance) for one in (outputs, gradients))
    most = max((*outputs.values(), *gradients.values()), default=0.0)
    if double and tolerance < most <= SMALL:
        # Perhaps the module computes in float64 what the file holds as a float32.
        nudged, _ = case.of_graph(run, double=True, nudged=True)
        rounding = made.apart_from(_graph_named(case, nudged), floor)
        outputs_limit, gradients_limit = (
            {name: max(tolerance, ROUNDINGS * moved) for name, moved in one.items()}
            for one in rounding
        )
    for name, one in outputs.items():
        if not one <= outputs_limit[name]:
            advice = advice_on_difference(draws=any(s.what == ELSEWHERE for s in run.suspects))
            raise ExportError(
                f"{type(case.module).__name__}: run by the launcher, the exported file computes"
                f" another {name!r} than the module: they differ by {one:.1e} of its largest"
                f" magnitude; {advice}"
            )
    wrong = {name: one for name, one in gradients.items() if not one <= gradients_limit[name]}
    if wrong:
        raise ExportError(_words(case, run, wrong, double, floor))
    return GradientCheck(
        difference=max(gradients.values(), default=0.0),
        dtype="float64" if double else "the types of the module",
        num_parameters=len(gradients),
        notes=tuple(_notes(case, run, graph, floor)),
        stopped=_stopped(case, run),
        unlike=_unlike(case, double, tolerance),
    )


def _unlike(case: _Case, double: bool, tolerance: float) -> str:
    """Which output the file computes otherwise than the module in evaluation, in words; empty if
    there is none, or nothing was compared.
    """
    assert case.model.record is not None
    if case.model.record.unlike or not any(one.training for one in case.module.modules()):
        return ""
    try:
        outputs, draws = run_evaluation(case.module, case.positional, case.named, double=double)
        made = run_graph_in_evaluation(case.model, case.inputs, draws, double=double)
    except OperatorError:  # random numbers that the module does not draw
        return ""
    except Exception as error:  # the module is the user's: its code raises what it likes
        return f"in evaluation it fails: {type(error).__name__}: {words_of(error)}"
    for at, one in zip(case.outputs, made, strict=True):
        if at < len(outputs) and outputs[at].shape == one.shape and one.is_floating_point():
            distance = apart(outputs[at], one.to(outputs[at].dtype), 0.0)
            if not distance <= max(EVALUATION, tolerance):
                return (
                    f"its output {_output_name(case, at)} differs by {distance:.1e} of its largest"
                    " magnitude in evaluation"
                )
    return ""


def _output_name(case: _Case, position: int) -> str:
    return str(case.model.proto.graph.output[position].name)


def _words(
    case: _Case, run: ModuleRun, wrong: Mapping[str, float], double: bool, floor: float
) -> str:
    """The parameters whose gradients differ, where the difference arises, why, and what to do."""
    run = case.of_module(double=double, of_inputs=run.of_inputs, tensors=True)
    _, values = case.of_graph(run, double=double, tensors=True)
    tolerance = _tolerance(case.module, double)
    where = between(run.seen, values, run.suspects, lambda a, b: apart(a, b, floor) <= tolerance)
    count = len(_trained(case.model))
    lines = [
        f"{type(case.module).__name__}: the file would train otherwise than the module: the"
        f" gradients of {len(wrong)} of {count} parameters differ:"
        f" {few([f'{name} by {_percent(one)}' for name, one in wrong.items()], _FEW)}",
        *_place_lines(where),
    ]
    causes = run.suspects if where is None else where.causes
    lines += [f"cause: {one}" for one in causes[:_FEW]] or ["cause: not known; please report it"]
    lines.append(_advice(causes))
    lines.append("--no-check writes the file nevertheless, to be trained as its operators say")
    return "\n  ".join(lines)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"


def _place_lines(where: Between | None) -> list[str]:
    if where is None:
        return []
    if where.behind is None:
        return [f"behind {where.before}"]
    if str(where.behind) == str(where.before):
        return [f"at {where.before}"]
    return [f"between {where.before}", f"and {where.behind}"]


_ADVICE = (
    ("torch.autograd.Function",
     "make it a torch.library.custom_op, and give its function and its backward pass to the planner"
     " by planner.operators.register"),
    ("torch.library", "give planner.operators.register a function with the same backward pass"),
    ("whose gradient in the file", "compute it by other operators, or report it"),
    ("hook", "take the hook away; planner launch --clip limits the norm of all gradients"),
    ("scale_grad_by_freq", "take it away: give the bag scale_grad_by_freq=False"),
    ("max_norm", "take it away: give the embedding max_norm=None"),
)  # fmt: skip


def _advice(causes: Sequence[Suspect]) -> str:
    """What to do, by the first cause."""
    what = causes[0].what if causes else ""
    for word, advice in _ADVICE:
        if word in what:
            return advice
    return (
        "a file has the gradients of its operators, stopped by detach() and torch.no_grad(): write"
        " the module by these"
    )


def _notes(case: _Case, run: ModuleRun, graph: Gradients, floor: float) -> Iterator[str]:
    """What makes no difference to the parameters, but is to be known."""
    for one in run.suspects:
        if "hook" in one.what or "Function" in one.what:
            yield f"{one}: its gradients agree with the file's on the example inputs"
        elif one.what == ELSEWHERE:
            yield f"forward draws {ELSEWHERE}: the file has what came of them when it was traced"
    zero = _only_zero(case, run)
    if zero:
        yield (
            f"the module gives {few(zero, _FEW)} a gradient of zeros, by which weight decay changes"
            " it; the file does not train it"
        )
    differing = _differing_inputs(case, run, graph, floor) if run.of_inputs else []
    if differing:
        yield (
            f"no gradient flows back to {few(differing, _FEW)} as it does in the file; training has"
            " no use for it"
        )
    stopped = _stopped(case, run)
    if stopped and not case.own:
        yield f"no gradient flows through {few(stopped, _FEW)}, which no loss can be made of"


def _only_zero(case: _Case, run: ModuleRun) -> list[str]:
    """Parameters with a gradient of zeros in the module that the file does not train."""
    left = {one.name for one in case.model.graph.parameters if not one.trainable}
    own = {one.name: run.gradients.parameters[one.name] for one in _trained(case.model)}
    return [
        one.name
        for one in _trained(case.model)
        if one.initializer in left and own[one.name] is not None and not largest(own[one.name])
    ]


def _differing_inputs(case: _Case, run: ModuleRun, graph: Gradients, floor: float) -> list[str]:
    """Inputs whose gradients differ by more than rounding."""
    names = [one.name for one in case.model.proto.graph.input]
    made = dict(zip(case.model.graph.inputs, graph.inputs, strict=True))
    return [
        name
        for name, own in zip(names, run.gradients.inputs, strict=True)
        if name in made and apart(own, made[name], floor) > SMALL
    ]


def _stopped(case: _Case, run: ModuleRun) -> tuple[str, ...]:
    """Outputs of floats through which the module lets no gradient flow."""
    outputs = run.gradients.outputs
    silent = [i for i in case.outputs if outputs[i].is_floating_point() and i not in run.flowing]
    return tuple(_output_name(case, i) for i in silent)
