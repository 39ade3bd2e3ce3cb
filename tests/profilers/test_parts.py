"""Parts of operators at their local shapes: what they compute, and what is made of their times."""

from dataclasses import replace

import pytest
import torch

from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.profile import Source
from planner.artefacts.sharding import local_shape, reads, rule_of, tile
from planner.costs.stage_pass import part_of
from planner.operators import parameters, synthetic
from planner.operators.parts import HALO
from planner.profilers.cache import MeasuredClass
from planner.profilers.measured import ModelTimer, measure
from planner.profilers.parts import measure_parts, obstacle
from planner.profilers.parts.unit import by_stride, local_strides, local_values, part_unit
from planner.profilers.runnable import unit
from tests.support.split_models import MODELS, lines, loaded
from tests.support.split_plans import fits


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr("planner.profilers.parts.measure.signs_of_load", lambda *_: ())


def model_of(kind, folder):
    return loaded(MODELS[kind](folder / f"{kind}.onnx"))


def profile_of(model):
    return measure(model, model_path=str(model.path), repetitions=1, budget_s=0.0, cached=False)


def parts_of(model, v, mesh):
    """All parts of an operator by the rules by hand, each axis by any of them."""
    operator = model.graph.operators[v]
    described = {**tensors_by_name(model.graph), **parameters_by_name(model.graph)}
    names = (*reads(operator), *operator.outputs)
    some = lines(model, operator)
    for first in some:
        for second in some if len(mesh) > 1 else [""]:
            rule = rule_of([first, second][: len(mesh)])
            both = zip(names, (*rule.inputs, *rule.outputs), strict=True)
            part = part_of(rule, mesh)
            if part and all(fits(described[name].shape, spec, mesh) for name, spec in both):
                yield part


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_part_makes_its_part_of_the_outputs(kind, mesh, tmp_path):
    model = model_of(kind, tmp_path)
    values = synthetic.inputs(model, seed=0, microbatch=0, device="cpu")
    held = parameters(model, [one.name for one in model.graph.parameters], "cpu")
    compared = 0
    for v, operator in enumerate(model.graph.operators):
        whole = unit(model, v, "cpu", held)
        outputs = dict(zip(whole.outputs, whole.forward(*whole.leaves(values)), strict=True))
        for part in parts_of(model, v, mesh):
            own = part_unit(model, v, part, "cpu", held)
            inside = local_values(model, v, part, values)
            made = own.forward(*own.leaves(inside))
            rule = rule_of(part[1])
            marked = any(HALO in axis.marks for axis in rule.axes)
            for name, one, spec in zip(operator.outputs, made, rule.outputs, strict=True):
                assert one.shape == local_shape(outputs[name].shape, spec, part[0])
                assert one.requires_grad == outputs[name].requires_grad
                if "P" in spec or marked or any("P" in some for some in rule.inputs):
                    continue
                box = tile(outputs[name].shape, spec, part[0], 0)
                due = outputs[name][tuple(slice(*ends) for ends in box)]
                torch.testing.assert_close(one, due, rtol=1e-9, atol=1e-9)
                compared += 1
        values |= {n: t.detach().requires_grad_(t.requires_grad) for n, t in outputs.items()}
    assert compared > 10


def test_local_tensors_lie_as_whole_ones_do():
    assert by_stride((1, 12, 4)) == [1, 2, 0]
    assert local_strides((1, 12, 4), (2, 3, 4)) == (1, 8, 2)
    assert local_strides((0, 0), (2, 3)) == (0, 0)


def time_s(numel):
    """Of a machine on which the first numbers are dear."""
    return 1e-4 + 1e-6 * numel**0.8


class Known:
    """Stands in for timing: a time that follows from the sizes of what is read."""

    def __init__(self):
        self.calls = 0

    def __call__(self, timer, operator, one, values, around):
        self.calls += 1
        read = [values[name] for name in one.inputs] + list(one.parameters.values())
        forward_s = time_s(sum(some.numel() for some in read))
        made = MeasuredClass(forward_s, 3 * forward_s, 0.0, 0.0, 1, 0, 0, (), 0, (), ())
        return made, ()


def wanted_of(model, mesh=(2,)):
    return {v: tuple(dict.fromkeys(parts_of(model, v, mesh)))
            for v in range(len(model.graph.operators))}  # fmt: skip


def due(model, v, part):
    operator, described = model.graph.operators[v], {
        **tensors_by_name(model.graph), **parameters_by_name(model.graph)
    }  # fmt: skip
    whole = part_numel = 0
    for name, spec in zip(reads(operator), rule_of(part[1]).inputs, strict=True):
        shape = described[name].shape
        whole += torch.Size(shape).numel()
        part_numel += torch.Size(local_shape(shape, spec, part[0])).numel()
    return time_s(part_numel) / time_s(whole)


def test_shares_are_those_of_the_times_at_local_shapes(tmp_path, monkeypatch, quiet):
    model = model_of("gpt", tmp_path)
    profile = profile_of(model)
    timing = Known()
    monkeypatch.setattr(ModelTimer, "timed", lambda timer, *rest: timing(timer, *rest))
    wanted = wanted_of(model)
    got = measure_parts(model, profile, wanted)
    for v, parts in wanted.items():
        found = {one.part: one for one in got.profile.operators[v].parts}
        assert found.keys() == set(parts)
        for part, one in found.items():
            assert one.forward == pytest.approx(due(model, v, part), abs=1e-4)
            assert one.backward == one.forward
    # Each class is timed once: as a whole and in its part.
    assert 0 < got.num_timed < sum(map(len, wanted.values()))
    assert timing.calls == 2 * got.num_timed
    assert got.num_cached == 0
    assert got.warnings == ()
    again = measure_parts(model, profile, wanted)
    assert (again.num_timed, again.num_cached) == (0, got.num_timed)
    assert again.profile.operators == got.profile.operators
    assert timing.calls == 2 * got.num_timed


def test_a_busy_machine_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    model = model_of("mlp", tmp_path)
    profile, timing = profile_of(model), Known()
    monkeypatch.setattr(ModelTimer, "timed", lambda timer, *rest: timing(timer, *rest))
    monkeypatch.setattr(
        "planner.profilers.parts.measure.signs_of_load",
        lambda *_: ("it was busy",),
    )
    wanted = {1: tuple(parts_of(model, 1, (2,)))}
    got = measure_parts(model, profile, wanted)
    assert got.warnings == ("it was busy",)
    assert measure_parts(model, profile, wanted).num_timed == got.num_timed > 0


def test_parts_are_timed_on_this_machine(tmp_path):
    model = model_of("mlp", tmp_path)
    profile = profile_of(model)
    wanted = wanted_of(model)
    got = measure_parts(model, profile, wanted, repetitions=1, budget_s=0.0, cached=False)
    for v, parts in wanted.items():
        for one in got.profile.operators[v].parts:
            assert one.forward > 0
            assert one.backward > 0
        assert len(got.profile.operators[v].parts) == len(parts)
    assert got.profile.graph == profile.graph


def test_only_measured_profiles_of_this_machine_have_parts_to_measure(tmp_path):
    profile = profile_of(model_of("mlp", tmp_path))
    assert obstacle(profile) is None
    for change, said in (
        ({"source": Source.ANALYTIC}, "local FLOPs and bytes"),
        ({"source": Source.INTERPOLATED}, "interpolated, not measured"),
        ({"engine": "onnxruntime (CPUExecutionProvider)"}, "by onnxruntime"),
        ({"device_type": "T4"}, "measured on T4, which is not here"),
    ):
        assert said in obstacle(replace(profile, **change))
