"""Small graphs, strategies, programs and clusters for the tests of schedules and the simulator."""

from dataclasses import replace
from math import lcm
from unittest import mock

from hypothesis import strategies as st

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import GradientSum, ScheduleName, Stage, Strategy
from planner.artefacts.topology import Device, DeviceType, Host, Link, Sharing, Topology
from planner.schedules.actions import Program, parse
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from tests.support.builders import asked, cluster, profile_of, unit_type
from tests.support.strategies import dags

SPARE = 2
SYNCHRONOUS = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
ANY_TYPE = DeviceType("any", 2**34, {"float32": 1e12}, 1e11, "made up")


def chain(num_operators):
    """Operators op0, op1, ... in a row; op i makes t<i>, 4 bytes, and has a parameter w<i>."""
    return as_graph([[v - 1] if v else [] for v in range(num_operators)])


def as_graph(feeds, tied=()):
    """A graph from predecessor lists; each operator also reads the parameter tied[v] or w<v>."""
    tied = list(tied) or range(len(feeds))
    operators = [
        Operator(f"op{v}", "Add", tuple(f"t{u}" for u in f) or ("x",), (f"t{v}",), (f"w{tied[v]}",))
        for v, f in enumerate(feeds)
    ]
    tensors = [Tensor("x", (1,), "float32", False)]
    tensors += [Tensor(f"t{v}", (1,), "float32", True) for v in range(len(feeds))]
    parameters = [Parameter(f"w{v}", (1,), "float32", True) for v in sorted(set(tied))]
    last = f"t{len(feeds) - 1}"
    return Graph(tuple(operators), tuple(tensors), tuple(parameters), ("x",), (last,))


def split(graph, cuts, widths, num_microbatches, schedule="1f1b", warmups=None):
    """A strategy with stages of consecutive operators, cut before each index in `cuts`, on devices
    0, 1, 2, ...
    """
    names = [o.name for o in graph.operators]
    ends = list(zip([0, *cuts], [*cuts, len(names)], strict=True))
    schedule = ScheduleName(schedule)
    warmups = warmups or default_warmups(widths, num_microbatches, schedule=schedule)
    stages, device = [], 0
    for (start, end), width, warmup in zip(ends, widths, warmups, strict=True):
        devices = tuple(range(device, device + width))
        stages.append(Stage.whole(tuple(names[start:end]), devices, warmup, False))
        device += width
    return Strategy(tuple(stages), schedule, num_microbatches)


@st.composite
def split_graphs(draw, max_warmup=None, schedules=tuple(ScheduleName)):
    """A graph with skips and tied parameters, and a sound strategy for it; its warm-up depths are
    the default ones, or any up to `max_warmup`. PipeDream's schedule ties nothing, and has whole
    rounds of every stage.
    """
    feeds = draw(dags(max_nodes=7))
    size = len(feeds)
    schedule = draw(st.sampled_from(schedules))
    asynchronous = schedule is ScheduleName.PIPEDREAM
    tied = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    graph = as_graph(feeds, () if asynchronous else tied)
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    widths = draw(st.lists(st.integers(1, 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    num_microbatches = draw(st.integers(max(widths), 9))
    if asynchronous:
        num_microbatches = draw(st.integers(1, 2)) * lcm(*widths)
    warmups = None
    if max_warmup:
        most = [min(max_warmup, -(-num_microbatches // width)) for width in widths]
        warmups = [draw(st.integers(1, one)) for one in most]
    return graph, split(graph, cuts, widths, num_microbatches, schedule, warmups)


def written(*lines, sums=()):
    """A program from the text form, a line per device; `sums` are groups of devices."""
    lists = {d: tuple(parse(word) for word in line.split()) for d, line in enumerate(lines)}
    return Program(lists, tuple(GradientSum(devices, (), 0) for devices in sums))


def in_buckets(strategy, graph, bucket_bytes):
    """The program with smaller buckets of gradients."""
    with mock.patch("planner.artefacts.strategy.BUCKET_BYTES", bucket_bytes):
        return program(strategy, graph)


def disturbed(draw, lists):
    """The program with some actions moved or left out, so that it may block."""
    changed = {device: list(actions) for device, actions in lists.lists.items()}
    for _ in range(draw(st.integers(1, 3))):
        actions = changed[draw(st.sampled_from(sorted(changed)))]
        action = actions.pop(draw(st.integers(0, len(actions) - 1))) if actions else None
        if action is not None and draw(st.booleans()):
            actions.insert(draw(st.integers(0, len(actions))), action)
    return Program({d: tuple(actions) for d, actions in changed.items()}, lists.sums)


def mesh(num_devices, bandwidth=1.0, latency_s=0.0):
    """Devices with a link of their own from each to each."""
    names = [f"gpu{i}" for i in range(num_devices)]
    links = [Link(a, b, bandwidth, latency_s) for a in names for b in names if a != b]
    return _cluster(names, (), links)


def star(out, into, latencies_s=None):
    """Devices behind one switch; `out` and `into` are the widths of their links to and from it."""
    names = [f"gpu{i}" for i in range(len(out))]
    latencies_s = latencies_s or [0.0] * len(out)
    up = [Link(n, "switch", w, t) for n, w, t in zip(names, out, latencies_s, strict=True)]
    down = [Link("switch", n, w, 0.0) for n, w in zip(names, into, strict=True)]
    return _cluster(names, ("switch",), up + down)


def hosts(num_hosts, num_devices, inner=100.0, outer=10.0):
    """Hosts of equally many devices; each is on one switch by a link of its own both ways."""
    names = [f"gpu{i}" for i in range(num_hosts * num_devices)]
    ends = [(name, f"host{i // num_devices}", inner) for i, name in enumerate(names)]
    ends += [(f"host{h}", "core", outer) for h in range(num_hosts)]
    links = [Link(*pair, width, 0.01) for a, b, width in ends for pair in ((a, b), (b, a))]
    return Topology(
        "hosts",
        (ANY_TYPE,),
        tuple(Host(f"host{h}") for h in range(num_hosts)),
        tuple(Device(name, "any", host) for name, host, _ in ends[: len(names)]),
        ("core",),
        tuple(links),
    )


def with_sharing(topology, each):
    """The topology with a way of sharing for each link, or one for all."""
    each = [each] * len(topology.links) if isinstance(each, Sharing) else each
    links = tuple(
        replace(link, sharing=one) for link, one in zip(topology.links, each, strict=True)
    )
    return replace(topology, links=links)


def _cluster(names, switches, links):
    devices = tuple(Device(name, "any", "host") for name in names)
    return Topology("test", (ANY_TYPE,), (Host("host"),), devices, switches, tuple(links))


@st.composite
def problems_and_strategies(draw):
    """A strategy for a graph with skips and tied parameters, and devices that it leaves free; links
    of every kind.
    """
    graph, strategy = draw(split_graphs(max_warmup=4, schedules=SYNCHRONOUS))
    size = len(graph.operators)
    times = st.floats(0.1, 3.0)
    profile = profile_of(
        graph,
        draw(st.lists(times, min_size=size, max_size=size)),
        draw(st.lists(times, min_size=size, max_size=size)),
    )
    count = SPARE + sum(stage.num_replicas for stage in strategy.stages)
    kinds = [unit_type(bandwidth=1e9), unit_type("other", flops=4e12, bandwidth=0.25e9)]
    types = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    topology = cluster(types, draw(st.sampled_from([1.0, 10.0, 1e3])), draw(st.just(0.25)))
    sharing = draw(st.sampled_from([*Sharing, Sharing.EXCLUSIVE]))
    options = asked(strategy.num_microbatches, schedule=strategy.schedule)
    problem = Problem(profile, with_sharing(topology, sharing), **options, measured_on=kinds[0])
    return problem, strategy


def three_stages():
    """Three stages of two operators each, on the first three of five devices."""
    graph = chain(6)
    topology = with_sharing(cluster([unit_type()] * 5), Sharing.EXCLUSIVE)
    problem = Problem(profile_of(graph, [1e-3] * 6), topology, **asked(4))
    return problem, split(graph, [2, 4], [1, 1, 1], 4)
