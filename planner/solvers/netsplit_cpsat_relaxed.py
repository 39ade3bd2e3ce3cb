"""NetSplit's model as it was published (`netsplit_model.py`, `relaxed`) in OR-Tools CP-SAT.

Nothing keeps two operators from running at once on one device, so there are no intervals: only
(1), (8), (2'), (4') and (5').

Source: NetSplit, Nanjing 2023.
"""

from typing import Any

from planner.solvers.coplacement import edge_bytes
from planner.solvers.netsplit_cpsat_model import Model
from planner.solvers.netsplit_model import Known, edge_ticks, relaxed_times


def makespan_of(model: Model, known: Known) -> Any:
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
