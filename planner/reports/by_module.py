"""Plans by module, as tables, lines of text and JSON.

All times are of an iteration, means over the used devices (`costs/by_operator.py`), so plans stand
beside each other whatever their meshes and stages are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner.artefacts.plan import Plan
from planner.costs.by_operator import BACKWARD, FORWARD, ONCE, OperatorCosts, together
from planner.planning.portfolio import SolverComparison, SolverRow
from planner.reports.modules import ModuleCosts, lie_apart, module_costs, share_text
from planner.reports.plans import NOTICEABLE
from planner.reports.split_words import in_words
from planner.reports.tables import MAX_ROWS, Column, Table, count, device_runs, json_rows, table
from planner.support.units import format_bytes, format_seconds

WORTH_A_LINE = 0.005
"""Modules below this share of the time and of the parameters are one line together."""
MOST_LINES = 60
"""Of plans beside each other."""


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
        Column("", lambda line: line.share, "held", share_text, left=True),
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
    apart = lie_apart(layers)
    return f", {count(len(layers), 'layer')}" if apart else f" {device_runs(layers)}"


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
