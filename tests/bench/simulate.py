"""Actions per second of the simulator by length and by links.

CPU seconds of one core, medians, kernels compiled; `docs/simulator.md` explains them.
"""

import statistics
import time

from planner.artefacts.topology import Sharing
from planner.schedules.dependencies import dependencies
from planner.schedules.program import program
from planner.simulator.events import run
from tests.simulator.test_events import costs
from tests.support.programs import chain, hosts, mesh, split, with_sharing

RUNS = 5
# (stages, replicas of each, microbatches): about 10,000, 100,000 and 1,000,000 actions.
LENGTHS = ((8, 1, 230), (64, 1, 262), (64, 1, 2640), (16, 4, 11000))


def seconds(what, runs=RUNS):
    """Median of CPU seconds."""
    taken = []
    for _ in range(runs):
        begin = time.process_time()
        what()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def speeds():
    """A table of lengths and links."""
    print("| devices | replicas | actions | links | CPU s | actions/s |")
    print("|---|---|---|---|---|---|")
    for num_stages, width, num_microbatches in LENGTHS:
        count = num_stages * width
        graph = chain(num_stages)
        cuts, widths = list(range(1, num_stages)), [width] * num_stages
        lists = program(split(graph, cuts, widths, num_microbatches), graph)
        shared = hosts(max(1, count // 8), 8)
        for links, topology in (
            ("of their own", mesh(count, 10.0)),
            ("exclusive", with_sharing(shared, Sharing.EXCLUSIVE)),
            ("fair shares", shared),
        ):
            case = lists, costs(lists, 1.0, 2.1, sum_s=3.0, step_s=0.1), topology
            run(*case)

            def whole(case=case):
                dependencies.cache_clear()
                run(*case)

            size, taken = len(lists.code), seconds(whole)
            row = count, width, f"{size:,}", links, f"{taken:.4f}", f"{size / taken:,.0f}"
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    speeds()
