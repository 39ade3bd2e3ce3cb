"""Alpa's ablation of splits inside one host (a quarter of an hour at first, then ten minutes).

    python -m tests.bench.ablation --write
    python -m tests.bench.ablation --family wresnet --gpus 8 --no-overlap
    python -m tests.bench.ablation --family wresnet --size 1 --gpus 8 --frozen

The networks are those of Alpa's figure 8 (Zheng et al., OSDI 2022; `tests/support/alpa.py`), on the
first GPUs of a p3.16xlarge: one stage and one microbatch. A plan that does not fit is shown with
its time as if devices had more memory. Computed profiles are kept in `.cache/truth`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import planner
from planner.artefacts.options import Recompute, Search, Training
from planner.artefacts.plan import Plan
from planner.artefacts.profile import Profile
from planner.artefacts.topology import Topology
from planner.clusters.yaml.read import device_table
from planner.solvers.sharded.options import Megatron, Zero
from planner.support.options import Options
from planner.support.units import format_bytes, format_seconds, parse_bytes
from tests.bench.solvers import put, table
from tests.support.alpa import FAMILIES, Family
from tests.support.charts import Chart, Look, picture
from tests.support.measured.predict import UNLIMITED
from tests.support.measured.profiles import FOLDER, computed

FILE = Path(__file__).parents[2] / "docs" / "ablation.md"
PICTURE = FILE.with_suffix(".svg")
HOST, DEVICE = "p3-16xlarge", "V100-SXM2-16GB"
GPUS = (1, 2, 4, 8)
LIMIT_S = 60.0


@dataclass(frozen=True)
class Way:
    """A way to split one stage over all devices.

    Attributes:
        solver: that plans it.
        switches: of the solver.
    """

    name: str
    solver: str
    switches: tuple[Options, ...] = ()


ONE = Way("one GPU", "single")
WAYS = (
    Way("Data", "zero", (Zero(0),)),
    Way("ZeRO-2", "zero", (Zero(2),)),
    Way("ZeRO-3", "zero", (Zero(3),)),
    Way("Heuristic", "heuristic"),
    Way("Megatron", "megatron", (Megatron(pipeline_degree=1),)),
    Way("intra-op", "intra-op"),
)


LOOKS = {
    "Data": Look("#999999", 4.0),
    "ZeRO-2": Look("#7fb0d8", 3.0),
    "ZeRO-3": Look("#1f5fa8", 2.5),
    "Heuristic": Look("#3a7d3a", 2.0, "2,3"),
    "Megatron": Look("#c2511d", 2.0, "6,3"),
    "intra-op": Look("#000000", 1.5),
}


@dataclass(frozen=True)
class Row:
    """The plan of a way.

    Attributes:
        gpus: number of devices.
        plan: None if there is none, with any memory.
        reason: why none fits; empty if this one does.
        flops: of an iteration's products, without those that run twice.
        num_parameters: that are trained.
    """

    gpus: int
    way: Way
    plan: Plan | None
    reason: str
    flops: float
    num_parameters: int


def row(way: Way, profile: Profile, topology: Topology, training: Training) -> Row:
    """The plan of a way, one that fits if there is any."""
    reason = ""
    for memory in (training.device_memory, UNLIMITED):
        plans = planner.solve(
            replace(profile, growth=None),
            topology=topology,
            training=replace(training, device_memory=memory),
            search=Search(switches=way.switches),
            solvers=(way.solver,),
            calibration=False,
            time_limit_s=LIMIT_S,
        )
        if plans.plan is not None:
            break
        reason = reason or next(one.reason for one in plans.comparison.rows if one.reason)
    return Row(
        gpus=len(topology.devices),
        way=way,
        plan=plans.plan,
        reason=reason,
        flops=3.0 * sum(one.flops for one in profile.operators),
        num_parameters=sum(prod(one.shape) for one in profile.graph.parameters if one.trainable),
    )


def memory_bytes(plan: Plan) -> int:
    """The peak of the fullest device."""
    return max(one.memory.total_bytes for one in plan.prediction.devices)


COLUMNS = (
    "GPUs", "parameters", "way", "mesh", "iteration", "TFLOP/s", "memory", "fits",
)  # fmt: skip


def cells(one: Row) -> list[str]:
    """A row of the table as text."""
    first = [f"{one.gpus}", f"{one.num_parameters / 1e9:.2f} B", one.way.name]
    if one.plan is None:
        return [*first, "", f"none: {one.reason}", "", "", ""]
    iteration_s = one.plan.prediction.iteration_s
    (stage,) = one.plan.strategy.stages
    return [
        *first,
        "x".join(map(str, stage.sharding.mesh)) if stage.sharding else "",
        format_seconds(iteration_s),
        f"{one.flops / iteration_s / 1e12:.0f}",
        format_bytes(memory_bytes(one.plan)),
        "no" if one.reason else "yes",
    ]


def rows(
    family: Family, gpus: Sequence[int], training: Training, folder: Path = FOLDER
) -> Iterator[Row]:
    """A row for each number of devices and way.

    Args:
        gpus: numbers of devices.
        folder: of computed profiles.
    """
    for count in gpus:
        network = family.ablation[count]
        profile = computed(network, family.batch, family.dtype, DEVICE, folder=folder)
        topology = planner.read_topology(HOST, count)
        for way in WAYS if count > 1 else (ONE,):
            yield row(way, profile, topology, training)


def training_of(family: Family, *, overlap: bool, recompute: bool | None) -> Training:
    """One microbatch.

    Args:
        recompute: whether forwards run twice; None as Alpa did.
    """
    own = Recompute.FULL if recompute else Recompute.NONE
    return Training(
        global_batch=family.batch,
        microbatch_size=family.batch,
        optimizer=family.optimizer,
        recompute=family.recompute if recompute is None else own,
        overlap=overlap,
    )


def title(name: str, *, size: int | None, frozen: bool, overlap: bool) -> str:
    """Of a table.

    >>> title("GPT", size=1, frozen=False, overlap=False)
    'GPT, size of 1 GPU, no overlap'
    """
    about = {
        f"size of {size} GPU{'s' * (size != 1)}": size is not None,
        "frozen statistics": frozen,
        "no overlap": not overlap,
    }
    return ", ".join([name, *(words for words, holds in about.items() if holds)])


def charts(name: str) -> tuple[Chart, Chart]:
    """Two charts of a family from its table on the page: TFLOP/s of the plans that fit, and the
    memory of all.
    """
    rate: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for line in FILE.read_text().partition(f"<!-- begin {name} -->\n")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        one = dict(zip(COLUMNS, map(str.strip, line.split("|")[1:-1]), strict=True))
        if one["way"] in LOOKS and one["memory"]:
            gpus = float(one["GPUs"])
            memory.setdefault(one["way"], []).append((gpus, parse_bytes(one["memory"]) / 2**30))
            if one["fits"] == "yes":
                rate.setdefault(one["way"], []).append((gpus, float(one["TFLOP/s"])))
    # A line of one point is a dash.
    rate = {way: some if len(some) > 1 else [(x + d, y) for x, y in some for d in (-0.15, 0.15)]
            for way, some in rate.items()}  # fmt: skip
    limit = device_table()[DEVICE].memory_bytes
    most = [max(y for some in lines.values() for _, y in some) for lines in (rate, memory)]
    return (
        Chart(f"{name}: TFLOP/s of plans that fit", "GPUs", rate, (0.0, 1.05 * most[0])),
        Chart(
            f"{name}: memory in GiB", "GPUs", memory, (0.0, 1.05 * most[1]),
            mark=(limit / 2**30, "a GPU's"),
        ),
    )  # fmt: skip


def main() -> None:
    """Prints all tables, and writes them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/{FILE.name}")
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=tuple(FAMILIES))
    parser.add_argument("--gpus", nargs="*", type=int, choices=GPUS, default=GPUS)
    parser.add_argument("--size", type=int, choices=GPUS, help="the network of that many GPUs")
    parser.add_argument("--frozen", action="store_true", help="batch normalizations are frozen")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--overlap", action=flag, default=True, help="of collectives")
    parser.add_argument("--recompute", action=flag, help="forwards run twice; as Alpa did")
    options = parser.parse_args()
    for name in options.family:
        family = FAMILIES[name]
        sizes = {n: family.ablation[options.size or n] for n in GPUS}
        if options.frozen:
            sizes = {n: replace(one, frozen=True) for n, one in sizes.items()}
        family = replace(family, ablation=sizes)
        training = training_of(family, overlap=options.overlap, recompute=options.recompute)
        made = rows(family, options.gpus, training)
        text = table(COLUMNS, [cells(one) for one in made])
        head = title(family.name, size=options.size, frozen=options.frozen, overlap=options.overlap)
        print(f"{head}\n\n{text}\n", flush=True)
        if options.write:
            put(FILE, head, text)
    if options.write:
        rows_of_charts = [charts(family.name) for family in FAMILIES.values()]
        PICTURE.write_text(picture("Ways to split inside a host", rows_of_charts, LOOKS))


if __name__ == "__main__":
    main()
