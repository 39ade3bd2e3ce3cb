"""Plans by module: how the operators of each module are split, what a device holds of its
parameters, and what it costs. Layers that are alike, and are split alike, are one row.

All times are of an iteration, means over the used devices (`costs/by_operator.py`), so plans stand
beside each other whatever their meshes and stages are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.modules import block_of, part_of_block
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import rule_by
from planner.artefacts.strategy import Strategy, stage_of
from planner.costs.by_operator import (
    BACKWARD,
    FORWARD,
    ONCE,
    OperatorCosts,
    operator_costs,
    together,
)
from planner.planning.portfolio import SolverComparison, SolverRow
from planner.reports.plans import NOTICEABLE
from planner.reports.split_words import in_words, word_of
from planner.reports.tables import MAX_ROWS, Column, Table, count, device_runs, json_rows, table
from planner.support.units import format_bytes, format_seconds

WORTH_A_WORD = 0.02
"""Operators that take less of the time of their module are not told of."""
WORTH_A_LINE = 0.005
"""Modules that take less of the time, and have less of the parameters, are told of together."""
MOST_LINES = 60
"""Of plans beside each other."""
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
        if not _lie_apart(self.layers):
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
        kind, held = _kind(profile, operators), one.share and _share_text(one.share)
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


# -------------------------------------------------------------------------------- as tables


class _Line(NamedTuple):
    """A line of the table; a heading has no costs."""

    label: str
    split: str = ""
    share: tuple[float, float, float] | None = None
    costs: OperatorCosts | None = None


def _time(time_s: float) -> str:
    """Empty for 0."""
    return format_seconds(time_s) if time_s else ""


def _size(size_bytes: float) -> str:
    return format_bytes(size_bytes) if size_bytes else ""


_HELD = "parameters", "gradients", "optimizer_state"
_COLUMNS: tuple[Column[ModuleCosts], ...] = (
    Column("module", lambda one: one.module),
    Column("layers", lambda one: list(one.layers)),
    Column("stages", lambda one: list(one.stages)),
    Column("replicas", lambda one: one.replicas),
    Column("split", lambda one: [{"devices": n, "along": list(along)} for n, along in one.split]),
    Column("parameter_bytes", lambda one: round(float(one.costs.parameter_bytes))),
    Column("share", lambda one: one.share and dict(zip(_HELD, one.share, strict=True))),
)
_COST_COLUMNS: tuple[Column[OperatorCosts], ...] = (
    Column("compute_s", lambda one: float(one.compute_s)),
    Column("optimizer_s", lambda one: float(one.optimizer_s)),
    Column("", lambda one: float(one.compute_s + one.optimizer_s), "compute", _time),
    Column("forward_s", lambda one: float(one.collective_s[FORWARD]), "forward", _time),
    Column("backward_s", lambda one: float(one.collective_s[BACKWARD]), "backward", _time),
    Column("once_s", lambda one: float(one.collective_s[ONCE]), "once", _time),
    Column("", lambda one: float(one.received_bytes.sum()), "received", _size,
           gives_way=1),
    Column("forward_bytes", lambda one: float(one.received_bytes[FORWARD])),
    Column("backward_bytes", lambda one: float(one.received_bytes[BACKWARD])),
    Column("once_bytes", lambda one: float(one.received_bytes[ONCE])),
)  # fmt: skip


def modules_json(rows: Iterable[ModuleCosts]) -> list[dict[str, Any]]:
    """An object for each row; times in s, bytes that a device receives."""
    every = *_COLUMNS, *(column.of(_costs) for column in _COST_COLUMNS)
    return json_rows(rows, every)


def _costs(one: ModuleCosts) -> OperatorCosts:
    return one.costs


def with_modules(plain: dict[str, Any], comparison: SolverComparison) -> dict[str, Any]:
    """The object of `compare --json`, with the modules of each plan.

    Args:
        plain: with a row in "compared" for each of the comparison.
    """
    rows = zip(plain["compared"], comparison.rows, strict=True)
    return {**plain, "compared": [{**fields, "modules": _modules_of(row)} for fields, row in rows]}


def _modules_of(row: SolverRow) -> list[dict[str, Any]] | None:
    if row.plan is None:
        return None
    return modules_json(module_costs(row.problem, row.plan.strategy))


def modules_table(plans: Mapping[str, Sequence[ModuleCosts]]) -> Table:
    """The modules of a plan or, under each module, those of several plans.

    Args:
        plans: by the name of the plan.
    """
    columns: list[Column[_Line]] = [
        Column("", lambda line: line.label, "module", left=True),
        Column("", lambda line: line.split, "split", left=True),
        Column("", lambda line: line.share, "held", _share_text, left=True),
        *(column.of(_costs_of_line) for column in _COST_COLUMNS),
    ]
    title = (
        "Modules, in an iteration: computation; collectives in forwards, in backwards, and once per"
        " iteration"
    )
    return table(title, list(_lines(plans)), columns)


def _costs_of_line(line: _Line) -> OperatorCosts | None:
    return line.costs


def _lines(plans: Mapping[str, Sequence[ModuleCosts]]) -> Iterator[_Line]:
    most = MAX_ROWS if len(plans) == 1 else MOST_LINES // (len(plans) + 1)
    shown = _worth_a_line(plans.values(), max(1, most))
    root = _root([before for before, _ in shown])
    for place in shown:
        mine = {
            name: [
                replace(one, before=one.before.removeprefix(root))
                for one in rows
                if one.place == place
            ]
            for name, rows in plans.items()
        }
        yield from _of_place(mine) if len(plans) > 1 else _of_layers(*mine.values())
    for label, places in (("others", shown), ("all modules", ())):
        some = {
            name: together([one.costs for one in rows if one.place not in places])
            for name, rows in plans.items()
        }
        if len(plans) == 1:
            yield from (_Line(label, costs=costs) for costs in some.values() if costs.total_s)
        elif any(costs.total_s for costs in some.values()):
            yield _Line(label)
            yield from (_Line(f"  {name}", costs=costs) for name, costs in some.items())


def _root(paths: Sequence[str]) -> str:
    """The names that all of some paths begin with.

    >>> _root(["net.h.", "net.wte"]), _root(["net.h."]), _root(["wte", "net.h."]), _root(["h."])
    ('net.', 'net.', '', '')
    """
    names = [path.removesuffix(".").split(".")[:-1] for path in paths]
    return "".join(f"{some[0]}." for some in _alike(names))


def _alike(names: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Of lists, the first entries, as long as these are the same in all."""
    for some in zip(*names, strict=False):
        if len(set(some)) > 1:
            return
        yield some


def _of_layers(rows: Sequence[ModuleCosts]) -> Iterator[_Line]:
    for one in rows:
        yield _Line(one.label, in_words(one.split, one.replicas), one.share, one.costs)


def _of_place(plans: Mapping[str, Sequence[ModuleCosts]]) -> Iterator[_Line]:
    """A heading, and a line for each plan, or for each of its ways to split these layers."""
    layers = sorted({n for rows in plans.values() for one in rows for n in one.layers})
    first = next(one for rows in plans.values() for one in rows)
    yield _Line(replace(first, layers=tuple(layers)).module)
    for name, rows in plans.items():
        for one, line in zip(rows, _of_layers(rows), strict=True):
            own = _layers_text(one.layers) if [*one.layers] != layers else ""
            yield line._replace(label=f"  {name}{own}")


def _layers_text(layers: Sequence[int]) -> str:
    """Some layers, behind the name of a plan.

    >>> _layers_text([0, 1, 2, 5]), _layers_text([0, 2, 4, 6])
    (' 0-2 5', ', 4 layers')
    """
    apart = _lie_apart(layers)
    return f", {count(len(layers), 'layer')}" if apart else f" {device_runs(layers)}"


def _lie_apart(layers: Sequence[int]) -> bool:
    """Whether a text has no room for the numbers of layers."""
    return len(device_runs(layers).split()) > MAX_RUNS


def _worth_a_line(plans: Iterable[Sequence[ModuleCosts]], most: int) -> tuple[tuple[str, str], ...]:
    """The places with the most time or parameters in any plan, in the order of the graph.

    Args:
        most: number of places.
    """
    worth: dict[tuple[str, str], float] = {}
    first: dict[tuple[str, str], int] = {}
    for rows in plans:
        of_all = together([one.costs for one in rows])
        mine: dict[tuple[str, str], list[OperatorCosts]] = {}
        for one in rows:
            mine.setdefault(one.place, []).append(one.costs)
            first[one.place] = min(first.get(one.place, one.operators[0]), one.operators[0])
        for place, some in mine.items():
            whole, size = together(some), float(of_all.parameter_bytes)
            share = whole.total_s / of_all.total_s if of_all.total_s else 0.0
            held = float(whole.parameter_bytes) / size if size else 0.0
            worth[place] = max(worth.get(place, 0.0), share, held)
    found = sorted(worth, key=lambda place: (-worth[place], first[place]))[:most]
    return tuple(sorted((p for p in found if worth[p] >= WORTH_A_LINE), key=lambda p: first[p]))


def _share_text(share: tuple[float, float, float]) -> str:
    """Parts of parameters, gradients and state; one where they are the same.

    >>> _share_text((0.25, 0.25, 0.25)), _share_text((1.0, 1.0, 0.12501)), _share_text((0.7,) * 3)
    ('1/4', 'all,all,1/8', '0.70')
    """
    texts = [_fraction(part) for part in share]
    return ",".join(texts if len(set(texts)) > 1 else texts[:1])


def _fraction(part: float) -> str:
    count = max(1, round(1 / part)) if part else 0
    if not count or abs(part * count - 1) > ROUNDED:
        return f"{part:.2f}"
    return "all" if count == 1 else f"1/{count}"


LEGEND = (
    "split: samples/4 are samples over the 4 devices of an axis of the mesh; held: parts of"
    " parameters, gradients and optimizer state on a device, one figure if they are equal",
    "compute has the optimizer's step, once has sums of gradients and gathers after a step; all"
    " collectives count in full, also those beside computations; received is their bytes",
)
"""What the columns are, for people."""


def iteration_line(plan: Plan, rows: Sequence[ModuleCosts]) -> str:
    """What an iteration is made of in the simulator, and how much of the collectives runs beside
    computations.
    """
    devices, costs = plan.prediction.devices, together([one.costs for one in rows])
    work_s, waits_s, idle_s = (
        sum(getattr(one, name) for one in devices) / len(devices)
        for name in ("compute_s", "communication_s", "idle_s")
    )
    # Between stages there are transfers, too, which are no module's.
    beside_s = costs.total_s - work_s - waits_s if len(plan.strategy.stages) == 1 else 0.0
    parts = [
        (work_s, "of passes and steps"),
        (beside_s, "of collectives beside these"),
        (waits_s, "of sums and transfers that nothing hides"),
        (idle_s, "idle"),
    ]
    iteration_s, rounds = plan.prediction.iteration_s, plan.strategy.num_microbatches
    said = [f"{format_seconds(t)} {words}" for t, words in parts if t > NOTICEABLE * iteration_s]
    return (
        f"{plan.solver}, {count(len(plan.strategy.stages), 'stage')},"
        f" {count(rounds, 'microbatch', 'microbatches')}: {format_seconds(iteration_s)} per"
        f" iteration, {', '.join(said)}"
    )
