"""What hypothesis draws: small DAGs, graphs, profiles, topologies."""

from hypothesis import strategies as st


@st.composite
def dags(draw, min_nodes=1, max_nodes=8):
    """Predecessor lists of a DAG whose nodes are in topological order."""
    size = draw(st.integers(min_nodes, max_nodes))
    return [
        sorted(draw(st.sets(st.integers(0, v - 1), max_size=3))) if v else [] for v in range(size)
    ]
