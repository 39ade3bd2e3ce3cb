"""The bound over all kernels, beside figures by hand."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.options import Optimizer
from planner.costs.peak_bound import peak_bound_s
from tests.support.builders import changed, cluster, problem_of, profile_of, unit_type

FLOPS, BANDWIDTH, COUNT = 1e12, 1e9, 2


def problem(kind, kernel, out, microbatches=3):
    """One convolution or product, of 1e6 FLOPs forward, on two devices."""
    graph = Graph(
        operators=(Operator("a", kind, ("x",), ("y",), ("w",)),),
        tensors=(
            Tensor("x", (1, 4, 8, 8), "float32", gradient=False),
            Tensor("y", (1, 4, *out), "float32", gradient=True),
        ),
        parameters=(Parameter("w", (4, 4, *kernel), "float32", trainable=True),),
        inputs=("x",),
        outputs=("y",),
    )
    profile = profile_of(graph, [1.0])
    operators = tuple(replace(one, flops=10**6) for one in profile.operators)
    topology = cluster([unit_type(flops=FLOPS, bandwidth=1e18)] * COUNT)
    return problem_of(replace(profile, operators=operators), topology, microbatches)


@pytest.mark.parametrize(
    ("kind", "kernel", "out", "share"),
    [
        ("Conv", (3, 3), (8, 8), 0.25),  # Winograd's
        ("Conv", (3, 3), (4, 4), 1.0),
        ("Conv", (1, 1), (8, 8), 1.0),
        ("Gemm", (1, 1), (8, 8), 1.0),
        ("Relu", (1, 1), (8, 8), 0.0),
    ],
)
def test_products_take_the_peak_of_all_devices(kind, kernel, out, share):
    """A forward and the gradient of the weight; the model's input has none."""
    flops = share * 3 * 2 * 10**6
    slow = 4 * 16 * kernel[0] * kernel[1] * 2 + 3 * 4 * 4 * 64  # bytes, at 1e18 B/s
    expected = max(flops / (COUNT * FLOPS), slow / (COUNT * 1e18))
    assert peak_bound_s(problem(kind, kernel, out)) == pytest.approx(expected)


def test_parameters_gradients_and_state_are_moved_at_least_once():
    given = problem("Gemm", (1, 1), (8, 8))
    topology = cluster([unit_type(flops=1e18, bandwidth=BANDWIDTH)] * COUNT)
    given = changed(given, topology=topology, optimizer=Optimizer.ADAM)
    moved = 4 * 16 * (1 + 1 + 2) + 3 * 4 * 4 * 64
    assert peak_bound_s(given) == pytest.approx(moved / (COUNT * BANDWIDTH))
