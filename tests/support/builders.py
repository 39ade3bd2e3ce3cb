"""Small graphs, profiles, topologies and problems, made by hand."""

from dataclasses import replace
from math import prod

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.options import Search, Training
from planner.artefacts.problem import Problem
from planner.artefacts.profile import OperatorCost, Profile, Source
from planner.artefacts.topology import Device, DeviceType, Host, Level, Link, Topology
from planner.support.options import declared, options_from

KB = 1000


def graph_of(feeds, tensor_bytes=None, parameter_bytes=None):
    """A graph with one output per operator, from predecessor lists; sizes in bytes per operator.

    Operators without predecessors read the model's input.
    """
    size = len(feeds)
    tensor_bytes = tensor_bytes or [KB] * size
    parameter_bytes = parameter_bytes or [KB] * size
    return Graph(
        operators=tuple(
            Operator(f"op{v}", "Test", tuple(f"t{u}" for u in us) or ("x",), (f"t{v}",), (f"w{v}",))
            for v, us in enumerate(feeds)
        ),
        tensors=(
            Tensor("x", (KB,), "int8", False),
            *(Tensor(f"t{v}", (b,), "int8", True) for v, b in enumerate(tensor_bytes)),
        ),
        parameters=tuple(Parameter(f"w{v}", (b,), "int8", True)
                         for v, b in enumerate(parameter_bytes)),
        inputs=("x",),
        outputs=(f"t{size - 1}",),
    )  # fmt: skip


def profile_of(graph, forward_s, backward_s=None, stash=True, work=None):
    """A profile of the graph; the backward takes twice the forward unless said.

    work: per operator (flops, bytes moved), which decide how it is rescaled.
    """
    work = work or [(10**9, 10**6)] * len(forward_s)
    backward_s = backward_s or [2 * f for f in forward_s]
    return Profile(
        graph=graph,
        operators=tuple(
            OperatorCost(o.name, f, b, 0, 0, *w, o.outputs if stash else (), 0)
            for o, f, b, w in zip(graph.operators, forward_s, backward_s, work, strict=True)
        ),
        views=(),
        model_path=None,
        model_hash=None,
        dimensions={},
        microbatch_size=1,
        dtype="float32",
        device_type="unit",
        source=Source.IMPORTED,
        threads=None,
        repetitions=1,
        spread=0.0,
        whole_step=None,
        versions={},
    )


def unit_type(name="unit", memory=10**12, flops=1e12, bandwidth=1e18):
    return DeviceType(name, memory, {"float32": flops}, bandwidth, "made up")


def cluster(
    types, bandwidth=1e9, latency=0.0, links=(), cores=None, memory=None, host_link=None
):  # fmt: skip
    """Devices on one host, all linked to it, and besides by links (p, q, bandwidth)."""
    kinds = {t.name: t for t in types}
    devices = tuple(Device(f"d{i}", t.name, "host") for i, t in enumerate(types))
    ends = [(d.name, "host", bandwidth) for d in devices]
    ends += [(f"d{p}", f"d{q}", rate) for p, q, rate in links]
    return Topology(
        name="test",
        device_types=tuple(kinds.values()),
        hosts=(Host("host", cores, memory, host_link),),
        devices=devices,
        switches=(),
        links=tuple(
            Link(*pair, rate, latency / 2) for a, b, rate in ends for pair in ((a, b), (b, a))
        ),
    )


def hierarchy(counts, bandwidths=(1e9,), kind=None):
    """A regular hierarchy of equal devices, innermost level first, whose links are those of a
    `cluster` of the first bandwidth.
    """
    levels = tuple(
        Level(f"level{i}", count, bandwidth, 0.0)
        for i, (count, bandwidth) in enumerate(zip(counts, bandwidths, strict=True))
    )
    flat = cluster([kind or unit_type()] * prod(counts), bandwidths[0])
    return replace(flat, levels=levels)


def islands(counts, inside, between, kind=None, latency=0.0):
    """Hosts with some devices each, whose links are fast inside a host and slow between hosts."""
    kind = kind or unit_type()
    hosts = [f"host{h}" for h in range(len(counts))]
    at = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    ends = [(f"d{i}", host, inside) for i, host in enumerate(at)]
    ends += [(host, "switch", between) for host in hosts]
    return Topology(
        name="islands",
        device_types=(kind,),
        hosts=tuple(Host(host, None, None) for host in hosts),
        devices=tuple(Device(f"d{i}", kind.name, host) for i, host in enumerate(at)),
        switches=("switch",),
        links=tuple(
            Link(*pair, rate, latency / 2) for a, b, rate in ends for pair in ((a, b), (b, a))
        ),
    )


def asked(num_microbatches, **how):
    """What a `Problem` says of training and search, as its keyword arguments."""
    training, search = options_from("asked", how, Training, Search)
    return {"num_microbatches": num_microbatches, "training": training, "search": search}


PROBLEMS_OWN = ("profile", "topology", "num_microbatches")


def changed(problem, **changes):
    """A problem with other values of its own fields, or of its training's and search's."""
    own = {name: changes.pop(name) for name in PROBLEMS_OWN if name in changes}
    for name in ("training", "search"):
        known = declared(type(getattr(problem, name)))
        given = {one: changes.pop(one) for one in known if one in changes}
        own[name] = replace(getattr(problem, name), **given)
    assert not changes
    return replace(problem, **own)


def problem_of(profile, topology, num_microbatches=4, measured_on=None, **options):
    how = asked(num_microbatches, **{"reserve": 0, **options})
    return Problem(profile, topology, **how, measured_on=measured_on or unit_type())
