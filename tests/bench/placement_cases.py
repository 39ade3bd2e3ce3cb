"""What `placements.py` asks: the networks, the clusters, and which network on which cluster."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from onnx import ModelProto

from planner.artefacts.graph import Graph, producers
from planner.artefacts.options import Objective, Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.topology import Topology, take
from planner.clusters.routes import bandwidth_bytes_per_s
from planner.clusters.yaml.read import device_table, find_topology, read_topology
from planner.model.load import ReadOptions, load
from planner.profilers.analytic import analytic
from tests.support import thesis_models
from tests.support.builders import asked
from tests.support.inception import inception_v3
from tests.support.models import deep_transformer, llama
from tests.support.rooflines import roofline_of
from tests.support.wide import experts, nasnet, towers

DEVICE = "TITAN-RTX"


# ------------------------------------------------------------------------------------ networks


@dataclass(frozen=True, slots=True)
class Published:
    """The thesis's figures of a network.

    Attributes:
        batch: samples per batch.
        nodes: nodes of its graph.
        megabytes: memory at a batch of 128.
        throughput: mean samples/s by planner.
    """

    batch: int
    nodes: int
    megabytes: int
    throughput: tuple[float, ...]

    @property
    def lead(self) -> float:
        """NetSplit's throughput over the best rival's, - 1."""
        return self.throughput[-1] / max(self.throughput[:-1]) - 1


# Pesto, m-TOPO, m-ETF, m-SCT, NetSplit.
PUBLISHED: Mapping[str, Published] = {
    "amoebanet-d": Published(64, 784, 117_756, (30.17, 36.46, 19.59, 28.82, 41.83)),
    "wide-resnet-152": Published(64, 388, 115_180, (38.66, 39.81, 34.15, 32.26, 42.34)),
    "u-net": Published(128, 134, 50_122, (38.66, 33.35, 37.69, 37.60, 40.36)),
    "deeplab-v3": Published(48, 417, 168_094, (11.58, 16.18, 14.00, 12.80, 18.39)),
}


@dataclass(frozen=True, slots=True)
class OnnxNetwork:
    """A network as an ONNX file, whose times are the analytic profile's.

    Attributes:
        build: makes it, batch symbolic.
        dimensions: sizes of its other symbolic dimensions.
    """

    build: Callable[[], ModelProto]
    dimensions: tuple[tuple[str, int], ...] = ()

    def profile(self, batch: int) -> Profile:
        """Its profile on a TITAN RTX."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(self.build().SerializeToString())
            model = load(path, ReadOptions(batch=batch, dimensions=dict(self.dimensions)))
            kind = device_table()[DEVICE]
            return analytic(model, model_path=None, kind=kind, dtype="float32")


@dataclass(frozen=True, slots=True)
class GraphNetwork:
    """A network that exists as a graph only; its times are rooflines, and a backward takes two
    forwards.

    Attributes:
        build: makes its graph for a batch.
    """

    build: Callable[[int], Graph]

    def profile(self, batch: int) -> Profile:
        """Its profile on a TITAN RTX."""
        return roofline_of(self.build(batch), DEVICE, batch)


NETWORKS: Mapping[str, OnnxNetwork | GraphNetwork] = {
    **{name: OnnxNetwork(build) for name, build in thesis_models.NETWORKS.items()},
    "nasnet-12": GraphNetwork(partial(nasnet, 12)),
    "inception-v3": OnnxNetwork(inception_v3),
    "towers": GraphNetwork(towers),
    "experts": GraphNetwork(experts),
    "gpt2": OnnxNetwork(partial(deep_transformer, 12, 768, 1024, 50_257)),
    "llama-block": OnnxNetwork(partial(llama, 1), (("seq", 2048),)),
}


def megabytes(graph: Graph) -> float:
    """Memory of training by the thesis's count: tensors that operators make twice, the inputs once,
    trained parameters four times.
    """
    made = producers(graph)
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    tensors = 2 * sum(sizes[name] for name in made) + sum(sizes[name] for name in graph.inputs)
    return (tensors + 4 * sum(p.bytes for p in graph.parameters if p.trainable)) / 1e6


# ------------------------------------------------------------------------------------ clusters


def three() -> Topology:
    """The thesis's three devices: 1 and 2 behind one switch, 0 over the host bridge."""
    whole = read_topology(find_topology("titan-rtx-5"))
    first, _, *others = whole.devices
    topology = take(replace(whole, devices=(first, *others)), 3)
    near, far, also_far = (bandwidth_bytes_per_s(topology, *p) for p in ((1, 2), (0, 1), (0, 2)))
    assert near > far == also_far
    return topology


TWO_HOSTS = """\
format: planner-topology/1
name: two-hosts
templates:
  host:
    hosts: [{name: host0}]
    devices: [{name: gpu, count: 4, type: TITAN-RTX, host: host0}]
    links: [{name: pcie, between: [gpu*, host0], bandwidth: 12 GB/s, latency: 5 us}]
hosts: [{template: host, count: 2}]
switches: [network]
links: [{name: nic, between: [host*, network], bandwidth: 25 Gbps, latency: 10 us}]
"""
SEVEN = """\
format: planner-topology/1
name: uneven-seven
hosts: [{name: near}, {name: far}]
devices:
  - {name: titan, count: 3, type: TITAN-RTX, host: near}
  - {name: volta, count: 2, type: V100-SXM2-16GB, host: far}
  - {name: small, count: 2, type: T4, host: far}
switches: [pcie0, network]
links:
  - {name: pcie, between: [titan0, near], bandwidth: 12 GB/s, latency: 5 us}
  - {name: shared, between: ["titan[12]", pcie0], bandwidth: 12 GB/s, latency: 5 us}
  - {name: bridge, between: [pcie0, near], bandwidth: 9 GB/s, latency: 1 us}
  - {name: far-pcie, between: ["volta*", far], bandwidth: 12 GB/s, latency: 5 us}
  - {name: small-pcie, between: ["small*", far], bandwidth: 12 GB/s, latency: 5 us}
  - {name: nvlink, between: [volta0, volta1], bandwidth: 50 GB/s, latency: 3 us}
  - {name: nic, between: [near, network], bandwidth: 25 Gbps, latency: 10 us}
  - {name: nic, between: [far, network], bandwidth: 25 Gbps, latency: 10 us}
"""


def written(text: str) -> Topology:
    """The topology of a text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "topology.yaml"
        path.write_text(text)
        return read_topology(path)


CLUSTERS: Mapping[str, Callable[[], Topology]] = {
    "three": three,
    "two-hosts": partial(written, TWO_HOSTS),
    "seven": partial(written, SEVEN),
}


# ----------------------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table.

    Attributes:
        network: a key of `NETWORKS`; cluster: one of `CLUSTERS`.
        batch: samples.
    """

    network: str
    cluster: str
    batch: int

    @property
    def key(self) -> str:
        """Its name among files."""
        return f"{self.network}-{self.cluster}-{self.batch}"

    @property
    def published(self) -> bool:
        """Whether the thesis has this row."""
        thesis = PUBLISHED.get(self.network)
        return thesis is not None and (self.cluster, self.batch) == ("three", thesis.batch)

    def problem(self, num_microbatches: int, objective: Objective) -> Problem:
        """The question; Adam's factor of 4 is the thesis's largest."""
        return Problem(
            NETWORKS[self.network].profile(self.batch // num_microbatches),
            CLUSTERS[self.cluster](),
            **asked(num_microbatches, optimizer=Optimizer.ADAM, objective=objective),
            measured_on=device_table()[DEVICE],
        )


_BATCHES = {"nasnet-12": 64, "inception-v3": 64, "towers": 64, "experts": 64, "gpt2": 8,
            "llama-block": 4}  # fmt: skip
# The thesis's rows come first.
CASES: tuple[Case, ...] = (
    *(Case(name, "three", published.batch) for name, published in PUBLISHED.items()),
    Case("nasnet-12", "three", 64),
    Case("inception-v3", "three", 64),
    Case("amoebanet-d", "three", 128),
    Case("wide-resnet-152", "three", 128),
    Case("u-net", "three", 256),
    Case("deeplab-v3", "three", 96),
    *(Case(name, "three", _BATCHES[name]) for name in ("towers", "experts", "gpt2", "llama-block")),
    *(
        Case(name, cluster, batch)
        for cluster in ("two-hosts", "seven")
        for name, batch in (("amoebanet-d", 64), *_BATCHES.items())
    ),
)
