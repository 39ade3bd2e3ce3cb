"""Memory and time of stages with segments that are run again, worked out by hand."""

from dataclasses import replace

from planner.artefacts.segments import Segment, segments_of
from planner.artefacts.strategy import Stage
from planner.costs.casts import held_private_bytes
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


def test_kept_operators_are_held_from_the_forward_on_and_take_no_time_again():
    """Six operators in a row, each with a parameter of 1 KB, that stash what they make. The
    products op2 and op3, of a segment from op1 to op4, are kept.
    """
    sizes = [1 * KB, 100 * KB, 2 * KB, 20 * KB, 1 * KB, 1 * KB]
    graph = graph_of([[], [0], [1], [2], [3], [4]], sizes)
    operators = tuple(
        replace(one, type="MatMul") if i in (2, 3) else one for i, one in enumerate(graph.operators)
    )
    profile = profile_of(replace(graph, operators=operators), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    names = tuple(one.name for one in profile.graph.operators)
    plain = Stage.whole(names, (0,), 1, recompute=False)
    whole = replace(plain, recompute=True, recomputed=(names[1:5],))
    kept = replace(whole, recomputed=((names[1], names[4]),))
    assert segments_of(kept, profile.graph) == (Segment(1, 5, 4, kept=(2, 3)),)
    assert segments_of(kept, profile.graph)[0].computed == (1, 4)
    memory = [stage_memory(profile, one) for one in (plain, whole, kept)]
    assert [memory[0].kept_bytes - one.kept_bytes for one in memory] == [0, 123 * KB, 101 * KB]
    # What is held is there anyway once the whole segment has run again.
    assert memory[1].backward_workspace_bytes == memory[2].backward_workspace_bytes + 22 * KB
    problem = problem_of(profile, cluster([unit_type()]), 1)
    backward_s = stage_pass(problem, plain, 0).backward_s
    assert stage_pass(problem, whole, 0).backward_s == backward_s + 2 + 4 + 8 + 16
    assert stage_pass(problem, kept, 0).backward_s == backward_s + 2 + 16
    assert stage_pass(problem, kept, 0).forward_s == stage_pass(problem, plain, 0).forward_s


def test_of_a_kept_product_its_copies_are_made_again_and_of_attention_the_rest_is_held():
    """Under autocast a product and an attention keep copies of the float32 tensors that they read,
    and an attention 4 KB more.
    """
    graph = graph_of([[], [0], [1], [2]])
    tensors = tuple(
        replace(one, dtype="bfloat16" if one.name == "t2" else "float32", shape=(2 * KB,))
        for one in graph.tensors
    )
    for kind, private, held in (("MatMul", 4 * KB, 0), ("Attention", 8 * KB, 4 * KB)):
        operators = tuple(
            replace(one, type=kind) if i == 2 else one for i, one in enumerate(graph.operators)
        )
        profile = profile_of(replace(graph, operators=operators, tensors=tensors), [1.0] * 4)
        costs = tuple(
            replace(one, stash_private_bytes=private, stash_tensors=()) if i == 2 else one
            for i, one in enumerate(profile.operators)
        )
        assert held_private_bytes(replace(profile, operators=costs), 2) == held
