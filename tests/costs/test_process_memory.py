"""What processes take beside tensors, against the groups that a launch makes and sums by hand."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.artefacts.topology import ProcessMemory
from planner.costs.bounds import memory_shortage
from planner.costs.evaluate import evaluate
from planner.costs.process_memory import least_reserve_bytes, num_groups
from planner.launcher import groups
from planner.launcher.gradients import buckets
from planner.launcher.mesh.lines import all_lines
from tests.support.builders import changed, cluster, problem_of, unit_type
from tests.support.split import megatron, mlp, one_stage, two_stages, with_stage

PROCESS = ProcessMemory(
    context_bytes=7_000, first_group_bytes=500, group_bytes=400, workspace_bytes=64
)
GPU = replace(unit_type("gpu"), process=PROCESS)
SPLIT = megatron(2)


def shared_over_replicas():
    return with_stage(one_stage(mlp(), None, [[0], [1], [2], [3]], 4), over=2, zero=3)


STRATEGIES = {
    "alone": one_stage(mlp(), None, [[0]]),
    "replicas": one_stage(mlp(), None, [[0], [1], [2]], 3),
    "pipeline": two_stages(mlp(), 2, (None, [[0]]), (None, [[1]])),
    "wider at its end": two_stages(mlp(), 2, (None, [[0]]), (None, [[1], [2]])),
    "split": one_stage(mlp(), SPLIT, [[0, 1]]),
    "split replicas": one_stage(mlp(), SPLIT, [[0, 1], [2, 3]], 2),
    "split pipeline": two_stages(mlp(), 1, (None, [[0]]), (SPLIT, [[1, 2]])),
    "in parts over replicas": shared_over_replicas(),
}
BY_HAND = {
    "alone": [0],
    "replicas": [1, 1, 1],  # of the sum
    "pipeline": [2, 2],  # tensors there, gradients back
    "wider at its end": [4, 3, 3],  # two of each pair, and the sum
    "split": [1, 1],  # the line
}


def problem(count=4, **options):
    return problem_of(mlp(), cluster([GPU] * count), 2, measured_on=GPU, **options)


def made_in_a_launch(monkeypatch, program, lines, ranks):
    """By device, the number of groups of nccl that it is in, as every rank makes them."""
    found = Counter()

    def made(members, backend, **_):
        if backend == "nccl":
            mine.append(tuple(members))
        return SimpleNamespace(members=members)

    post = SimpleNamespace(post=lambda tensor: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(groups, "join_group", lambda rank, size: None)
    monkeypatch.setattr(groups, "Channel", lambda *_: post)
    monkeypatch.setattr(groups, "dist", SimpleNamespace(new_group=made))
    monkeypatch.setattr(groups, "torch", SimpleNamespace(zeros=lambda *_, **__: None))
    monkeypatch.setattr(groups, "collective_group", made)
    monkeypatch.setattr(groups, "ProcessGroupAxis", lambda *_: None)
    for rank, device in enumerate(ranks):
        mine = []
        groups.Groups(ranks, rank, program, "cuda", lines)
        found[device] = sum(rank in members for members in mine)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_as_many_groups_are_counted_as_a_launch_makes(name, monkeypatch):
    strategy, given = STRATEGIES[name], problem()
    graph, lists = given.profile.graph, evaluate(given, strategy).program
    used = tuple(lists.lists)
    found = num_groups(strategy, graph, lists)
    lines, of_launch = all_lines(strategy, graph), replace(lists, sums=buckets(lists.sums))
    if len(used) > 1:
        expected = made_in_a_launch(monkeypatch, of_launch, lines, used)
        assert {d: found[d] for d in used} == {d: expected[d] for d in used}
    if name in BY_HAND:
        assert [found[d] for d in used] == BY_HAND[name]


def test_a_process_counts_in_the_peak_and_not_among_tensors():
    free = changed(problem(), topology=cluster([unit_type("gpu")] * 4))
    strategy = STRATEGIES["wider at its end"]
    bare, found = (evaluate(given, strategy).memory for given in (free, problem()))
    for device, number in enumerate(BY_HAND["wider at its end"]):
        process = 7_000 + 500 + 400 * (number - 1)
        assert found[device].process_bytes == found[device].reserve_bytes == process
        assert found[device].total_bytes == bare[device].total_bytes + process + 64
        assert found[device].tensor_bytes == bare[device].tensor_bytes + 64  # cuBLAS's buffers
        assert bare[device].process_bytes == bare[device].reserve_bytes == 0


def test_what_is_left_free_is_there_for_the_process():
    strategy = STRATEGIES["replicas"]
    for reserve, expected in ((100, 7_500), (7_499, 7_500), (9_000, 9_000)):
        given = problem(reserve=reserve)
        parts = evaluate(given, strategy).memory[0]
        assert (parts.reserve_bytes, parts.process_bytes) == (expected, 7_500)
        assert least_reserve_bytes(given, 0) == max(reserve, 7_000)


def test_a_plan_that_fits_but_for_its_process_does_not_fit():
    strategy = STRATEGIES["replicas"]
    need = evaluate(problem(), strategy).memory[0].total_bytes
    assert evaluate(problem(device_memory=need), strategy).shortage is None
    shortage = evaluate(problem(device_memory=need - 1), strategy).shortage
    assert "reserve 7.32 KiB, 7.32 KiB of it the process)" in shortage


def test_a_model_that_does_not_fit_beside_contexts_does_not_fit_at_all():
    assert memory_shortage(problem(device_memory=20_000)) is None
    free = changed(problem(device_memory=6_000), topology=cluster([unit_type("gpu")] * 4))
    assert memory_shortage(free) is None
    assert "beside the reserve" in memory_shortage(problem(device_memory=7_001))


def test_a_stage_without_products_has_no_buffers_for_them():
    strategy = two_stages(mlp(), 1, (None, [[0]]), (None, [[1]]))
    free = changed(problem(), topology=cluster([unit_type("gpu")] * 4))
    bare, found = (evaluate(given, strategy).memory for given in (free, problem()))
    more = [found[d].tensor_bytes - bare[d].tensor_bytes for d in (0, 1)]
    assert more == [0, 64]
