"""Which initializers are trained and why, and over which tensors a gradient flows.

In order of authority:

1. the user's choices, `--train` and `--freeze`;
2. the record of `planner export`: parameters with `requires_grad`, and nothing else;
3. the notes of torch's exporter: what a call names a parameter, a buffer or a constant;
4. the graph: a gradient starts at the loss, goes back through float tensors, and stops where an
   operator has no derivative;
5. name, use and content (`constants.py`): masks, tables and states are not trained.

All that is left is trained. An initializer that no gradient reaches never is.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
from onnx import NodeProto

from planner.artefacts.operator_types import facts
from planner.model.constants import Candidate, Uses, pairs_of_tables, why_constant
from planner.model.origins import Origin, OriginKind
from planner.model.protos import operator_type
from planner.model.record import ModuleRecord, TensorRecord
from planner.model.repair import AVOIDING
from planner.model.scopes import stops_gradient
from planner.support.errors import FileError, ModelError
from planner.support.printable import few

_REACHED = "a gradient reaches it"
_COMPUTED = "the exporter computed it from other tensors of the module"


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a float is trained.

    Attributes:
        trained: whether it is.
        reason: why, or why not.
        parameter: path of the module's tensor that it is, "" where nothing says it.
    """

    trained: bool
    reason: str
    parameter: str = ""


def differentiable_inputs(node: NodeProto) -> list[str]:
    """The inputs that get a gradient if they are floats and an output of the node has one."""
    known = facts(operator_type(node))
    if not known.differentiable or stops_gradient(node):
        return []
    without = (*known.settings, *known.no_gradient)
    return [name for i, name in enumerate(node.input) if name and i not in without]


def reaching(nodes: Sequence[NodeProto], loss: str, floats: Collection[str]) -> set[str]:
    """The float tensors from which a differentiable path leads to `loss`, itself included.

    Args:
        nodes: in topological order.
        loss: the tensor that the loss is computed from.
        floats: names of all float tensors.
    """
    reached = {loss}
    for node in reversed(nodes):
        if not reached.isdisjoint(node.output):
            reached.update(name for name in differentiable_inputs(node) if name in floats)
    return reached


def depending(
    nodes: Iterable[NodeProto], sources: Collection[str], floats: Collection[str]
) -> set[str]:
    """The float tensors to which a differentiable path leads from one of `sources`, and these."""
    reached = set(sources)
    for node in nodes:
        if not reached.isdisjoint(differentiable_inputs(node)):
            reached.update(name for name in node.output if name in floats)
    return reached


@dataclass(frozen=True)
class Evidence:
    """All that is known of a model's float initializers.

    Attributes:
        shapes: of the float initializers, by name.
        reaching: names of floats from which a gradient flows to the loss.
        loss: the outputs that have a loss, for messages.
        uses: who reads them.
        origins: the module's tensor that an initializer is, where the exporter's notes say it.
        record: of the module; None in files of other exporters.
        values: content, read on access.
    """

    shapes: Mapping[str, tuple[int, ...]]
    reaching: Collection[str]
    loss: str
    uses: Uses
    origins: Mapping[str, Origin]
    record: ModuleRecord | None
    values: Mapping[str, np.ndarray]


def choices(
    evidence: Evidence, train: Collection[str], freeze: Collection[str]
) -> dict[str, Choice]:
    """For each float initializer, whether it is trained, and why.

    Args:
        train: names that the user wants trained.
        freeze: names that the user does not want trained.

    Raises:
        ModelError: if no gradient reaches a name of `train`.
    """
    stuck = [name for name in train if name not in evidence.reaching]
    if stuck:
        raise ModelError(
            f"--train {few(stuck)}: no gradient flows from {evidence.loss} to it; leave it out"
        )
    recorded = _recorded(evidence)
    chosen = {
        name: _choice(name, evidence, recorded.get(name))
        for name in evidence.shapes
        if name not in train and name not in freeze
    }
    for name in _angle_pairs(chosen, evidence):
        chosen[name] = Choice(False, "a table of cosines or sines, with its partner")
    for names, trained, option in ((train, True, "--train"), (freeze, False, "--freeze")):
        for name in names:
            chosen[name] = Choice(trained, f"{option} names it", _path(name, evidence))
    return chosen


def _choice(name: str, evidence: Evidence, recorded: Choice | None) -> Choice:
    path = _path(name, evidence)
    choice = recorded or _by_notes(name, evidence)
    if choice is not None and not choice.trained:
        return choice
    if name not in evidence.reaching:
        return Choice(False, f"no gradient flows from {evidence.loss} to it", path)
    if choice is not None:
        return choice
    if not evidence.shapes[name]:
        return Choice(False, "a single number", path)
    uses, origin = evidence.uses.of(name), evidence.origins.get(name)
    try:
        why = why_constant(
            Candidate(
                name, evidence.shapes[name], origin, uses, evidence.uses,
                lambda: evidence.values[name],
            )
        )  # fmt: skip
    except FileError:
        # Plans can be made without the weights, as long as nobody has to look at them.
        return Choice(True, f"{_REACHED}; its content was not looked at, the file is missing", path)
    if why is not None:
        return Choice(False, why, path)
    if origin is not None and origin.kind is OriginKind.COMPUTED:
        return Choice(True, f"{_REACHED}; {_COMPUTED} ({origin.name})", path)
    return Choice(True, f"{_REACHED}, and nothing says that it is a constant", path)


def _path(name: str, evidence: Evidence) -> str:
    origin = evidence.origins.get(name)
    known = origin is not None and origin.kind in (OriginKind.PARAMETER, OriginKind.BUFFER)
    return origin.name if origin is not None and known else ""


def _recorded(evidence: Evidence) -> dict[str, Choice]:
    """What `planner export` wrote; it knows every tensor of the module, unless another tool has
    changed the initializers since.
    """
    record = evidence.record
    if record is None:
        return {}
    stale = any(one.initializer not in evidence.shapes for one in record.trained)
    other = Choice(False, "a constant: the record of planner export names no such tensor")
    found = {} if stale else dict.fromkeys(evidence.shapes, other)
    for one in (*record.buffers, *record.parameters):
        if one.initializer is not None and one.initializer in evidence.shapes:
            found[one.initializer] = Choice(one.requires_grad, _said(one, record), one.name)
    return found


def _said(one: TensorRecord, record: ModuleRecord) -> str:
    what = "a parameter" if one in record.parameters else "a buffer"
    frozen = "" if one.requires_grad or what == "a buffer" else " with requires_grad=False"
    return f"{what}{frozen}, by the record of planner export"


def _by_notes(name: str, evidence: Evidence) -> Choice | None:
    """What the calls of torch's exporter name it."""
    origin = evidence.origins.get(name)
    if origin is None:
        return None
    match origin.kind:
        case OriginKind.PARAMETER:
            return Choice(True, "a parameter, by the exporter's notes", origin.name)
        case OriginKind.BUFFER:
            return Choice(False, "a buffer, by the exporter's notes", origin.name)
        case OriginKind.CONSTANT:
            return Choice(False, "a constant of the module's code, by the exporter's notes")
        case OriginKind.COMPUTED:
            return None


def _angle_pairs(chosen: Mapping[str, Choice], evidence: Evidence) -> set[str]:
    """Tables of angles that only their partner tells: positions in two dimensions."""
    open_tables = {
        name
        for name, choice in chosen.items()
        if choice.trained
        and not choice.parameter
        and len(evidence.shapes[name]) > 1
        and {use.node.op_type for use in evidence.uses.of(name)} == {"Mul"}
    }
    return pairs_of_tables(open_tables, evidence.shapes, lambda name: evidence.values[name])


def check_choices(train: Collection[str], freeze: Collection[str], known: Collection[str]) -> None:
    """Names to train and to freeze must exist, and none may be both.

    Args:
        train: names given with --train.
        freeze: names given with --freeze.
        known: names of all values that a model holds.

    Raises:
        ModelError: naming every mistake, with similar names.
    """
    problems = [f"--train and --freeze both name {name!r}" for name in sorted({*train} & {*freeze})]
    for option, names in (("--train", train), ("--freeze", freeze)):
        for name in names:
            if name not in known:
                near = get_close_matches(name, sorted(known)) or sorted(known)
                problems.append(f"{option} {name}: no value of that name; near: {few(near)}")
    if problems:
        raise ModelError("\n".join(problems))


# ------------------------------------------------------ against what the file says


def doubts(
    choices: Mapping[str, Choice],
    record: ModuleRecord | None,
    named: Collection[Origin],
    origins: Mapping[str, Origin],
) -> Iterator[str]:
    """Why the trained tensors may not be the module's, in words.

    Args:
        choices: for each float initializer, whether it is trained, and why.
        record: of the module; None in files of other exporters.
        named: parameters and buffers that the exporter's notes name.
        origins: the module's tensor that an initializer is, where the notes say it.
    """
    if record is not None:
        yield from _by_record(choices, record)
        return
    yield from _lost(choices, named)
    computed = [
        name
        for name, one in choices.items()
        if one.trained and name in origins and origins[name].kind is OriginKind.COMPUTED
    ]
    if computed:
        yield (
            f"tensors that the exporter computed from parameters which the file does not name:"
            f" {few(computed)}; they are trained as they are, which is the same only where rows"
            f" were looked up; {AVOIDING}, or name constants with --freeze"
        )


def _lost(choices: Mapping[str, Choice], named: Collection[Origin]) -> Iterator[str]:
    """Parameters that the exporter's notes name and that no initializer is."""
    trained = {one.parameter or name for name, one in choices.items() if one.trained}
    known = {one.name for one in named if one.kind is OriginKind.PARAMETER}
    frozen = {one.parameter for one in choices.values() if not one.trained and one.parameter}
    if lost := sorted(known - trained - frozen):
        yield (
            f"the file names {len(known)} parameters of the module, and {len(lost)} of them are no"
            f" initializers of their own: {few(lost)}; the exporter computed them into others,"
            f" and these are trained; {AVOIDING}"
        )


def _by_record(choices: Mapping[str, Choice], record: ModuleRecord) -> Iterator[str]:
    missing = [one.name for one in record.trained if one.initializer not in choices]
    if missing:
        yield (
            f"the record of planner export names {len(record.trained)} trained parameters, and"
            f" {len(missing)} of them are not in the file: {few(missing)}; another tool has"
            " changed it: export it again, or name parameters with --train and --freeze"
        )
    for_user = ("--train names it", "--freeze names it")
    other = [
        one.name
        for one in record.trained
        if one.initializer is not None
        and one.initializer in choices
        and not choices[one.initializer].trained
        and choices[one.initializer].reason not in for_user
    ]
    if other:
        yield (
            f"the record of planner export names {len(record.trained)} trained parameters, and"
            f" {len(other)} of them are not trained: {few(other)}; no gradient reaches them"
        )
