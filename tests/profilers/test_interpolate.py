"""Profiles for microbatches between those that were profiled, and `solve` with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import cli
from planner.api.conversion import convert
from planner.artefacts.files import artefact_hash, read_plan, write_profiles
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import Graph, Operator, Parameter, Tensor, View
from planner.artefacts.options import Objective
from planner.artefacts.profile import BatchNorm, OperatorCost, Profile, Source, WholeStep
from planner.clusters.yaml.read import shipped_device_type
from planner.planning.portfolio import compare
from planner.planning.sizes import MAX_BETWEEN, best_over_sizes
from planner.profilers.interpolate import interpolated, span
from planner.support.errors import OptionError
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.commands import run
from tests.support.models import llama

KIND = "V100-SXM2-16GB"


def profile_at(size, base_s=0.0, step_s=1e-3, private=(0, 8), source=Source.MEASURED):
    """x (n, 4) -> a -> b, where a keeps its output, and b what it makes besides: times of
    base + step n, private bytes of (p, q): p + q n, and a mask of n as a constant.
    """
    graph = Graph(
        operators=(
            Operator("a", "MatMul", ("x",), ("y",), ("w",)),
            Operator("b", "Where", ("y",), ("z",), ("mask",)),
        ),
        tensors=(
            Tensor("x", (size, 4), "float32", False),
            Tensor("y", (size, 9), "float32", True),
            Tensor("z", (4, size), "float32", True),
        ),
        parameters=(
            Parameter("w", (4, 4), "float32", True),
            Parameter("mask", (size, 1), "bool", False),
        ),
        inputs=("x",),
        outputs=("z",),
    )
    time_s = base_s + step_s * size
    outputs = [graph.tensors[1].bytes, graph.tensors[2].bytes]
    return Profile(
        graph=graph,
        operators=(
            OperatorCost("a", time_s, 2 * time_s, outputs[0], 64, 32 * size, 64, ("y",), 0),
            OperatorCost(
                "b", time_s / 2, 0.0, outputs[1], size, 4 * size, 12 + 8 * size, ("y",),
                private[0] + private[1] * size, workspace_bytes=100 + size, interval=0.01 * size,
            ),
        ),
        views=(View("z", "y"),),
        model_path="m.onnx",
        model_hash="0" * 64,
        dimensions={"N": size, "seq": 4},
        microbatch_size=size,
        dtype="float32",
        device_type=KIND,
        source=source,
        threads=None,
        repetitions=10 + size,
        spread=size / 100,
        whole_step=None,
        versions={"torch": "2"},
        engine="torch",
    )  # fmt: skip


def test_a_size_that_was_profiled_is_taken_as_it_is():
    profiles = [profile_at(n) for n in (1, 4, 8)]
    assert [interpolated(profiles, n) for n in (1, 4, 8)] == profiles


def test_a_size_between_is_made_once():
    profiles = [profile_at(n) for n in (1, 4)]
    assert interpolated(profiles, 2) is interpolated(tuple(profiles), 2)


@given(
    low=st.integers(1, 64),
    gap=st.integers(2, 64),
    data=st.data(),
    base=st.floats(0, 1),
    step=st.floats(0, 1),
)
def test_what_is_linear_in_the_size_comes_out_exact(low, gap, data, base, step):
    size = data.draw(st.integers(low + 1, low + gap - 1))
    ends = [profile_at(n, base + 1e-3, step, private=(8, 4)) for n in (low, low + gap)]
    found, due = interpolated(ends, size), profile_at(size, base + 1e-3, step, private=(8, 4))
    assert (found.graph, found.views, found.dimensions) == (due.graph, due.views, due.dimensions)
    for one, other in zip(found.operators, due.operators, strict=True):
        assert one.forward_s == pytest.approx(other.forward_s, rel=1e-12)
        assert one.backward_s == pytest.approx(other.backward_s, rel=1e-12)
        times = {"forward_s": 0.0, "backward_s": 0.0}
        certainty = {"interval": 0.0, "workspace_bytes": 0}
        assert replace(one, **times, **certainty) == replace(other, **times, **certainty)


def weight_apart(profile, share):
    """The profile with a share of the backward pass of `a` that is its weight's; None for none."""
    one, *others = profile.operators
    of_weight_s = None if share is None else share * one.backward_s
    return replace(profile, operators=(replace(one, backward_weight_s=of_weight_s), *others))


def test_the_time_of_a_weight_is_linear_where_both_neighbours_have_it():
    low, high = weight_apart(profile_at(4), 0.5), weight_apart(profile_at(8), 1.0)
    of_weight_s = [profile.operators[0].backward_weight_s for profile in (low, high)]
    (found, other) = interpolated([low, high], 6).operators
    assert found.backward_weight_s == pytest.approx(sum(of_weight_s) / 2, rel=1e-12)
    assert other.backward_weight_s is None
    above = interpolated([low, high], 16).operators[0]
    assert above.backward_weight_s == above.backward_s == 2 * high.operators[0].backward_s
    unknown = interpolated([low, weight_apart(high, None)], 6).operators[0]
    assert unknown.backward_weight_s is None


def started(profile, host_s):
    own = [replace(one, host_forward_s=host_s) for one in profile.operators]
    return replace(profile, operators=tuple(own))


@pytest.mark.parametrize("size", [3, 8])
def test_a_host_starts_as_many_kernels_for_any_number_of_samples(size):
    found = interpolated([started(profile_at(2), 5e-6), started(profile_at(4), 6e-6)], size)
    assert [one.host_forward_s for one in found.operators] == [6e-6, 6e-6]


def test_only_the_two_neighbours_count():
    profiles = [profile_at(1, 1.0), profile_at(4, 2.0), profile_at(8, 4.0), profile_at(16, 0.0)]
    found = interpolated(profiles, 6)
    middle_s = (profiles[1].operators[0].forward_s + profiles[2].operators[0].forward_s) / 2
    assert found.operators[0].forward_s == pytest.approx(middle_s, rel=1e-12)


def test_a_file_says_what_was_interpolated_and_how_sure_it_is():
    low = replace(profile_at(4), warnings=("the machine was busy",))
    high = replace(profile_at(8), whole_step=WholeStep(1.0, 1.0))
    found = interpolated([low, high], 6)
    assert (found.source, found.engine, found.microbatch_size) == (
        Source.INTERPOLATED, "torch", 6
    )  # fmt: skip
    assert found.warnings == (
        "times are interpolated between microbatches of 4 and 8, measured",
        "the machine was busy",
    )
    assert [o.interval for o in found.operators] == [0.0, 0.08]
    assert [o.workspace_bytes for o in found.operators] == [0, 108]
    assert (found.spread, found.repetitions, found.whole_step) == (0.08, 14, None)


def test_bytes_and_operations_are_rounded_up_to_whole_ones():
    pair = [profile_at(4), profile_at(8)]
    for i, count in enumerate((1, 2)):
        first, second = pair[i].operators
        first = replace(first, flops=count, bytes_moved=count)
        pair[i] = replace(pair[i], operators=(first, second))
    found = interpolated(pair, 6).operators[0]
    assert (found.flops, found.bytes_moved) == (2, 2)


def test_next_to_one_sample_what_is_kept_is_in_proportion_to_the_larger_neighbour():
    # A view of one sample's tensor, a copy of 8 bytes a sample from two samples on.
    one, four = profile_at(1, private=(0, 0)), profile_at(4, private=(0, 8))
    one = replace(
        one, views=(), operators=(one.operators[0], replace(one.operators[1], stash_tensors=()))
    )
    found = interpolated([one, four], 2)
    assert found.operators[1].stash_private_bytes == 16
    assert found.operators[1].stash_tensors == ("y",)
    assert found.views == four.views
    # What does not grow stays.
    constant = [profile_at(n, private=(4096, 0)) for n in (1, 4)]
    assert interpolated(constant, 2).operators[1].stash_private_bytes == 4096


def without_a_view(profile):
    return replace(profile, views=())


def with_a_gradient_view(profile):
    return replace(profile, gradient_views=(View("y", "z"),))


def with_operators(profile):
    first, second = profile.graph.operators
    graph = replace(profile.graph, operators=(replace(first, type="Gemm"), second))
    return replace(profile, graph=graph)


def with_another_output(profile):
    return replace(profile, graph=replace(profile.graph, outputs=("z", "y")))


def with_rows(profile):
    """10 columns in place of 9."""
    x, y, z = profile.graph.tensors
    graph = replace(profile.graph, tensors=(x, replace(y, shape=(8, 10)), z))
    first, second = profile.operators
    costs = (replace(first, output_bytes=320), second)
    return replace(profile, graph=graph, operators=costs)


def with_rank(profile):
    w, mask = profile.graph.parameters
    return replace(profile, graph=replace(profile.graph, parameters=(w, replace(mask, shape=(8,)))))


def with_weight(profile):
    w, mask = profile.graph.parameters
    graph = replace(profile.graph, parameters=(replace(w, shape=(8, 4)), mask))
    first, second = profile.operators
    return replace(profile, graph=graph, operators=(replace(first, parameter_bytes=128), second))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_operators, "their operators differ"),
        (with_another_output, "their inputs or outputs differ"),
        (with_rows, r"y is float32\[4, 9\] and float32\[8, 10\], which leaves no whole shape"),
        (with_rank, r"mask is bool\[4, 1\] and bool\[8\]"),
        (with_weight, r"w is trained, and is float32\[4, 4\] and float32\[8, 4\]"),
        (without_a_view, "other tensors are views"),
        (with_a_gradient_view, "other gradients are views"),
        (lambda p: replace(p, engine="roofline"), "engine is 'torch' and 'roofline'"),
        (lambda p: replace(p, model_hash="1"), "model_hash is"),
        (lambda p: replace(p, threads=2), "threads is None and 2"),
        (
            lambda p: replace(p, batch_norm=BatchNorm.TRAINING),
            "batch_norm is .*frozen.* and .*training",
        ),
        (lambda p: replace(p, tie=("a",)), r"tie is \(\) and \('a',\)"),
        (lambda p: replace(p, untie=("a",)), r"untie is \(\) and \('a',\)"),
        (lambda p: replace(p, dimensions={"N": 8, "seq": 5}), "dimension seq is 4 and 5"),
        (lambda p: replace(p, dimensions={"N": 8}), "their dimensions differ"),
    ],
)
def test_neighbours_that_differ_in_more_than_the_size_have_nothing_between(change, reason):
    pair = [profile_at(4), change(profile_at(8))]
    with pytest.raises(OptionError, match=rf"between those of 4 and 8: {reason}.*--batch 4,6,8"):
        interpolated(pair, 6)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_with_one_size_profiled_all_others_are_refused_with_what_to_run(size):
    with pytest.raises(OptionError, match=r"a size that was profiled, 4; profile it too: .*"):
        interpolated([profile_at(4)], size)


@pytest.mark.parametrize("size", [0, -1, 10**16])
def test_no_microbatch_has_no_samples_or_more_than_any_file_says(size):
    with pytest.raises(OptionError, match=r"expected at least 1 and at most 1e\+15"):
        interpolated([profile_at(4), profile_at(8)], size)


@pytest.mark.parametrize(
    ("size", "nearest", "which"), [(1, 2, "smallest"), (16, 8, "largest"), (9, 8, "largest")]
)
def test_outside_shapes_and_bytes_are_exact_and_times_those_of_the_nearest_per_sample(
    size, nearest, which
):
    """Of x + 1 ms n a sample takes more in a smaller microbatch, which is not seen outside."""
    profiles = [profile_at(n, 1e-2, private=(8, 4)) for n in (2, 4, 8)]
    found, due = interpolated(profiles, size), profile_at(size, 1e-2, private=(8, 4))
    near = interpolated(profiles, nearest)
    assert found.graph == due.graph
    assert found.dimensions == due.dimensions
    for one, other, own in zip(found.operators, due.operators, near.operators, strict=True):
        assert one.forward_s == pytest.approx(own.forward_s * size / nearest)
        assert one.backward_s == pytest.approx(own.backward_s * size / nearest)
        for name in ("output_bytes", "parameter_bytes", "flops", "bytes_moved", "stash_tensors",
                     "stash_private_bytes"):  # fmt: skip
            assert getattr(one, name) == getattr(other, name), name
    assert found.source is Source.SCALED
    assert found.warnings[0] == (
        f"times are scaled from a microbatch of {nearest}, the {which} profiled, measured"
    )
    assert interpolated(profiles, size) is found


def test_outside_what_is_no_shape_or_too_large_is_refused():
    with pytest.raises(OptionError, match=r"y is float32\[4, 9\] and float32\[8, 10\], which"):
        interpolated([profile_at(4), with_rows(profile_at(8))], 9)
    with pytest.raises(OptionError, match=r"a microbatch of 100000000000000: .* at most"):
        interpolated([profile_at(4), profile_at(8)], 10**14)


def test_searches_choose_sizes_between_those_profiled_only():
    assert span([profile_at(8), profile_at(2), profile_at(4)]) == (2, 8)
    assert span([profile_at(4)]) == (4, 4)


# -------------------------------------------------------------------------------- solve


def problems_of(sizes, samples, devices=2, overhead_s=1e-2, **options):
    """Problems with an overhead per microbatch, and the profiles of the sizes."""
    profiles = [profile_at(n, overhead_s, step_s=1e-3) for n in sizes]
    topology = cluster([unit_type(KIND)] * devices, bandwidth=1e12)
    kind = unit_type(KIND)
    return [
        problem_of(profile, topology, samples // size, kind, **options)
        for size, profile in zip(sizes, profiles, strict=True)
        if samples % size == 0
    ], profiles


def test_a_size_between_wins_where_the_larger_one_does_not_fit():
    problems, profiles = problems_of([1, 16], 64, device_memory=1500)
    assert compare(problems[1]).best is None
    plans = best_over_sizes(problems, profiles)
    found, asked = plans.comparison, plans.problems
    assert found.best.microbatch_size in (2, 4, 8)
    assert found.best.source is found.best.plan.source is Source.INTERPOLATED
    sizes = [problem.profile.microbatch_size for problem in asked]
    assert sizes == sorted({row.microbatch_size for row in found.rows})
    best_s = {}
    for problem in asked:
        alone = compare(problem).best
        if alone is not None:
            best_s[problem.profile.microbatch_size] = alone.plan.prediction.iteration_s
    assert found.best.plan.prediction.iteration_s == min(best_s.values())
    assert found.lower_bound_s <= min(best_s.values())


def asked_of(sizes, samples, **options):
    """The sizes that are asked."""
    plans = best_over_sizes(*problems_of(sizes, samples, **options))
    found, asked = plans.comparison, plans.problems
    return found, [problem.profile.microbatch_size for problem in asked]


def test_sizes_are_asked_next_to_the_best_only():
    # Of the profiled sizes one sample alone fits, so larger ones than four are not worth asking.
    found, asked = asked_of([1, 4, 120], 120, device_memory=600)
    assert asked == [1, 2, 3, 4, 120]
    assert found.best.microbatch_size == 3


def test_powers_of_two_are_asked_first_and_no_more_than_a_few():
    # Without overheads the bound is the same for all sizes.
    _, asked = asked_of([1, 120], 120, overhead_s=0.0)
    assert asked == [1, 2, 3, 4, 8, 120]
    assert len(asked) - 2 == MAX_BETWEEN


def test_where_not_even_the_smallest_fits_nothing_larger_is_asked():
    found, asked = asked_of([2, 16], 64, device_memory=200)
    assert found.best is None
    assert asked == [2, 16]


def test_sizes_that_cannot_win_are_not_asked():
    # Work is all in the overhead: half the size, twice the time, whatever the plan.
    problems, profiles = problems_of([1, 16], 32, devices=1)
    plans = best_over_sizes(problems, profiles)
    found, asked = plans.comparison, plans.problems
    assert found.best.microbatch_size == 16
    assert [one.profile.microbatch_size for one in asked] == [1, 16]


def test_where_only_the_larger_size_divides_smaller_ones_between_are_asked():
    problems, profiles = problems_of([3, 16], 16, device_memory=1500)
    assert [one.profile.microbatch_size for one in problems] == [16]
    plans = best_over_sizes(problems, profiles)
    found, asked = plans.comparison, plans.problems
    assert [one.profile.microbatch_size for one in asked] == [4, 8, 16]
    assert found.best.microbatch_size in (4, 8)


def test_a_bottleneck_is_compared_per_sample_between_too():
    problems, profiles = problems_of(
        [1, 16], 64, objective=Objective.BOTTLENECK, device_memory=1500
    )
    plans = best_over_sizes(problems, profiles)
    found, _ = plans.comparison, plans.problems
    assert found.best.source is Source.INTERPOLATED


def test_sizes_that_cannot_be_interpolated_are_said():
    problems, profiles = problems_of([2, 16], 64, device_memory=1500)
    problems[1] = replace(problems[1], profile=without_a_view(problems[1].profile))
    plans = best_over_sizes(problems, [profiles[0], problems[1].profile])
    found, asked = plans.comparison, plans.problems
    assert [one.profile.microbatch_size for one in asked] == [2, 16]
    assert "a microbatch of 4 cannot be interpolated" in found.notes[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with profiles of two sizes, of which the larger one does not fit."""
    monkeypatch.chdir(tmp_path)
    profiles = [replace(profile_at(n, 1e-2), model_path=None) for n in (1, 16)]
    write_profiles(profiles, Path("profiles/p.json"))
    return tmp_path


GIVEN = ("--topology", "p3", "--gpus", "2", "--global-batch", "64", "--reserve", "0 B")
OWN = shipped_device_type(KIND).process
SCARCE = ("--device-memory", f"{OWN.context_bytes + OWN.workspace_bytes + 1500} B")
"""What one process takes, and 1500 bytes for tensors."""


def solve(*arguments, code=0):
    done = CliRunner().invoke(cli.main, ["solve", *GIVEN, *arguments])
    assert done.exit_code == code, done.output
    return done


def test_solve_takes_a_size_between_and_says_so(folder):
    shown = solve(*SCARCE).output
    plan = read_plan(Path("strategy.json"))
    assert plan.microbatch_size in (2, 4, 8)
    assert (plan.source, plan.engine) == (Source.INTERPOLATED, "torch")
    assert plan.dimensions == {"N": plan.microbatch_size, "seq": 4}
    assert f"{plan.microbatch_size} interpolated" in shown
    assert f"operator times: interpolated (torch), of {KIND}" in shown
    assert "note: profile: times are interpolated between microbatches of 1 and 16" in shown
    found = json.loads(solve(*SCARCE, "--json").stdout)
    assert (found["microbatch_size"], found["source"], found["engine"]) == (
        plan.microbatch_size, "interpolated", "torch"
    )  # fmt: skip
    sources = {row["microbatch_size"]: row["source"] for row in found["compared"]}
    assert sources[1] == sources[16] == "measured"


def test_a_strategy_of_a_size_between_finds_its_profile_again(folder):
    solve(*SCARCE)
    plan = read_plan(Path("strategy.json"))
    profiles = read_any_profiles(Path("profiles/p.json"))
    assert plan.profile_hash == artefact_hash(interpolated(profiles, plan.microbatch_size))
    assert plan.profile_hash not in map(artefact_hash, profiles)
    written = convert(Path("strategy.json"), Path("graph.txt"), "pipedream")
    assert [path.name for path in written] == ["graph.txt", "graph.dot"]


def test_the_size_can_be_fixed(folder):
    for size, source in ((1, "measured"), (4, "interpolated"), (16, "measured")):
        found = json.loads(solve("--microbatch-size", str(size), "--json").stdout)
        assert (found["microbatch_size"], found["source"]) == (size, source)
        assert {row["microbatch_size"] for row in found["compared"]} == {size}


def test_a_fixed_size_outside_is_scaled_and_said(folder):
    shown = solve("--microbatch-size", "32").output
    assert "times are scaled from a microbatch of 16, the largest profiled, measured" in shown
    assert "32 scaled" in shown
    plan = read_plan(Path("strategy.json"))
    assert (plan.microbatch_size, plan.source) == (32, Source.SCALED)
    found = interpolated(read_any_profiles(Path("profiles/p.json")), 32)
    assert plan.profile_hash == artefact_hash(found)
    assert convert(Path("strategy.json"), Path("graph.txt"), "pipedream")


def test_a_fixed_size_of_another_planner_is_refused(folder):
    said = solve("--microbatch-size", "1", "--cost-model", "piper", code=1).output
    assert "--microbatch-size is for --cost-model planner or pipedream" in said


def test_imported_times_between_two_sizes_still_hold_on_every_device(folder):
    profiles = [
        replace(
            profile_at(n, 1e-2, source=Source.IMPORTED), device_type="imported", model_path=None
        )
        for n in (1, 16)
    ]
    write_profiles(profiles, Path("profiles/p.json"))
    assert json.loads(solve("--microbatch-size", "4", "--json").stdout)["source"] == "interpolated"


def test_a_real_model_between_two_sizes_is_as_if_it_had_been_profiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("llama.onnx").write_bytes(llama(1, 32, 2, 48, 64, seed=0).SerializeToString())

    run("profile", "llama.onnx", "--batch", "1,3,4", "--dim", "seq=8", "--no-cache")
    one, *between, four = read_any_profiles(Path("profiles/llama.json"))
    for due in between:
        found = interpolated([one, four], due.microbatch_size)
        assert (found.graph, found.dimensions) == (due.graph, due.dimensions)
        for mine, other in zip(found.operators, due.operators, strict=True):
            for name in ("output_bytes", "parameter_bytes", "flops", "bytes_moved",
                         "stash_tensors", "stash_private_bytes"):  # fmt: skip
                assert getattr(mine, name) == getattr(other, name), (mine.name, name)
    write_profiles([one, four], Path("profiles/llama.json"))
    run("solve", "--topology", "local", "--gpus", "1", "--microbatch-size", "2",
        "--microbatches", "2")  # fmt: skip
    done = run("launch", "strategy.json", "--steps", "1", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["operator_times"] == f"interpolated ({four.engine}), of cpu"
