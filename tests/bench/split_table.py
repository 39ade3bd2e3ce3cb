"""Plans for a Llama of 6.7 billion parameters on hosts of A100 and H100, with operators split and
without; `--write` puts the tables into docs/split.md.

    python -m tests.bench.split_table --write
    python -m tests.bench.split_table --hosts p4d --gpus 8 --per-device 1

Microbatches of one sample have the operators of the shipped profiles. Those of `LARGEST` samples
are computed in the same way, and sizes between are interpolated.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import planner
from planner.clusters.yaml.read import device_table
from planner.files import shipped
from planner.formats import read_any_profiles
from planner.plan import Plan
from planner.request import Search, Training
from planner.solvers.sharded.options import Megatron, Zero
from planner.units import format_bytes, format_seconds
from tests.support.models import SYNTHETIC

FILE = Path(__file__).parents[2] / "docs" / "split.md"
HOSTS = {"p4d": ("A100-SXM4-80GB", "llama7b-a100"), "p5": ("H100-SXM", "llama7b-h100")}
GPUS = (8, 16, 32, 64)
# Samples per device and iteration.
PER_DEVICE = (1, 4)
# Samples of the largest microbatch.
LARGEST = 64
# For each way, at all sizes of the microbatch together.
LIMIT_S = 120.0


@dataclass(frozen=True)
class Way:
    """A way to train, by the solver that plans it.

    Attributes:
        splits: whether it splits operators.
    """

    name: str
    solver: str
    switches: tuple[object, ...] = ()
    splits: bool = True


WAYS = (
    Way("data parallelism", "data-parallel", splits=False),
    Way("pipeline, stages replicated", "antichain", splits=False),
    Way("ZeRO-1", "zero", (Zero(1),)),
    Way("ZeRO-2", "zero", (Zero(2),)),
    Way("ZeRO-3", "zero", (Zero(3),)),
    Way("Megatron-LM", "megatron"),
    Way("Megatron-LM, sequence parallel", "megatron", (Megatron(sequence_parallel=True),)),
)


@dataclass(frozen=True)
class Row:
    """The best plan of a way over all sizes of the microbatch.

    Attributes:
        plan: None if none fits.
        reason: why there is none.
        bound_s: no plan of any way is faster, in s.
        took_s: search and judge, in s.
    """

    way: Way
    plan: Plan | None
    reason: str
    bound_s: float
    took_s: float


def profiles_of(hosts, folder):
    """The profiles at one sample and at the largest size.

    Raises:
        ValueError: if the operators at one sample are not the shipped profile's.
    """
    kind, name = HOSTS[hosts]
    path = folder / "llama7b.onnx"
    if not path.exists():
        path.write_bytes(SYNTHETIC["llama7b"]().SerializeToString())
    made = [
        planner.profile(path, batch=size, dims={"seq": 2048}, device=kind, dtype="bfloat16")
        for size in (1, LARGEST)
    ]
    (known,) = read_any_profiles(shipped("profiles") / f"{name}.json")
    if (made[0].graph, made[0].operators) != (known.graph, known.operators):
        raise ValueError(f"{name}: expected the operators of the shipped profile, got others")
    return made


def rows_of(profiles, topology, samples):
    """A row for each way."""
    for way in WAYS:
        begin = time.perf_counter()
        plans = planner.solve(
            profiles,
            topology=topology,
            training=Training(global_batch=samples, optimizer="adam"),
            search=Search(switches=way.switches),
            solvers=(way.solver,),
            calibration=False,
            time_limit_s=LIMIT_S,
        )
        took_s = time.perf_counter() - begin
        reasons = [row.reason for row in plans.comparison.rows if row.reason]
        reason = "" if plans.plan else reasons[0]
        yield Row(way, plans.plan, reason, plans.comparison.lower_bound_s, took_s)


def used_share(profiles, topology, samples, plan):
    """The share of the devices' peak that the products of the model take: three times the FLOPs of
    a forward, without recomputation.
    """
    kind = {one.name: one for one in topology.device_types}.get(topology.devices[0].type)
    kind = kind or device_table()[topology.devices[0].type]
    flops = 3 * samples * sum(one.flops for one in profiles[0].operators)
    peak = kind.flops["bfloat16"] * len(topology.devices)
    return flops / (plan.prediction.iteration_s * peak)


def shape_of(plan):
    """The stages in words.

    Such as "4 stages of 2 devices" or "1 stage of 8 devices, 2 replicas".
    """
    stages = plan.strategy.stages
    groups = sorted({(len(one.groups[0]), one.num_replicas) for one in stages})
    shapes = [
        (f"{size} devices split" if size > 1 else "one device")
        + (f", {replicas} replicas" if replicas > 1 else "")
        for size, replicas in groups
    ]
    count = f"{len(stages)} stages" if len(stages) > 1 else "1 stage"
    text = f"{count} of {' or '.join(shapes)}"
    return text + ("; recomputed" if any(one.recompute for one in stages) else "")


def cells(row, profiles, topology, samples):
    """A row of the table as text."""
    if row.plan is None:
        return (row.way.name, "does not fit", "", "", "", "", "", f"{row.took_s:.1f} s")
    plan, prediction = row.plan, row.plan.prediction
    memory = max(device.memory.total_bytes for device in prediction.devices)
    return (
        row.way.name,
        shape_of(plan),
        f"{plan.strategy.num_microbatches} x {plan.microbatch_size}",
        format_seconds(prediction.iteration_s),
        f"{samples / prediction.iteration_s:.1f}",
        f"{used_share(profiles, topology, samples, plan):.1%}",
        format_bytes(memory),
        f"{row.took_s:.1f} s",
    )


COLUMNS = (
    "way", "plan", "microbatches", "iteration", "samples/s", "of the peak", "memory", "took",
)  # fmt: skip


def verdict(rows):
    """The best with and without split operators, the lead, the bound, and the gap."""
    best = {}
    for row in rows:
        if row.plan is not None:
            value = row.plan.prediction.iteration_s
            if row.way.splits not in best or value < best[row.way.splits][0]:
                best[row.way.splits] = value, row.way.name
    bound_s = min(row.bound_s for row in rows)
    if not best:
        return f"Nothing fits. Lower bound {format_seconds(bound_s)}."
    first = min(best.values())
    text = f"Best: {first[1]}, {format_seconds(first[0])}"
    if len(best) == 2:
        lead = best[False][0] / best[True][0] - 1
        text += f"; split operators lead by {lead:+.1%}"
    elif True in best:
        text += "; nothing fits without split operators"
    return f"{text}. Lower bound {format_seconds(bound_s)}, gap {first[0] / bound_s - 1:.1%}."


def table(rows, profiles, topology, samples):
    """A table as Markdown, and its verdict."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(cells(row, profiles, topology, samples))} |" for row in rows]
    return "\n".join([*lines, "", verdict(rows)])


def main():
    """Prints all tables, and writes them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/split.md")
    parser.add_argument("--hosts", nargs="*", choices=HOSTS, default=tuple(HOSTS))
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS)
    parser.add_argument("--per-device", nargs="*", type=int, default=PER_DEVICE)
    options = parser.parse_args()
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        for hosts in options.hosts:
            profiles = profiles_of(hosts, Path(scratch))
            for gpus in options.gpus:
                topology = planner.read_topology(f"{hosts}-x8", gpus)
                for each in options.per_device:
                    samples = gpus * each
                    rows = list(rows_of(profiles, topology, samples))
                    head = f"### {gpus} devices of {hosts}, {samples} samples\n\n"
                    parts.append(head + table(rows, profiles, topology, samples))
                    print(parts[-1], flush=True)
                    for row in rows:
                        if row.reason:
                            print(f"{row.way.name}: {row.reason}")
    if options.write:
        FILE.write_text(FILE.read_text().split("### ")[0] + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
