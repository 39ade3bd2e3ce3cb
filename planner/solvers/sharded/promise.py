"""The order in which Megatron-LM's grid is tried: by the time of an iteration that can be told
before any rule is chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.artefacts.graph import Graph, parameters_by_name, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import has_rules
from planner.costs.operators import operator_times
from planner.costs.process_memory import least_reserve_bytes
from planner.costs.stage_memory import memory_of, own_limit_bytes
from planner.costs.transfers import transfer_s
from planner.costs.update import update_copies
from planner.solvers.segments import Again, recompute_choices
from planner.solvers.sharded.degrees import grid
from planner.solvers.sharded.layout import divisors, host_by_host
from planner.solvers.sharded.options import Megatron


class Promise(NamedTuple):
    """Smaller is more promising.

    Attributes:
        too_large: whether parameters and activations seem not to fit, with recomputation or
            without.
        iteration_s: about the time of an iteration.
    """

    too_large: bool
    iteration_s: float


def promises(
    problem: Problem, devices: Sequence[int], points: Sequence[tuple[int, int, int]]
) -> list[Promise]:
    """What each point (t, d, p) of the grid promises. Work and memory are shared out evenly,
    products of matrices add up what they make over a mesh, and replicas their gradients at the end.

    Args:
        devices: all, in the order in which groups are made of them.
    """
    profile = problem.profile
    trained = sum(one.bytes for one in profile.graph.parameters if one.trainable)
    kept = memory_of(profile, range(len(profile.operators))).kept_bytes
    summed = _summed_bytes(profile.graph)
    times = operator_times(problem, devices[0])
    forward_s, backward_s = float(times.forward_s.sum()), float(times.backward_s.sum())
    room = min(own_limit_bytes(problem, d) - least_reserve_bytes(problem, d) for d in devices)

    choices = recompute_choices(problem)

    def promise(t: int, d: int, p: int) -> Promise:
        replicas = max(n for n in divisors(d) if n <= problem.num_microbatches)
        rounds = problem.num_microbatches / replicas
        share = t * p * (d // replicas)  # of a microbatch that a device has
        held = trained / (t * p)
        static = held * (1 + update_copies(problem))
        # With one forward after one backward, the first stage keeps up to p microbatches. Of layers
        # that are run again only what they read is kept, which is little, and of those that wait in
        # the host's memory two.
        least = {Again.NOTHING: min(p, rounds), Again.STAGE: 1}
        fits = (one for one in choices if static + least.get(one, 0) * kept / share <= room)
        first = next(fits, None)
        short, recompute = first is None, first is None or first.reruns
        busy_s = ((1 + recompute) * forward_s + backward_s) / share
        # Forward and backward, each summand is sent and fetched. Latencies are left out: the number
        # of messages follows from rules that are not chosen yet.
        inside, summed_bytes = devices[:t], 4 * (1 - 1 / t) * summed / (p * (d // replicas))
        sums_s = transfer_s(problem.topology, inside, inside, summed_bytes, messages=0)
        last_bytes = 2 * (1 - 1 / replicas) * held
        last_s = transfer_s(problem.topology, devices, devices, last_bytes, messages=0)
        return Promise(short, (rounds + p - 1) * (busy_s + sums_s) + last_s)

    return [promise(*point) for point in points]


def best_promise(problem: Problem) -> Promise:
    """The best of the whole grid; without tensor degrees where the profile has no rules."""
    points = grid(problem, Megatron(tensor_degree=None if has_rules(problem.profile) else 1))
    return min(promises(problem, host_by_host(problem), points))


def _summed_bytes(graph: Graph) -> float:
    """About the bytes of a microbatch that are added up over a mesh in a forward pass. Of two
    products with weights in a row one adds up, and those that read the same tensor, such as
    queries, keys and values, add up once.
    """
    parameters, tensors = parameters_by_name(graph), tensors_by_name(graph)
    of_inputs: dict[str, int] = {}
    for operator in graph.operators:
        weights = (parameters[name] for name in operator.parameters)
        if operator.inputs and any(one.trainable and len(one.shape) > 1 for one in weights):
            read, made = operator.inputs[0], tensors[operator.outputs[0]].bytes
            if read in tensors:
                made = min(made, tensors[read].bytes)
            of_inputs[read] = max(made, of_inputs.get(read, 0))
    return sum(of_inputs.values()) / 2
