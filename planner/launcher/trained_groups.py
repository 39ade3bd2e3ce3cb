"""The groups of --no-weight-decay and --param-group: which trained parameters are in each.

A parameter has the names that a user knows: of its initializer and, where the file says it, all of
the module's, of which a tied parameter has several. A glob that matches any of them matches the
parameter, and the parameter belongs to the first group with such a glob. Parameters in no group are
the rest, which is trained by the options of the launch alone.

Groups part the parameters of an optimizer, as those of torch do. Gradients are summed, clipped and
cut into shards by parameter, whatever the groups are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import Tensor

from planner.artefacts.graph import Graph
from planner.launcher.options import Loop, ParameterGroup
from planner.model.load import Model
from planner.model.repair import Ties
from planner.support.errors import OptionError
from planner.support.printable import few

FACTOR = "lr_factor"
"""Key of a group of an optimizer: the factor of its learning rate."""
NEAR = 3
"""Names that a message shows."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """Trained parameters that are stepped alike.

    Attributes:
        globs: of the user; empty for the rest.
        names: of the parameters in the graph, ascending.
        num_elements: of all of them together.
        lr_factor: multiplies the learning rate.
        weight_decay: its own; None for that of the launch.
    """

    globs: tuple[str, ...]
    names: tuple[str, ...]
    num_elements: int
    lr_factor: float = 1.0
    weight_decay: float | None = None


def trained_groups(model: Model, loop: Loop) -> tuple[TrainedGroup, ...]:
    """The groups that a user asks for, in their order, without the rest.

    Raises:
        OptionError: if a glob matches no trained parameter; one line for each.
    """
    asked, flag = loop.param_groups, "--param-group"
    if loop.no_weight_decay:
        asked = (ParameterGroup(loop.no_weight_decay, weight_decay=0.0),)
        flag = "--no-weight-decay"
    known = _names_of(model)
    trained = _trained(model.graph)
    wrong = [
        _unmatched(flag, glob, known, trained)
        for group in asked
        for glob in group.names
        if not any(_matches(glob, known[name]) for name in trained)
    ]
    if wrong:
        raise OptionError("\n".join(wrong))
    groups, left = [], trained
    for group in asked:
        own = {n for n in left if any(_matches(glob, known[n]) for glob in group.names)}
        how = group.lr_factor, group.weight_decay
        groups.append(_group(group.names, {name: trained[name] for name in own}, *how))
        left = {name: size for name, size in left.items() if name not in own}
    return tuple(groups)


def _trained(graph: Graph) -> dict[str, int]:
    """Elements of the trained parameters by name."""
    return {one.name: prod(one.shape) for one in graph.parameters if one.trainable}


def _group(globs: tuple[str, ...], sizes: Mapping[str, int], *how: Any) -> TrainedGroup:
    return TrainedGroup(globs, tuple(sorted(sizes)), sum(sizes.values()), *how)


def _names_of(model: Model) -> dict[str, tuple[str, ...]]:
    """By the name of a parameter in the graph: all names that a user knows it by."""
    names = {one.name: [one.name] for one in model.graph.parameters}
    for name, choice in model.choices.items():
        if name in names and choice.parameter:
            names[name].append(choice.parameter)
    for one in () if model.record is None else model.record.parameters:
        if one.initializer in names:
            names[one.initializer] += (one.name, *one.aliases)
    for first, second in Ties.of(model.tie, model.untie).joined:
        if first in names:
            names[first].append(second)
    return {name: tuple(dict.fromkeys(held)) for name, held in names.items()}


def _matches(glob: str, names: Collection[str]) -> bool:
    return any(name == glob or fnmatchcase(name, glob) for name in names)


def _unmatched(
    flag: str, glob: str, known: Mapping[str, Sequence[str]], trained: Collection[str]
) -> str:
    """Why a glob is refused."""
    frozen = [name for name, held in known.items() if _matches(glob, held)]
    if frozen:
        return f"{flag} {glob}: matches only parameters that are not trained: {few(frozen)}"
    names = sorted({one for name in trained for one in known[name]})
    near = get_close_matches(glob, names, NEAR, 0.4) or names[:NEAR]
    return f"{flag} {glob}: no trained parameter has such a name; near: {few(near)}"


def with_rest(groups: Sequence[TrainedGroup], graph: Graph) -> tuple[TrainedGroup, ...]:
    """Groups and, after them, the rest of the trained parameters; nothing where there are none."""
    if not groups:
        return ()
    grouped = {name for group in groups for name in group.names}
    rest = {name: size for name, size in _trained(graph).items() if name not in grouped}
    return (*groups, _group((), rest))


def optimizer_groups(
    groups: Sequence[TrainedGroup], parameters: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The parameters of one device in groups, as optimizers of torch take them, with the factor of
    the learning rate under `FACTOR`. Those without parameters on the device are left out.

    Args:
        parameters: by name, the tensors that the optimizer steps.
    """
    grouped = {name for group in groups for name in group.names}
    rest = [one for name, one in parameters.items() if name not in grouped]
    made: list[dict[str, Any]] = [{"params": rest}]
    for group in groups:
        held = [parameters[name] for name in group.names if name in parameters]
        own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        made.append({"params": held, FACTOR: group.lr_factor, **own})
    return [one for one in made if one["params"]]


def settings(groups: Sequence[TrainedGroup]) -> dict[str, tuple[float, float | None]]:
    """Factor of the learning rate and weight decay by parameter, where they are not those of the
    launch; what a checkpoint remembers of groups.
    """
    return {
        name: (group.lr_factor, group.weight_decay)
        for group in groups
        for name in group.names
        if (group.lr_factor, group.weight_decay) != (1.0, None)
    }
