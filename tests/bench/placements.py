"""NetSplit's experiments (thesis, Nanjing 2023) anew: four networks on three TITAN RTX with uneven
links, one whole batch as one microbatch, samples/s of every placement by the planner's simulator;
and samples/s with several microbatches.

    python -m tests.bench.placements [--networks NAME,...] [--limit S] [--write]

Times and memory come from analytic profiles, so no model has weights. With --write the tables go
into docs/placements.md, between its markers.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from planner.clusters.routes import bandwidth_bytes_per_s
from planner.clusters.yaml.read import device_table, find_topology, read_topology
from planner.graph import Graph, producers
from planner.judging.judge import judge
from planner.judging.portfolio import compare
from planner.model import Model, load
from planner.problem import Objective, Optimizer, Options, Problem
from planner.profilers.analytic import analytic
from planner.solvers import SOLVERS
from planner.topology import Topology, take
from tests.bench.solvers import ROOT, machine, percent, put, table
from tests.support.thesis_models import NETWORKS

DOCUMENT = ROOT / "docs" / "placements.md"
DEVICE = "TITAN-RTX"
RIVALS = ("pesto", "m-topo", "m-etf", "m-sct")
ASKED = (*RIVALS, "netsplit", "heft", "single")
MICROBATCHES = 8
LIMIT_S = 60.0
# Batches beside the thesis's: times this where one device holds that, or these shares where some
# planner has no room.
LARGER, SMALLER = 2, ((3, 4), (1, 2))
NETWORKS_HEAD = [
    "network", "operators", "thesis: nodes", "parameters", "MB at 128", "thesis: MB",
    "thesis: batch", "Pesto", "m-TOPO", "m-ETF", "m-SCT", "NetSplit", "to the best rival",
]  # fmt: skip
THROUGHPUT_HEAD = [
    "network", "batch", "Pesto", "m-TOPO", "m-ETF", "m-SCT", "NetSplit", "to the best rival",
    "HEFT", "one device", f"{MICROBATCHES} microbatches (solver)",
]  # fmt: skip

Rates = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Published:
    """The thesis's figures of a network.

    Attributes:
        batch: samples per batch.
        nodes: nodes of its graph.
        megabytes: memory at a batch of 128.
        throughput: mean samples/s by planner.
    """

    batch: int
    nodes: int
    megabytes: int
    throughput: tuple[float, ...]

    @property
    def lead(self) -> float:
        """NetSplit's throughput over the best rival's, - 1."""
        return self.throughput[-1] / max(self.throughput[:-1]) - 1


# Pesto, m-TOPO, m-ETF, m-SCT, NetSplit.
PUBLISHED: Mapping[str, Published] = {
    "amoebanet-d": Published(64, 784, 117_756, (30.17, 36.46, 19.59, 28.82, 41.83)),
    "wide-resnet-152": Published(64, 388, 115_180, (38.66, 39.81, 34.15, 32.26, 42.34)),
    "u-net": Published(128, 134, 50_122, (38.66, 33.35, 37.69, 37.60, 40.36)),
    "deeplab-v3": Published(48, 417, 168_094, (11.58, 16.18, 14.00, 12.80, 18.39)),
}


def three() -> Topology:
    """Two devices behind one switch, and one over the host bridge."""
    topology = take(read_topology(find_topology("titan-rtx-5")), 3)
    near, far, also_far = (bandwidth_bytes_per_s(topology, *p) for p in ((0, 1), (0, 2), (1, 2)))
    assert near > far == also_far
    return topology


def megabytes(graph: Graph) -> float:
    """Memory of training by the thesis's count: tensors twice, trained parameters four times."""
    made = producers(graph)
    tensors = sum(t.bytes for t in graph.tensors if t.name in made)
    return (2 * tensors + 4 * sum(p.bytes for p in graph.parameters if p.trainable)) / 1e6


class Network:
    """One of the networks at any batch."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, folder / f"{name}.onnx"
        self.path.write_bytes(NETWORKS[name]().SerializeToString())

    def model(self, batch: int) -> Model:
        return load(self.path, batch=batch)

    def problem(self, batch: int, num_microbatches: int, objective: Objective) -> Problem:
        """Adam, whose factor of 4 is the thesis's largest."""
        kind = device_table()[DEVICE]
        model = self.model(batch // num_microbatches)
        return Problem(
            analytic(model, model_path=None, kind=kind, dtype="float32"),
            three(),
            Options(num_microbatches, optimizer=Optimizer.ADAM, objective=objective),
            kind,
        )


def placed(problem: Problem, solver: str, limit_s: float) -> tuple[float | None, str | None]:
    """Samples/s of a solver that minimises the latency, by the simulator; or why it has no plan."""
    result = SOLVERS[solver](problem, limit_s)
    if result.strategy is None:
        return None, result.reason
    # With one microbatch that is the latency and the optimizer's step, in the simulator.
    options = replace(problem.options, objective=Objective.ITERATION)
    judged = replace(problem, options=options)
    plan, reason = judge(judged, solver, result)
    return (None if plan is None else plan.prediction.throughput), reason


def pipelined(network: Network, batch: int, limit_s: float) -> tuple[float, str]:
    """Samples/s of the best plan for the same batch in several microbatches, and its solver."""
    best = compare(network.problem(batch, MICROBATCHES, Objective.ITERATION), None, limit_s).best
    if best is None or best.plan is None:
        return 0.0, "nothing fits"
    return best.plan.prediction.throughput, best.solver


def row(network: Network, batch: int, limit_s: float) -> tuple[Rates, list[str], list[str]]:
    """One batch of a network: samples/s by solver, the cells of its row, and the missing plans."""
    problem = network.problem(batch, 1, Objective.LATENCY)
    rates: Rates = {}
    missing = []
    for solver in ASKED:
        rates[solver], reason = placed(problem, solver, limit_s)
        if rates[solver] is None:
            missing.append(f"- {network.name}, batch {batch}, {solver}: {reason}")
    best = max((rates[solver] or 0.0 for solver in RIVALS), default=0.0)
    ours = rates["netsplit"]
    lead = percent(ours / best - 1, 1) if ours and best else "-"
    most, solver = pipelined(network, batch, limit_s)
    shown = [f"{rate:.1f}" if rate else "-" for rate in rates.values()]
    cells = [network.name, str(batch), *shown[:5], lead, *shown[5:], f"{most:.1f} ({solver})"]
    print(" | ".join(cells), flush=True)
    return rates, cells, missing


def rows(network: Network, limit_s: float) -> tuple[list[list[str]], list[str]]:
    """The rows of a network: the thesis's batch; a larger one if one device holds the first; and
    smaller ones as long as a planner of the thesis finds no room.
    """
    batch = PUBLISHED[network.name].batch
    rates, cells, missing = row(network, batch, limit_s)
    table_rows = [cells]
    if rates["single"] is not None:
        _, cells, more = row(network, LARGER * batch, limit_s)
        table_rows.append(cells)
        missing += more
    for numerator, denominator in SMALLER:
        if all(rates[solver] is not None for solver in (*RIVALS, "netsplit")):
            break
        rates, cells, _ = row(network, batch * numerator // denominator, limit_s)
        table_rows.append(cells)
    return table_rows, missing


def described(network: Network) -> list[str]:
    """A network beside the thesis's, with the throughput of each planner there."""
    published = PUBLISHED[network.name]
    graph = network.model(128).graph
    parameters = sum(p.bytes for p in graph.parameters if p.trainable) // 4
    return [
        network.name, f"{len(graph.operators)}", f"{published.nodes}", f"{parameters / 1e6:.1f} M",
        f"{megabytes(graph):,.0f}", f"{published.megabytes:,}", f"{published.batch}",
        *(f"{rate:.2f}" for rate in published.throughput), percent(published.lead, 1),
    ]  # fmt: skip


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="s for each solver and row")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    names = options.networks.split(",")
    assert {*names} <= {*NETWORKS}
    known, throughputs, missing = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            network = Network(name, Path(folder))
            known.append(described(network))
            cells, reasons = rows(network, options.limit)
            throughputs += cells
            missing += reasons
    parts = {
        "networks": table(NETWORKS_HEAD, known),
        "throughput": table(THROUGHPUT_HEAD, throughputs),
        "missing": "\n".join(missing) or "All have a plan.",
        "machine": f"{machine()}; {options.limit:g} s for each solver and row",
    }
    for part, text in parts.items():
        print(f"\n{text}")
        if options.write:
            put(DOCUMENT, part, text)


if __name__ == "__main__":
    main()
