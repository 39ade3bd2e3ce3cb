"""The published inputs of PipeDream, dnn-partitioning and Piper, and what those programs made of
them. They lie beside the project, or where PLANNER_REFERENCE says.
"""

import csv
import os
import re
from functools import cache
from pathlib import Path

from planner.artefacts.formats.dnn_partitioning import read_dnn_partitioning
from planner.artefacts.formats.piper import read_piper
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Options, Problem
from planner.solvers.pipedream.options import PipeDream
from planner.solvers.piper.solve import PiperOptions
from tests.support.builders import hierarchy
from tests.support.profiles import read_any_profile

REFERENCE = Path(
    os.environ.get("PLANNER_REFERENCE", Path(__file__).parents[3] / "shared" / "reference")
)
GIB = 1024**3


def rows(peer):
    """The rows of expected.csv of one program; none without the folder."""
    if not (REFERENCE / "expected.csv").is_file():
        return []
    with (REFERENCE / "expected.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["peer"] == peer]


@cache
def profile(name):
    """The profile of a file such as "pipedream/vgg16.txt"."""
    return read_any_profile(REFERENCE / name)


def pipedream_problem(row):
    """The problem of a row such as "n=5 5 b=800000000 1000000000", "hierarchical_dp/act1_mem"."""
    counts, bandwidths = row["config"].removeprefix("n=").split(" b=")
    switches = set(row["algorithm"].partition("/")[2].split("_"))
    if unknown := switches - {"default", "straight", "mem", "fewer", "act1"}:
        raise ValueError(f"expected.csv: {row['algorithm']}: unknown switches {sorted(unknown)}")
    options = PipeDream(
        straight_pipeline="straight" in switches,
        memory_constraint="mem" in switches,
        fewer_machines="fewer" in switches,
        activation_compression=1.0 if "act1" in switches else None,
    )
    graph = profile(f"pipedream/{row['instance']}.txt")
    topology = hierarchy([int(n) for n in counts.split()], [float(b) for b in bandwidths.split()])
    return Problem(graph, topology, Options(100, switches=(options,)))


@cache
def dnn_graph(instance):
    """The graph of an instance such as "throughput-inputs/LayerGraphs/bert24_training.json"."""
    _, kind, name = instance.split("/")
    folder = REFERENCE / "dnn-partitioning"
    return read_dnn_partitioning(folder / f"{kind.removesuffix('Graphs').lower()}-{name}")


@cache
def piper_graph(instance):
    return read_piper(REFERENCE / "piper" / f"{instance}.json")


def piper_options(row):
    """The options of a row such as "K=8 memGiB=2 batch=1920 bwGiB=25", "piper-noar"."""
    devices, memory, batch, bandwidth = map(int, re.findall(r"=(\d+)", row["config"]))
    kind = row["algorithm"]
    return PiperOptions(
        devices,
        memory * GIB,
        float(bandwidth * GIB),
        batch,
        recompute=Recompute.NONE if kind == "piper-noar" else Recompute.AUTO,
        max_tensor_parallel=1 if kind == "piper-notp" else None,
        max_data_parallel=1 if kind == "piper-nodp" else None,
    )
