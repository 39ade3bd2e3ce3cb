"""The placement with the smallest bottleneck: what the busiest device, or the busiest pair of
devices, has to do for one microbatch, forward and backward. It bounds the throughput of a pipeline
with enough microbatches in flight. A mixed integer program, solved by HiGHS through OR-Tools'
MathOpt.

Legend: groups g, h of operators that share a device (`coplacement`), devices p, q, tensor t of
group g(t), read in groups H(t) other than that. w_gp seconds of g on p, both passes; m_tpq seconds
of a message of t from p to q. Variables:

    x_gp            whether group g is on device p
    r_tq            whether t is read on q
    y_tpq           whether t goes from p to q
    T               the bottleneck

    minimise   T
    subject to (1) sum_p x_gp = 1
               (2) sum_g w_gp x_gp <= T
               (3) r_tq >= x_hq for h in H(t);  y_tpq >= x_g(t)p + r_tq - 1
               (4) sum over t of m_tpq y_tpq + sum over t with a gradient of m_tpq y_tqp <= T,
                   p != q
               (5) what p keeps <= its memory, as in `netsplit_model` (8)
               (6) of devices that may be swapped, p before q: g is on q only if an earlier group
                   is on p
               (7) contiguous: devices have an order, and for every edge from g to h the device of g
                   is not behind that of h

As in the closed form (`costs/closed_form.py`), transfers overlap with the computation, and each
direction between two devices is a line of its own: (2) and (4) are its periods. T is in units of
an even share of all work, so that tolerances mean the same for every model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from planner.problem import Status
from planner.solvers.netsplit_model import Answer, Instance, canonical, grouped
from planner.solvers.placing import Placing, transfer_s

NODES_PER_S = 1000
"""Nodes of the search tree per second of the limit; small models do more, so the clock cuts large
ones only."""


@dataclass(slots=True)
class _Model:
    """The model while it is built.

    Attributes:
        mip: MathOpt's model; x: x[g][p]; y: y[t, p, q]; bottleneck: T.
    """

    instance: Instance
    mip: Any
    x: list[list[Any]]
    y: dict[tuple[int, int, int], Any]
    bottleneck: Any


def bottleneck_s(placing: Placing, device_of: Sequence[int]) -> float:
    """T of a placement, in s.

    Args:
        device_of: device of each operator.
    """
    load = [0.0] * placing.num_devices
    line: dict[tuple[int, int], float] = {}
    for i, p in enumerate(device_of):
        load[p] += float(placing.forward_s[i, p] + placing.backward_s[i, p])
    for flow in placing.tensors:
        p = device_of[flow.producer]
        for q in {device_of[j] for j in flow.consumers} - {p}:
            line[p, q] = line.get((p, q), 0.0) + transfer_s(placing, flow.bytes, p, q)
            if flow.gradient:
                line[q, p] = line.get((q, p), 0.0) + transfer_s(placing, flow.bytes, q, p)
    return max(*load, *line.values(), 0.0)


def solve(
    instance: Instance,
    time_limit_s: float,
    start: Sequence[int] | None,
    order: Sequence[int] | None = None,
) -> Answer:
    """The best placement that is found; `latency_s` of the answer is T.

    Args:
        time_limit_s: of the wall clock; the limit that is meant is that of nodes.
        start: a placement that fits, to start from; None if none is known.
        order: of the devices, for contiguous stages; None allows any placement.
    """
    from ortools.math_opt.python import mathopt

    scale_s = _even_share_s(instance)
    model = _built(instance, mathopt.Model(), order, scale_s)
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=time_limit_s),
        node_limit=max(1, round(NODES_PER_S * time_limit_s)),
        relative_gap_tolerance=1e-6,
        random_seed=0,
    )
    hints = mathopt.ModelSolveParameters()
    if start is not None:
        hints.solution_hints.append(_hint(model, grouped(instance, start), order, mathopt))
    found = mathopt.solve(
        model.mip, mathopt.SolverType.HIGHS, params=parameters, model_params=hints
    )
    return _answer(model, found, scale_s, start, mathopt)


def _even_share_s(instance: Instance) -> float:
    placing = instance.placing
    work_s = float((placing.forward_s + placing.backward_s).min(axis=1).sum())
    return work_s / placing.num_devices or 1.0


def _answer(
    model: _Model, found: Any, scale_s: float, start: Sequence[int] | None, mathopt: Any
) -> Answer:
    """MathOpt's reason of termination in our words.

    Source: https://developers.google.com/optimization/math_opt (TerminationReason).
    """
    reason, instance = found.termination.reason, model.instance
    cut = found.termination.limit == mathopt.Limit.TIME
    if reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    ):
        return Answer(Status.INFEASIBLE, None, math.inf, None)
    bound = found.termination.objective_bounds.dual_bound
    bound_s = max(0.0, bound) * scale_s if math.isfinite(bound) else None
    candidates = [grouped(instance, start)] if start is not None else []
    if found.has_primal_feasible_solution():
        values = found.variable_values()
        best = [max(range(len(row)), key=lambda p: values[row[p]]) for row in model.x]
        candidates.append(tuple(best[g] for g in instance.group_of))
    if not candidates:
        return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=not cut)
    device_of = min(candidates, key=lambda one: bottleneck_s(instance.placing, one))
    optimal = reason == mathopt.TerminationReason.OPTIMAL
    return Answer(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        device_of,
        bottleneck_s(instance.placing, device_of),
        bound_s,
        reproducible=not cut,
    )


def _hint(
    model: _Model, device_of: Sequence[int], order: Sequence[int] | None, mathopt: Any
) -> Any:
    instance = model.instance
    named = device_of if order is not None else canonical(instance, device_of)
    values = {
        one: float(named[group[0]] == p)
        for group, row in zip(instance.groups, model.x, strict=True)
        for p, one in enumerate(row)
    }
    return mathopt.SolutionHint(variable_values=values)


def _built(instance: Instance, mip: Any, order: Sequence[int] | None, scale_s: float) -> _Model:
    devices = range(instance.placing.num_devices)
    x = [[mip.add_binary_variable() for _ in devices] for _ in instance.groups]
    model = _Model(instance, mip, x, {}, mip.add_variable(lb=0.0))
    for row in x:
        mip.add_linear_constraint(sum(row) == 1)  # (1)
    _loads(model, scale_s)
    _crossings(model)
    _lines(model, scale_s)
    _memory(model)
    if order is None:
        _symmetry(model)
    else:
        _contiguous(model, order)
    mip.minimize(model.bottleneck)
    return model


def _loads(model: _Model, scale_s: float) -> None:
    """(2)."""
    placing = model.instance.placing
    work = (placing.forward_s + placing.backward_s) / scale_s
    for p in range(placing.num_devices):
        load = sum(
            float(work[list(inside), p].sum()) * model.x[g][p]
            for g, inside in enumerate(model.instance.groups)
        )
        model.mip.add_linear_constraint(load <= model.bottleneck)


def _crossings(model: _Model) -> None:
    """(3)."""
    instance, mip = model.instance, model.mip
    devices = range(instance.placing.num_devices)
    for t, flow in enumerate(instance.placing.tensors):
        home = instance.group_of[flow.producer]
        readers = sorted({instance.group_of[j] for j in flow.consumers} - {home})
        for q in devices if readers else ():
            read = _any(model, readers, q)
            for p in devices:
                if p != q:
                    y = model.y[t, p, q] = mip.add_variable(lb=0.0, ub=1.0)
                    mip.add_linear_constraint(y >= model.x[home][p] + read - 1)


def _any(model: _Model, groups: Sequence[int], p: int) -> Any:
    """At least whether a device has one of some groups."""
    if len(groups) == 1:
        return model.x[groups[0]][p]
    found = model.mip.add_variable(lb=0.0, ub=1.0)
    for g in groups:
        model.mip.add_linear_constraint(found >= model.x[g][p])
    return found


def _lines(model: _Model, scale_s: float) -> None:
    """(4)."""
    placing = model.instance.placing
    use: dict[tuple[int, int], list[Any]] = {}
    for (t, p, q), y in model.y.items():
        flow = placing.tensors[t]
        use.setdefault((p, q), []).append(transfer_s(placing, flow.bytes, p, q) / scale_s * y)
        if flow.gradient:
            use.setdefault((q, p), []).append(transfer_s(placing, flow.bytes, q, p) / scale_s * y)
    for parts in use.values():
        model.mip.add_linear_constraint(sum(parts) <= model.bottleneck)


def _memory(model: _Model) -> None:
    """(5), in units of the largest memory; left out where everything fits every device."""
    instance, room = model.instance, model.instance.placing.capacity_bytes
    if sum(instance.alone_bytes) + sum(instance.together_bytes.values()) <= room.min():
        return
    unit = float(max(room.max(), 1))
    for p in range(instance.placing.num_devices):
        alone = sum(size / unit * model.x[g][p] for g, size in enumerate(instance.alone_bytes))
        together = sum(
            size / unit * _any(model, groups, p)
            for groups, size in sorted(instance.together_bytes.items())
        )
        model.mip.add_linear_constraint(alone + together <= int(room[p]) / unit)


def _symmetry(model: _Model) -> None:
    """(6)."""
    for alike in model.instance.alike:
        for p, q in pairwise(alike):
            for g, row in enumerate(model.x):
                earlier = sum(model.x[h][p] for h in range(g))
                model.mip.add_linear_constraint(row[q] <= earlier + 0.0 * model.bottleneck)


def _contiguous(model: _Model, order: Sequence[int]) -> None:
    """(7)."""
    instance = model.instance
    edges = {
        (instance.group_of[flow.producer], instance.group_of[j])
        for flow in instance.placing.tensors
        for j in flow.consumers
    }
    for g, h in sorted(edge for edge in edges if edge[0] != edge[1]):
        for k in range(1, len(order)):
            ahead = [sum(model.x[one][p] for p in order[:k]) for one in (g, h)]
            model.mip.add_linear_constraint(ahead[1] <= ahead[0])
