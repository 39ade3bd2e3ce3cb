import numpy as np
from hypothesis import given

from planner.schedules.actions import Compute, Send, text
from planner.schedules.dry_run import dry_run, wire
from planner.schedules.dry_run_kernels import ends
from planner.schedules.program import program
from tests.support.programs import chain, split, split_graphs, written


def test_what_a_transfer_waits_for_is_found_in_the_arrays():
    found = wire(program(split(chain(2), [1], [1, 1], 2), chain(2)).code)
    assert found.sound
    assert (found.source.tolist(), found.target.tolist()) == ([0, 1], [1, 0])
    assert np.diff(found.first).tolist() == [2, 2]
    assert not wire(written("0F0 0>1:0:x 0>1:0:y", "1<0:0:y 1<0:0:x 1F0").code).sound


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
    assert dry_run(written("0F0 0>1:0:x", "1F0")) == "device 0 sends 0>1:0:x, unheard"
    assert dry_run(written("0F0", "1F0 1<0:0:x")) == "device 1 awaits 1<0:0:x in vain"


def test_sums_in_crossed_order_are_found():
    lists = written("A0 A1", "A1 A0", sums=[(0, 1), (0, 1)])
    assert dry_run(lists) == "device 0 waits at A0; device 1 waits at A1"


@given(split_graphs(max_warmup=5))
def test_waiting_for_what_was_sent_blocks_nothing_else(case):
    graph, strategy = case
    lists = program(strategy, graph)
    code, found = lists.code, wire(lists.code)
    without = np.full(len(code), -1)
    assert (dry_run(lists) is None) == ends(
        code.start, code.kind, found.key, found.num_keys, without, found.pair, found.source,
        found.target, found.receives, found.first, lists.members,
    )  # fmt: skip


def test_what_a_computation_has_sent_holds_the_second_one_after_it():
    lists = program(split(chain(2), [1], [1, 1], 4), chain(2))
    found = wire(lists.code)
    backwards = [text(a) for a in lists.lists[1] if text(a)[:2] == "1B"]
    assert backwards == ["1B0", "1B1", "1B2", "1B3"]
    held = {
        text(send): text(one)
        for send, key in zip(lists.lists[1], found.holds[lists.code.start[1] :], strict=True)
        for one, own in zip(lists.lists[1], found.key[lists.code.start[1] :], strict=True)
        if isinstance(send, Send) and isinstance(one, Compute) and key == own
    }
    assert held == {"1>0:0:d/t0": "1B2", "1>0:1:d/t0": "1B3"}
    # Forwards wait where they come first.
    first = wire(program(split(chain(2), [1], [1, 1], 4, "gpipe"), chain(2)).code)
    assert (first.holds >= 0).sum() == 2 * (found.holds >= 0).sum()
