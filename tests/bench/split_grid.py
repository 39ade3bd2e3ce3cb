"""Every point of Megatron-LM's grid for one row of the tables of `split.py`, beside the plan
that `megatron` chooses: the same planner with all three degrees given. `--write` puts the table
into docs/split.md.

    python -m tests.bench.split_grid --write
    python -m tests.bench.split_grid --hosts p4d --gpus 32 --per-device 4
"""

import argparse
from itertools import product

import planner
from planner.artefacts.options import Search, Training
from planner.solvers.sharded.options import Megatron
from planner.support.units import format_seconds
from tests.bench.solvers import put
from tests.bench.split import FILE, HOSTS, LIMIT_S, PER_DEVICE, profile_of

LARGEST_TENSOR_DEGREE = 8  # the devices of a host


def degrees_of(gpus):
    """(t, d, p) whose product is the number of devices.

    >>> degrees_of(4)
    [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    """
    powers = [2**k for k in range(gpus.bit_length()) if 2**k <= gpus]
    return [
        (t, d, gpus // (t * d))
        for t, d in product(powers, powers)
        if t <= LARGEST_TENSOR_DEGREE and t * d <= gpus
    ]


def plan_of(profile, topology, samples, degrees):
    """The best plan of `megatron` with these degrees over all sizes of the microbatch, with
    sequence parallelism and without; None if none fits.
    """
    plans = planner.solve(
        profile,
        topology=topology,
        training=Training(global_batch=samples, optimizer="adam"),
        search=Search(switches=(Megatron(*degrees),)),
        solvers=("megatron",),
        calibration=False,
        time_limit_s=LIMIT_S,
    )
    return plans.plan


def seconds(plan):
    """The iteration of a plan, in s."""
    return float("inf") if plan is None else plan.prediction.iteration_s


def row(degrees, plan, best_s):
    """A row of the table as Markdown."""
    if plan is None:
        cells = ("does not fit", "", "", "")
    else:
        size = f"{plan.strategy.num_microbatches} of {plan.microbatch_size}"
        again = sum(stage.recompute for stage in plan.strategy.stages)
        recompute = f"{again} of {len(plan.strategy.stages)}" if again else ""
        beside = f"{seconds(plan) / best_s - 1:+.0%}" if seconds(plan) != best_s else ""
        cells = (size, recompute, format_seconds(seconds(plan)), beside)
    return f"| {', '.join(map(str, degrees))} | {' | '.join(cells)} |"


def main():
    """Prints the table, and writes it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/split.md")
    parser.add_argument("--hosts", choices=HOSTS, default="p4d")
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--per-device", type=int, choices=PER_DEVICE, default=4)
    options = parser.parse_args()
    samples = options.gpus * options.per_device
    profile = profile_of(options.hosts)
    topology = planner.read_topology(f"{options.hosts}-x8", options.gpus)
    chosen = plan_of(profile, topology, samples, (None, None, None))
    plans = {}
    for degrees in degrees_of(options.gpus):
        plans[degrees] = plan_of(profile, topology, samples, degrees)
        print(row(degrees, plans[degrees], seconds(chosen)), flush=True)
    best_s = min(map(seconds, plans.values()))
    lines = [
        f"{options.gpus} devices of {options.hosts}, {samples} samples: `megatron` chooses a plan"
        f" that takes {format_seconds(seconds(chosen))}, and the fastest point takes"
        f" {format_seconds(best_s)}.",
        "",
        "| t, d, p | microbatches | stages that recompute | iteration | beside the chosen plan |",
        "|---|---:|---:|---:|---:|",
        *(
            row(degrees, plan, seconds(chosen))
            for degrees, plan in sorted(plans.items(), key=lambda pair: seconds(pair[1]))
        ),
    ]
    print("\n".join(lines))
    if options.write:
        put(FILE, "every point of the grid", "\n".join(lines))


if __name__ == "__main__":
    main()
