"""Small placement problems in which any pairs of devices share links."""

from dataclasses import replace

from hypothesis import strategies as st

from planner.solvers.placement.links import SharedLink
from tests.solvers.test_netsplit import partly_trained


@st.composite
def linked_problems(draw, max_nodes=4, devices=3):
    """Problems with links of all sources with all targets, and of any pairs."""
    problem = draw(partly_trained(max_nodes, devices).filter(lambda one: one.num_devices > 1))
    problem = replace(problem, capacity_bytes=problem.capacity_bytes + 10**12)
    names = range(problem.num_devices)
    some = st.sets(st.sampled_from(names), min_size=1)
    pairs = [(p, q) for p in names for q in names if p != q]
    sides = st.builds(lambda a, b: {(p, q) for p in a for q in b if p != q}, some, some)
    links = []
    for _ in range(draw(st.integers(0, 3))):
        listed = draw(sides | st.sets(st.sampled_from(pairs)))
        if len(listed) > 1:
            narrowest = min(problem.seconds_per_byte[pair] for pair in listed)
            share = draw(st.sampled_from([0.5, 1.0]))
            listed = tuple(sorted(listed))
            links.append(SharedLink(listed, share * narrowest, draw(st.booleans())))
    return replace(problem, shared=(*problem.shared, *links))
