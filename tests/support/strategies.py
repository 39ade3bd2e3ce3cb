"""What hypothesis draws: small DAGs, graphs, profiles, topologies."""

from hypothesis import strategies as st

from planner.artefacts.options import Objective
from planner.artefacts.strategy import ScheduleName
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type


@st.composite
def dags(draw, min_nodes=1, max_nodes=8):
    """Predecessor lists of a DAG whose nodes are in topological order."""
    size = draw(st.integers(min_nodes, max_nodes))
    return [
        sorted(draw(st.sets(st.integers(0, v - 1), max_size=3))) if v else [] for v in range(size)
    ]


@st.composite
def problems(draw, max_nodes=6, max_devices=4):
    """Small problems with every combination of options; all of them fit."""
    feeds = draw(dags(max_nodes=max_nodes))
    size = len(feeds)
    times = st.integers(1, 9).map(lambda x: x / 1000)
    sizes = st.integers(1, 1000).map(lambda x: x * 1000)
    graph = graph_of(
        feeds,
        draw(st.lists(sizes, min_size=size, max_size=size)),
        draw(st.lists(sizes, min_size=size, max_size=size)),
    )
    # Bound by computation or by memory: one type is faster at this, the other at that.
    bound = st.sampled_from([(10**9, 1), (1, 10**6)])
    profile = profile_of(
        graph,
        draw(st.lists(times, min_size=size, max_size=size)),
        draw(st.lists(times, min_size=size, max_size=size)),
        work=draw(st.lists(bound, min_size=size, max_size=size)),
    )
    kinds = [unit_type(bandwidth=1e9), unit_type("other", flops=4e12, bandwidth=0.25e9)]
    count = draw(st.integers(1, max_devices))
    types = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    topology = cluster(types, draw(st.sampled_from([1e8, 1e9, 1e12])), draw(st.just(1e-5)))
    return problem_of(
        profile,
        topology,
        num_microbatches=draw(st.integers(1, 5)),
        measured_on=unit_type(bandwidth=1e9),
        objective=draw(st.sampled_from(Objective)),
        schedule=draw(st.sampled_from(ScheduleName)),
    )
