"""Live bytes of tensors: the tracker by hand, and what a plan predicts beside what a run takes."""

import random
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch

from planner import launch
from planner.artefacts.files import write_plan
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.launcher.updates import make_optimizer
from planner.model.load import ReadOptions, load
from planner.profilers.measured import measure
from planner.profilers.storages import StorageTracker
from planner.reports.launch import launch_json, launch_tables
from planner.schedules.orders import default_warmups
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.memory_runs import SlowLinks, peaks_of, run
from tests.support.models import light, llama

F1B, GPIPE = ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE


def test_a_storage_counts_once_from_its_making_to_its_end():
    there = torch.zeros(1000)
    with StorageTracker([there, there.view(10, 100)]) as tracker:
        assert tracker.peak_bytes() == 4000
        made = there + 1
        view = made.view(10, 100)
        del made
        assert tracker.peak_bytes() == 8000
        del view
        there.add_(1)
        assert tracker.peak_bytes() == 8000  # since it was asked before
        assert tracker.peak_bytes() == 4000


def test_what_autograd_keeps_counts_until_backward():
    x = torch.ones(1000, requires_grad=True)
    with StorageTracker([x]) as tracker:
        y = (x * 2).relu()  # relu keeps its result; the product is gone
        assert tracker.peak_bytes() == 12_000
        total = y.sum()
        del y
        tracker.peak_bytes()
        assert tracker.peak_bytes() == 8000 + 4
        total.backward()
        del total
        tracker.peak_bytes()
        assert tracker.peak_bytes() == 8000  # x and its gradient


@pytest.mark.parametrize("name", Optimizer)
def test_a_step_takes_no_memory(name):
    weight = torch.ones(1000, requires_grad=True)
    weight.grad = torch.ones(1000)
    optimizer = make_optimizer(name, [weight], None)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    with StorageTracker([weight, weight.grad, *state]) as tracker:
        before = tracker.peak_bytes()
        optimizer.step()
        assert before >= 4000 * (2 + name.num_moments)
        assert tracker.peak_bytes() < before + 4000


# ------------------------------------------------------------------- predicted and measured

MODELS = {
    "llama": (
        lambda: llama(layers=2, width=64, heads=2, inner=176, vocabulary=300, seed=0),
        {"batch": 2, "seq": 24},
    ),
    "squeezenet": (lambda: light("squeezenet", batch=1), {}),
}
# Replicas, microbatches, schedule, optimizer, recomputation, one more microbatch in flight.
CASES = {
    "alone": ((1,), 2, F1B, "adam", False, 0),
    "alone, again": ((1,), 3, F1B, "sgd", True, 0),
    "pipeline": ((1, 1), 4, F1B, "momentum", False, 1),
    "gpipe": ((1, 1), 3, GPIPE, "sgd", False, 0),
    "uneven": ((2, 1), 5, F1B, "adamw", False, 0),
    "again": ((1, 1, 1), 4, F1B, "sgd", True, 0),
}


def write_case(folder, model, profile, case):
    """strategy.json of a case, cut into stages with equally many operators."""
    widths, count, schedule, optimizer, again, extra = case
    names = [operator.name for operator in profile.graph.operators]
    bounds = [len(names) * s // len(widths) for s in range(len(widths) + 1)]
    warmups = default_warmups(widths, count, extra, schedule)
    stages, first = [], 0
    for s, width in enumerate(widths):
        operators = tuple(names[bounds[s] : bounds[s + 1]])
        stages.append(Stage.whole(operators, tuple(range(first, first + width)), warmups[s], again))
        first += width
    topology = cluster([unit_type("cpu")] * first, bandwidth=1e9)
    options = asked(count, schedule=schedule, optimizer=Optimizer(optimizer))
    problem = Problem(profile, topology, **options)
    plan = planned(problem, Strategy(tuple(stages), schedule, count))
    path = folder / f"{model}.{len(list(folder.glob('*.strategy.json')))}.strategy.json"
    write_plan(plan, path)
    return path


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Small models and their profiles, by name."""
    folder = tmp_path_factory.mktemp("memory")
    found = {}
    for name, (build, dimensions) in MODELS.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(build().SerializeToString())
        model = load(path, ReadOptions(dimensions=dimensions))
        quick = {"repetitions": 1, "budget_s": 0.0, "cached": False}
        profile = measure(model, model_path=path.name, **quick)
        found[name] = replace(profile, warnings=())
    return folder, found


@pytest.mark.parametrize("case", ["alone", "alone, again"])
@pytest.mark.parametrize("model", MODELS)
def test_one_device_takes_what_is_predicted(profiled, model, case):
    folder, profiles = profiled
    path = write_case(folder, model, profiles[model], CASES[case])
    found = launch(path, steps=1, track_memory=True)
    (one,) = peaks_of({case: launch_json(found)})
    assert one.right, one
    assert found.timeline.memory[0] and "of tensors" in launch_tables(found)[1].heads[-1]
    assert launch_json(launch(path, steps=1))["live_bytes"] == [None]


@pytest.mark.parametrize("seed", range(16))
def test_a_random_network_takes_what_is_predicted(tmp_path, seed):
    path = tmp_path / "model.onnx"
    path.write_bytes(random_network(random.Random(seed)).SerializeToString())
    profile = measure(load(path), model_path=path.name, repetitions=1, budget_s=0.0, cached=False)
    plan = write_case(tmp_path, "model", replace(profile, warnings=()), CASES["alone"])
    (one,) = peaks_of({"model": launch_json(launch(plan, steps=1, track_memory=True))})
    assert one.right, one


def random_network(dice):
    """Views, sums, parts and products of the last few tensors, which all have one shape."""
    lines, weights, made = ["t0 = MatMul (x, w0)"], {"w0": (SIDE, SIDE)}, ["t0"]
    for i in range(1, dice.randint(5, 15)):
        a, b, new = *(dice.choice(made[-4:]) for _ in range(2)), f"t{i}"
        kind = dice.choice(sorted(STEPS))
        weights[f"w{i}"] = (2 * SIDE if kind == "joined" else SIDE, SIDE)
        lines += [line.format(a=a, b=b, i=i) for line in STEPS[kind]]
        made.append(new)
    declared = f"float[2,{SIDE},{SIDE}]"
    header = '<ir_version: 10, opset_import: ["" : 17]>'
    proto = onnx.parser.parse_model(
        f"{header} agraph ({declared} x) => ({declared} {made[-1]})"
        f" <int64[2] flat = {{2, {SIDE * SIDE}}}, int64[3] full = {{2, {SIDE}, {SIDE}}},"
        f" int64[2] parts = {{8, {SIDE - 8}}}> {{ {chr(10).join(lines)} }}"
    )
    needed = {made[-1]}
    for node in reversed(list(proto.graph.node)):
        if needed.isdisjoint(node.output):
            proto.graph.node.remove(node)
        else:
            needed.update(node.input)
    for name, shape in weights.items():
        if name in needed:
            value = np.full(shape, 0.01, np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


SIDE = 32
STEPS = {
    "relu": ["t{i} = Relu ({a})"],
    "sigmoid": ["t{i} = Sigmoid ({a})"],
    "identity": ["t{i} = Identity ({a})"],
    "sum": ["t{i} = Add ({a}, {b})"],
    "product of elements": ["t{i} = Mul ({a}, {b})"],
    "transposed": ["t{i} = Transpose <perm = [0,2,1]> ({a})"],
    "softmax": ["t{i} = Softmax <axis = 2> ({a})"],
    "linear": ["t{i} = MatMul ({a}, w{i})"],
    "product": ["t{i} = MatMul ({a}, {b})"],
    "reshaped": ["r{i} = Reshape ({a}, flat)", "t{i} = Reshape (r{i}, full)"],
    "joined": ["j{i} = Concat <axis = 2> ({a}, {b})", "t{i} = MatMul (j{i}, w{i})"],
    "in parts": [
        "p{i}, q{i} = Split <axis = 2> ({a}, parts)",
        "s{i} = Relu (p{i})",
        "t{i} = Concat <axis = 2> (s{i}, q{i})",
    ],
}


@pytest.mark.parametrize(
    "late", [None, SlowLinks(0, back=False, waits=True)], ids=["evenly", "slow links"]
)
def test_several_devices_take_what_is_predicted(profiled, tmp_path, late):
    """All cases on ranks that are forked once."""
    folder, profiles = profiled
    cases = {name: case for name, case in CASES.items() if len(case[0]) > 1}
    if late:
        cases, profiles = {"again": CASES["again"]}, {"llama": profiles["llama"]}
    for name, profile in profiles.items():
        (tmp_path / f"{name}.onnx").write_bytes((folder / f"{name}.onnx").read_bytes())
        for case, what in cases.items():
            write_case(tmp_path, f"{name}-{case}", profile, what)
    found = run(tmp_path, 3, timeout_s=200, late=late)
    assert len({one.plan for one in found}) == len(profiles) * len(cases)
    assert not [one for one in found if not one.right]
    if late:
        # Its outputs have waited.
        assert any(one.rank == late.rank and one.share < 1.01 for one in found)
