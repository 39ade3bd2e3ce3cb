"""Plans with operators split or state in parts, on 8 to 64 devices, beside others (half an hour).

The model is a Llama of 6.7 billion parameters, on hosts of A100 and H100. `--write` puts each table
into docs/split.md as soon as it is made, and its best plan into the summary at the head. Tables
that are not asked for stay as they are.

    python -m tests.bench.split --write
    python -m tests.bench.split --hosts p4d --gpus 8 --per-device 1
    python -m tests.bench.split --parameters bfloat16 --per-device 1 --write

The planner chooses the size of the microbatches, out of all that divide the samples.
"""

import argparse
import re
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import planner
from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Search, Training
from planner.artefacts.plan import Plan
from planner.clusters.yaml.read import device_table
from planner.reports.plans import sharing_text
from planner.solvers.sharded.options import Megatron, Zero
from planner.support.units import format_bytes, format_seconds
from tests.bench.solvers import put
from tests.support.models import SYNTHETIC

FILE = Path(__file__).parents[2] / "docs" / "split.md"
HOSTS = {"p4d": "llama7b-a100", "p5": "llama7b-h100"}
GPUS = (8, 16, 32, 64)
# Samples per device and iteration.
PER_DEVICE = (1, 4)
# For each way, at all sizes of the microbatch together: that of `planner solve`.
LIMIT_S = 7.0


@dataclass(frozen=True)
class Way:
    """A way to train, by the solver that plans it.

    Attributes:
        solver: None for all that `planner solve` asks.
        splits: whether it splits operators, or keeps parts over replicas by itself.
    """

    name: str
    solver: str | None
    switches: tuple[object, ...] = ()
    splits: bool = True


WAYS = (
    Way("data parallelism", "data-parallel", splits=False),
    Way("pipeline, stages replicated", "antichain", splits=False),
    Way("ZeRO-1", "zero", (Zero(1),)),
    Way("ZeRO-2", "zero", (Zero(2),)),
    Way("ZeRO-3", "zero", (Zero(3),)),
    Way("Megatron-LM", "megatron", (Megatron(sequence_parallel=False),)),
    Way("with sequence parallelism", "megatron", (Megatron(sequence_parallel=True),)),
    Way("intra-op", "intra-op"),
    Way("inter-op", "inter-op"),
    Way("all solvers", None),
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


def profile_of(hosts, parameters="float32"):
    """The shipped profile of a host's devices, which is good for microbatches of any size, or one
    that is computed with the same options and another type of parameters.
    """
    (profile,) = read_any_profiles(shipped("profiles") / f"{HOSTS[hosts]}.json")
    if parameters == "float32":
        return profile
    with TemporaryDirectory() as folder:
        path = Path(folder) / profile.model_path
        path.write_bytes(SYNTHETIC["llama7b"]().SerializeToString())
        return planner.profile(
            path, batch=1, dims={"seq": profile.dimensions["seq"]}, dtype=profile.dtype,
            device=profile.device_type, parameters=parameters,
        )  # fmt: skip


def rows_of(profile, topology, samples):
    """A row for each way."""
    for way in WAYS:
        begin = time.perf_counter()
        plans = planner.solve(
            profile,
            topology=topology,
            training=Training(global_batch=samples, optimizer="adam"),
            search=Search(switches=way.switches),
            solvers=None if way.solver is None else (way.solver,),
            calibration=False,
            time_limit_s=LIMIT_S,
        )
        took_s = time.perf_counter() - begin
        reasons = [row.reason for row in plans.comparison.rows if row.reason]
        reason = "" if plans.plan else reasons[0]
        yield Row(way, plans.plan, reason, plans.comparison.lower_bound_s, took_s)


def used_share(profile, topology, samples, plan):
    """The share of the devices' peak that the products of the model take: three times the FLOPs of
    a forward, without recomputation.
    """
    kind = {one.name: one for one in topology.device_types}.get(topology.devices[0].type)
    kind = kind or device_table()[topology.devices[0].type]
    flops = 3 * samples * sum(one.flops for one in profile.operators)
    peak = kind.flops["bfloat16"] * len(topology.devices)
    return flops / (plan.prediction.iteration_s * peak)


def span(numbers):
    """The smallest and the largest number, or the only one."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}-{high}"


def cells(row, profile, topology, samples):
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
        ", ".join(dict.fromkeys(filter(None, map(sharing_text, stages)))),
        span([one.num_replicas for one in stages]),
        f"{plan.strategy.num_microbatches} x {plan.microbatch_size}",
        format_seconds(prediction.iteration_s),
        f"{samples / prediction.iteration_s:.1f}",
        f"{used_share(profile, topology, samples, plan):.1%}",
        format_bytes(memory),
        f"{row.took_s:.0f} s",
    )


COLUMNS = (
    "way", "stages", "mesh", "in parts", "replicas", "microbatches", "iteration", "samples/s",
    "FLOPs used", "memory", "took",
)  # fmt: skip


SUMMARY = (
    "devices", "best plan with split operators", "time", "pipeline with replicas",
    "data parallelism", "lead", "lower bound", "gap",
)  # fmt: skip


def best_of(rows):
    """The row with the fastest plan; None if none has a plan."""
    fitting = [row for row in rows if row.plan is not None]
    return min(fitting, key=lambda row: row.plan.prediction.iteration_s, default=None)


def time_of(row):
    """The time of a row's plan as text."""
    return "does not fit" if row is None else format_seconds(row.plan.prediction.iteration_s)


def counted(number, one, many):
    """A number and its noun.

    >>> counted("1", "stage", "stages"), counted("1-2", "replica", "replicas")
    ('1 stage', '1-2 replicas')
    """
    return f"{number} {one if number == '1' else many}"


def degrees(row, stage):
    """How a stage is split, in words. A tensor axis cuts parameters; one of samples cuts none, but
    for ZeRO's, which is the only axis of its mesh.
    """
    sharding, shared = stage.sharding, sharing_text(stage)
    if sharding is None:
        return shared or "no operator split"
    if row.way.solver == "zero":
        return f"{row.way.name} over {sharding.mesh[0]}"
    if not row.way.switches:
        mesh = f"mesh of {'x'.join(map(str, sharding.mesh))}"
        return f"{mesh}, {shared}" if shared else mesh
    words = []
    for axis, size in enumerate(sharding.mesh):
        cuts = any(spec[axis] != "R" for spec in sharding.parameters.values())
        words.append(f"tensor degree {size}" if cuts else f"samples over {size}")
    if row.way.switches[0].sequence_parallel:
        words.append("sequence parallelism")
    words += [shared] if shared else []
    return ", ".join(words)


def in_words(row):
    """The plan of a row: stages, how they are split, replicas, and microbatches."""
    strategy = row.plan.strategy
    stages = strategy.stages
    again = sum(stage.recompute for stage in stages)
    replicas = span([stage.num_replicas for stage in stages])
    parts = (
        counted(f"{len(stages)}", "stage", "stages") + (f" ({again} recompute)" if again else ""),
        *dict.fromkeys(degrees(row, stage) for stage in stages),
        counted(replicas, "replica", "replicas"),
        counted(f"{strategy.num_microbatches}", "microbatch", "microbatches")
        + f" of {row.plan.microbatch_size}",
    )
    return ", ".join(parts)


def gap_of(rows):
    """The lower bound over the sizes of the microbatch that were asked, and the gap of the best
    plan to it, as text.
    """
    best, bound_s = best_of(rows), min(row.bound_s for row in rows)
    gap = "" if best is None else f"{best.plan.prediction.iteration_s / bound_s - 1:.1%}"
    return format_seconds(bound_s), gap


def summary(rows, devices):
    """A row of the summary. The lead is that of the best plan with split operators over the best
    without.
    """
    split, whole = (best_of([row for row in rows if row.way.splits == s]) for s in (True, False))
    lead = ""
    if split is not None and whole is not None:
        ratio = whole.plan.prediction.iteration_s / split.plan.prediction.iteration_s
        lead = f"{ratio - 1:+.1%}"
    alone = {row.way.solver: best_of([row]) for row in rows if not row.way.splits}
    texts = (
        devices,
        "none" if split is None else in_words(split),
        time_of(split),
        time_of(alone["antichain"]),
        time_of(alone["data-parallel"]),
        lead,
        *gap_of(rows),
    )
    return f"| {' | '.join(texts)} |"


def table(rows, profile, topology, samples):
    """A table as Markdown, and its best plan."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(cells(row, profile, topology, samples))} |" for row in rows]
    bound, gap = gap_of(rows)
    best = best_of(rows)
    first = "Nothing fits" if best is None else f"Best: {best.way.name}, {time_of(best)}"
    return "\n".join([*lines, "", f"{first}. Lower bound {bound}{gap and f', gap {gap}'}."])


def text_of(name):
    """The text between the markers of a name in the document."""
    return FILE.read_text().partition(f"<!-- begin {name} -->\n")[2].partition("<!-- end")[0]


def replaced(old, new, starts):
    """The parts of a text in the order of their starts, the new one in place of the old one.

    >>> replaced(["| 8 | a", "| 32 | b"], "| 16 | c", ["| 8 |", "| 16 |", "| 32 |"])
    ['| 8 | a', '| 16 | c', '| 32 | b']
    """
    first = (next((one for one in (new, *old) if one.startswith(s)), None) for s in starts)
    return [one for one in first if one is not None]


def write(of, row, part):
    """Puts a row of the summary and a table into the document.

    Args:
        of: what the table is of, in words.
    """
    names = list(product(HOSTS, GPUS))
    head = [f"| {' | '.join(SUMMARY)} |", "|---|---|" + "---:|" * (len(SUMMARY) - 2)]
    name = f"summary of {of}"
    starts = [f"| {gpus} {hosts} |" for hosts, gpus in names]
    put(FILE, name, "\n".join(head + replaced(text_of(name).splitlines(), row, starts)))
    name = f"tables of {of}"
    starts = [f"#### {gpus} devices of {hosts}," for hosts, gpus in names]
    old = re.split("(?m)^(?=#### )", text_of(name))
    parts = replaced([one.strip() for one in old], part, starts)
    put(FILE, name, "\n\n".join(parts))


def main():
    """Prints all tables, and writes them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/split.md")
    parser.add_argument("--hosts", nargs="*", choices=HOSTS, default=tuple(HOSTS))
    parser.add_argument("--gpus", nargs="*", type=int, choices=GPUS, default=GPUS)
    parser.add_argument("--per-device", nargs="*", type=int, choices=PER_DEVICE, default=PER_DEVICE)
    parser.add_argument("--parameters", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    profiles = {hosts: profile_of(hosts, options.parameters) for hosts in options.hosts}
    short = "" if options.parameters == "float32" else f", {options.parameters} parameters"
    for each, hosts, gpus in product(options.per_device, options.hosts, options.gpus):
        profile = profiles[hosts]
        topology = planner.read_topology(f"{hosts}-x8", gpus)
        samples = gpus * each
        rows = list(rows_of(profile, topology, samples))
        part = table(rows, profile, topology, samples)
        part = f"#### {gpus} devices of {hosts}, {samples} samples\n\n{part}"
        row = summary(rows, f"{gpus} {hosts}")
        print(f"{part}\n\n{row}", flush=True)
        for one in rows:
            if one.reason:
                print(f"{one.way.name}: {one.reason}", flush=True)
        if options.write:
            write(f"{each} per device{short}", row, part)


if __name__ == "__main__":
    main()
