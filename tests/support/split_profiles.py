"""Profiles of small models with the rules of `split_models.lines`, and plans of them."""

from dataclasses import replace

from planner.artefacts.options import Optimizer
from planner.artefacts.profile import OperatorCost, SplitRule
from planner.solvers.registry import SOLVERS
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import mlp
from tests.support.split_models import BATCH, lines

FAST = unit_type(bandwidth=1e12)


def problem(profile, count=2, num_microbatches=2, bandwidth=1e9, **options):
    topology = cluster([FAST] * count, bandwidth, 1e-7)
    options = {"optimizer": Optimizer.ADAM, **options}
    return problem_of(profile, topology, num_microbatches, measured_on=FAST, **options)


def profiled(model, found=None):
    """A profile in which products take the most time, and reshaping next to none.

    Args:
        found: rules of every operator; None takes those by hand.
    """
    graph = model.graph
    costs = []
    for v, operator in enumerate(graph.operators):
        heavy = 8.0 if operator.type in ("MatMul", "Softmax", "Conv", "Einsum") else 1.0
        heavy = 1e-3 if operator.type in ("Reshape", "Transpose", "Flatten") else heavy
        by_hand = () if found else (SplitRule(line) for line in lines(model, operator)[1:])
        rules = found[v] if found else tuple(by_hand)
        outputs = operator.outputs
        costs.append(
            OperatorCost(operator.name, 1e-3 * heavy, 2e-3 * heavy, 0, 0,
                         10**9, 10**6, outputs, 0, rules=rules)
        )  # fmt: skip
    return replace(
        mlp(), graph=graph, operators=tuple(costs), microbatch_size=BATCH, dtype="float64"
    )


def planned(model, switches, count=2, num_microbatches=2):
    """The strategy of the solver `megatron` for a model."""
    given = problem(profiled(model), count, num_microbatches, switches=(switches,))
    return SOLVERS["megatron"](given, 1.0).strategy
