"""All-reduces inside operators whose statistics are of a dimension that is cut, beside figures by
hand: of C channels, two sums in double precision each way.
"""

import pytest

from planner.artefacts.graph import Operator
from planner.artefacts.options import Optimizer
from planner.artefacts.sharding import rule_of
from planner.artefacts.strategy import ScheduleName, Strategy
from planner.costs.stage_pass import stage_pass
from planner.resharding.statistics import statistics_steps
from planner.simulator.account import account
from planner.simulator.collectives import collectives
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.mode_runs import MICROBATCHES, along_samples, net, profile_of

SIZE, RATE = 4, 1e6
CHANNELS = {"bn1_op": 6, "bn2_op": 8}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A problem, and a strategy that cuts the samples of each microbatch."""
    path = tmp_path_factory.mktemp("statistics") / "net.onnx"
    net(path)
    profile = profile_of(path)
    topology = cluster([unit_type("cpu")] * SIZE, bandwidth=RATE)
    problem = problem_of(profile, topology, MICROBATCHES, optimizer=Optimizer.SGD)
    stage = along_samples(profile, SIZE)
    return problem, Strategy((stage,), ScheduleName.ONE_F_ONE_B, MICROBATCHES)


def test_sums_of_statistics_take_the_time_of_two_figures_per_channel_each_way(split):
    problem, strategy = split
    own = stage_pass(problem, strategy.stages[0], 0)
    names = [one.name for one in problem.profile.graph.operators]
    for i, v in enumerate(own.operators.tolist()):
        if v >= 0 and names[v] in CHANNELS:
            ring_s = 2 * (SIZE - 1) / SIZE * 2 * 8 * CHANNELS[names[v]] / RATE
            assert own.collective_s[:, i] == pytest.approx([ring_s] * 2, rel=1e-6)


def test_the_timeline_names_them(split):
    problem, strategy = split
    timeline = account(problem, strategy).timeline
    found = [one.name for one in collectives(problem, strategy, timeline) if one.device == 0]
    for name in CHANNELS:
        assert found.count(f"all-reduce in {name}") == MICROBATCHES
        assert found.count(f"all-reduce in d/{name}") == MICROBATCHES


CASES = [
    ("LayerNormalization", "S2,S0,S0->S2", [(2, 6, 8), (8,), (8,)], [12 * 2 * 8], [12 * 2 * 8]),
    ("RMSNormalization", "S2,S0->S2", [(2, 6, 8), (8,)], [12 * 8], [12 * 8]),
    ("InstanceNormalization", "S2,R,R->S2", [(2, 6, 8), (6,), (6,)], [12 * 16], [12 * 16]),
    ("Softmax", "S1->S1", [(2, 6, 8)], [16 * 4, 16 * 4], [16 * 4]),
]


@pytest.mark.parametrize(("kind", "line", "shapes", "forward", "backward"), CASES)
def test_bytes_of_sums(kind, line, shapes, forward, backward):
    names = [f"t{i}" for i in range(len(shapes))]
    operator = Operator(kind, kind, tuple(names), ("y",), ())
    rule = rule_of([f"{line} @moments"])
    sides = statistics_steps(operator, rule, dict(zip(names, shapes, strict=True)), (2,))
    assert [[step.bytes for step in side] for side in sides] == [forward, backward]
    assert statistics_steps(operator, rule_of([line]), {}, (2,)) == ((), ())
