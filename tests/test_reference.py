"""The antichain solver is never worse, by its own closed form, than the plans that it has to beat,
on the published graphs and on the profiles that come with the planner.
"""

import math
from math import prod

import pytest

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.options import Objective
from planner.artefacts.problem import Options, Problem
from planner.artefacts.strategy import Stage, Strategy
from planner.clusters.yaml.read import device_table, find_topology, read_topology
from planner.costs.evaluate import closed_form_s, evaluate
from planner.solvers import SOLVERS
from tests.support import reference

GRAPHS = ("alexnet", "gnmt", "resnet18", "resnext50", "squeezenet1_0", "vgg16")
OTHERS = (
    "dnn-partitioning/layer-bert24_inference.json",
    "dnn-partitioning/layer-bert24_training.json",
    "dnn-partitioning/layer-resnet50_inference.json",
    "dnn-partitioning/layer-resnet50_training.json",
    "dnn-partitioning/operator-bert_l-3_inference.json",
    "dnn-partitioning/operator-bert_l-3_training.json",
    "piper/bert32a100.json",
)
# Machines per level, innermost first.
SHAPES = ((8,), (4, 2), (3, 5))
BANDWIDTHS = ("10 GB/s", "10 Gbps")
PLAIN = ("single", "data-parallel", "even", "pipedream")


def hierarchy(tmp_path, counts):
    """V100s in a regular hierarchy: fast links inside, slow ones around them."""
    path = tmp_path / "levels.yaml"
    levels = "".join(
        f"  - {{name: level{i}, count: {count}, bandwidth: {rate}, latency: 5 us}}\n"
        for i, (count, rate) in enumerate(zip(counts, BANDWIDTHS, strict=False))
    )
    head = "format: planner-topology/1\nname: levels\ndevice: V100-SXM2-16GB\nlevels:\n"
    path.write_text(head + levels)
    return read_topology(path)


def transposed(strategy, counts):
    """The same stages with the devices taken across the hosts: the first device of every host, then
    the second of every host, and so on.
    """
    inner, count = counts[0], prod(counts)
    order = [host * inner + place for place in range(inner) for host in range(count // inner)]
    stages = (
        Stage.whole(s.operators, tuple(sorted(order[d] for d in s.devices)), s.warmup, s.recompute)
        for s in strategy.stages
    )
    return Strategy(tuple(stages), strategy.schedule, strategy.num_microbatches)


def rivals(problem, counts=None):
    """Plans that fit, by name; those on levels also on the devices in transposed order."""
    for name in PLAIN:
        strategy = SOLVERS[name](problem, 10.0).strategy
        if strategy is None:
            continue
        yield name, strategy
        if counts is not None:
            turned = transposed(strategy, counts)
            if evaluate(problem, turned).shortage is None:
                yield f"{name}, transposed", turned


def check_never_worse(problem, others, known=()):
    """Asked alone, it starts from the plain solvers' plans."""
    own = SOLVERS["antichain"](problem, 10.0, known).strategy
    assert own is not None or not others  # the largest models fit nowhere
    found = math.inf if own is None else closed_form_s(problem, own)
    for name, strategy in others.items():
        assert found <= closed_form_s(problem, strategy) * (1 + 1e-9), name


# Those that were computed for a type of device are large.
SHIPPED = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if "-" in path.stem else [])
    for path in sorted(shipped("profiles").glob("*.json"))
]
# One shape of each graph in `make test`, all of one graph.
CASES = (
    *(
        pytest.param(
            f"pipedream/{name}.txt",
            counts,
            marks=[] if counts == (4, 2) or name == "alexnet" else [pytest.mark.slow],
        )
        for name in GRAPHS
        for counts in SHAPES
    ),
    *((name, (4, 2)) for name in OTHERS),
)


@pytest.mark.reference
@pytest.mark.parametrize(("name", "counts"), CASES, ids=str)
@pytest.mark.parametrize("objective", [Objective.ITERATION, Objective.BOTTLENECK])
def test_never_worse_on_published_profiles(name, counts, objective, tmp_path):
    path = reference.REFERENCE / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; set PLANNER_REFERENCE")
    # The batches were large: most graphs fit no V100 at all.
    options = Options(4 * prod(counts), objective=objective, device_memory_bytes=2**40)
    problem = Problem(reference.profile(name), hierarchy(tmp_path, counts), options)
    others = dict(rivals(problem, counts))
    assert {"single", "data-parallel", "even"} <= set(others)
    assert "pipedream" in others or path.suffix != ".txt"
    check_never_worse(problem, others)
    # Not only because it starts from the others' plans: the worst of them is enough.
    worst = max(others.values(), key=lambda strategy: closed_form_s(problem, strategy))
    check_never_worse(problem, others, (worst,))


@pytest.mark.parametrize("topology", ["p3-8xlarge.yaml", "p3.yaml"])
@pytest.mark.parametrize("path", SHIPPED)
def test_never_worse_on_the_profiles_that_come_with_the_planner(path, topology):
    found = read_topology(find_topology(topology))
    options = Options(4 * len(found.devices))
    for profile in read_any_profiles(path):
        measured_on = device_table().get(profile.device_type)
        problem = Problem(profile, found, options, measured_on)
        check_never_worse(problem, dict(rivals(problem)))
