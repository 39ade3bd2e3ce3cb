"""The JSON of dnn-partitioning: a graph of operators, forward and backward, and equal devices.

Times and costs of transfers are in ms. Nodes with one `colorClass` share a device: an operator,
its backward operators, the weights and their optimizer. A node's output is sent at one cost,
however large its fan-out.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from planner.artefacts.graph import (
    MAX_BYTES,
    Graph,
    Operator,
    Parameter,
    Tensor,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.profile import MAX_SECONDS, OperatorCost, Profile, Source
from planner.artefacts.strict import read_strict

if TYPE_CHECKING:
    import networkx as nx

FORM = "a dnn-partitioning graph (JSON)"

MILLI = 1e-3
Flag = bool | Literal[0, 1]
# Limits for one node: a thousand nodes stay within the limits of a profile for one operator.
Milliseconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Bytes = Annotated[float, Field(ge=0, le=MAX_BYTES / 1000)]


@dataclass(frozen=True, slots=True)
class DnnNode:
    """One operator, forward or backward.

    Attributes:
        id: as the edges name it.
        time_ms: on a device.
        cpu_time_ms: on a host's CPU.
        backward: whether it belongs to the backward pass.
        supported: whether a device can run it.
        name: for people.
        color: nodes with the same one share a device; None for a node that is free.
        size_bytes: memory that it occupies on its device.
        layer: an id of its layer, if the file has one.
    """

    id: int
    time_ms: Annotated[Milliseconds, Field(alias="fpgaLatency")]
    cpu_time_ms: Annotated[Milliseconds, Field(alias="cpuLatency")]
    backward: Annotated[Flag, Field(alias="isBackwardNode")]
    supported: Annotated[Flag, Field(alias="supportedOnFpga")]
    name: str = ""
    color: Annotated[int | None, Field(alias="colorClass")] = None
    size_bytes: Annotated[Bytes, Field(alias="size")] = 0.0
    layer: Annotated[int | None, Field(alias="layerId")] = None


@dataclass(frozen=True, slots=True)
class DnnEdge:
    """The output of one operator, read by another one.

    Attributes:
        source: id of the node that makes it.
        dest: id of a node that reads it.
        cost_ms: to send it to another device; the same on every edge of the source.
        size_bytes: of the transfer, where the file says it.
    """

    source: Annotated[int, Field(alias="sourceId")]
    dest: Annotated[int, Field(alias="destId")]
    cost_ms: Annotated[Milliseconds, Field(alias="cost")]
    size_bytes: Annotated[Bytes, Field(alias="size")] = 0.0


@dataclass(frozen=True, slots=True)
class DnnGraph:
    """A graph and the devices it is to be split over.

    Attributes:
        num_devices: k, all alike.
        num_cpus: of the host, each as one more device, with times of its own.
        memory_bytes: of each device.
        nodes: in the file's order.
        edges: in the file's order.

    Raises:
        ValueError: if ids repeat or are unknown, a source has two costs, the graph has a cycle, or
            a backward node feeds a forward node; all of it.
    """

    num_devices: Annotated[int, Field(alias="maxFPGAs", ge=1, le=100_000)]
    num_cpus: Annotated[int, Field(alias="maxCPUs", ge=0)]
    memory_bytes: Annotated[float, Field(alias="maxSizePerFPGA", ge=0, le=MAX_BYTES)]
    nodes: Annotated[tuple[DnnNode, ...], Field(min_length=1)]
    edges: tuple[DnnEdge, ...]

    def __post_init__(self) -> None:
        problems = [*self._ids(), *self._ends()] or [*self._costs(), *self._order()]
        if problems:
            raise ValueError("\n".join(problems))

    def _ids(self) -> Iterator[str]:
        times = Counter(node.id for node in self.nodes)
        for i, node in enumerate(self.nodes):
            if times[node.id] > 1:
                yield f"nodes[{i}].id: expected each id once, got {node.id} {times[node.id]} times"

    def _ends(self) -> Iterator[str]:
        known = {node.id for node in self.nodes}
        for i, edge in enumerate(self.edges):
            for field, end in (("sourceId", edge.source), ("destId", edge.dest)):
                if end not in known:
                    yield f"edges[{i}].{field}: expected the id of a node, got {end}"
            if edge.source == edge.dest:
                yield f"edges[{i}].destId: expected another node than the source {edge.dest}"

    def _costs(self) -> Iterator[str]:
        first: dict[int, float] = {}
        for i, edge in enumerate(self.edges):
            due = first.setdefault(edge.source, edge.cost_ms)
            if edge.cost_ms != due:
                yield (
                    f"edges[{i}].cost: expected {due} as on the other edges of node"
                    f" {edge.source}, got {edge.cost_ms}"
                )

    def _order(self) -> Iterator[str]:
        backward = {node.id: bool(node.backward) for node in self.nodes}
        feeds: dict[int, set[int]] = {node.id: set() for node in self.nodes}
        for i, edge in enumerate(self.edges):
            feeds[edge.dest].add(edge.source)
            if backward[edge.source] and not backward[edge.dest]:
                yield f"edges[{i}].destId: expected a backward node after one, got {edge.dest}"
        try:
            TopologicalSorter(feeds).prepare()
        except CycleError as error:
            yield f"edges: expected no cycle, got {' -> '.join(map(str, error.args[1]))}"


@dataclass(frozen=True, slots=True)
class ColorBlocks:
    """Nodes that share a device, and the order between them.

    Attributes:
        members: per block, the positions of its nodes in the file, ascending; blocks are in
            topological order.
        predecessors: per block, the blocks that feed it, ascending.
    """

    members: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]


def read_dnn_partitioning(path: Path, text: str | None = None) -> DnnGraph:
    """The graph in a JSON file.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing or malformed; with every problem of its fields.
    """
    graph: DnnGraph = read_strict(DnnGraph, path, FORM, text)
    return graph


def colors(graph: DnnGraph) -> list[int]:
    """Per node, a number of its color class: 0, 1, ... as they appear in the file."""
    seen: dict[tuple[str, int], int] = {}
    keys = [("color", n.color) if n.color is not None else ("node", n.id) for n in graph.nodes]
    return [seen.setdefault(key, len(seen)) for key in keys]


def color_classes(graph: DnnGraph) -> list[list[int]]:
    """The positions of the nodes of each color class, by `colors`."""
    return _members(colors(graph))


def colocated(graph: DnnGraph) -> ColorBlocks:
    """The blocks that a contiguous split may part.

    Color classes are ordered by the edges between forward nodes. A class without forward nodes has
    its place by its edges in the backward pass, which runs the other way round. Classes on a cycle
    cannot be parted and become one block.
    """
    import networkx as nx  # takes long to load

    color = colors(graph)
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    forward = {color[v] for v, node in enumerate(graph.nodes) if not node.backward}
    order = nx.DiGraph()
    order.add_nodes_from(range(max(color) + 1))
    for edge in graph.edges:
        u, v = at[edge.source], at[edge.dest]
        if not graph.nodes[v].backward:
            order.add_edge(color[u], color[v])
        elif graph.nodes[u].backward and not {color[u], color[v]} <= forward:
            order.add_edge(color[v], color[u])
    order.remove_edges_from(list(nx.selfloop_edges(order)))
    return _condensed(order, _members(color))


def _members(color: Sequence[int]) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(max(color) + 1)]
    for v, c in enumerate(color):
        members[c].append(v)
    return members


def _condensed(order: "nx.DiGraph", members: Sequence[Sequence[int]]) -> ColorBlocks:
    """Cycles fused, the rest sorted: the next block is the ready one with the first node."""
    import networkx as nx  # takes long to load

    dag = nx.condensation(order)
    nodes = {b: sorted(v for c in dag.nodes[b]["members"] for v in members[c]) for b in dag}
    ranked = list(nx.lexicographical_topological_sort(dag, key=lambda b: nodes[b][0]))
    place = {b: i for i, b in enumerate(ranked)}
    return ColorBlocks(
        tuple(tuple(nodes[b]) for b in ranked),
        tuple(tuple(sorted(place[a] for a in dag.predecessors(b))) for b in ranked),
    )


# -------------------------------------------------------------------------------- as a profile


def _leaving(graph: DnnGraph, blocks: ColorBlocks) -> tuple[dict[int, float], dict[int, set[int]]]:
    """Of each node that forward nodes of other blocks read: the bytes of its output, and the
    blocks.
    """
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    block_of = {v: b for b, members in enumerate(blocks.members) for v in members}
    leaving: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    for edge in graph.edges:
        u, v = at[edge.source], at[edge.dest]
        if not graph.nodes[v].backward and block_of[u] != block_of[v]:
            leaving[u] = max(leaving.get(u, 0.0), edge.size_bytes)
            readers.setdefault(u, set()).add(block_of[v])
    return leaving, readers


def dnn_partitioning_profile(graph: DnnGraph) -> Profile:
    """The graph as the planner's own cost model sees it.

    Nodes that share a device become one operator, whose forward and backward times are the sums
    of its forward and backward nodes. A forward node's output is a tensor; a gradient comes back
    over it if its operator has backward nodes. The file does not say what the memory of a node
    holds: the memory of its forward nodes beyond their outputs is taken as a parameter, trained
    where there are backward nodes, and the outputs as the stash for the backward pass.
    """
    blocks = colocated(graph)
    names = unique_names([graph.nodes[members[0]] for members in blocks.members])
    leaving, readers = _leaving(graph, blocks)
    operators, tensors, parameters, times_s = [], [], [], []
    for b, members in enumerate(blocks.members):
        trained = any(graph.nodes[v].backward for v in members)
        sizes = {f"output{u}": round(leaving[u]) for u in members if u in leaving}
        sizes = sizes or {f"end{b}": 0}
        tensors += [Tensor(name, (size,), "uint8", trained) for name, size in sizes.items()]
        occupied = sum(graph.nodes[v].size_bytes for v in members if not graph.nodes[v].backward)
        held = max(0, round(occupied) - sum(sizes.values()))
        parameters.append(Parameter(f"parameter{b}", (held,), "uint8", trained))
        read = tuple(f"output{u}" for u in sorted(readers) if b in readers[u])
        operators.append(Operator(names[b], "block", read, (*sizes,), (f"parameter{b}",)))
        times_s.append(
            (_time_s(graph, members, backward=False), _time_s(graph, members, backward=True))
        )
    ends = tuple(tensor.name for tensor in tensors if tensor.name.startswith("end"))
    return imported_profile(
        Graph(tuple(operators), tuple(tensors), tuple(parameters), (), ends), times_s
    )


def imported_profile(
    graph: Graph, times_s: Iterable[tuple[float, float]], stash_bytes: Sequence[int] = ()
) -> Profile:
    """A profile of a foreign graph: of one sample, on a device that nothing is known of.

    Args:
        times_s: forward and backward time of each operator, in s.
        stash_bytes: what each keeps for its backward pass; without, it keeps its outputs.
    """
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    costs = (
        OperatorCost(
            name=operator.name,
            forward_s=forward_s,
            backward_s=backward_s,
            output_bytes=sum(tensors[name].bytes for name in operator.outputs),
            parameter_bytes=sum(parameters[name].bytes for name in operator.parameters),
            flops=0,
            bytes_moved=0,
            stash_tensors=() if stash_bytes else operator.outputs,
            stash_private_bytes=stash_bytes[v] if stash_bytes else 0,
        )
        for v, (operator, (forward_s, backward_s)) in enumerate(
            zip(graph.operators, times_s, strict=True)
        )
    )
    return Profile(
        graph=graph,
        operators=tuple(costs),
        views=(),
        model_path=None,
        model_hash=None,
        dimensions={},
        microbatch_size=1,
        dtype="float32",
        device_type="imported",
        source=Source.IMPORTED,
        threads=None,
        repetitions=0,
        spread=0.0,
        whole_step=None,
        versions={},
    )


def _time_s(graph: DnnGraph, members: Sequence[int], *, backward: bool) -> float:
    return MILLI * sum(
        graph.nodes[v].time_ms for v in members if bool(graph.nodes[v].backward) is backward
    )


class _Named(Protocol):
    """A node of a foreign graph."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...


def unique_names(nodes: Sequence[_Named]) -> list[str]:
    """A name per node: its own; where it has none, or another one has it too, with its id."""
    times = Counter(node.name for node in nodes)
    return [
        node.name if node.name and times[node.name] == 1 else f"{node.name}#{node.id}"
        for node in nodes
    ]
