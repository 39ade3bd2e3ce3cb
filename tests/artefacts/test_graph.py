"""What follows from a graph."""

from dataclasses import replace

import pytest

from planner.artefacts.graph import Parameter, main_dtype
from tests.support.builders import graph_of


def test_the_main_dtype_has_the_most_bytes_of_all_parameters_together():
    graph = graph_of([[], [0], [1]])
    halves = [Parameter(name, (300,), "float16", True) for name in ("w0", "w1")]
    graph = replace(graph, parameters=(*halves, Parameter("w2", (250,), "float32", True)))
    assert main_dtype(graph) == "float16"
    graph = replace(graph, parameters=(*halves, Parameter("w2", (350,), "float32", True)))
    assert main_dtype(graph) == "float32"


def test_without_floats_there_is_no_main_dtype():
    with pytest.raises(ValueError, match="without floats"):
        main_dtype(graph_of([[]]))
