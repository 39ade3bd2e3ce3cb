"""Plans for a Llama of 6.7 billion parameters on hosts of A100 and H100, with operators split and
without; `--write` puts the tables into docs/split.md, one after the other.

    python -m tests.bench.split_table --write
    python -m tests.bench.split_table --hosts p4d --gpus 8 --per-device 1

Microbatches of one sample have the operators of the shipped profiles. Those of as many samples as
there are devices are computed in the same way, and sizes between are interpolated. ZeRO is asked at
the sizes of an eighth of the devices to all of them, the others at 1, 2 and 4.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import planner
from planner.clusters.yaml.read import device_table
from planner.files import shipped
from planner.formats import read_any_profiles
from planner.judging.interpolate import interpolated
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
# Samples of small microbatches.
SMALL = (1, 2, 4)
# For each way, at all sizes of the microbatch together.
LIMIT_S = 300.0


@dataclass(frozen=True)
class Way:
    """A way to train, by the solver that plans it.

    Attributes:
        splits: whether it splits operators.
        wide: whether it splits samples alone, so that microbatches of a sample for each device, or
            for each of a part, are asked instead of small ones.
    """

    name: str
    solver: str
    switches: tuple[object, ...] = ()
    splits: bool = True
    wide: bool = False

    def sizes(self, gpus):
        """Samples of the microbatches that are asked: a few, to have the tables sooner than by
        `planner solve`, which looks for the best.
        """
        return (gpus // 8, gpus // 4, gpus // 2, gpus) if self.wide else SMALL


WAYS = (
    Way("data parallelism", "data-parallel", splits=False),
    Way("pipeline, stages replicated", "antichain", splits=False),
    Way("ZeRO-1", "zero", (Zero(1),), wide=True),
    Way("ZeRO-2", "zero", (Zero(2),), wide=True),
    Way("ZeRO-3", "zero", (Zero(3),), wide=True),
    Way("Megatron-LM", "megatron", (Megatron(sequence_parallel=False),)),
    Way("with sequence parallelism", "megatron", (Megatron(sequence_parallel=True),)),
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


def profiles_of(hosts, folder, largest):
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
        for size in (1, largest)
    ]
    (known,) = read_any_profiles(shipped("profiles") / f"{name}.json")
    if (made[0].graph, made[0].operators) != (known.graph, known.operators):
        raise ValueError(f"{name}: expected the operators of the shipped profile, got others")
    return made


def rows_of(profiles, topology, samples):
    """A row for each way."""
    for way in WAYS:
        begin = time.perf_counter()
        sizes = way.sizes(len(topology.devices))
        plans = planner.solve(
            [interpolated(profiles, size) for size in sizes if samples % size == 0],
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


def span(numbers):
    """The smallest and the largest number, or the only one."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}-{high}"


def cells(row, profiles, topology, samples):
    """A row of the table as text."""
    if row.plan is None:
        return (row.way.name, "does not fit", *[""] * (len(COLUMNS) - 3), f"{row.took_s:.0f} s")
    plan, prediction = row.plan, row.plan.prediction
    stages = plan.strategy.stages
    again = sum(one.recompute for one in stages)
    mesh = {"x".join(map(str, one.sharding.mesh)) if one.sharding else "" for one in stages}
    memory = max(device.memory.total_bytes for device in prediction.devices)
    return (
        row.way.name,
        f"{len(stages)}" + (f", {again} recompute" if again else ""),
        ", ".join(sorted(mesh)),
        span([one.num_replicas for one in stages]),
        f"{plan.strategy.num_microbatches} x {plan.microbatch_size}",
        format_seconds(prediction.iteration_s),
        f"{samples / prediction.iteration_s:.1f}",
        f"{used_share(profiles, topology, samples, plan):.1%}",
        format_bytes(memory),
        f"{row.took_s:.0f} s",
    )


COLUMNS = (
    "way", "stages", "mesh", "replicas", "microbatches", "iteration", "samples/s", "FLOPs used",
    "memory", "took",
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
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
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
    parts = {}
    with tempfile.TemporaryDirectory() as scratch:
        asked = product(options.per_device, options.hosts, options.gpus)
        for each, hosts, gpus in asked:
            profiles = profiles_of(hosts, Path(scratch), gpus)
            topology = planner.read_topology(f"{hosts}-x8", gpus)
            samples = gpus * each
            rows = list(rows_of(profiles, topology, samples))
            head = f"### {gpus} devices of {hosts}, {samples} samples\n\n"
            key = tuple(HOSTS).index(hosts), gpus, each
            parts[key] = head + table(rows, profiles, topology, samples)
            print(parts[key], flush=True)
            for row in rows:
                if row.reason:
                    print(f"{row.way.name}: {row.reason}", flush=True)
            if options.write:
                head = FILE.read_text().split("### ")[0]
                FILE.write_text(head + "\n\n".join(parts[k] for k in sorted(parts)) + "\n")


if __name__ == "__main__":
    main()
