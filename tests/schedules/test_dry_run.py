import pytest
from hypothesis import given

from planner.schedules import dependencies as module
from planner.schedules.dependencies import dependencies
from planner.schedules.dry_run import Meeting, dry_run
from planner.schedules.program import program
from tests.support.programs import chain, split, split_graphs, written

TWO = {(0, backward): Meeting(2) for backward in (False, True)}


@given(split_graphs())
def test_default_warmups_never_block(case):
    graph, strategy = case
    assert dry_run(program(strategy, graph)) is None


def test_one_microbatch_in_flight_everywhere_is_slow_but_does_not_block():
    graph = chain(3)
    assert dry_run(program(split(graph, [1, 2], [1, 1, 1], 4, warmups=[1, 1, 1]), graph)) is None


def test_a_stage_that_wants_more_in_flight_than_the_one_before_it_blocks():
    graph = chain(2)
    lists = program(split(graph, [1], [1, 1], 4, warmups=[1, 2]), graph)
    assert dry_run(lists).startswith("device 0 waits at 0B0; device 1 waits at 1F1; ")


def test_transfers_in_crossed_order_are_found():
    lists = written("0F0 0>1:0:x 0>1:0:y", "1<0:0:y 1<0:0:x 1F0")
    assert dry_run(lists) == "device 0 sends 0>1:0:x, device 1 expects 1<0:0:y"


def test_a_transfer_with_one_end_is_found():
    assert dry_run(written("0F0 0>1:0:x", "1F0")) == (
        "device 0 sends 0>1:0:x, which device 1 never receives"
    )
    assert dry_run(written("0F0", "1F0 1<0:0:x")) == (
        "device 1 expects 1<0:0:x, which device 0 never sends"
    )


def test_sums_in_crossed_order_are_found():
    lists = written("A0 A1", "A1 A0", sums=[(0, 1), (0, 1)])
    assert dry_run(lists) == "device 0 waits at A0; device 1 waits at A1"


def test_boxes_that_differ_are_found():
    lists = written("0F0 0>1:0:x[0:2]", "1<0:0:x[2:4] 1F0")
    assert dry_run(lists) == "device 0 sends 0>1:0:x[0:2], device 1 expects 1<0:0:x[2:4]"
    assert dry_run(written("0F0 0>1:0:x[0:2]", "1<0:0:x[0:2] 1F0")) is None


@given(split_graphs(max_warmup=5))
def test_waiting_for_what_was_sent_blocks_nothing_else(case):
    graph, strategy = case
    lists = program(strategy, graph)
    verdict = dry_run(lists)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "waiting_for_sends", lambda code: frozenset())
        dependencies.cache_clear()
        assert (dry_run(lists) is None) == (verdict is None)
    dependencies.cache_clear()


def test_devices_of_a_mesh_that_compute_in_another_order_block():
    lists = written("0F0 0F1", "0F1 0F0")
    assert dry_run(lists) is None
    assert dry_run(lists, TWO) == (
        "device 0 waits at 0F0 for other devices of its stage; "
        "device 1 waits at 0F1 for other devices of its stage"
    )
    assert dry_run(written("0F0 0F1 0B0", "0F0 0F1 0B0"), TWO) is None


def test_a_device_of_a_mesh_whose_other_one_waits_for_it_blocks():
    """Device 0 computes microbatch 0 when it has what device 1 makes after the same microbatch."""
    lists = written("0<2:0:x 0F0", "0F0 1>2:0:y", "2<1:0:y 2F0 2>0:0:x")
    assert dry_run(lists) is None
    assert "device 1 waits at 0F0 for other devices of its stage" in dry_run(lists, TWO)


def test_meetings_take_part_in_the_order_of_sums():
    lists = written("0F0 A0 0B0 A1", "0F0 A0 0B0 A1", sums=[(0, 1), (0, 1)])
    assert dry_run(lists, TWO) is None


def test_replicas_that_share_meet_with_microbatches_of_their_own():
    """Microbatches 0 and 1 are run together, and so are 2 and 3."""
    lists = written("0F0 0F2", "0F1 0F3")
    assert dry_run(lists, {(0, False): Meeting(2, 2, 2)}) is None
    lists = written("0F0 0F2", "0F3 0F1")
    assert dry_run(lists, {(0, True): Meeting(2, 2, 2)}) is None
    assert dry_run(lists, {(0, False): Meeting(2, 2, 2)}) == (
        "device 0 waits at 0F0 for other devices of its stage; "
        "device 1 waits at 0F3 for other devices of its stage"
    )


def test_only_replicas_of_one_group_meet():
    lists = written("0F0 0F4", "0F1 0F5", "0F6 0F2", "0F7 0F3")
    assert dry_run(lists, {(0, False): Meeting(2, 4, 2)}) is None
    assert "device 2 waits at 0F6" in dry_run(lists, {(0, False): Meeting(4, 4, 4)})
