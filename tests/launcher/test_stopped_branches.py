"""A branch before a stop has no backward: in profile, memory, trace, and in a launch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import planner
from planner import launch
from planner.artefacts.files import write_plan
from planner.artefacts.graph import consumers, differentiated, producers, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, crossings
from planner.costs.evaluate import evaluate
from planner.model.load import load
from planner.operators import to_torch
from planner.profilers.analytic import analytic
from planner.profilers.measured import measure
from planner.reports.launch import launch_json
from planner.schedules.actions import Compute, Direction
from planner.schedules.orders import default_warmups
from planner.simulator.events import simulate
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.memory_runs import peaks_of

WIDTH, LAYERS, BATCH = 32, 6, 256
ACTIVATION = 4 * WIDTH * BATCH


class Siamese(nn.Module):
    """One encoder for two views; the second one is the target, without its gradient if stopped."""

    def __init__(self, *, stopped):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.encoder, self.stopped = nn.Sequential(*layers), stopped
        self.predictor = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b):
        target = self.encoder(b)
        if self.stopped:
            target = target.detach()
        return {"loss": functional.mse_loss(self.predictor(self.encoder(a)), target)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The network with and without the stop: its file and its measured profile."""
    folder, made = tmp_path_factory.mktemp("siamese"), {}
    for stopped in (True, False):
        torch.manual_seed(0)
        path = folder / f"{'stopped' if stopped else 'whole'}.onnx"
        views = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        planner.export(Siamese(stopped=stopped), views, path)
        quick = {"repetitions": 1, "budget_s": 0.0, "cached": False}
        profile = measure(load(path), model_path=path.name, **quick)
        made[stopped] = path, replace(profile, warnings=())
    return made


def branch(graph):
    """Indices of the operators that work on the second view alone."""
    found, reached = set(), {graph.inputs[1]}
    made = producers(graph)
    for i, operator in enumerate(graph.operators):
        if set(operator.inputs) and reached.issuperset(operator.inputs):
            found.add(i)
            reached.update(operator.outputs)
    assert len(found) >= 2 * LAYERS
    assert all(i in made.values() for i in found)
    return found


def test_operators_before_a_stop_have_no_backward_in_a_profile(models):
    for stopped, (path, measured) in models.items():
        graph, inside = measured.graph, branch(measured.graph)
        assert differentiated(graph).isdisjoint(inside) is stopped
        for profile in (measured, analytic(load(path), model_path=None, kind=unit_type("cpu"))):
            costs = [profile.operators[i] for i in inside]
            assert (sum(one.backward_s for one in costs) == 0) is stopped
            kept = [(one.stash_tensors, one.stash_private_bytes) for one in costs]
            assert (set(kept) == {((), 0)}) is stopped
            others = [one for i, one in enumerate(profile.operators) if i not in inside]
            assert sum(one.backward_s for one in others) > 0


def plan_of(models, stopped, widths=(1,)):
    """The plan of a network on one device, or with the second view's branch on one of its own."""
    path, profile = models[stopped]
    names = [operator.name for operator in profile.graph.operators]
    first = {names[i] for i in branch(profile.graph)}
    parts = [names] if len(widths) == 1 else [
        [one for one in names if one in first], [one for one in names if one not in first]
    ]  # fmt: skip
    warmups = default_warmups(list(widths), 2)
    stages = tuple(
        Stage.whole(tuple(part), (s,), warmups[s], False) for s, part in enumerate(parts)
    )
    topology = cluster([unit_type("cpu")] * len(widths), bandwidth=1e9)
    problem = Problem(profile, topology, **asked(2))
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, 2)
    return problem, strategy, planned(problem, strategy), path


def test_a_launch_takes_the_memory_that_is_predicted_without_the_branch(models):
    live = {}
    for stopped in models:
        *_, plan, path = plan_of(models, stopped)
        file = Path(path).with_suffix(".strategy.json")
        write_plan(plan, file)
        (one,) = peaks_of({"": launch_json(launch(file, steps=1, track_memory=True))})
        assert one.right, one
        live[stopped] = one.live_bytes
    # Each layer keeps what its GELU reads and what its product reads.
    assert live[False] - live[True] > 1.8 * LAYERS * ACTIVATION


def test_a_stage_with_the_branch_has_no_backward_in_the_trace(models):
    for stopped in models:
        problem, strategy, *_ = plan_of(models, stopped, (1, 1))
        graph = problem.profile.graph
        (crossing,) = crossings(strategy, graph)
        assert crossing.gradient is not stopped
        evaluation = evaluate(problem, strategy)
        timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
        computed = (one for one in timeline.events if isinstance(one.action, Compute))
        back = [
            one for one in computed if (one.device, one.action.direction) == (0, Direction.BACKWARD)
        ]
        assert (sum(one.end_s - one.start_s for one in back) == 0) is stopped
        assert any(one.source == 1 for one in timeline.transfers) is not stopped


def test_nothing_of_the_branch_is_recorded(models):
    model = load(models[True][0])
    module = to_torch(model)
    recorded = {}
    for node in module.graph.nodes:
        name = node.meta.get("onnx_name")
        if name is not None:
            index = next(i for i, o in enumerate(model.graph.operators) if o.name == name)
            sources = [one.target for one in node.all_input_nodes]
            recorded[index] = torch.detach not in sources
    assert not any(recorded[i] for i in branch(model.graph) if _reads_trained(model.graph, i))
    assert all(recorded[i] for i in differentiated(model.graph))


def _reads_trained(graph, i):
    trained = {one.name for one in graph.parameters if one.trainable}
    return bool(trained.intersection(graph.operators[i].parameters))


def test_a_stop_is_a_fact_of_the_tensor(models):
    graph = load(models[True][0]).graph
    tensors, readers = tensors_by_name(graph), consumers(graph)
    made = [n for i in branch(graph) for n in graph.operators[i].outputs]
    assert not any(tensors[name].gradient for name in made)
    assert all(readers[name] for name in made)


def test_what_is_written_of_a_model_keeps_its_stops(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = models[True]
    before = load(path)
    *_, plan, _ = plan_of(models, True)
    planner.write_strategy(plan, "s.json", model=path)
    planner.launch("s.json", steps=1, learning_rate=0.1, checkpoint="kept")
    planner.write_weights("kept", "trained.onnx")
    assert load(Path("s.onnx")).hash == before.hash
    for file in ("s.onnx", "trained.onnx"):
        after = load(Path(file))
        assert stops_of(after) == stops_of(before) != []
        assert after.graph == before.graph
    profile = analytic(load(Path("trained.onnx")), model_path="trained.onnx", kind=unit_type("cpu"))
    assert planner.solve(profile, gpus=2).plan is not None


def stops_of(model):
    return [node.name for node in model.nodes if node.attributes.get("stop_gradient")]


def test_another_engine_runs_a_stop_as_a_copy(models):
    profile = planner.profile(
        models[True][0], engine="onnxruntime", repetitions=1, budget_s=0.0, cache=False,
        contention=False,
    )  # fmt: skip
    inside = branch(profile.graph)
    assert sum(profile.operators[i].backward_s for i in inside) == 0
    assert sum(profile.operators[i].forward_s for i in inside) > 0
