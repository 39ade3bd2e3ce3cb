"""The smallest bottleneck beside published ones; needs the reference inputs (10 minutes).

Placements need not be contiguous. Graphs are dnn-partitioning's published ones, under its own cost
model.

    python -m tests.bench.bottleneck                # 60 s per graph
    python -m tests.bench.bottleneck --limit 10 --only resnet50

"published" is the bottleneck that its integer program reaches on HiGHS in 75 s (expected.csv), if
it was run; "contiguous" is the exact optimum over chains of downsets. Times are in ms and leave out
compilation.
"""

import argparse
import time

from planner.planning.other_cost_models import ForeignOptions, solve_foreign
from tests.support import reference


def measured(instance, published_ms, limit_s, seed):
    """Runs one graph and prints its row."""
    graph = reference.dnn_graph(instance)
    begin = time.monotonic()
    asked = ForeignOptions(contiguous=False, time_limit_s=limit_s, seed=seed)
    comparison = solve_foreign(graph, asked)
    took_s = time.monotonic() - begin
    row, contiguous = comparison.rows[:2]
    published = f"{published_ms:10.5f}" if published_ms else " " * 10
    name = instance.split("/", 1)[1].removesuffix(".json")
    print(
        f"{name:36} {contiguous.bottleneck_s * 1e3:10.5f}"
        f" {published} {row.bottleneck_s * 1e3:10.5f} {row.bound_s * 1e3:10.5f}"
        f" {row.bottleneck_s / row.bound_s - 1:7.3%} {took_s:6.1f} {row.status}"
        f"{'' if row.reproducible else ', cut by the clock'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=60.0, help="s per graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="graphs with this in their names")
    asked = parser.parse_args()
    rows = reference.rows("dnn-partitioning")
    published = {
        row["instance"]: float(row["objective"])
        for row in rows
        if row["algorithm"] == "ip_highs_noncontig"
    }
    instances = dict.fromkeys(row["instance"] for row in rows if asked.only in row["instance"])
    for instance in list(instances)[:1]:
        solve_foreign(
            reference.dnn_graph(instance), ForeignOptions(contiguous=False, time_limit_s=1)
        )
    print(f"{'graph':36} contiguous  published    reached      bound     gap      s status")
    for instance in instances:
        measured(instance, published.get(instance), asked.limit, asked.seed)


if __name__ == "__main__":
    main()
