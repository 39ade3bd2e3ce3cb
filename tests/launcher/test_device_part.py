"""The place of a device in a stage that is not split."""

import torch

from planner.artefacts import graph
from planner.artefacts.losses import Loss
from planner.artefacts.strategy import Stage
from planner.launcher.batch import Batch
from planner.launcher.device_part import stage_place
from planner.launcher.groups import Groups
from planner.schedules.actions import Program
from tests.support.programs import chain


def test_an_unsplit_stage_is_a_mesh_without_axes_in_which_everything_is_whole():
    stage = Stage.whole(("v",), (4, 3), 1, False)
    groups = Groups((3,), 0, Program({}, ()), "cpu")
    place, x, y = (
        stage_place(stage, chain(2), groups),
        torch.ones(2, 3),
        torch.zeros(2),
    )
    assert (place.replica, place.mesh.sizes, place.mesh.index, [*place.mesh.lines]) == (
        1,
        (),
        0,
        [],
    )
    assert place.spec("outputs", "w") == place.spec("inputs", "x") == ()
    assert place.part(x, ()) is place.whole((2, 3), (), x) is x
    output = graph.Tensor("z", (2,), "float32", True)
    batch = place.batch(Batch({"x": x}, {"z": y}), [Loss("mse", output, "Relu", None, True)])
    assert batch.inputs["x"] is x
    assert batch.targets["z"] is y
