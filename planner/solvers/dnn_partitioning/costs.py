"""dnn-partitioning's cost model: the load of a device.

    load = sum of the times of its nodes
         + sum over the nodes whose output crosses the device's boundary of the cost to send it

An output crosses if some of its maker and its readers are on the device and others are not. It is
paid once by each device that it touches, however many readers it has there; transfers do not
overlap with computation, or with each other. A CPU of the host counts as a device of its own: it
has its own times, pays for no transfers, and its memory is not limited. The objective is the
largest load.

Source: Tarnawski et al., NeurIPS 2020, section 3 (throughput).
"""

from collections.abc import Collection

import numpy as np

from planner.artefacts.formats.dnn_partitioning import MILLI, DnnEdge, DnnGraph, DnnNode
from planner.artefacts.graph import consumers, parameters_by_name, producers, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import stash_bytes
from planner.artefacts.roofline import OperatorTimes
from planner.clusters.routes import pair_widths
from planner.costs.operators import operator_times
from planner.costs.stage_memory import static_bytes
from planner.support.memo import remembered


@remembered
def outputs(graph: DnnGraph) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Per node that is read: the cost to send its output, in ms, and the positions of the node
    and its readers, ascending.
    """
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    costs: dict[int, float] = {}
    touched: dict[int, set[int]] = {}
    for edge in graph.edges:
        u = at[edge.source]
        costs[u] = edge.cost_ms
        touched.setdefault(u, {u}).add(at[edge.dest])
    return tuple((costs[u], tuple(sorted(touched[u]))) for u in sorted(touched))


def compute_s(
    graph: DnnGraph, nodes: Collection[int], *, backward: bool, cpu: bool = False
) -> float:
    """Time of a device's forward or backward nodes, in s.

    Args:
        nodes: their positions in the file.
        backward: which of the two.
        cpu: whether the device is a CPU of the host.
    """
    chosen = [node for node in map(graph.nodes.__getitem__, nodes) if node.backward == backward]
    return MILLI * sum(node.cpu_time_ms if cpu else node.time_ms for node in chosen)


def transfer_s(graph: DnnGraph, nodes: Collection[int]) -> float:
    """Time of what crosses a device's boundary, in s; argument as `compute_s`."""
    inside = set(nodes)
    return MILLI * sum(
        cost
        for cost, touched in outputs(graph)
        if 0 < len(inside.intersection(touched)) < len(touched)
    )


def load_s(graph: DnnGraph, nodes: Collection[int], *, cpu: bool = False) -> float:
    """Load of a device, in s; arguments as `compute_s`."""
    computing = sum(compute_s(graph, nodes, backward=which, cpu=cpu) for which in (False, True))
    return computing + (0.0 if cpu else transfer_s(graph, nodes))


def memory_bytes(graph: DnnGraph, nodes: Collection[int]) -> float:
    """What a device's nodes occupy; argument as `compute_s`."""
    return sum(graph.nodes[v].size_bytes for v in nodes)


# -------------------------------------------------------------------------------- of a profile


def slowest_times(problem: Problem) -> OperatorTimes:
    """Times of the operators on the type of device of the topology that is slowest for each."""
    devices = {device.type: d for d, device in enumerate(problem.topology.devices)}
    by_type = [operator_times(problem, d) for d in devices.values()]
    return OperatorTimes(
        np.max([times.device_s for times in by_type], axis=0),
        np.max([times.host_s for times in by_type], axis=0),
    )


def slowest_bandwidth_bytes_per_s(problem: Problem) -> float:
    """Of all ordered pairs of devices; inf if there is one device."""
    _, bandwidth = pair_widths(problem.topology)
    return float(bandwidth.min())


def held_bytes(problem: Problem, operators: Collection[int]) -> int:
    """Parameters of some operators with their gradients and optimizer state."""
    graph = problem.profile.graph
    held = parameters_by_name(graph)
    names = {name for v in operators for name in graph.operators[v].parameters}
    trained = sum(held[name].bytes for name in names if held[name].trainable)
    total = sum(held[name].bytes for name in names)
    return static_bytes(total, trained, problem)


def as_dnn_graph(problem: Problem, num_devices: int, memory_bytes: int) -> DnnGraph:
    """A profile as dnn-partitioning sees it, for one microbatch on equal devices.

    An operator is a forward and a backward node of one color. Each of its outputs is a node of that
    color without time, whose cost is that of the tensor, and of its gradient if it has one, over
    the topology's slowest path; latencies are left out. Memory is that of parameters, gradients,
    optimizer state, and one microbatch's stash.
    """
    graph, times = problem.profile.graph, slowest_times(problem)
    tensors, read_by, made_by = tensors_by_name(graph), consumers(graph), producers(graph)
    rate = slowest_bandwidth_bytes_per_s(problem)
    nodes, edges = [], []
    for v, operator in enumerate(graph.operators):
        size = held_bytes(problem, (v,)) + stash_bytes(problem.profile, (v,))
        for w, (time_s, taken) in enumerate(((times.forward_s[v], size), (times.backward_s[v], 0))):
            time_ms = float(time_s) / MILLI
            nodes.append(
                DnnNode(2 * v + w, time_ms, time_ms, bool(w), True, operator.name, v, float(taken))
            )
    for name, v in made_by.items():
        if not read_by[name]:
            continue
        tensor, place = tensors[name], len(nodes)
        cost_ms = (1 + tensor.gradient) * tensor.bytes / rate / MILLI
        nodes.append(DnnNode(place, 0.0, 0.0, False, True, name, v))
        edges.append(DnnEdge(2 * v, place, 0.0))
        edges += [DnnEdge(place, 2 * w, cost_ms, float(tensor.bytes)) for w in read_by[name]]
    return DnnGraph(num_devices, 0, float(memory_bytes), tuple(nodes), tuple(edges))
