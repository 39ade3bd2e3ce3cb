"""Plans whose operators are split, by name: what benchmarks draw from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.artefacts.problem import Problem, Result
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import Topology
from planner.solvers.sharded import megatron, zero
from planner.solvers.sharded.options import Megatron, Zero
from tests.support.builders import changed

TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class Kind:
    """A way to split a model.

    Attributes:
        solve: the solver that gives the strategy.
        switches: its options.
        whole_states: whether the strategy's states, gradients and parameters are made whole again.
    """

    solve: Callable[[Problem, float], Result]
    switches: Megatron | Zero
    whole_states: bool = False


def _tensor(data: int = 1, stages: int = 1, *, sequence: bool = False) -> Kind:
    return Kind(megatron.solve, Megatron(2, data, stages, sequence))


# By number of ranks.
KINDS: Mapping[int, Mapping[str, Kind]] = {
    2: {
        "tensor": _tensor(),
        "sequence": _tensor(sequence=True),
        "data": Kind(zero.solve, Zero(1), whole_states=True),
        "zero1": Kind(zero.solve, Zero(1)),
        "zero2": Kind(zero.solve, Zero(2)),
        "zero3": Kind(zero.solve, Zero(3)),
    },
    4: {
        "tensor-pipeline": _tensor(stages=2),
        "sequence-pipeline": _tensor(stages=2, sequence=True),
        "tensor-replicas": _tensor(data=2),
    },
}


def split_plan(
    profile: Profile, topology: Topology, name: str, options: dict[str, Any]
) -> tuple[Problem, Strategy] | None:
    """The problem and the strategy of a kind; None where the model has no plan of this kind that
    splits anything.

    Args:
        profile: one with rules.
        topology: as many devices as the kind needs.
        name: of the kind.
        options: the solver's own are added.
    """
    kind = KINDS[len(topology.devices)][name]
    problem = changed(Problem(profile, topology, **options), switches=(kind.switches,))
    strategy = kind.solve(problem, TIME_LIMIT_S).strategy
    if strategy is None:
        return None
    if kind.whole_states:
        strategy = replace(strategy, stages=tuple(
            replace(stage, sharding=replace(stage.sharding, states={}))
            if stage.sharding is not None else stage
            for stage in strategy.stages
        ))  # fmt: skip
    splits = any(stage.sharding is not None and stage.sharding.rules for stage in strategy.stages)
    return (problem, strategy) if splits else None
