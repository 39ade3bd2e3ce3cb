"""Actions per second of the simulator; one change simulated again (10 minutes).

    python -m tests.bench.simulate            actions per second by length and by links
    python -m tests.bench.simulate --delta    one strategy after another, against full simulations

CPU seconds of one core, medians, kernels compiled; `docs/simulator.md` explains them.
"""

import argparse
import random
import statistics
import time
from functools import cache

import numpy as np

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.problem import Options, Problem
from planner.artefacts.strategy import crossings, shares_devices
from planner.artefacts.topology import Sharing, take
from planner.clusters.yaml.read import device_table, find_topology, read_topology
from planner.schedules import rules_kernels
from planner.schedules.dependencies import dependencies, tasks
from planner.schedules.program import program
from planner.schedules.tasks import Crowds
from planner.simulator.delta import simulated
from planner.simulator.events import prepared, run, workload
from planner.solvers import SOLVERS
from tests.simulator.test_events import costs
from tests.support.moves import operator_moves, replication_moves, with_devices, with_operator
from tests.support.programs import chain, hosts, mesh, split, with_sharing

RUNS = 5
# (stages, replicas of each, microbatches): about 10,000, 100,000 and 1,000,000 actions.
LENGTHS = ((8, 1, 230), (64, 1, 262), (64, 1, 2640), (16, 4, 11000))
# Devices, and the preset that has them.
CLUSTERS = ((4, "p3-8xlarge"), (8, "p3"), (16, "dgx-a100-x4"), (32, "dgx-a100-x4"))
MODELS = ("resnet50", "bert-large-a100", "gpt2-medium-a100", "llama7b-a100")
MOVES = 20


def seconds(what, runs=RUNS):
    """Median of CPU seconds."""
    taken = []
    for _ in range(runs):
        begin = time.process_time()
        what()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


# -------------------------------------------------------------------------------- speed


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


# -------------------------------------------------------------------------------- delta


@cache
def profile_of(model):
    """A shipped profile; the same object each time, as in one run of the planner."""
    return read_any_profiles(shipped("profiles") / f"{model}.json")[-1]


def problem_of(model, count, preset, sharing=Sharing.EXCLUSIVE):
    """A shipped profile on the first devices of a preset, four microbatches for each."""
    profile = profile_of(model)
    topology = with_sharing(take(read_topology(find_topology(preset)), count), sharing)
    options = Options(4 * count, device_memory_bytes=10**15)
    return Problem(profile, topology, options, device_table().get(profile.device_type))


def starts(problem, count):
    """Even pipelines with a device for each stage, and with one left free for each four."""
    pipelines = []
    for stages in (count, max(2, count * 3 // 4)):
        part = Problem(
            problem.profile, take(problem.topology, stages), problem.options, problem.measured_on
        )
        result = SOLVERS["even"](part, 10.0)
        if result.strategy is not None and not shares_devices(result.strategy):
            pipelines.append(result.strategy)
    return pipelines


def moves(draw, problem, strategy, kind):
    """A strategy that differs in one decision of a kind; None where there is none."""
    graph = problem.profile.graph
    if kind == "replication":
        some = replication_moves(strategy, len(problem.topology.devices))
        return with_devices(strategy, *draw.choice(some)) if some else None
    some = operator_moves(strategy, graph, neighbours=kind == "neighbour")
    if kind == "device":
        some = [one for one in some if one not in operator_moves(strategy, graph, neighbours=True)]
    return with_operator(strategy, graph, *draw.choice(some)) if some else None


def full(problem, strategy):
    """From scratch; nothing is kept of earlier simulations of this strategy."""
    crossings.cache_clear()
    dependencies.cache_clear()
    return simulated(problem, strategy)


def changed_share(before, after):
    """The share of actions whose times differ; None where the lists are not equally long."""
    if before.times.code.kind.shape != after.times.code.kind.shape:
        return None
    same = (before.times.start_s == after.times.start_s) & (before.times.end_s == after.times.end_s)
    return 1.0 - float(np.mean(same))


def deltas(models, clusters, kinds=("neighbour", "device", "replication")):
    """A table of models and devices: a chain of changes of each kind, every one accepted."""
    print(
        "| model | devices | actions | change | full, ms | delta, ms | ratio | loop, ms | changed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in models:
        for count, preset in clusters:
            problem = problem_of(model, count, preset)
            for kind in kinds:
                rows = list(chained(problem, count, kind))
                if rows:
                    report(model, count, kind, rows)


def chained(problem, count, kind):
    """(actions, s in full, s by delta, s in the event loop, share that changed) of each change."""
    draw = random.Random(0)
    for strategy in starts(problem, count):
        now = simulated(problem, strategy)
        for _ in range(MOVES):
            new = moves(draw, problem, now.strategy, kind)
            if new is None:
                break
            whole_s = seconds(lambda new=new: full(problem, new), 3)
            after = now.moved(new)
            delta_s = seconds(lambda now=now, new=new: now.moved(new), 3)
            yield (
                len(after.times.code),
                whole_s,
                delta_s,
                loop_s(problem, after),
                changed_share(now, after),
            )
            now = after


def loop_s(problem, result):
    """CPU seconds of the event loop alone."""
    code = result.program.code
    known, work = prepared(code, problem.topology), workload(code, result.costs)
    members = result.program.members
    job = tasks(code, known.dependencies, members, work.duration_s, work.size_bytes)
    crowds = Crowds(work.crowd, work.slowdown)
    return seconds(lambda: rules_kernels.run(job, known.paths, crowds), 3)


def report(model, count, kind, rows):
    """One line: medians over the changes."""
    size, whole_s, delta_s, events_s, changed = zip(*rows, strict=True)
    shares = [one for one in changed if one is not None]
    ratio = statistics.median(w / d for w, d in zip(whole_s, delta_s, strict=True))
    cells = (
        model, count, f"{statistics.median(size):,.0f}", kind,
        f"{1e3 * statistics.median(whole_s):.2f}", f"{1e3 * statistics.median(delta_s):.2f}",
        f"{ratio:.1f}", f"{1e3 * statistics.median(events_s):.2f}",
        f"{statistics.mean(shares):.0%}" if shares else "-",
    )  # fmt: skip
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delta", action="store_true", help="one strategy after another")
    parser.add_argument("--model", choices=MODELS, help="of --delta; all by default")
    options = parser.parse_args()
    if options.delta:
        deltas([options.model] if options.model else MODELS, CLUSTERS)
    else:
        speeds()


if __name__ == "__main__":
    main()
