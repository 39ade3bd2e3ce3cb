"""Collectives beside computations: where they are started, and that all devices agree on it."""

import random
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Semaphore

import pytest
import torch

from planner.costs.local_stage import local_stage
from planner.costs.pass_times import SideDurations, backward_times, forward_times
from planner.launcher.device_part import StagePlace, local_parameters
from planner.launcher.mesh import module as modules
from planner.launcher.mesh.lines import queued
from planner.launcher.mesh.module import split_module
from planner.launcher.mesh.queue import ThreadQueue
from planner.launcher.mesh.shards import OptimizerShards
from planner.operators import parameters, to_torch
from planner.resharding.conversion import sends
from planner.resharding.overlap import pass_order
from planner.resharding.sums import gathered_together
from tests.support.recording import RecordingQueue
from tests.support.split_models import MODELS, gpt, loaded, megatron
from tests.support.split_plans import (
    alone,
    cut_further,
    data,
    local_run,
    random_segments,
    random_sharding,
    stage_of,
)
from tests.support.split_profiles import profiled
from tests.support.threads import on_all

BUDGETS = (0, 2_000, 2**30)
CASES = [((2,), 0), ((2,), 3), ((4,), 3), ((2, 2), 0), ((2, 2), 3)]


def expected(model, stage, recompute):
    """The conversions of a microbatch in the order of the costs' passes, in which each takes a
    second and all else no time.
    """
    local = local_stage(profiled(model), stage)
    sides, forward = [], None
    for side, times in enumerate((forward_times, backward_times)):
        steps = {
            row: [one.forward if side == 0 else one.backward]
            for row, one in local.conversions.items()
        }
        if side == 1:
            for row, copies in local.regathered.items():
                steps[row] = [local.conversions[copy].forward for copy in copies]
        none = [0.0] * len(local.graph_index)
        moved = [float(any(map(sends, steps.get(row, [])))) for row in range(len(none))]
        order = pass_order(stage, model.graph)
        durations = SideDurations(none, moved, none, none, none)
        ahead = {"ahead": forward} if side else {}
        forward = forward or durations
        found = times(local, order, durations, beside=True, **ahead)
        every = [
            *((ends, steps[row]) for row, ends in found.moved.items()),
            *((ends, [local.conversions[row].forward]) for row, ends in found.moved_again.items()),
        ]
        sides.append([one for _, some in sorted(every, key=lambda one: one[0]) for one in some
                      if sends(one)])  # fmt: skip
    return [*sides[0], *sides[0] * recompute, *sides[1]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: loaded(make(folder / f"{name}.onnx")) for name, make in MODELS.items()}


def check_order(model, mesh, zero, num_plans, seed):
    """What all devices of a mesh post in two microbatches of some random plans."""
    chance = random.Random(seed)
    for i in range(num_plans):
        sharding = random_sharding(model, mesh, chance)
        if zero:
            sharding = cut_further(sharding, model, zero, chance)
        prefetch, recompute = BUDGETS[i % len(BUDGETS)], i % 4 == 1
        stage = replace(stage_of(model, sharding), prefetch=prefetch)
        if i % 3 == 2:
            segments = random_segments(model.graph, chance)
            stage = replace(stage, recompute=True, recomputed=segments)

        def on_one(mesh, stage=stage, recompute=recompute):
            queue = RecordingQueue()
            local_run(model, stage, data(model, 2), queued(mesh, queue), recompute)
            return queue.posted

        found, _ = on_all(mesh, on_one)
        assert all(one == found[0] for one in found)
        conversions = [how for how, _ in found[0] if not isinstance(how, str)]
        assert conversions == expected(model, stage, recompute) * 2, (i, sharding)


@pytest.mark.parametrize("mesh, zero", CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_all_devices_post_the_same_in_the_order_that_is_priced(models, name, mesh, zero):
    check_order(models[name], mesh, zero, 3, zero)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, zero", CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_many_plans(models, name, mesh, zero):
    check_order(models[name], mesh, zero, 16, 10 + zero)


class WaitingLine:
    """A line whose collectives wait for computations.

    Args:
        line: the same without that.
        method: that waits.
        calls: of the method, the numbers of those that do.
        computed: what they wait for: a release each.
    """

    def __init__(self, line, method, calls, computed):
        self._line, self._computed, self._calls, self._count = line, computed, calls, count()
        self.rank, self.size = line.rank, line.size
        setattr(self, method, partial(self._wait, getattr(line, method)))

    def __getattr__(self, name):
        return getattr(self._line, name)

    def _wait(self, collective, own):
        if next(self._count) in self._calls:
            assert self._computed.acquire(timeout=20), "the computation waits for the collective"
        return collective(own)


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    return loaded(gpt(tmp_path_factory.mktemp("block") / "gpt.onnx", tied=False))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_weights_are_computed_beside_the_all_reduce_of_the_inputs(block, recompute):
    """Two all-reduces of a forward of Megatron-LM's block, and two of its backward, each of which
    waits for the gradient of a weight that reads its input.
    """
    stage = replace(stage_of(block, megatron(block, 2)), prefetch=2**20)
    held = {one.name: one.parameters for one in block.graph.operators}
    order = pass_order(stage, block.graph)
    late = {
        name
        for places in order.late.values()
        for place in places
        for name in held[stage.operators[place]]
    }
    assert {one[1:] for one in late} >= set("qkvu")
    backward = range(2 + 2 * recompute, 4 + 2 * recompute)

    def on_one(mesh):
        computed, seen = Semaphore(0), []

        def begin(values):
            for name in late:
                values[name].register_post_accumulate_grad_hook(partial(noted, name))

        def noted(name, _):
            seen.append(name)
            computed.release()

        line = WaitingLine(mesh.lines[0], "all_reduce", backward, computed)
        beside = queued(replace(mesh, lines=[line]), ThreadQueue())
        local_run(block, stage, data(block, 1), beside, recompute, begin=begin)
        return {*seen}

    found, counts = on_all((2,), on_one)
    assert counts == [{"all-reduce": 4 + 2 * recompute}]
    assert found == [late, late]


def test_parameters_are_gathered_beside_the_operators_that_read_others(block, monkeypatch):
    """Of all gathers of a forward, which begin with it, the second one waits until an operator has
    what the first one has gathered.
    """
    cut = {one.name: ("S0",) for one in block.graph.parameters if one.shape[:1] != (1,)}
    plain = replace(random_sharding(block, (2,), random.Random(1)), rules={}, inputs={}, outputs={})
    stage = replace(stage_of(block, replace(plain, parameters=cut)), prefetch=2**30)
    gathers, end = len(pass_order(stage, block.graph).order), modules.finished
    computed = Semaphore(0)

    def noted(started):
        made = end(started)
        computed.release()
        return made

    monkeypatch.setattr(modules, "finished", noted)

    def on_one(mesh):
        line = WaitingLine(mesh.lines[0], "all_gather", [1], computed)
        beside = queued(replace(mesh, lines=[line]), ThreadQueue())
        return local_run(block, stage, data(block, 1), beside)

    found, counts = on_all((2,), on_one)
    assert counts[0]["all-gather"] > gathers > 10
    assert sum(loss for loss, _ in found) == pytest.approx(alone(block, data(block, 1))[0])


class Releasing(torch.nn.Module):
    """Between operators: says that those before have run."""

    def __init__(self, computed):
        super().__init__()
        self._computed = computed

    def forward(self):
        self._computed.release()


def test_parameters_are_gathered_after_a_step_beside_the_forward_that_waits_for_them(tmp_path):
    """The gather of the parameters that are read last waits until an operator before has run; each
    operator reads what the step has made.
    """
    model = loaded(MODELS["mlp"](tmp_path / "mlp.onnx"))
    plain = replace(random_sharding(model, (2,), random.Random(1)), rules={}, inputs={}, outputs={})
    specs = {"w1": ("S0",), "w2": ("S1",)}
    names = [one.name for one in model.graph.parameters]
    lies = replace(plain, parameters=dict.fromkeys(names, ("R",)), states=specs)
    stage = replace(stage_of(model, lies), prefetch=0)
    assert gathered_together(stage, model.graph) == (("w1",), ("w2",))
    ((inputs, _),) = data(model, 1)

    def on_one(mesh):
        computed = Semaphore(0)
        line = WaitingLine(mesh.lines[0], "all_gather", [1], computed)
        beside = queued(replace(mesh, lines=[line]), ThreadQueue())
        place = StagePlace(stage, 0, beside, stage, beside)
        values = local_parameters(model, names, place, "cpu")
        module = split_module(model, stage, beside, values, "cpu")
        shards = OptimizerShards(stage, beside, values, model.graph)
        shards.connect(module)
        given = [inputs[name] for name in module.input_names]
        (before,) = module(*given)
        gelu = next(one for one in module.graph.nodes if "gelu" in one.name)
        with module.graph.inserting_after(gelu):
            module.add_submodule("releasing", Releasing(computed))
            module.graph.call_module("releasing")
        module.recompile()
        with torch.no_grad():
            for one in shards.shards.values():
                one.mul_(2.0)
        shards.gather()
        (after,) = module(*given)
        shards.settle()
        return before, after, values

    found, counts = on_all((2,), on_one)
    assert counts == [{"all-gather": 2}]
    whole = parameters(model, names)
    for before, after, values in found:
        assert all(torch.equal(values[name], 2 * whole[name]) for name in specs)
        held = {name: one.detach() * (1 + (name in specs)) for name, one in whole.items()}
        (expected,) = to_torch(model, values=held)(inputs["x"])
        torch.testing.assert_close(after, expected)
        assert not torch.allclose(before, after)


@pytest.mark.parametrize(("ahead", "posted"), [(None, 2), (0, 0)])
def test_parameters_are_gathered_after_a_step_in_the_order_of_need(tmp_path, ahead, posted):
    """All at once, or each when its first reader is reached; `settle` starts what is left."""
    model = loaded(MODELS["mlp"](tmp_path / "mlp.onnx"))
    plain = replace(random_sharding(model, (2,), random.Random(1)), rules={}, inputs={}, outputs={})
    specs = {"w1": ("S0",), "w2": ("S1",)}
    names = [one.name for one in model.graph.parameters]
    lies = replace(plain, parameters=dict.fromkeys(names, ("R",)), states=specs)
    stage = replace(stage_of(model, lies), prefetch=0, gathered_ahead=ahead)
    ((inputs, _),) = data(model, 1)

    def on_one(mesh):
        beside = queued(mesh, ThreadQueue())
        place = StagePlace(stage, 0, beside, stage, beside)
        values = local_parameters(model, names, place, "cpu")
        module = split_module(model, stage, beside, values, "cpu")
        shards = OptimizerShards(stage, beside, values, model.graph)
        shards.connect(module)
        seen, start = [], shards._start
        shards._start = lambda i: (seen.append(i) if i in shards._to_start else None, start(i))
        shards.gather()
        first = len(seen)
        module(*[inputs[name] for name in module.input_names])
        passed = [*seen]
        shards.gather()
        shards.settle()
        return first, passed, seen[2:]

    found, counts = on_all((2,), on_one)
    assert found == [(posted, [0, 1], [0, 1])] * 2
    assert counts == [{"all-gather": 4}]
