"""Trainings on CPU ranks whose activations wait in the host's memory equal those that keep them on
the device, to the last bit; memory is as predicted.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.artefacts.files import write_plan
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import HostLink
from planner.model.export.export import export_module
from planner.model.load import ReadOptions, load
from planner.profilers.measured import measure
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.memory_runs import reports as launched

WIDTH, BATCH, STEPS = 256, 96, 3
PRODUCT = 1  # the place of the first product in a layer
UNDER, OVER = 0.99, 1.08


def net():
    """Blocks with a residual connection and dropout."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2),
                nn.Linear(2 * WIDTH, WIDTH),
            )  # fmt: skip

        def forward(self, x):
            return x + self.inner(x)

    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(WIDTH, 10))


def _with(stage, layers, waiting, again, kept):
    """A stage whose first layers wait or run again, these but for an operator in some place."""
    own = [layer for layer in layers if layer[0] in stage.operators]
    rerun = tuple(tuple(name for i, name in enumerate(layer) if i != kept) for layer in own[:again])
    waits = (*rerun[:waiting], *own[again:waiting])
    return replace(stage, offloaded=waits, recompute=bool(rerun), recomputed=rerun)


def plans(profile):
    """By name: two stages with two microbatches in flight, and two replicas, all with layers that
    wait, or run again, or both, as a whole or but for a product.
    """
    names = tuple(one.name for one in profile.graph.operators)
    starts = [v for v, name in enumerate(names) if profile.graph.operators[v].type ==
              "LayerNormalization"]  # fmt: skip
    layers = [names[a:b] for a, b in zip(starts, [*starts[1:], len(names) - 1], strict=True)]
    cut = starts[3]
    pair = [
        Stage.whole(names[:cut], (0,), 2, recompute=False),
        Stage.whole(names[cut:], (1,), 1, recompute=False),
    ]
    shared = replace(Stage.whole(names, (0, 1), 1, recompute=False), over=2, zero=3)
    found = {}
    for kind, stages in {"pipeline": pair, "zero3": [shared]}.items():
        for how, waiting, again, kept in (
            ("plain", 0, 0, None), ("waits", 5, 0, None), ("runsagain", 0, 4, None),
            ("both", 5, 2, None), ("selected", 5, 2, PRODUCT),
        ):  # fmt: skip
            some = [_with(one, layers, waiting, again, kept) for one in stages]
            name = f"{kind}-{how}.strategy.json"
            found[name] = Strategy(tuple(some), ScheduleName.ONE_F_ONE_B, 4)
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offloaded")
    torch.manual_seed(0)
    export_module(net().train(), (torch.randn(BATCH, WIDTH),), folder / "net.onnx")
    profile = measure(
        load(folder / "net.onnx", ReadOptions()), model_path="net.onnx", repetitions=1,
        budget_s=0.0, cached=False,
    )  # fmt: skip
    topology = cluster([unit_type("cpu")] * 2, host_link=HostLink(1e9))
    problem = Problem(profile, topology, **asked(4))
    for name, strategy in plans(profile).items():
        write_plan(planned(problem, strategy), folder / name)
    found = launched(folder, 2, STEPS, timeout_s=300)
    return {name.split(".")[0]: one for name, one in found.items()}


@pytest.mark.parametrize("how", ["waits", "runsagain", "both", "selected"])
@pytest.mark.parametrize("kind", ["pipeline", "zero3"])
def test_losses_of_all_steps_have_the_same_bits(reports, kind, how):
    plain, found = reports[f"{kind}-plain"], reports[f"{kind}-{how}"]
    assert len(set(plain["loss"])) == STEPS
    assert found["loss"] == plain["loss"]


@pytest.mark.parametrize("how", ["waits", "both", "selected"])
@pytest.mark.parametrize("kind", ["pipeline", "zero3"])
def test_memory_of_device_and_host_is_as_predicted(reports, kind, how):
    found, plain = reports[f"{kind}-{how}"], reports[f"{kind}-plain"]
    both = zip(found["predicted_live_bytes"], found["live_bytes"], strict=True)
    for predicted, live in both:
        assert UNDER <= predicted / live <= OVER
    assert found["live_bytes"][0] < plain["live_bytes"][0]
    assert found["host_bytes"] == found["predicted_host_bytes"]
    assert min(found["host_bytes"]) > 0 == max(plain["host_bytes"])
