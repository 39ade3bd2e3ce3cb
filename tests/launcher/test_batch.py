"""A step's data waits in the memory of the host: a pass has its microbatch on the device."""

from types import SimpleNamespace

import pytest
import torch

from planner.launcher.batch import Batch, StepBatches
from planner.launcher.executor import StepSize, TrainingStep
from planner.launcher.stage import ReportedLoss
from planner.schedules.actions import Compute, Direction


class Totals:
    """Totals of a model whose losses count nothing in their data."""

    def own(self, batches):
        return {}


class Stage:
    """A stage that keeps where its data was."""

    def forward(self, microbatch, tensors, targets, totals):
        self.devices = {one.device.type for one in (*tensors.values(), *targets.values())}
        return {}, ReportedLoss(0.0, 0.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_has_its_microbatch_on_the_device_and_the_others_wait_on_the_host(device):
    data = {m: Batch({"x": torch.ones(2)}, {"y": torch.ones(2)}) for m in range(3)}
    groups = SimpleNamespace(add_up=lambda numbers: numbers, torch_device=device)
    step = TrainingStep(0, StepBatches(3, data), None, Totals(), StepSize(3, 1), groups)
    stage = Stage()
    step.forward(Compute(Direction.FORWARD, 0, 1), stage, {})
    assert stage.devices == {device}
    every = [
        one for batch in data.values() for one in (*batch.inputs.values(), *batch.targets.values())
    ]
    assert {one.device.type for one in every} == {"cpu"}
