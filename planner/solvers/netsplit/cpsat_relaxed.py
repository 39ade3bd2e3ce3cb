"""NetSplit's model as it was published (`netsplit_model.py`, `relaxed`) in OR-Tools CP-SAT.

Nothing keeps two operators from running at once on one device, so there are no intervals: only
(1), (8), (2'), (4') and (5').

Source: NetSplit, Nanjing 2023.
"""

import math
from collections.abc import Sequence
from typing import Any

from planner.problem import Status
from planner.solvers.netsplit.cpsat_model import Model, placement_of
from planner.solvers.netsplit.cpsat_run import Run, call
from planner.solvers.netsplit.model import (
    Answer,
    Instance,
    Known,
    edge_ticks,
    known_of,
    relaxed_times,
)
from planner.solvers.placement.coplacement import edge_bytes


def relaxed(instance: Instance, run: Run, start: Sequence[int] | None) -> Answer:
    """The best placement by the published model.

    Args:
        start: see `netsplit_cpsat.solve`.
    """
    from ortools.sat.python import cp_model

    known = known_of(instance, start)
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=True)
    model.cp.minimize(_makespan(model, known))
    if known.fits:
        run.watch.see(known.latest)
    found = call(model, run, 1.0, besides=0, whole=True)
    bound_s = max(0.0, found.bound * instance.tick_s - instance.lost_s)
    value, device_of = known.latest, known.device_of
    if found.device_of is not None:
        value, device_of = found.value, found.device_of
    elif not known.fits and found.status == "INFEASIBLE":
        return Answer(Status.INFEASIBLE, None, math.inf, None)
    elif not known.fits:
        return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=run.in_time)
    status = Status.OPTIMAL if value <= found.bound else Status.FEASIBLE
    return Answer(status, device_of, value * instance.tick_s, bound_s, reproducible=run.in_time)


def _makespan(model: Model, known: Known) -> Any:
    """(2'), (4') and (5'): the makespan."""
    instance, cp, worst = model.instance, model.cp, known.latest
    num, devices = instance.placing.num_operators, range(instance.placing.num_devices)
    edges = edge_bytes(instance.placing)
    forward, backward = relaxed_times(instance, known.device_of)
    there = [cp.new_int_var(0, worst, "") for _ in range(num)]
    back = [cp.new_int_var(0, worst, "") for _ in range(num)]
    model.hints += [*zip(there, forward, strict=True), *zip(back, backward, strict=True)]
    makespan = cp.new_int_var(0, worst, "")
    model.hints.append((makespan, worst))
    lasts = [
        [sum(int(ticks[i, p]) * model.on(i, p) for p in devices) for i in range(num)]
        for ticks in (instance.forward, instance.backward)
    ]
    fed, read = {j for _, j in edges}, {i for i, _ in edges}
    for i in range(num):
        if i not in fed:
            cp.add(there[i] == 0)
        if i not in read:
            cp.add(back[i] == there[i] + lasts[0][i])
        cp.add(makespan >= back[i] + lasts[1][i])
    for (i, j), size in edges.items():
        cp.add(there[j] >= there[i] + lasts[0][i])
        cp.add(back[i] >= back[j] + lasts[1][j])
        for p in devices:
            for q in devices:
                moved = edge_ticks(instance, size, p, q)
                if not moved or instance.group_of[i] == instance.group_of[j]:
                    continue
                both = [model.on(i, p), model.on(j, q)]
                cp.add(there[j] >= there[i] + lasts[0][i] + moved).only_enforce_if(both)
                cp.add(back[i] >= back[j] + lasts[1][j] + moved).only_enforce_if(both)
    return makespan
