"""Closed forms and estimates of plans beside the simulator (3 minutes).

    python -m tests.bench.estimates [--count 200] [--seed 0]

Plans are drawn (tests/support/split_pipelines.py): pipelines of whole operators, and those with
stages that are split or keep parts over replicas, of few and of very many microbatches. Others are
those of solvers, with all from which the judge chooses. Errors are relative to the simulator.
"""

import argparse
import random
from collections import defaultdict
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import in_parts
from planner.costs.closed_form import iteration_s
from planner.costs.evaluate import priced
from planner.schedules.program import program
from planner.simulator.estimate import ERROR, estimated_iteration_s
from planner.simulator.events import run
from planner.solvers.registry import SOLVERS
from tests.support.split_pipelines import CASES, LONG, SHORT, random_pipeline, shipped_problem

ASKED = ("data-parallel", "even", "antichain", "zero", "megatron")
LIMIT_S = 10.0


def drawn(count, seed):
    """Kinds, problems and strategies: for each kind, a number of plans over all cases in turn."""
    rng = random.Random(seed)
    for name, counts, whole in (
        ("whole", SHORT, True),
        ("parts", SHORT, False),
        ("parts, very long", LONG, False),
    ):
        for case in islice(cycle(CASES), count):
            problem, strategy = random_pipeline(
                shipped_problem(*case), rng, counts=counts, whole=whole
            )
            stages = "a stage" if len(strategy.stages) == 1 else "a pipeline"
            yield f"{name}: {stages}", problem, strategy


def solved():
    """The strategies of solvers on all cases."""
    for case in CASES:
        base = shipped_problem(*case)
        training = replace(base.training, optimizer=Optimizer.ADAMW)
        problem = replace(base, num_microbatches=64, training=training)
        for name in ASKED:
            result = SOLVERS[name](problem, LIMIT_S)
            for strategy in () if result.strategy is None else (result.strategy, *result.others):
                parts = "parts" if any(map(in_parts, strategy.stages)) else "whole"
                yield f"{name}: {parts}", problem, strategy


def errors_of(problem, strategy):
    """Of the closed form and of the estimate."""
    known = priced(problem, strategy)
    lists = program(strategy, problem.profile.graph, known.times)
    simulated_s = run(lists, known.costs, problem.topology).iteration_s
    closed_s = iteration_s(known.stages, strategy.num_microbatches, strategy.schedule)
    return closed_s / simulated_s - 1, estimated_iteration_s(problem, strategy) / simulated_s - 1


def main():
    """Prints a row for each kind of plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="plans of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = defaultdict(list)
    for plans in (drawn(options.count, options.seed), solved()):
        for kind, problem, strategy in plans:
            found[kind].append(errors_of(problem, strategy))
    head = f"within {ERROR:.0%}", "95 %", "least", "most"
    print(f"{'':28}{'plans':>6}", *(f"{one:>12}" for one in (*head, *head)))
    for kind, rows in sorted(found.items()):
        cells = [
            cell
            for errors in np.array(rows).T
            for cell in (
                f"{(abs(errors) <= ERROR).mean():.1%}",
                f"{np.quantile(abs(errors), 0.95):.2%}",
                f"{errors.min():+.2%}",
                f"{errors.max():+.2%}",
            )
        ]
        print(f"{kind:28}{len(rows):>6}", *(f"{one:>12}" for one in cells))


if __name__ == "__main__":
    main()
