"""Kinds trained on two devices, as a pipeline of two stages and with split operators; in float64
where they can be.

`trials` exports and plans every kind, trains all plans in one start of two ranks, which runs this
file, and compares with PyTorch's loop.
"""

import json
import os
import random
import sys
import warnings
from pathlib import Path
from zlib import crc32

import torch

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.graph import joint_operators, predecessors
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.profilers.rules import split_rules
from planner.schedules.orders import default_warmups
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.gradient_kinds import KINDS
from tests.support.gradient_kinds.kind import Outcome
from tests.support.gradient_kinds.trial import (
    NUM_MICROBATCHES,
    Trained,
    Trial,
    batches,
    build,
    by_torch,
    compared,
    feeding_of,
    joined,
    last_of,
    refused,
    within,
)
from tests.support.ranks import forked
from tests.support.split_plans import random_sharding
from tests.support.zoo import draws

PLANS = ("pipeline", "tensor")
OPTIMIZER = "sgd"


def trials(names, folder):
    """What came of each plan of some kinds, by (name, plan); by (name, "export") of those that are
    refused there.

    Args:
        folder: an empty one, for the files.
    """
    refusals = {name: _prepared(name, KINDS[name], folder) for name in names}
    left = [name for name in names if refusals[name] is None]
    (folder / "names.json").write_text(json.dumps(left))
    forked(Path(__file__), 2, folder, folder=folder, timeout_s=60 + 20 * len(left))
    made = {(name, "export"): one for name, one in refusals.items() if one is not None}
    return made | {
        (name, plan): one
        for name in left
        for plan, one in _outcomes(name, KINDS[name], folder).items()
    }


def _prepared(name, kind, folder):
    """Writes the file of a kind and its two plans; gives the refusal instead where there is one."""
    own = folder / name
    own.mkdir(parents=True)
    with within(own), warnings.catch_warnings(action="ignore"):
        try:
            kind.prepare()
            exported = planner.export(*build(name, kind, kind.dtypes[-1]), "model.onnx")
            Path("notes.txt").write_text("; ".join(exported.notes))
            model = planner.read_model("model.onnx", output=kind.outputs, loss=kind.loss)
            profile = planner.profile(
                model, repetitions=1, budget_s=0.0, cache=False, contention=False
            )
            for plan, strategy in _strategies(name, model).items():
                options = asked(NUM_MICROBATCHES, optimizer=Optimizer(OPTIMIZER))
                topology = cluster([unit_type("cpu")] * 2, bandwidth=1e9)
                one = planned(Problem(profile, topology, **options), strategy)
                write_plan(one, Path(f"{plan}.json"))
        except planner.PlannerError as error:
            return refused(kind, error)
    return None


def _strategies(name, model):
    """A pipeline that is cut in the middle, and all operators by random rules on two devices."""
    names = tuple(operator.name for operator in model.graph.operators)
    warmups = default_warmups([1, 1], NUM_MICROBATCHES)
    stages = tuple(
        Stage.whole(some, (s,), warmups[s], False) for s, some in enumerate(halves(model.graph))
    )
    made = {"pipeline": Strategy(stages, ScheduleName.ONE_F_ONE_B, NUM_MICROBATCHES)}
    chance = random.Random(crc32(name.encode()))
    sharding = random_sharding(model, (2,), chance, rules=split_rules(model))
    stage = Stage(names, ((0, 1),), 1, False, sharding)
    return made | {"tensor": Strategy((stage,), ScheduleName.ONE_F_ONE_B, NUM_MICROBATCHES)}


def halves(graph):
    """The names of the operators of two stages, as equal as those allow that share state, which
    are in one stage.
    """
    num, before = len(graph.operators), predecessors(graph)
    shared = {v: one for one in joint_operators(graph) for v in one}

    def closed(operators):
        """With all that some operators need."""
        found, left = set(), [*operators]
        while left:
            v = left.pop()
            if v not in found:
                found.add(v)
                left += (*before[v], *shared.get(v, ()))
        return found

    cuts = (closed(range(v)) for v in range(1, num))
    first = min((one for one in cuts if len(one) < num), key=lambda one: abs(len(one) - num / 2))
    names = [(operator.name, v in first) for v, operator in enumerate(graph.operators)]
    return [tuple(name for name, early in names if early is which) for which in (True, False)]


def _outcomes(name, kind, folder):
    """What came of each plan of a kind."""
    with within(folder / name), warnings.catch_warnings(action="ignore"):
        made, dtype = torch.load("trained.pt", weights_only=False), kind.dtypes[-1]
        try:
            wanted = by_torch(name, kind, dtype, OPTIMIZER, feeding_of(kind, "pipeline.json"))
        except draws.OtherDrawsError as error:
            return dict.fromkeys(made, Trial(Outcome.DRAWS, text=str(error)))
        notes = Path("notes.txt").read_text()
        return {
            plan: Trial(Outcome(one["outcome"]), text=one["text"])
            if "outcome" in one
            else compared(name, kind, dtype, OPTIMIZER, Trained(**one, gradients={}), wanted, notes)
            for plan, one in made.items()
        }


def _trained(name, kind, plan):
    """Losses and the module's tensors after the steps; or why there are none."""
    try:
        rate = kind.rate[OPTIMIZER]
        with planner.trainer(f"{plan}.json", learning_rate=rate, threads=1) as trainer:
            losses = [trainer.step(joined(one)) for one in batches(name, kind, kind.dtypes[-1])]
            return {"losses": losses, "state": trainer.state_dict()}
    except planner.PlannerError as error:
        one = refused(kind, error)
        return {"outcome": str(one.outcome), "text": one.text}
    except Exception as error:  # whatever it is, it is in the table
        return {"outcome": str(Outcome.FAILED), "text": last_of(error)}


def main(folder):
    """Trains every plan of every kind in a folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in json.loads((folder / "names.json").read_text()):
        with within(folder / name):
            found = {plan: _trained(name, KINDS[name], plan) for plan in PLANS}
            if os.environ["RANK"] == "0":
                torch.save(found, "trained.pt")


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
