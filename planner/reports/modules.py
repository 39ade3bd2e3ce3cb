"""The modules of a plan: how their operators are split, what a device holds of their parameters,
and what they cost (`costs/by_operator.py`). Layers that are alike, and are split alike, are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.modules import block_of, part_of_block
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import rule_by
from planner.artefacts.strategy import Strategy, stage_of
from planner.costs.by_operator import OperatorCosts, operator_costs, together
from planner.reports.split_words import word_of
from planner.reports.tables import count, device_runs

WORTH_A_WORD = 0.02
"""Words of operators below this share of the time of their module are left out."""
MAX_RUNS = 3
"""Runs of layers that a line names."""
ROUNDED = 0.02
"""By how much a fraction may be off."""

Split = tuple[tuple[int, tuple[str, ...]], ...]
"""Of each axis of a mesh, its size, and in words what the operators split along it."""


@dataclass(frozen=True, slots=True)
class ModuleCosts:
    """Modules that are alike, and are split alike, in one plan.

    Attributes:
        before: their paths before the number of the layer; the whole path where it has no number.
        behind: their paths behind it.
        layers: the numbers, ascending.
        stages: that run them, ascending.
        replicas: of these stages.
        split: how their operators are split.
        operators: their indices.
        costs: of these together.
    """

    before: str
    behind: str
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    replicas: int
    split: Split
    operators: tuple[int, ...]
    costs: OperatorCosts

    @property
    def module(self) -> str:
        """The path, such as "h.0-2,5.attn"."""
        return f"{self.before}{device_runs(self.layers).replace(' ', ',')}{self.behind}"

    @property
    def label(self) -> str:
        """The path for people, without the numbers of layers that lie apart."""
        if not lie_apart(self.layers):
            return self.module
        return f"{self.before}*{self.behind}, {count(len(self.layers), 'layer')}"

    @property
    def place(self) -> tuple[str, str]:
        """The path of all layers, for plans beside each other."""
        return self.before, self.behind

    @property
    def share(self) -> tuple[float, float, float] | None:
        """Parts of the parameters, of their gradients and of the optimizer's state that a device of
        the stage holds; None without trained parameters.
        """
        whole = float(self.costs.parameter_bytes)
        if not whole:
            return None
        parameters, gradients, states = (float(held) / whole for held in self.costs.held_bytes)
        return parameters, gradients, states


def module_costs(problem: Problem, strategy: Strategy) -> tuple[ModuleCosts, ...]:
    """The modules of a sound strategy, in the order of the graph."""
    profile, stages = problem.profile, stage_of(strategy, problem.profile.graph)
    costs = operator_costs(problem, strategy)
    parts: dict[tuple[str, int], list[int]] = {}
    for v, part in enumerate(zip(modules_of(profile), stages, strict=True)):
        parts.setdefault(part, []).append(v)
    alike: dict[tuple[object, ...], list[ModuleCosts]] = {}
    for (path, s), operators in parts.items():
        before, behind, number = _parts_of(path)
        one = ModuleCosts(
            before=before,
            behind=behind,
            layers=() if number is None else (number,),
            stages=(s,),
            replicas=strategy.stages[s].num_replicas,
            split=_split(profile, strategy, s, operators),
            operators=tuple(operators),
            costs=costs.over(operators),
        )
        kind, held = _kind(profile, operators), one.share and share_text(one.share)
        key = one.place, kind, one.replicas, one.split, held
        alike.setdefault(key, []).append(one)
    return tuple(map(_joined, alike.values()))


def _joined(some: Sequence[ModuleCosts]) -> ModuleCosts:
    """Modules that are alike, as one."""
    return replace(
        some[0],
        layers=tuple(sorted({n for one in some for n in one.layers})),
        stages=tuple(sorted({s for one in some for s in one.stages})),
        operators=tuple(v for one in some for v in one.operators),
        costs=together([one.costs for one in some]),
    )


def modules_of(profile: Profile) -> tuple[str, ...]:
    """The module of each operator: of a layer, its parts. Where the profile names none, or whole
    layers only, these are called after the parameters, and operators without any belong to the one
    before.
    """
    graph, last = profile.graph, dict[str, str]()
    paths = profile.modules or ("",) * len(graph.operators)
    own = [_own_parameter(profile, v, path) for v, path in enumerate(paths)]
    for path, name in zip(reversed(paths), reversed(own), strict=True):
        if name is not None and not path:
            last[path] = name  # what comes before the first parameter belongs to it
    found = []
    for path, name in zip(paths, own, strict=True):
        if name is not None:
            last[path] = name
        found.append(last.get(path, part_of_block(path)))
    return tuple(found)


def _own_parameter(profile: Profile, v: int, path: str) -> str | None:
    """The part of a layer that an operator belongs to by its trained parameter; None if the path
    of its module says it, or the parameter is not of that module.
    """
    if part_of_block(path) != block_of(path):
        return None
    known = parameters_by_name(profile.graph)
    inside = f"{path}." if path else ""
    held = (
        name.removesuffix(".weight").removesuffix(".bias")
        for name in profile.graph.operators[v].parameters
        if known[name].trainable
    )
    return next((part_of_block(name) for name in held if name.startswith(inside)), None)


def _parts_of(path: str) -> tuple[str, str, int | None]:
    """A path before and behind the number of its layer, and that, if it has one.

    >>> _parts_of("net.h.0.attn"), _parts_of("wte")
    (('net.h.', '.attn', 0), ('wte', '', None))
    """
    block = block_of(path)
    before, _, number = block.rpartition(".")
    if not number.isdecimal():
        return path or "the whole network", "", None
    return f"{before}." if before else "", path.removeprefix(block), int(number)


def _kind(profile: Profile, operators: Sequence[int]) -> object:
    """The type of the longest operator, and the shapes of weights: the same of layers alike."""
    known, every = parameters_by_name(profile.graph), profile.graph.operators
    longest = max(operators, key=lambda v: (_whole_s(profile, v), -v))
    shapes = [known[name].shape for v in operators for name in every[v].parameters]
    return every[longest].type, tuple(shape for shape in shapes if len(shape) > 1)


def _whole_s(profile: Profile, v: int) -> float:
    return profile.operators[v].forward_s + profile.operators[v].backward_s


def _split(profile: Profile, strategy: Strategy, s: int, operators: Sequence[int]) -> Split:
    sharding = strategy.stages[s].sharding
    if sharding is None:
        return ()
    times_s = [_whole_s(profile, v) for v in operators]
    least_s, found = WORTH_A_WORD * sum(times_s), []
    rules = [rule_by(sharding, profile.graph.operators[v]) for v in operators]
    for axis, size in enumerate(sharding.mesh):
        taken: dict[str, float] = {}
        for v, rule, time_s in zip(operators, rules, times_s, strict=True):
            word = word_of(profile, v, rule.axes[axis])
            taken[word] = taken.get(word, 0.0) + time_s
        found.append((size, tuple(word for word, time_s in taken.items() if time_s >= least_s)))
    return tuple(found)


def share_text(share: tuple[float, float, float]) -> str:
    """Parts of parameters, gradients and state; one where they are the same.

    >>> share_text((0.25, 0.25, 0.25)), share_text((1.0, 1.0, 0.12501)), share_text((0.7,) * 3)
    ('1/4', 'all,all,1/8', '0.70')
    """
    texts = [_fraction(part) for part in share]
    return ",".join(texts if len(set(texts)) > 1 else texts[:1])


def _fraction(part: float) -> str:
    n = max(1, round(1 / part)) if part else 0
    if not n or abs(part * n - 1) > ROUNDED:
        return f"{part:.2f}"
    return "all" if n == 1 else f"1/{n}"


def lie_apart(layers: Sequence[int]) -> bool:
    """Whether a text has no room for the numbers of layers."""
    return len(device_runs(layers).split()) > MAX_RUNS
