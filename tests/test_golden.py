"""strategy.json, byte for byte."""

from dataclasses import replace

import pytest

from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import ScheduleName
from planner.planning.portfolio import compare
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

#     0 - 1 - 2 - 3 - 4 - 5, where 5 also reads what 1 makes
SKIPPING = [[], [0], [1], [2], [3], [1, 4]]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("skip-1f1b.json", {"schedule": ScheduleName.ONE_F_ONE_B}),
        ("skip-gpipe-adam.json", {"schedule": ScheduleName.GPIPE, "optimizer": Optimizer.ADAM}),
    ],
)
def test_a_strategy_file_stays_the_same(name, options, golden, tmp_path):
    graph = graph_of(SKIPPING, [8000] * 6, [10**6] * 6)
    problem = problem_of(
        profile_of(graph, [0.5e-3, 1e-3, 1.5e-3, 1e-3, 1e-3, 1e-3]),
        cluster([unit_type(bandwidth=1e11)] * 3, bandwidth=1e8, latency=1e-5),
        num_microbatches=6,
        **options,
    )
    # Far more time than it takes, so that a busy machine cuts no search.
    plan = replace(compare(problem, time_limit_s=60.0).best.plan, versions={})
    write_plan(plan, tmp_path / name)
    assert read_plan(tmp_path / name) == plan
    golden(name, (tmp_path / name).read_text())
