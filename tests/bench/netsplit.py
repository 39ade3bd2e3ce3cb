"""The constraint model on 30 drawn graphs: optimum or gap per seed (60 minutes).

The graphs are those of `tests/support/netsplit_instances.py`.

    python -m tests.bench.netsplit                              # 2, 4 and 8 devices, seeds 0 to 9
    python -m tests.bench.netsplit --devices 4 --seeds 0 1      # some of them
    python -m tests.bench.netsplit --apart                      # a link of its own for each pair
    python -m tests.bench.netsplit --coplaced                   # operators one by one inside groups

Each instance has the work of 60 s with CP-SAT (`--limit`), so that other processes on the machine
change the seconds but not the answer; the clock cuts at ten times that. A gap is
(latency - bound) / bound; "optimal" is to 0.1 %, the accuracy of ticks. HEFT's latency, which heeds
no memory, stands beside it.
"""

import argparse
import time
from dataclasses import replace

from planner.artefacts.problem import Status
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit.model import instance_of, overflow
from planner.solvers.netsplit.solve import PER_DEVICE
from planner.solvers.placement import heft
from planner.solvers.placement.coplacement import coplaced
from planner.solvers.placement.problem import placement_problem_of
from planner.solvers.placement.timetable import latency_s
from tests.support.netsplit_instances import SEEDS, problem_from


def measured(seed, num_devices, limit_s, together, apart):
    """Runs one instance and prints its row; returns its status and gap."""
    problem = placement_problem_of(problem_from(seed, num_devices))
    problem = replace(problem, shared=()) if apart else problem
    groups = [(i,) for i in range(problem.num_operators)]
    if together:
        groups = coplaced(problem, PER_DEVICE * num_devices)
    instance, by_heft = instance_of(problem, groups), heft.place(problem)
    begin = time.monotonic()
    answer = netsplit_cpsat.solve(instance, limit_s, None)
    took_s = time.monotonic() - begin
    bound_s = (answer.bound_s or 0.0) + instance.lost_s
    gap = max(0.0, answer.latency_s / bound_s - 1)
    over = "" if overflow(instance, by_heft) <= 0 else " (over memory)"
    print(
        f"{num_devices:7} {seed:4} {len(groups):6} {answer.status:10}"
        f" {answer.latency_s * 1e3:10.2f} {gap:7.2%} {took_s:6.1f}"
        f" {latency_s(problem, by_heft) * 1e3:10.2f}{over}",
        flush=True,
    )
    return answer.status, gap


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--limit", type=float, default=60.0, help="s of work per instance")
    parser.add_argument("--coplaced", action="store_true", help="2 x devices groups")
    parser.add_argument("--apart", action="store_true", help="no link is shared by pairs")
    asked = parser.parse_args()
    print("devices seed groups status     latency ms     gap      s    HEFT ms")
    for num_devices in asked.devices:
        rows = [
            measured(s, num_devices, asked.limit, asked.coplaced, asked.apart) for s in asked.seeds
        ]
        proved = sum(status is Status.OPTIMAL for status, _ in rows)
        worst = max(gap for _, gap in rows)
        print(f"{num_devices} devices: {proved} of {len(rows)} optimal, largest gap {worst:.2%}")


if __name__ == "__main__":
    main()
