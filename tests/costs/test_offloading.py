"""Memory and time of stages whose activations wait in the host's memory, worked out by hand."""

from dataclasses import replace

import pytest

from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import HostLink
from planner.costs.evaluate import evaluate
from planner.costs.offloading import HostSegment, stage_offload
from planner.costs.stage_memory import stage_memory
from planner.costs.stage_pass import stage_pass
from planner.support.errors import TopologyError
from tests.support.builders import KB, cluster, graph_of, problem_of, profile_of, unit_type

LINK = HostLink(100.0 * KB)


@pytest.fixture
def profile():
    """Five operators in a row, each with a parameter of 1 KB, that stash what they make. Each takes
    1 s forward and 2 s backward.
    """
    sizes = [70 * KB, 100 * KB, 200 * KB, 100 * KB, 1 * KB]
    return profile_of(graph_of([[], [0], [1], [2], [3]], sizes), [1.0] * 5)


@pytest.fixture
def stage(profile):
    """Of op1 100 KB wait, of op2 and op3 300 KB."""
    names = tuple(one.name for one in profile.graph.operators)
    plain = Stage.whole(names, (0,), 1, recompute=False)
    return replace(plain, offloaded=(names[1:2], names[2:4]))


def passes(profile, stage, count=1, **how):
    topology = cluster([unit_type()] * count, **how)
    one = stage_pass(problem_of(profile, topology, 1), stage, 0)
    return one.forward_s, one.backward_s


def test_copies_hide_behind_the_segments_beside_them(profile, stage):
    # Forward: op1 ends at 2, and is copied until 3. op3 ends at 4, and is copied until 7.
    # Backward: op2 and op3 are back at 3; then op1 is copied until 4. op3, op2, op1, op0 until 11.
    assert passes(profile, stage, host_link=LINK) == (7.0, 11.0)


def test_devices_that_share_a_link_copy_at_the_same_time(profile, stage):
    shared = replace(LINK, num_devices=2)
    # op1 until 4, op3 ends then, too, and is copied until 10; back at 6, and op1 at 8.
    assert passes(profile, stage, 2, host_link=shared) == (10.0, 14.0)
    assert passes(profile, stage, 1, host_link=shared) == (7.0, 11.0)


def test_cores_make_the_copies_of_processes(profile, stage):
    assert passes(profile, stage, cores=1, host_link=LINK) == (5.0 + 4.0, 10.0 + 4.0)


def test_a_segment_waits_for_the_copies_of_the_one_before(profile, stage):
    slow = HostLink(20.0 * KB)
    # op1 ends at 2, and is copied until 7. op3 would end at 4, but waits, and is copied until 22.
    # Back: op2 and op3 at 15, op1 at 20, op3 and op2 run until 19, op1 and op0 until 24.
    assert passes(profile, stage, host_link=slow) == (22.0, 24.0)


def test_without_a_link_nothing_waits(profile, stage):
    with pytest.raises(TopologyError, match="host has no host_link"):
        passes(profile, stage)


def test_bytes_leave_the_device(profile, stage):
    before, after = (
        stage_memory(profile, replace(stage, offloaded=())),
        stage_memory(profile, stage),
    )
    assert stage_offload(profile, stage).segments == (
        HostSegment(1, 1, 100 * KB, 100 * KB), HostSegment(3, 3, 300 * KB, 300 * KB),
    )  # fmt: skip
    assert before.kept_bytes - after.kept_bytes == after.host_bytes == 400 * KB
    # While op3 runs, op1's output is still being copied. The loss and op4's output come later.
    assert after.forward_workspace_bytes == (400 - 2) * KB
    # In the backward of op3 all are on the device: those of op2 and op3, and that of op1, which is
    # on its way. Gradients are of op3's and op2's outputs and of a parameter; the loss is gone.
    assert after.backward_workspace_bytes == (300 + 100 + 301 - 1) * KB


def test_what_else_is_kept_of_a_tensor_stays(profile, stage):
    """op2 keeps what it reads, too, and is not offloaded."""
    keeping = replace(profile.operators[2], stash_tensors=("t1", "t2"))
    operators = (*profile.operators[:2], keeping, *profile.operators[3:])
    some = replace(profile, operators=operators)
    assert {"t1", "t2"} <= {one.name for one in profile.graph.tensors}
    first, last = stage.offloaded
    apart = stage_offload(some, replace(stage, offloaded=(first, last[1:])))
    # It is copied before that is known.
    assert apart.segments[0] == HostSegment(1, 1, 100 * KB, 0)
    together = stage_offload(some, stage)
    assert together.segments[0] == HostSegment(1, 1, 100 * KB, 0)
    assert together.segments[1].back_bytes == 400 * KB


def test_segments_that_run_again_keep_what_they_read_in_the_host_memory(profile, stage):
    names = stage.operators
    again = replace(stage, recompute=True, recomputed=(names[2:4],), offloaded=(names[2:4],))
    # op1's output is kept by op1, too.
    assert stage_offload(profile, again).host_bytes == 0
    both = replace(again, offloaded=(names[1:2], names[2:4]))
    assert stage_offload(profile, both).segments == (
        HostSegment(1, 1, 100 * KB, 0), HostSegment(3, 3, 0, 100 * KB),
    )  # fmt: skip


def test_what_kept_operators_made_stays(profile, stage):
    """op2 is not computed again."""
    names = stage.operators
    again = (names[1], names[3])
    some = replace(stage, recompute=True, recomputed=(again,), offloaded=(names[:1], again))
    # The segment reads op0's output.
    assert stage_offload(profile, some).segments == (
        HostSegment(0, 0, 70 * KB, 0), HostSegment(3, 3, 0, 70 * KB),
    )  # fmt: skip
    # Of a whole segment op2's output is not held.
    plain = stage_memory(profile, replace(some, offloaded=()))
    assert plain.kept_bytes - stage_memory(profile, some).kept_bytes == 70 * KB
    whole = replace(some, recomputed=(names[1:4],), offloaded=(names[:1], names[1:4]))
    held = stage_memory(profile, some).kept_bytes - stage_memory(profile, whole).kept_bytes
    assert held == 200 * KB


def test_small_tensors_stay(profile, stage):
    small = profile_of(
        graph_of([[], [0], [1], [2], [3]], [KB, 65 * KB, 66 * KB, KB, KB]), [1.0] * 5
    )
    assert stage_offload(small, stage).host_bytes == 66 * KB


def test_the_host_holds_all_microbatches_in_flight(profile, stage):
    link = replace(LINK, memory_bytes=1500 * KB)
    several = replace(stage, warmup=3)
    problem = problem_of(profile, cluster([unit_type()], host_link=link), 3)
    found = evaluate(problem, Strategy((several,), ScheduleName.GPIPE, 3))
    assert found.memory[0].host_bytes == 3 * 400 * KB
    assert found.shortage is None
    less = replace(link, memory_bytes=1100 * KB)
    short = evaluate(
        problem_of(profile, cluster([unit_type()], host_link=less), 3),
        Strategy((several,), ScheduleName.GPIPE, 3),
    )
    assert "of activations wait in the memory of host" in short.shortage
