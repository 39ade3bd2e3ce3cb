"""The JSON of Piper: a graph of layers, each with ways to run it on several devices.

Each layer lists, per degree t of tensor parallelism, configurations (TMPCs) such as with and
without recomputation: time per sample, parameters, memory A per sample in flight and B besides,
and the bytes to synchronise per edge. Times are in s.

Source: Tarnawski, Narayanan and Phanishayee, "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.artefacts.formats.dnn_partitioning import Bytes, imported_profile, unique_names
from planner.artefacts.graph import MAX_BYTES, Graph, Operator, Parameter, Tensor
from planner.artefacts.profile import MAX_SECONDS, Profile
from planner.artefacts.strict import read_strict
from planner.support.errors import FileError

FORM = "a Piper graph (JSON)"

RECOMPUTED = "activation recomp"
VANILLA = "vanilla"

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS / 1000)]


@dataclass(frozen=True, slots=True)
class Tmpc:
    """One way to run a layer on t devices.

    Attributes:
        id: "vanilla", "activation recomp", or another name.
        time_s: forward and backward of one sample.
        parameter_bytes: summed by data-parallel replicas, on each of the t devices.
        memory_a_bytes: on each device, per sample in flight.
        memory_b_bytes: on each device, besides.
        sync_forward_bytes: per id of a layer that feeds it, what is sent besides the output if the
            two are in different stages.
        sync_backward_bytes: the same per id of a layer that it feeds.
    """

    id: Annotated[str, Field(min_length=1)]
    time_s: Annotated[Seconds, Field(alias="timePerSample")]
    parameter_bytes: Annotated[Bytes, Field(alias="parameterSize")]
    memory_a_bytes: Annotated[Bytes, Field(alias="memoryUsageA")]
    memory_b_bytes: Annotated[Bytes, Field(alias="memoryUsageB")]
    sync_forward_bytes: Annotated[dict[str, Bytes], Field(alias="syncTimeFw")]
    sync_backward_bytes: Annotated[dict[str, Bytes], Field(alias="syncTimeBw")]

    def __hash__(self) -> int:
        return hash((self.id, self.time_s, self.memory_a_bytes, self.memory_b_bytes))


@dataclass(frozen=True, slots=True)
class PiperNode:
    """One layer.

    Attributes:
        id: as the edges name it.
        tmpcs: by degree t, as text; a degree that is missing is not supported.
        name: for people.
    """

    id: int
    tmpcs: Annotated[
        dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}$")], tuple[Tmpc, ...]],
        Field(alias="TMPCs"),
    ]
    name: str = ""

    def __hash__(self) -> int:
        return hash((self.id, self.name, len(self.tmpcs)))


@dataclass(frozen=True, slots=True)
class PiperEdge:
    """The output of one layer, read by another one.

    Attributes:
        source: id of the layer that makes it.
        dest: id of the layer that reads it.
        bytes: of one sample, one way.
    """

    source: Annotated[int, Field(alias="sourceId")]
    dest: Annotated[int, Field(alias="destId")]
    bytes: Annotated[Bytes, Field(alias="communicationCost")]


@dataclass(frozen=True, slots=True)
class PiperGraph:
    """A graph, and the devices and the batch that it is to be planned for.

    Attributes:
        num_devices: K, all alike.
        memory_bytes: of each device.
        bandwidth_bytes_per_s: between any two.
        batch: samples per batch.
        nodes: in the file's order.
        edges: in the file's order.

    Raises:
        ValueError: if ids repeat or are unknown, the graph has a cycle, or a configuration does
            not synchronise exactly the layer's edges; all of it.
    """

    num_devices: Annotated[int, Field(alias="maxDevices", ge=1, le=100_000)]
    memory_bytes: Annotated[float, Field(alias="maxMemoryPerDevice", gt=0, le=MAX_BYTES)]
    bandwidth_bytes_per_s: Annotated[float, Field(alias="bandwidth", gt=0, le=1e18)]
    batch: Annotated[int, Field(alias="mbsInBatch", ge=1, le=10**9)]
    nodes: Annotated[tuple[PiperNode, ...], Field(min_length=1)]
    edges: tuple[PiperEdge, ...]

    def __post_init__(self) -> None:
        problems = [*self._ids(), *self._ends()] or [*self._syncs(), *self._order()]
        if problems:
            raise ValueError("\n".join(problems))

    def _ids(self) -> Iterator[str]:
        times = Counter(node.id for node in self.nodes)
        for i, node in enumerate(self.nodes):
            if times[node.id] > 1:
                yield f"nodes[{i}].id: expected each id once, got {node.id} {times[node.id]} times"
            for t, tmpcs in node.tmpcs.items():
                names = Counter(tmpc.id for tmpc in tmpcs)
                for name in sorted(name for name, count in names.items() if count > 1):
                    yield f"nodes[{i}].TMPCs.{t}: expected each id once, got {name!r} again"

    def _ends(self) -> Iterator[str]:
        known, seen = {node.id for node in self.nodes}, set()
        for i, edge in enumerate(self.edges):
            for field, end in (("sourceId", edge.source), ("destId", edge.dest)):
                if end not in known:
                    yield f"edges[{i}].{field}: expected the id of a node, got {end}"
            if (edge.source, edge.dest) in seen:
                yield f"edges[{i}]: expected each edge once, got {edge.source} -> {edge.dest} again"
            seen.add((edge.source, edge.dest))

    def _syncs(self) -> Iterator[str]:
        feeds, fed = _neighbours(self)
        for i, node in enumerate(self.nodes):
            for t, tmpcs in node.tmpcs.items():
                for k, tmpc in enumerate(tmpcs):
                    for field, given, due in (
                        ("syncTimeFw", tmpc.sync_forward_bytes, feeds[node.id]),
                        ("syncTimeBw", tmpc.sync_backward_bytes, fed[node.id]),
                    ):
                        if set(given) != {str(x) for x in due}:
                            yield (
                                f"nodes[{i}].TMPCs.{t}[{k}].{field}: expected the neighbours"
                                f" {sorted(due)}, got {sorted(given)}"
                            )

    def _order(self) -> Iterator[str]:
        try:
            TopologicalSorter(_neighbours(self)[0]).prepare()
        except CycleError as error:
            yield f"edges: expected no cycle, got {' -> '.join(map(str, error.args[1]))}"


def _neighbours(graph: PiperGraph) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """The layers that feed each layer, and the layers that it feeds, by id."""
    feeds: dict[int, set[int]] = {node.id: set() for node in graph.nodes}
    fed: dict[int, set[int]] = {node.id: set() for node in graph.nodes}
    for edge in graph.edges:
        feeds[edge.dest].add(edge.source)
        fed[edge.source].add(edge.dest)
    return feeds, fed


def read_piper(path: Path, text: str | None = None) -> PiperGraph:
    """The graph in a JSON file.

    Args:
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing or malformed; with every problem of its fields.
    """
    graph: PiperGraph = read_strict(PiperGraph, path, FORM, text)
    return graph


def layer_predecessors(graph: PiperGraph) -> tuple[tuple[int, ...], ...]:
    """Per layer, the layers that feed it, ascending; by positions in the file."""
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    feeds, _ = _neighbours(graph)
    return tuple(tuple(sorted(at[u] for u in feeds[node.id])) for node in graph.nodes)


# -------------------------------------------------------------------------------- as a profile


def piper_profile(graph: PiperGraph) -> Profile:
    """The graph as the planner's own cost model sees it: each layer on one device, without
    recomputation, one sample a microbatch.

    The file has one time for both passes; a third of it is taken as the forward pass, because a
    backward pass is two products of matrices where the forward pass is one. Memory A is
    kept per sample for its backward pass; parameters are trained, and memory B, which is made of
    them, is the planner's own account of gradients and optimizer state.

    Raises:
        FileError: if a layer cannot run on one device.
    """
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    order = {node.id: i for i, node in enumerate(_sorted(graph))}
    sizes: Mapping[int, dict[float, list[int]]] = {node.id: {} for node in graph.nodes}
    for edge in graph.edges:
        sizes[edge.source].setdefault(edge.bytes, []).append(edge.dest)
    names = unique_names(graph.nodes)
    operators, times_s, stash_bytes = [], [], []
    tensors, parameters, read = [], [], {node.id: list[str]() for node in graph.nodes}
    for node in _sorted(graph):
        tmpc = _one_device(node)
        made = []
        # Readers that get different bytes get different tensors.
        for x, (size, readers) in enumerate(sorted(sizes[node.id].items()) or [(0.0, [])]):
            made.append(f"output{node.id}.{x}")
            tensors.append(Tensor(made[-1], (round(size),), "uint8", True))
            for reader in sorted(readers, key=order.__getitem__):
                read[reader].append(made[-1])
        held = round(tmpc.parameter_bytes)
        parameters.append(Parameter(f"parameter{node.id}", (held,), "uint8", True))
        name, inputs = names[at[node.id]], tuple(read[node.id])
        operators.append(Operator(name, "layer", inputs, tuple(made), (f"parameter{node.id}",)))
        times_s.append((tmpc.time_s / 3, tmpc.time_s * 2 / 3))
        stash_bytes.append(round(tmpc.memory_a_bytes))
    known = set().union(*read.values())
    ends = tuple(tensor.name for tensor in tensors if tensor.name not in known)
    made_graph = Graph(tuple(operators), tuple(tensors), tuple(parameters), (), ends)
    return imported_profile(made_graph, times_s, stash_bytes)


def _one_device(node: PiperNode) -> Tmpc:
    """The configuration of a layer on one device: vanilla, or the first in the file.

    Raises:
        FileError: if it cannot.
    """
    tmpcs = node.tmpcs.get("1", ())
    if not tmpcs:
        raise FileError(
            f"layer {node.name} (id {node.id}): expected a configuration for one device, got"
            f" {', '.join(sorted(node.tmpcs)) or 'none'}; plan it with --cost-model piper"
        )
    return next((tmpc for tmpc in tmpcs if tmpc.id == VANILLA), tmpcs[0])


def _sorted(graph: PiperGraph) -> list[PiperNode]:
    """The layers in topological order."""
    nodes = {node.id: node for node in graph.nodes}
    feeds = {node: sorted(sources) for node, sources in _neighbours(graph)[0].items()}
    return [nodes[node] for node in TopologicalSorter(feeds).static_order()]
