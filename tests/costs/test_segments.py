"""Memory and time of stages with segments that are run again, worked out by hand."""

from dataclasses import replace

from planner.artefacts.segments import Segment, segments_of
from planner.artefacts.strategy import Stage
from planner.costs.stage_memory import stage_memory
from planner.costs.stage_pass import stage_pass
from tests.support.builders import KB, cluster, graph_of, problem_of, profile_of, unit_type


def test_a_segment_that_runs_again_has_its_stash_in_its_backward_only():
    """Five operators in a row, each with a parameter of 1 KB, that stash what they make."""
    sizes = [1 * KB, 100 * KB, 2 * KB, 20 * KB, 1 * KB]
    profile = profile_of(graph_of([[], [0], [1], [2], [3]], sizes), [1.0] * 5)
    names = tuple(one.name for one in profile.graph.operators)
    plain = Stage.whole(names, (0,), 1, recompute=False)
    again = replace(plain, recompute=True, recomputed=(names[1:3],))
    assert segments_of(again, profile.graph) == (Segment(1, 3, 2),)
    before, after = stage_memory(profile, plain), stage_memory(profile, again)
    assert before.kept_bytes - after.kept_bytes == 102 * KB
    # In the backward of op2: gradients of what it makes and reads and of its parameter, and the
    # second stash; the loss's tensor and op3's output are gone.
    assert after.backward_workspace_bytes == (2 + 100 + 1 + 102 - 1 - 20) * KB
    problem = problem_of(profile, cluster([unit_type()]), 1)
    assert stage_pass(problem, plain, 0).backward_s == 10.0
    assert stage_pass(problem, again, 0).backward_s == 10.0 + 2 * 1.0
    assert stage_pass(problem, again, 0).forward_s == 5.0
