"""The cases of `tests.bench.solvers`. Each one runs in a process of its own, so that its peak of
memory is its own, and prints JSON:

    python -m tests.bench.cases pipedream
    python -m tests.bench.cases wide inception_v1

Times are CPU seconds of a warm process: kernels are loaded, but the planner's caches are cleared
before each run. Cases that take seconds run once, the others three times.
"""

import json
import re
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from planner.artefacts.files import read_profile, shipped, write_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import predecessors
from planner.artefacts.options import Objective, Recompute
from planner.artefacts.problem import Options, Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.clusters.yaml.read import device_table, find_topology, read_topology
from planner.costs.evaluate import evaluate
from planner.planning.judge import judge
from planner.planning.other_cost_models import ForeignModel, ForeignOptions, solve_profile
from planner.solvers import SOLVERS
from planner.solvers.dnn_partitioning import costs as dnn_partitioning
from planner.solvers.dnn_partitioning.solve import split
from planner.solvers.graphs.downsets import count_downsets
from planner.solvers.pipedream.solve import optimum
from planner.solvers.piper import costs as piper
from planner.solvers.piper.equal import equal_stages
from planner.solvers.piper.solve import plan
from tests.support import reference
from tests.support.builders import graph_of, hierarchy, problem_of, profile_of
from tests.support.scale import deep_profile, regular_cluster
from tests.support.wide import wide_profile

RUNS = 3
# Downsets of wide graphs are counted up to this number.
MAX_DOWNSETS = 100_000


def forget():
    """Clears the caches of all functions of the planner."""
    for name, module in list(sys.modules.items()):
        if name.startswith("planner"):
            for thing in vars(module).values():
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()


def timed(solve, runs=RUNS):
    """The median CPU time in s, and the answer."""
    times_s = []
    for _ in range(runs):
        forget()
        begin = time.process_time()
        answer = solve()
        times_s.append(time.process_time() - begin)
    return statistics.median(times_s), answer


def tiny():
    """A problem that every compiled solver answers at once."""
    graph = graph_of([[v - 1] if v else [] for v in range(4)])
    return problem_of(profile_of(graph, [1e-3] * 4), hierarchy([2]), num_microbatches=8)


FIRST = {
    "pipedream": optimum,
    "dnn-partitioning": lambda p: solve_profile(p, ForeignModel.DNN_PARTITIONING, ForeignOptions()),
    "piper": lambda p: solve_profile(p, ForeignModel.PIPER, ForeignOptions()),
    "antichain": lambda p: SOLVERS["antichain"](p, 10.0),
}


def first(solver):
    """CPU time of the first call, and of all imports before it."""
    imports_s, problem = time.process_time(), tiny()
    begin = time.process_time()
    FIRST[solver](problem)
    return {"imports_s": imports_s, "first_s": time.process_time() - begin}


# -------------------------------------------------------------------------------- the references


def _row(row, ours_s, objective):
    """objective: in the unit of expected.csv; None if there is no plan."""
    expected = float(row["objective"])
    infeasible = row["status"] == "infeasible"
    if infeasible or objective is None:
        difference = 0.0 if infeasible and objective is None else None
    else:
        difference = objective / expected - 1
    return {
        "instance": row["instance"].rpartition("/")[2],
        "algorithm": row["algorithm"].removeprefix("hierarchical_dp/"),
        "config": row["config"],
        "reference_s": float(row["cpu_s"]),
        "ours_s": ours_s,
        "objective": objective,
        "expected": None if infeasible else expected,
        "difference": difference,
    }


def pipedream():
    FIRST["pipedream"](tiny())
    rows = []
    for row in reference.rows("pipedream"):
        if row["status"] == "ok":
            problem = reference.pipedream_problem(row)
            ours_s, answer = timed(lambda problem=problem: optimum(problem))
            rows.append(_row(row, ours_s, answer.report and answer.report.objective_s))
    return {"rows": rows}


def dnn():
    FIRST["dnn-partitioning"](tiny())
    rows = []
    for row in reference.rows("dnn-partitioning"):
        if row["algorithm"] == "dp":
            graph = reference.dnn_graph(row["instance"])
            ours_s, answer = timed(lambda g=graph: split(g, g.num_devices, g.memory_bytes))
            loads = [dnn_partitioning.load_s(graph, s.nodes, cpu=s.cpu) for s in answer.stages]
            rows.append(_row(row, ours_s, 1e3 * max(loads) if loads else None))
    return {"rows": rows}


def piper_rows():
    FIRST["piper"](tiny())
    rows = []
    for row in reference.rows("piper"):
        graph, options = reference.piper_graph(row["instance"]), reference.piper_options(row)
        solve = equal_stages if row["algorithm"] == "2bw" else plan
        ours_s, answer = timed(lambda s=solve, g=graph, o=options: s(g, o))
        rows.append(_row(row, ours_s, _piper_s(graph, options, answer)))
    return {"rows": rows}


def _piper_s(graph, options, piper_plan):
    """The largest time of a stage per sample; None without a plan."""
    times = []
    for stage in piper_plan.stages:
        ways = [graph.nodes[v].tmpcs[str(stage.tensor_parallel)] for v in stage.layers]
        chosen = [way[x] for way, x in zip(ways, stage.tmpcs, strict=True)]
        figures = piper.stage_figures(
            graph, stage.layers, chosen, options.batch, options.bandwidth_bytes_per_s
        )
        times.append(figures.time_s(stage.data_parallel))
    return max(times, default=None)


# -------------------------------------------------------------------------------- wide graphs

ETHERNET = """\
format: planner-topology/1
name: ethernet
device: V100-SXM2-16GB
levels: [{{name: host, count: {count}, bandwidth: 10 Gbps, latency: 20 us}}]
"""
# Objective, and microbatches per device.
ASKED = ((Objective.ITERATION, 4), (Objective.ITERATION, 32), (Objective.BOTTLENECK, 4))
SETTINGS = ("NVLink", "10 Gbps", "NVLink, 60 % of the memory")


def preset(count):
    """An NVLink machine with a number of V100."""
    return read_topology(find_topology({4: "p3-8xlarge.yaml", 8: "p3.yaml"}[count]))


def ethernet(count):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ethernet.yaml"
        path.write_text(ETHERNET.format(count=count))
        return read_topology(path)


def wide_problem(profile, setting, count, objective, per_device):
    """One of the settings: fast links, slow ones, or 60 % of the memory that data parallelism
    needs and no recomputation.
    """
    topology = ethernet(count) if setting == "10 Gbps" else preset(count)
    options = Options(per_device * count, objective=objective)
    problem = Problem(profile, topology, options, device_table()["V100-SXM2-16GB"])
    if "memory" not in setting:
        return problem
    everything = tuple(o.name for o in profile.graph.operators)
    replicated = Strategy(
        (Stage.whole(everything, tuple(range(count)), 1, False),),
        ScheduleName.ONE_F_ONE_B,
        options.num_microbatches,
    )
    bare = replace(problem, options=replace(options, reserve_bytes=0, recompute=Recompute.NONE))
    needed = evaluate(bare, replicated).memory[0].total_bytes
    return replace(
        bare, options=replace(bare.options, device_memory_bytes=int(0.6 * needed))
    )  # fmt: skip


def wide(name):
    """The antichain solver on a wide graph."""
    FIRST["antichain"](tiny())
    profile, rows = wide_profile(name), []
    for setting in SETTINGS:
        for count in (4, 8):
            cells = [
                _antichain(wide_problem(profile, setting, count, *asked), 1) for asked in ASKED
            ]  # fmt: skip
            rows.append({"graph": name, "setting": setting, "devices": count, "asked": cells})
    downsets = count_downsets(predecessors(profile.graph), MAX_DOWNSETS)
    return {"rows": rows, "operators": len(profile.operators), "downsets": downsets}


def _antichain(problem, runs=RUNS):
    ours_s, result = timed(lambda: SOLVERS["antichain"](problem, 10.0), runs)
    figures = {"ours_s": ours_s, "status": result.status.value, "gap": None}
    seen = re.search(r"\((\d+) downsets\)", result.space)
    figures["downsets"] = int(seen[1]) if seen else None
    made, _ = judge(problem, "antichain", result) if result.strategy else (
        None, None)  # fmt: skip
    if made is not None:
        iteration = problem.options.objective is Objective.ITERATION
        told = made.prediction
        figures |= {
            "gap": made.certificate.gap,
            "stages": len(made.strategy.stages),
            "closed_s": told.closed_form_s if iteration else told.bottleneck_s,
            "simulated_s": told.iteration_s if iteration else told.bottleneck_s,
        }
    return figures


def wide_foreign(name):
    """A wide graph under dnn-partitioning's cost model."""
    FIRST["dnn-partitioning"](tiny())
    profile, rows = wide_profile(name), []
    for count in (4, 8):
        problem = wide_problem(profile, "NVLink", count, Objective.BOTTLENECK, 4)
        ours_s, answer = timed(
            lambda p=problem: solve_profile(p, ForeignModel.DNN_PARTITIONING, ForeignOptions()), 1
        )
        best, single = answer.rows
        rows.append(
            {
                "graph": name, "devices": count, "ours_s": ours_s, "status": best.status.value,
                "load_s": best.bottleneck_s, "single_s": single.bottleneck_s,
            }
        )  # fmt: skip
    return {"rows": rows}


def exact(name, setting, count, asked):
    """The same question with all downsets and by default, each once."""
    FIRST["antichain"](tiny())
    problem = wide_problem(wide_profile(name), setting, int(count), *ASKED[int(asked)])
    whole = replace(problem, options=replace(problem.options, exact=True))
    return {"default": _antichain(problem, 1), "exact": _antichain(whole, 1)}


# -------------------------------------------------------------------------------- profiles, scale


def profiles():
    """The antichain solver on the profiles that come with the planner."""
    FIRST["antichain"](tiny())
    rows = []
    for path in sorted(shipped("profiles").glob("*.json")):
        profile = read_any_profiles(path)[-1]
        measured_on = device_table().get(profile.device_type)
        for count in (4, 8):
            problem = Problem(profile, preset(count), Options(4 * count), measured_on)
            rows.append(
                {
                    "profile": path.stem, "microbatch": profile.microbatch_size,
                    "operators": len(profile.operators), "devices": count, **_antichain(problem),
                }
            )  # fmt: skip
    return {"rows": rows}


def deep(folder, *layers):
    """Writes profiles of deep transformers; their numbers of operators."""
    sizes = []
    for count in layers:
        profile = deep_profile(int(count))
        write_profile(profile, Path(folder) / f"{count}.json")
        sizes.append(len(profile.operators))
    return {"operators": sizes}


def cluster(folder, *hosts):
    """Writes topologies of hosts with 8 GPUs."""
    for count in hosts:
        (Path(folder) / f"{count}.yaml").write_text(regular_cluster(int(count)))
    return {}


def scale(profile, topology):
    """The antichain solver on files of the two before."""
    FIRST["antichain"](tiny())
    profile, topology = read_profile(Path(profile)), read_topology(Path(topology))
    options = Options(4 * len(topology.devices))
    problem = Problem(profile, topology, options, device_table()[profile.device_type])
    ours_s, result = timed(lambda: SOLVERS["antichain"](problem, 10.0), 1)
    return {"ours_s": ours_s, "status": result.status.value}


CASES = {
    "first": first, "pipedream": pipedream, "dnn-partitioning": dnn, "piper": piper_rows,
    "wide": wide, "wide-foreign": wide_foreign, "exact": exact, "profiles": profiles,
    "deep": deep, "cluster": cluster, "scale": scale,
}  # fmt: skip


def main():
    _, name, *arguments = sys.argv
    result = CASES[name](*arguments)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**result, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()
