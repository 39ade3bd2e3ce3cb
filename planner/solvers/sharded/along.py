"""The rules of all operators along one axis of a mesh, by a policy that says which are allowed.

A beam goes through the operators in their order. Its states are the parts in which the tensors that
are still to be read lie at home, with their copies; each is extended by every rule that is allowed.
Of states with the same parts the fastest is kept, and of all the `BEAM` fastest; of equally fast
ones that whose operators have made fewer bytes. Nothing is lost by
the first of these, and little by the second: few tensors are read by later operators at any time.

What a state has cost is the time of a microbatch on the axis: local operators, conversions forward
and backward, and per iteration, divided by its microbatches, the step through the local parts of
parameters and the sums of their gradients. A conversion along one axis takes the time that
`costs/transfers.py` gives for its line, where all-reduces are not measured; a part takes its
measured time, or else 1/n of its operator's. The judge also knows what other axes do, and how few
bytes a part reads (`costs/stage_pass.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from planner.artefacts.graph import Graph, consumers
from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import AxisRule, Rule, blocks_of, reads
from planner.resharding.gradients import gradient_part
from planner.resharding.statistics import statistics_steps
from planner.solvers.sharded.rules import Named, divides, holds

BEAM = 24


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis and its prices.

    Attributes:
        size: n, at least 2.
        latency_s: of a message between its devices.
        bytes_per_s: between its devices.
        step_s_per_byte: of the optimizer, through a parameter, and per microbatch.
        num_microbatches: that a replica runs in an iteration.
    """

    size: int
    latency_s: float
    bytes_per_s: float
    step_s_per_byte: float
    num_microbatches: float

    def gathered_s(self, size_bytes: float) -> float:
        """Time of an all-gather to so many bytes, or a reduce-scatter of them, in s: on a ring,
        n - 1 messages of a part.
        """
        return (self.size - 1) * (self.latency_s + size_bytes / self.size / self.bytes_per_s)

    def converted_s(self, size_bytes: float, old: str, new: str) -> float:
        """Time of a conversion of a tensor, in s. In an all-to-all the buffer of each device is a
        part already, which it sends in n pieces. Blocks are gathered and cut anew.

        Args:
            size_bytes: of the whole tensor.
        """
        if old == new or old == "R" or new == "P":
            return 0.0
        if old == "P":
            return (2.0 if new == "R" else 1.0) * self.gathered_s(size_bytes)
        gathered = new == "R" or blocks_of(old) > 1 or blocks_of(new) > 1
        return self.gathered_s(size_bytes if gathered else size_bytes / self.size)


def _anything(*_: object) -> bool:
    return True


def _nothing(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed along an axis.

    Attributes:
        rule: of an operator, by its index, and a rule of it.
        conversion: of a tensor, by its name, and the parts before and after.
        comes: the part in which a tensor from outside may come.
        leaves: the part in which a tensor may leave.
        must: of an operator, whether it is run whole only where no rule of it holds.
        lies: by name, the parts in which parameters and inputs of the model lie, where readers have
            no choice.
    """

    rule: Callable[[int, AxisRule], bool] = _anything
    conversion: Callable[[str, str, str], bool] = _anything
    comes: Callable[[str, str], bool] = _anything
    leaves: Callable[[str, str], bool] = _anything
    must: Callable[[int], bool] = _nothing
    lies: Mapping[str, str] = field(default_factory=dict)


class Home(NamedTuple):
    """Where a tensor lies.

    Attributes:
        part: of its spec.
        gradient: of its gradient.
        copies: the parts of copies that were made, with those of their gradients.
    """

    part: str
    gradient: str
    copies: frozenset[tuple[str, str]] = frozenset()


State = dict[str, Home]


@dataclass(slots=True)
class _Path:
    """A state, what it cost, and how it was reached."""

    cost_s: float
    made_bytes: float
    state: State
    rule: SplitRule | None = None
    before: "_Path | None" = None

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better."""
        return self.cost_s, self.made_bytes


@dataclass(frozen=True)
class Search:
    """What a search along one axis is for.

    Attributes:
        graph: the model's.
        about: all tensors and parameters, at the shapes that other axes leave.
        axis: the axis.
        policy: what is allowed along it.
        times_s: per operator, forward and backward of a microbatch.
        floors_s: per operator, what no part of it takes less than, unless it does as a whole.
        measured_s: by operator and rule, the times of parts that were measured, as `times_s`.
    """

    graph: Graph
    about: Mapping[str, Named]
    axis: Axis
    policy: Policy
    times_s: Sequence[float]
    floors_s: Sequence[float]
    measured_s: Mapping[tuple[int, str], float]

    @cached_property
    def last(self) -> Mapping[str, int]:
        """By name, the last operator that reads a tensor or parameter; behind all, of an output."""
        last = {name: max(v) for name, v in consumers(self.graph).items() if v}
        last |= dict.fromkeys(self.graph.outputs, len(self.graph.operators))
        for v, operator in enumerate(self.graph.operators):
            for name in operator.parameters:
                last[name] = max(v, last.get(name, -1))
        return last


def along(
    search: Search, rules: Sequence[Sequence[SplitRule]], beam: int = BEAM
) -> tuple[SplitRule, ...]:
    """A rule for every operator.

    Args:
        search: what it is for.
        rules: per operator, whole first. That one is always allowed.
        beam: states that are kept. With one, each operator takes what costs least by itself.
    """
    # Where parts of which no conversion is allowed led all paths to an operator that has no rule
    # for them, every conversion is allowed, so that a path is left.
    free = replace(search, policy=replace(search.policy, conversion=_anything))
    path = _best(search, rules, beam) or _best(free, rules, beam)
    chosen: list[SplitRule] = []
    while path is not None and path.rule is not None:
        chosen.append(path.rule)
        path = path.before
    return tuple(reversed(chosen))


def _best(search: Search, rules: Sequence[Sequence[SplitRule]], beam: int) -> _Path | None:
    """The fastest path; None where all that were kept came to an operator that no conversion which
    is allowed leads to.
    """
    paths = [_Path(0.0, 0.0, {})]
    for v, own in enumerate(rules):
        paths = _extended(search, paths, v, own)[:beam]
    return min(
        paths,
        key=lambda path: (path.cost_s + _ending_s(search, path.state), path.made_bytes),
        default=None,
    )


def _usable(search: Search, v: int, rules: Sequence[SplitRule]) -> list[SplitRule]:
    """The rules of an operator that the policy allows and the axis divides; the first one cuts
    nothing.
    """
    operator, size = search.graph.operators[v], search.axis.size
    usable = [
        one
        for i, one in enumerate(rules)
        if not i or (search.policy.rule(v, one.rule) and holds(one, operator, search.about, size))
    ]
    return usable[1:] if len(usable) > 1 and search.policy.must(v) else usable


class _Candidate(NamedTuple):
    """A rule of an operator, and what it costs and makes whatever the path.

    Attributes:
        rule: of the operator.
        time_s: of the operator on its part.
        made_bytes: that each device makes.
        homes: of its outputs, by name.
    """

    rule: SplitRule
    time_s: float
    made_bytes: float
    homes: dict[str, Home]


def _candidates(search: Search, v: int, rules: Sequence[SplitRule]) -> list[_Candidate]:
    outputs = search.graph.operators[v].outputs
    return [
        _Candidate(
            one,
            _own_s(search, v, one),
            _made_bytes(search, outputs, one.rule),
            dict(zip(outputs, _made(one.rule), strict=True)),
        )
        for one in _usable(search, v, rules)
    ]


def _extended(
    search: Search, paths: Sequence[_Path], v: int, rules: Sequence[SplitRule]
) -> list[_Path]:
    """The paths behind one more operator, the fastest first."""
    operator, candidates = search.graph.operators[v], _candidates(search, v, rules)
    names = reads(operator)
    done = [name for name in (*names, *operator.outputs) if search.last.get(name, -1) <= v]
    best: dict[tuple[tuple[str, Home], ...], _Path] = {}
    known: dict[tuple[Home | None, ...], list[tuple[float, list[Home]] | None]] = {}
    for path in paths:
        here = tuple(path.state.get(name) for name in names)
        if here not in known:
            known[here] = [_read(search, names, here, one.rule.rule) for one in candidates]
        for one, read in zip(candidates, known[here], strict=True):
            if read is None:
                continue
            state = {**path.state, **dict(zip(names, read[1], strict=True)), **one.homes}
            for name in done:
                state.pop(name, None)
            cost_s = path.cost_s + one.time_s + read[0]
            new = _Path(cost_s, path.made_bytes + one.made_bytes, state, one.rule, path)
            key = tuple(sorted(state.items()))
            if key not in best or new.rank < best[key].rank:
                best[key] = new
    return sorted(best.values(), key=lambda path: path.rank)


def _made(rule: AxisRule) -> list[Home]:
    """Where the outputs of an operator lie."""
    parts = ["P" if part == "A" else part for part in rule.outputs]
    return [Home(part, gradient_part(rule, part)) for part in parts]


def _own_s(search: Search, v: int, one: SplitRule) -> float:
    """Time of an operator on its part, with the all-reduces of its statistics."""
    whole_s = search.times_s[v]
    if not one.rule.shares_work:
        return whole_s
    linear_s = max(min(whole_s, search.floors_s[v]), whole_s / search.axis.size)
    own_s = search.measured_s.get((v, one.line), linear_s)
    if not one.rule.marks:
        return own_s
    operator, sizes = search.graph.operators[v], (search.axis.size,)
    shapes = {name: search.about[name].shape for name in reads(operator)}
    both = statistics_steps(operator, Rule((one.rule,)), shapes, sizes)
    return own_s + sum(2 * search.axis.gathered_s(step.bytes) for side in both for step in side)


def _made_bytes(search: Search, outputs: Sequence[str], rule: AxisRule) -> float:
    """Bytes that each device makes."""
    return sum(
        _bytes(search.about[name]) / (search.axis.size if part.startswith("S") else 1)
        for name, part in zip(outputs, rule.outputs, strict=True)
    )


def _read(
    search: Search, names: Sequence[str], here: Sequence[Home | None], rule: AxisRule
) -> tuple[float, list[Home]] | None:
    """Time to bring all that an operator reads into its parts, and the homes afterwards; None if
    that is not allowed.
    """
    total_s, after = 0.0, []
    for name, home, part in zip(names, here, rule.inputs, strict=True):
        about, gradient = search.about[name], gradient_part(rule, part)
        if home is None:
            rest = search.policy.lies.get(name, part)
            if rest == "P" or (not about.parameter and not search.policy.comes(name, rest)):
                rest = "R"
            first_s, home = _first_read(search, about, rest, gradient)
            total_s += first_s
        wanted = part, gradient if about.gradient else home.gradient
        if wanted != (home.part, home.gradient) and wanted not in home.copies:
            checked = not about.parameter and part != home.part
            if checked and not search.policy.conversion(name, home.part, part):
                return None
            size = _bytes(about)
            total_s += search.axis.converted_s(size, home.part, part)
            if about.gradient:
                total_s += search.axis.converted_s(size, gradient, home.gradient)
            home = home._replace(copies=home.copies | {wanted})
        after.append(home)
    return total_s, after


def _first_read(
    search: Search, about: Named, rest: str, gradient: str
) -> tuple[float, Home]:  # fmt: skip
    """What it costs that a tensor or parameter lies in a part, and its home."""
    axis = search.axis
    if not about.parameter:
        return 0.0, Home(rest, rest)
    lies = gradient if rest == "R" else rest
    if not about.gradient:
        return 0.0, Home(rest, rest)
    local = _bytes(about) / (axis.size if rest.startswith("S") else 1)
    once_s = axis.step_s_per_byte * local
    if lies == "P":
        once_s += 2 * axis.gathered_s(local)
    return once_s / axis.num_microbatches, Home(rest, lies)


def _ending_s(search: Search, state: State) -> float:
    """Time to bring the outputs of the model into parts in which they may leave."""
    total_s = 0.0
    for name in search.graph.outputs:
        home = state.get(name)
        if home is not None and not search.policy.leaves(name, home.part):
            total_s += search.axis.converted_s(_bytes(search.about[name]), home.part, "R")
            total_s += search.axis.converted_s(_bytes(search.about[name]), "R", home.gradient)
    return total_s


def _bytes(about: Named) -> float:
    return prod(about.shape) * about.item_bytes


def cut_by(about: Mapping[str, Named], parts: Mapping[str, str], size: int) -> dict[str, Named]:
    """The tensors and parameters as an axis leaves them to the others.

    Args:
        parts: by name, those that the axis cuts.
    """
    left = {}
    for name, one in about.items():
        part = parts.get(name, "R")
        shape = list(one.shape)
        if part.startswith("S") and divides(shape, part, size):
            shape[int(part[1:].partition("/")[0])] //= size
        left[name] = replace(one, shape=tuple(shape))
    return left
