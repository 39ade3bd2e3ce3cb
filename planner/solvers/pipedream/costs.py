"""PipeDream's cost model, as the code of its optimizer computes it.

Symbols: states 0 .. S-1 (`states.pipedream_states`); T, P, Act (S,): time, parameter bytes and
activation bytes of everything at or before a state; O (S,): bytes of the outputs of a state's
augmented antichain. A range i..j costs X[j] - X[i-1] of each. A level of the hierarchy joins n
machines at B bytes per s; its machines are the groups of the level inside. A[i][j][m] is the least
time per minibatch of the range i..j on m machines:

    (1) not split       A = (c + 4 (m-1) p / (B m) / N) / m         `whole_s`
    (2) split behind k  A = max(A[i][k][m-m'], last stage, (3))
        last stage      (c + 4 (m'-1) p / (B m')) / m'              `last_s`
    (3) transfers, only where a compression ratio is given:         `transfer_s`
                        2 O[k] / (B m') / ratio, and for j < S-1 the same with O[j]
    (4) in flight       ceil((n - m) / m') times activations and parameters of the last stage
                        must not exceed the memory                  `stashed`
    (5) next level      c[i][j] = A[i][j][n], p stays               `solve.py`
    (6) data parallel   t = (t + 4 (n-1) P / (B n) / N) / n, level by level   `data_parallel_s`

N is the number of machines of the level inside, 1 at the innermost: (1) and (6) take it that so
many links work at once, (2) does not.

Where the paper (Narayanan et al., SOSP 2019, section 3.1) differs: it takes the larger of
computation and synchronisation where the code takes the sum, and it always counts transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.topology import Level
from planner.costs.operators import operator_times
from planner.solvers.pipedream.states import States, bit_matrix
from planner.support.arrays import Floats


def whole_s(
    compute_s: float, parameter_bytes: float, machines: int, bandwidth: float, inside: int
) -> float:
    """(1) Time per minibatch of a range that is not split, in s.

    Args:
        compute_s: c, of the range on one machine.
        parameter_bytes: p, of the range.
        machines: m, that share the minibatches.
        bandwidth: B, in bytes per s.
        inside: N, machines of the level inside.

    >>> whole_s(4.0, 100.0, 2, 100.0, 1)
    3.0
    """
    synchronisation = 4 * (machines - 1) * parameter_bytes / (bandwidth * machines) / inside
    return (compute_s + synchronisation) / machines


def last_s(compute_s: float, parameter_bytes: float, machines: int, bandwidth: float) -> float:
    """(2) Time per minibatch of the last stage of a split, in s; arguments as `whole_s`.

    >>> last_s(4.0, 100.0, 2, 100.0)
    3.0
    """
    synchronisation = 4 * (machines - 1) * parameter_bytes / (bandwidth * machines)
    return (compute_s + synchronisation) / machines


def transfer_s(output_bytes: float, machines: int, bandwidth: float, ratio: float) -> float:
    """(3) Time per minibatch to send activations and their gradients over a cut, in s.

    Args:
        output_bytes: O of the state in front of the cut.
        machines: m', of the stage behind the cut.
        bandwidth: B, in bytes per s.
        ratio: by how much activations are compressed; 1 is not at all.

    >>> transfer_s(100.0, 2, 100.0, 1.0)
    1.0
    """
    return 2.0 * output_bytes / (bandwidth * machines) / ratio


def stashed(num_machines: int, used: int, replicas: int) -> int:
    """(4) For how many minibatches a stage keeps activations and parameters, by PipeDream's count.

    Args:
        num_machines: n, of the level.
        used: m, machines for the stage and all before it.
        replicas: machines of the stage.

    >>> stashed(8, 2, 2), stashed(8, 5, 2), stashed(8, 8, 3)
    (3, 2, 0)
    """
    return -((used - num_machines) // replicas)


def in_flight(machines: int, replicas: int) -> int:
    """Minibatches in flight on each replica of a stage (the paper's NOAM).

    Args:
        machines: of this stage and all behind it.
        replicas: of this stage.

    >>> in_flight(4, 1), in_flight(4, 3), in_flight(1, 1)
    (4, 2, 1)
    """
    return -(-machines // replicas)


@dataclass(frozen=True, slots=True)
class StateCosts:
    """What comes at or before each state, (S,) each.

    Attributes:
        compute_s: T, forward and backward of one minibatch, in s.
        parameter_bytes: P, of trained parameters; one that operators share counts for each.
        activation_bytes: Act, what operators put out.
        output_bytes: O, what the state's augmented antichain puts out.
    """

    compute_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    output_bytes: Floats


def state_costs(problem: Problem, states: States, operators: Sequence[int]) -> StateCosts:
    """The costs of PipeDream's states.

    Args:
        states: of the graph that `operators` form.
        operators: per node of the states, its index in the problem's graph.
    """
    graph, times = problem.profile.graph, operator_times(problem, 0)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    chosen = [graph.operators[v] for v in operators]
    held = [[parameters[name] for name in one.parameters] for one in chosen]
    per_node = np.array(
        [
            [times.forward_s[v] + times.backward_s[v] for v in operators],
            [sum(p.bytes for p in own if p.trainable) for own in held],
            [sum(tensors[name].bytes for name in one.outputs) for one in chosen],
        ]
    )
    inside = bit_matrix(states.downsets, len(operators)).astype(np.float64)
    compute_s, parameter_bytes, activation_bytes = (inside @ per_node.T).T
    outputs = [float(per_node[2, list(antichain)].sum()) for antichain in states.antichains]
    return StateCosts(compute_s, parameter_bytes, activation_bytes, np.array(outputs))


def data_parallel_s(costs: StateCosts, levels: Sequence[Level]) -> float:
    """(6) Time per minibatch of the whole model on all machines, in s.

    Args:
        levels: innermost first.
    """
    time_s, inside = float(costs.compute_s[-1]), 1
    for level in levels:
        time_s = whole_s(
            time_s,
            float(costs.parameter_bytes[-1]),
            level.count,
            level.bandwidth_bytes_per_s,
            inside,
        )
        inside = level.count
    return time_s


@dataclass(frozen=True, slots=True)
class StageReport:
    """A stage of the flat pipeline, as PipeDream's cost model sees it.

    Attributes:
        devices: indices into the topology.
        num_operators: that it runs.
        replicas: per level, innermost first; their product is the number of devices.
        compute_s: computation per minibatch over the replicas, in s.
        synchronisation_s: of the stage's parameters at the innermost level, and at each other
            level of all stages that are replicated there as one, in s per minibatch.
        transfer_s: the longer of the transfers over the cuts in front of and behind it, in s per
            minibatch; whether it counts says `PipeDreamReport.transfers_counted`.
        antichain: operators of the augmented antichain before which the stage was split off; none
            for the first stage.
        in_flight: minibatches in flight on each replica, by PipeDream's rule.
    """

    devices: tuple[int, ...]
    num_operators: int
    replicas: tuple[int, ...]
    compute_s: float
    synchronisation_s: float
    transfer_s: float
    antichain: tuple[str, ...]
    in_flight: int


def _speedup(before_s: float, after_s: float) -> float:
    """How many times faster; 1 where there is nothing to do."""
    return before_s / after_s if after_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class PipeDreamReport:
    """What PipeDream's optimizer says of its plan.

    Attributes:
        objective_s: time per minibatch of its plan, in s: the slowest stage.
        single_s: time per minibatch of the whole model on one machine, in s.
        data_parallel_s: time per minibatch of data parallelism on all machines, in s.
        transfers_counted: whether transfers count in the objective.
        num_states: S.
        unused_devices: indices of the devices that it leaves out.
        stages: in the order of the flow.
    """

    objective_s: float
    single_s: float
    data_parallel_s: float
    transfers_counted: bool
    num_states: int
    unused_devices: tuple[int, ...]
    stages: tuple[StageReport, ...]

    @property
    def pipeline_speedup(self) -> float:
        """Of the plan over a single machine."""
        return _speedup(self.single_s, self.objective_s)

    @property
    def data_parallel_speedup(self) -> float:
        """Of data parallelism over a single machine."""
        return _speedup(self.single_s, self.data_parallel_s)

    @property
    def advantage(self) -> float:
        """Of the plan over data parallelism."""
        return _speedup(self.data_parallel_s, self.objective_s)
