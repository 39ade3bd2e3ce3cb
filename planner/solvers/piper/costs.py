"""Piper's cost model: time per sample and memory of a stage that runs on d replicas of t devices.

With K devices, a stage takes t d of them, and each of its layers runs in one configuration of
degree t. Over the chosen configurations, with s the sum of the replicas d of this stage and of
all that follow:

    time   = sum of compute / d
             + (sum over the edges to other stages of 2 (bytes + sync) / d
                + sum of 4 (d - 1) / d parameters / batch) / bandwidth
    memory = sum of A ceil(s / d) + sum of B

d divides the batch, and no more samples are in flight than the batch has: s <= batch. The
objective is the largest stage time, in s per sample. The factor 4 is PipeDream's account of an
all-reduce.

Source: Tarnawski, Narayanan and Phanishayee, NeurIPS 2021, section 4. The functions are compiled
into `kernels.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.artefacts.formats.piper import (
    RECOMPUTED,
    VANILLA,
    PiperEdge,
    PiperGraph,
    PiperNode,
    Tmpc,
)
from planner.artefacts.graph import consumers, producers, tensors_by_name
from planner.artefacts.problem import Problem
from planner.costs.stage_memory import memory_of
from planner.solvers.dnn_partitioning.costs import (
    held_bytes,
    slowest_bandwidth_bytes_per_s,
    slowest_times,
)
from planner.solvers.graphs.coarsen import coarsen

# Number of downsets, roughly, of the blocks that a profile's operators are merged into.
_DOWNSETS = 64
# Instead of no limit: the bandwidth of one device to itself.
_FAST = 1e18


def stage_time_s(serial_s: float, sync_s: float, num_replicas: int) -> float:
    """Time of a stage per sample, in s.

    Args:
        serial_s: its computation and its transfers to other stages, on one replica.
        sync_s: 4 parameter bytes / batch / bandwidth.
        num_replicas: d.

    >>> stage_time_s(6.0, 4.0, 2)
    5.0
    """
    return serial_s / num_replicas + sync_s * (num_replicas - 1) / num_replicas


def transfer_s(edge_bytes: float, sync_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Time of an edge between stages, there and back, for one of its ends, in s."""
    return 2 * (edge_bytes + sync_bytes) / bandwidth_bytes_per_s


def sync_s(parameter_bytes: float, batch: int, bandwidth_bytes_per_s: float) -> float:
    """What data parallelism adds per sample with many replicas, in s."""
    return 4 * parameter_bytes / batch / bandwidth_bytes_per_s


def in_flight(replicas_to_the_end: int, num_replicas: int) -> int:
    """Samples in flight on a replica: ceil(s / d).

    Args:
        replicas_to_the_end: s, of this stage and all that follow.
        num_replicas: d.
    """
    return -(-replicas_to_the_end // num_replicas)


def memory_bytes(a_bytes: float, b_bytes: float, num_in_flight: int) -> float:
    """Memory of a stage on each device.

    Args:
        a_bytes: per sample in flight.
        b_bytes: besides.
        num_in_flight: see `in_flight`.
    """
    return a_bytes * num_in_flight + b_bytes


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Sums over the layers of a stage, in the configurations that were chosen.

    Attributes:
        compute_s: of one sample on one replica.
        transfer_s: to and from other stages, of one sample on one replica.
        sync_s: see `sync_s`.
        a_bytes: memory per sample in flight.
        b_bytes: memory besides.
    """

    compute_s: float
    transfer_s: float
    sync_s: float
    a_bytes: float
    b_bytes: float

    def time_s(self, num_replicas: int) -> float:
        """Time per sample."""
        return stage_time_s(self.compute_s + self.transfer_s, self.sync_s, num_replicas)

    def memory_bytes(self, num_replicas: int, replicas_to_the_end: int) -> float:
        """Memory on each device."""
        samples = in_flight(replicas_to_the_end, num_replicas)
        return memory_bytes(self.a_bytes, self.b_bytes, samples)


def stage_figures(
    graph: PiperGraph,
    layers: Sequence[int],
    tmpcs: Sequence[Tmpc],
    batch: int,
    bandwidth_bytes_per_s: float,
) -> StageFigures:
    """What the layers of a stage sum up to.

    Args:
        layers: their positions in the file.
        tmpcs: the configuration of each.
    """
    chosen = {graph.nodes[v].id: tmpc for v, tmpc in zip(layers, tmpcs, strict=True)}
    crossing = 0.0
    for edge in graph.edges:
        if edge.dest in chosen and edge.source not in chosen:
            sync = chosen[edge.dest].sync_forward_bytes[str(edge.source)]
            crossing += transfer_s(edge.bytes, sync, bandwidth_bytes_per_s)
        elif edge.source in chosen and edge.dest not in chosen:
            sync = chosen[edge.source].sync_backward_bytes[str(edge.dest)]
            crossing += transfer_s(edge.bytes, sync, bandwidth_bytes_per_s)
    parameters = sum(tmpc.parameter_bytes for tmpc in tmpcs)
    return StageFigures(
        compute_s=sum(tmpc.time_s for tmpc in tmpcs),
        transfer_s=crossing,
        sync_s=sync_s(parameters, batch, bandwidth_bytes_per_s),
        a_bytes=sum(tmpc.memory_a_bytes for tmpc in tmpcs),
        b_bytes=sum(tmpc.memory_b_bytes for tmpc in tmpcs),
    )


def as_piper_graph(problem: Problem, num_devices: int, memory_bytes: int, batch: int) -> PiperGraph:
    """A profile as Piper sees it, on equal devices over the topology's slowest path; latencies are
    left out.

    Operators are merged into some tens of layers. A layer runs on one device, vanilla or with
    recomputation: the forward pass twice, and between the passes only what enters and leaves the
    layer is kept. Memory B has parameters, gradients and optimizer state.
    """
    profile, times = problem.profile, slowest_times(problem)
    graph, samples = profile.graph, profile.microbatch_size
    whole = (times.forward_s + times.backward_s).tolist()
    coarse = coarsen(graph, whole, _DOWNSETS)
    blocks = coarse.blocks
    block_of = {v: b for b, block in enumerate(blocks) for v in block}
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    # Of blocks that only wait for each other, nothing is sent.
    sent = {(u, w): 0.0 for w, sources in enumerate(coarse.predecessors) for u in sources}
    for name, v in producers(graph).items():
        for b in sorted({block_of[w] for w in read_by[name]} - {block_of[v]}):
            pair = block_of[v], b
            sent[pair] = sent.get(pair, 0.0) + tensors[name].bytes / samples
    nodes = []
    for b, block in enumerate(blocks):
        forward_s, backward_s = (
            float(part[list(block)].sum()) / samples for part in (times.forward_s, times.backward_s)
        )
        memory, static = memory_of(profile, block), held_bytes(problem, block)
        kept, boundary = memory.kept_bytes / samples, memory.boundary_bytes / samples
        into = {str(u): 0.0 for u, w in sent if w == b}
        out = {str(w): 0.0 for u, w in sent if u == b}
        trained = float(memory.static.trainable)
        vanilla = Tmpc(VANILLA, forward_s + backward_s, trained, kept, static, into, out)
        again = Tmpc(
            RECOMPUTED, 2 * forward_s + backward_s, trained, boundary, static + kept, into, out
        )
        name = graph.operators[block[0]].name
        nodes.append(PiperNode(b, {"1": (vanilla, again)}, name))
    edges = tuple(PiperEdge(u, w, size) for (u, w), size in sorted(sent.items()))
    rate = min(slowest_bandwidth_bytes_per_s(problem), _FAST)
    return PiperGraph(num_devices, float(memory_bytes), rate, batch, tuple(nodes), edges)
