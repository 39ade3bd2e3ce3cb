"""Trainings whose replicas keep parameters, gradients and optimizer state in parts.

    torchrun --nproc-per-node N tests/support/shared_runs.py FOLDER

FOLDER/launches.json has the options of each launch by name, as `split_launches` has them. The model
is `counted_runs.tokens` of an odd width: parts are uneven, and over four devices one is empty.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.utils.data import TensorDataset

from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.solvers import SOLVERS
from tests.support import split_launches
from tests.support.builders import cluster, problem_of
from tests.support.counted_runs import NAMES, SAMPLES, lies, samples
from tests.support.split_plans import plan_of
from tests.support.split_profiles import FAST, profiled

HERE = "tests.support.shared_runs"
WIDTH, BATCH = 5, 3
LEFT = 43
"""Samples that make three steps of 12 and a shorter one of 6, where two replicas run together."""


def data():
    """For --data."""
    return TensorDataset(*samples())


def some():
    """For --data, with an end that makes no whole step."""
    x, y = samples()
    return TensorDataset(x[:LEFT], y[:LEFT])


def few():
    """For --eval-data: two microbatches and a third of one."""
    x, y = samples()
    return TensorDataset(x[:7], y[:7])


def one():
    """For --eval-data: a microbatch, which one replica runs."""
    x, y = samples()
    return TensorDataset(x[:BATCH], y[:BATCH])


def searched(model, count):
    """The stages of the antichain solver on four devices that have no room for a whole copy."""
    problem = problem_of(
        profiled(model), cluster([FAST] * 4, 1e9, 1e-7), count, measured_on=FAST,
        optimizer="momentum", device_memory=29_567, recompute="none",
    )  # fmt: skip
    return SOLVERS["antichain"](problem, 1.0).strategy.stages


BESIDE = " beside"
"""Behind the name of a strategy whose collectives run beside computations."""


def written(folder, name, model, strategy):
    """Writes a plan, and the same with collectives beside computations."""
    write_plan(plan_of(model, strategy, optimizer="momentum"), folder / f"{name}.json")
    stages = tuple(replace(one, prefetch=2**20, gathered_ahead=0) for one in strategy.stages)
    plan = plan_of(model, replace(strategy, stages=stages), optimizer="momentum")
    write_plan(plan, folder / f"{name}{BESIDE}.json")


def write(folder, model):
    """A strategy of each kind; gives the number of ranks of each."""
    names, count = tuple(one.name for one in model.graph.operators), SAMPLES // BATCH
    both = ((0,), (1,))

    def stage(operators, groups, warmup=1, **how):
        return Stage(operators, groups, warmup, how.pop("recompute", False), **how)

    whole = partial(stage, names)
    four = tuple((d,) for d in range(4))
    plans = {
        "replicas": [whole(both)],
        **{f"zero{level}": [whole(both, over=2, zero=level)] for level in (1, 2, 3)},
        "again": [whole(both, over=2, zero=3, recompute=True)],
        **{
            f"layers{level}": [
                whole(
                    both,
                    over=2,
                    zero=level,
                    recompute=True,
                    recomputed=(names[:2], names[2:4]),
                )
            ]
            for level in (1, 3)
        },
        # The first product is kept.
        "selected": [
            whole(both, over=2, zero=3, recompute=True, recomputed=((names[1], names[3]),))
        ],
        "mixed": [whole(both, over=2, zero=1, zero_of={"w1": 3, "words": 2, "g": 0})],
        "four": [whole(four, over=4, zero=3)],
        "hybrid": [whole(four, over=2, zero=3)],
        "searched": searched(model, count),
        "mesh": [whole(((0, 1), (2, 3)), sharding=lies(model, "classes"), over=2, zero=3)],
        **{
            f"pipeline{level}": [
                stage(names[:3], both, 2, over=2, zero=level),
                stage(names[3:], ((2,), (3,)), over=2, zero=level),
            ]
            for level in (1, 2, 3)
        },
    }
    ranks = {}
    for name, stages in plans.items():
        strategy = Strategy(tuple(stages), ScheduleName.ONE_F_ONE_B, count)
        written(folder, name, model, strategy)
        ranks[name] = sum(len(one.devices) for one in stages)
    return ranks


def write_split(folder, model):
    """Strategies of one replica on a mesh of two that splits samples, and lies in chunks."""
    names, count = tuple(one.name for one in model.graph.operators), SAMPLES // model.batch
    rows, cut = lies(model, "zero"), dict.fromkeys(NAMES, ("C",))
    lying = {"states": {"states": cut}, "gradients": {"states": cut, "gradients": cut},
             "parameters": {"parameters": cut}}  # fmt: skip
    for name, kinds in lying.items():
        sharding = replace(rows, **{"parameters": {}, **kinds})
        stage = Stage(names, ((0, 1),), 1, False, sharding)
        strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, count)
        written(folder, name, model, strategy)


if __name__ == "__main__":
    with ranks_leave_at_once():
        split_launches.main(Path(sys.argv[1]))
        sys.exit(0)
