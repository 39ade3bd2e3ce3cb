"""Profiles for microbatches of several sizes: the best one is chosen."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from cli import main
from planner.errors import FileError
from planner.files import read_profile_set, write_profile, write_profiles
from planner.formats import read_any_profiles
from planner.judging.judge import objective_s
from planner.judging.portfolio import attempts, compare, comparison
from planner.problem import Objective
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type


def profile_at(size, overhead_s=0.0, stash=True):
    """A chain of four operators: 1 ms per sample each, and an overhead per microbatch."""
    graph = graph_of([[], [0], [1], [2]], tensor_bytes=[1000 * size] * 4)
    profile = profile_of(graph, [overhead_s + size * 1e-3] * 4, stash=stash)
    return replace(profile, microbatch_size=size)


def problems_at(sizes, samples, overhead_s=0.0, devices=2, **options):
    topology = cluster([unit_type()] * devices, bandwidth=1e12)
    return [
        problem_of(profile_at(size, overhead_s), topology, samples // size, **options)
        for size in sizes
    ]


def compare_sizes(problems):
    """These sizes and none between them."""
    return comparison([attempts(one, None, 10.0, lambda solver: None) for one in problems])


def test_large_microbatches_win_where_each_has_an_overhead():
    best = compare_sizes(problems_at([1, 2, 4], 16, overhead_s=1e-2)).best
    assert best.microbatch_size == best.plan.microbatch_size == 4


def test_small_microbatches_win_where_memory_is_short():
    problems = problems_at([1, 8], 16, overhead_s=1e-3, device_memory_bytes=30_000)
    assert compare(problems[1]).best is None
    assert compare_sizes(problems).best.microbatch_size == 1


def test_the_bound_and_the_gaps_are_over_all_sizes():
    problems = problems_at([1, 4], 16, overhead_s=1e-2)
    both = compare_sizes(problems)
    alone = [compare(problem) for problem in problems]
    assert both.lower_bound_s == min(one.lower_bound_s for one in alone)
    assert len(both.rows) == sum(len(one.rows) for one in alone)
    for row in both.rows:
        if row.plan is not None:
            expected = objective_s(row.plan) / both.lower_bound_s - 1
            assert row.plan.certificate.gap == pytest.approx(expected)


def test_a_bottleneck_is_compared_per_sample():
    problems = problems_at([1, 4], 16, overhead_s=1e-4, objective=Objective.BOTTLENECK)
    best = compare_sizes(problems).best
    assert best.microbatch_size == 4
    certificate = best.plan.certificate
    assert objective_s(best.plan) == pytest.approx(
        certificate.lower_bound_s * (1 + certificate.gap)
    )


def test_a_file_with_several_sizes_comes_back_as_it_was(tmp_path):
    profiles = (profile_at(1), profile_at(2))
    write_profiles(profiles, tmp_path / "p.json")
    assert read_any_profiles(tmp_path / "p.json") == profiles
    write_profiles(profiles[:1], tmp_path / "q.json")
    write_profile(profiles[0], tmp_path / "r.json")
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "r.json").read_bytes()


def test_profiles_of_different_models_are_refused(tmp_path):
    write_profiles((profile_at(1), profile_at(2)), tmp_path / "p.json")
    plain = json.loads((tmp_path / "p.json").read_text())
    plain["profiles"][1]["model_hash"] = "another"
    (tmp_path / "p.json").write_text(json.dumps(plain))
    with pytest.raises(FileError, match="expected one model_hash for all"):
        read_profile_set(tmp_path / "p.json")


def test_solve_chooses_among_the_sizes_that_divide_the_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profiles = [replace(profile_at(n, 1e-2), device_type="V100-SXM2-16GB") for n in (1, 3, 4)]
    write_profiles(profiles, tmp_path / "p.json")
    options = ["--profile", "p.json", "--topology", "p3.yaml", "--gpus", "2", "--json"]
    done = CliRunner().invoke(main, ["solve", *options, "--global-batch", "16"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["microbatch_size"] == 4
    assert {row["microbatch_size"] for row in found["compared"]} == {1, 4}
    odd = CliRunner().invoke(
        main, ["solve", *options, "--global-batch", "16", "--microbatches", "2"]
    )
    assert odd.exit_code == 1
    assert "not both" in odd.output


@pytest.mark.parametrize("text", ["0", "1,", "2,2", "a", "1,-2"])
def test_nonsense_sizes_are_refused(text):
    done = CliRunner().invoke(main, ["profile", "model.onnx", "--batch", text])
    assert done.exit_code == 2
    assert "expected a size such as 8" in done.output
