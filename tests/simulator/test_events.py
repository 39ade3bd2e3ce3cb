import json
from dataclasses import replace
from itertools import pairwise, product
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.strategy import crossings
from planner.artefacts.topology import Sharing
from planner.clusters.routes import routes
from planner.costs.actions import ActionCosts, ContentionGroup
from planner.costs.transfers import allreduce_s
from planner.schedules.actions import AllReduce, Compute, Direction, Receive, Send, Step, text
from planner.schedules.dry_run import dry_run
from planner.schedules.program import program
from planner.simulator.events import run, simulate
from planner.simulator.timeline import (
    Event,
    Timeline,
    Transfer,
    communication_s,
    compute_s,
    idle_s,
    shares_s,
)
from planner.simulator.traces.write import chrome_trace, write_trace
from tests.support import slow_simulator
from tests.support.often import often
from tests.support.programs import (
    chain,
    disturbed,
    hosts,
    in_buckets,
    mesh,
    split,
    split_graphs,
    star,
    with_sharing,
    written,
)
from tests.support.slow_simulator import Links, fair_rates

FREE = 1e30


def costs(lists, forward_s=1.0, backward_s=2.0, sizes=None, sum_s=0.0, step_s=0.0):
    """The same costs everywhere; every tensor has 4 bytes where `sizes` says nothing else."""
    ends = [(d, a) for d, actions in lists.lists.items() for a in actions]
    stages = {(a.stage, d) for d, a in ends if isinstance(a, Compute)}
    tensors = {a.tensor for _, a in ends if isinstance(a, Send)}
    return ActionCosts(
        dict.fromkeys(stages, forward_s),
        dict.fromkeys(stages, backward_s),
        {name: (sizes or {}).get(name, 4) for name in tensors},
        (sum_s,) * len(lists.sums),
        dict.fromkeys(lists.lists, step_s),
    )


def events(timeline):
    """Per device, the events in text form with start and end."""
    lines = {}
    for event in timeline.events:
        word = f"{text(event.action)}[{event.start_s:g},{event.end_s:g}]"
        lines.setdefault(event.device, []).append(word)
    return "\n".join(" ".join(lines[device]) for device in sorted(lines))


def flows(timeline):
    """The transfers in text form with start and end."""
    return " ".join(
        f"{f.source}>{f.target}:{f.tensor}[{f.start_s:g},{f.end_s:g}]" for f in timeline.transfers
    )


# Transfers, by hand.


def test_two_stages_with_a_transfer_of_2_s():
    lists = written("0F0 0>1:0:x 0<1:0:d/x 0B0 O", "1<0:0:x 1F0 1B0 1>0:0:d/x O")
    found = simulate(lists, costs(lists, step_s=0.5), mesh(2, bandwidth=2.0))
    assert events(found) == "0F0[0,1] 0B0[8,10] O[10,10.5]\n1F0[3,4] 1B0[4,6] O[6,6.5]"
    assert flows(found) == "0>1:x[1,3] 1>0:x[6,8]"
    assert found.iteration_s == 10.5


def test_a_transfer_waits_until_its_receiver_has_posted_it():
    lists = written("0F0 0>1:0:x 0F1", "1F9 1F8 1<0:0:x 1F0")
    found = simulate(lists, costs(lists), mesh(2, bandwidth=2.0))
    assert events(found) == "0F0[0,1] 0F1[1,2]\n1F9[0,1] 1F8[1,2] 1F0[4,5]"
    assert flows(found) == "0>1:x[2,4]"


def test_a_backward_waits_until_what_the_second_one_before_it_made_is_sent():
    lists = written("0B0 0>1:0:d/x 0B1 0B2", "1<0:0:d/x 1B0")
    found = simulate(lists, costs(lists), mesh(2, bandwidth=0.5))
    assert events(found) == "0B0[0,2] 0B1[2,4] 0B2[10,12]\n1B0[10,12]"


@pytest.mark.parametrize(("last", "start"), [("", 9), (" 0B0 0F3", 2)])
def test_a_forward_does_so_only_where_forwards_come_first(last, start):
    lists = written("0F0 0>1:0:x 0F1 0F2" + last, "1<0:0:x 1F0")
    found = simulate(lists, costs(lists), mesh(2, bandwidth=0.5))
    assert f"0F2[{start},{start + 1}]" in events(found)


def test_none_does_where_a_device_runs_several_stages():
    lists = written("0B0 0>1:0:d/x 0B1 0B2 3B9", "1<0:0:d/x 1B0")
    found = simulate(lists, costs(lists), mesh(2, bandwidth=0.5))
    assert "0B2[4,6]" in events(found)


def test_transfers_run_beside_computation():
    lists = written("0F0 0>1:0:x 0F1", "1<0:0:x 1F9 1F8 1F0")
    found = simulate(lists, costs(lists), mesh(2, bandwidth=2.0))
    assert events(found) == "0F0[0,1] 0F1[1,2]\n1F9[0,1] 1F8[1,2] 1F0[3,4]"


def test_transfers_of_a_pair_run_one_after_the_other():
    lists = written("0>1:0:x 0>1:0:y 0>2:0:z", "1<0:0:x 1<0:0:y 1F0", "2<0:0:z 2F0")
    found = simulate(lists, costs(lists), mesh(3, bandwidth=2.0, latency_s=1.0))
    assert flows(found) == "0>1:x[0,3] 0>2:z[0,3] 0>1:y[3,6]"
    assert events(found) == "1F0[6,7]\n2F0[3,4]"


def test_the_two_directions_of_a_pair_do_not_wait_for_each_other():
    lists = written("0>1:0:x 0<1:0:y 0F0", "1>0:0:y 1<0:0:x 1F0")
    assert flows(simulate(lists, costs(lists), mesh(2))) == "0>1:x[0,4] 1>0:y[0,4]"


def test_an_empty_tensor_takes_the_latency():
    lists = written("0>1:0:x", "1<0:0:x 1F0")
    found = simulate(lists, costs(lists, sizes={"x": 0}), mesh(2, latency_s=0.25))
    assert flows(found) == "0>1:x[0,0.25]"


def test_a_sum_starts_when_its_last_member_has_come_and_occupies_all():
    lists = written("0F0 A0 O", "0F1 0F3 A0 O", "1F0 O", sums=[(0, 1)])
    found = simulate(lists, costs(lists, sum_s=3.0, step_s=1.0), mesh(3))
    assert events(found) == (
        "0F0[0,1] A0[2,5] O[5,6]\n0F1[0,1] 0F3[1,2] A0[2,5] O[5,6]\n1F0[0,1] O[1,2]"
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("0<1:0:y 0F0 0>1:0:x", "1<0:0:x 1F0 1>0:0:y"),
        ("0>1:0:x 0>1:0:y", "1<0:0:y 1<0:0:x 1F0"),
        ("0>1:0:x", "1F0"),
        ("A0 A1", "A1 A0"),
    ],
)
def test_lists_that_block_are_an_error_with_the_text_of_the_dry_run(lines):
    lists = written(*lines, sums=[(0, 1), (0, 1)])
    sizes = ActionCosts({(0, 0): 1.0, (1, 1): 1.0}, {}, {"x": 4, "y": 4}, (1.0, 1.0), {})
    with pytest.raises(ValueError, match="the schedule blocks: device") as error:
        simulate(lists, sizes, mesh(2))
    assert dry_run(lists) in str(error.value)


# Shared links, by hand.


def test_two_flows_on_one_link_get_half_each_and_the_longer_one_all_of_it_at_the_end():
    lists = written("0>2:0:x", "1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    found = simulate(lists, costs(lists, sizes={"y": 8}), star([9, 9, 9], [9, 9, 2.0]))
    assert flows(found) == "0>2:x[0,4] 1>2:y[0,6]"


def test_a_flow_slows_down_when_another_one_starts():
    lists = written("0>2:0:x", "1F0 1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    found = simulate(lists, costs(lists), star([9, 9, 9], [9, 9, 2.0]))
    assert flows(found) == "0>2:x[0,3] 1>2:y[1,4]"


def test_a_flow_takes_no_bandwidth_during_its_latency():
    lists = written("0>2:0:x", "1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    topology = star([9, 9, 9], [9, 9, 2.0], latencies_s=[0.0, 1.0, 0.0])
    assert flows(simulate(lists, costs(lists), topology)) == "0>2:x[0,3] 1>2:y[0,4]"


def test_three_flows_with_unequal_bottlenecks():
    # The link out of 1 is the narrowest: 3 / 2 for each of its two flows. The link into 2 has
    # 4 - 1.5 = 2.5 left. At 2 s both end there, and the third flow has 3 bytes left at rate 3.
    lists = written("0>2:0:x", "1>2:0:y 1>3:0:z", "2<0:0:x 2<1:0:y", "3<1:0:z")
    topology = star([10, 3.0, 10, 10], [10, 10, 4.0, 10])
    found = simulate(lists, costs(lists, sizes={"x": 5, "y": 3, "z": 6}), topology)
    assert flows(found) == "0>2:x[0,2] 1>2:y[0,2] 1>3:z[0,3]"


# Exclusive links, by hand.

ALONE = Sharing.EXCLUSIVE


def test_the_later_one_of_two_transfers_waits_for_an_exclusive_link():
    lists = written("0F0 0>2:0:x", "1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    narrow = with_sharing(star([9, 9, 9], [9, 9, 2.0]), ALONE)
    assert flows(simulate(lists, costs(lists, sizes={"y": 8}), narrow)) == "1>2:y[0,4] 0>2:x[4,6]"


def test_of_transfers_that_are_ready_together_the_lower_source_goes_first():
    lists = written("0>2:0:x 0>2:1:x", "1>2:0:y", "2<1:0:y 2<0:0:x 2<0:1:x 2F0")
    narrow = with_sharing(star([9, 9, 9], [9, 9, 2.0]), ALONE)
    # The second x is ready when the first has ended: y has waited longer.
    assert flows(simulate(lists, costs(lists), narrow)) == "0>2:x[0,2] 1>2:y[2,4] 0>2:x[4,6]"


def test_a_transfer_waits_for_all_of_its_exclusive_links_and_keeps_them_for_its_latency():
    # 0 -> 2 holds the link into 2, so 1 -> 2 waits, and behind it, on the link out of 1, 1 -> 3.
    lists = written("0>2:0:x", "1>2:0:y 1>3:0:z", "2<0:0:x 2<1:0:y", "3<1:0:z")
    cluster = star([4, 4, 4, 4], [4, 4, 4, 4], latencies_s=[1.0] * 4)
    found = simulate(lists, costs(lists), with_sharing(cluster, ALONE))
    assert flows(found) == "0>2:x[0,2] 1>2:y[2,4] 1>3:z[4,6]"


def test_only_the_links_that_say_so_are_exclusive():
    lists = written("0>2:0:x", "1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    cluster = star([1, 1, 9], [9, 9, 9])
    shared = [Sharing.FAIR if link.target == "switch" else ALONE for link in cluster.links]
    assert flows(simulate(lists, costs(lists), with_sharing(cluster, shared))) == (
        "0>2:x[0,4] 1>2:y[4,8]"
    )


# What posting takes, by hand.


def test_posting_keeps_a_device_from_its_next_action_and_the_transfer_from_its_start():
    lists = written("0F0 0>1:0:x 0F1", "1<0:0:x 1F9 1F0")
    slow = replace(costs(lists), post_s={0: 0.5, 1: 2.0}, copy_s_per_byte={0: 0.25})
    found = simulate(lists, slow, mesh(2, bandwidth=4.0))
    assert events(found) == (
        "0F0[0,1] 0>1:0:x[1,2.5] 0F1[2.5,3.5]\n1<0:0:x[0,2] 1F9[2,3] 1F0[3.5,4.5]"
    )
    assert flows(found) == "0>1:x[2.5,3.5]"
    assert (compute_s(found, 0), communication_s(found, 0), idle_s(found, 0)) == (2.0, 1.5, 1.0)


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 100), min_size=5, max_size=5),
)
def test_every_flow_has_a_full_link_on_which_no_flow_is_faster(taken, widths):
    paths = {7 * i: tuple(sorted(links)) for i, links in enumerate(taken)}
    rates = fair_rates(paths, widths)
    on = [[rates[f] for f, path in paths.items() if link in path] for link in range(5)]
    assert all(sum(one) <= widths[link] * (1 + 1e-9) for link, one in enumerate(on))
    for flow, path in paths.items():
        assert any(
            sum(on[link]) >= widths[link] * (1 - 1e-9) and rates[flow] >= max(on[link]) * (1 - 1e-9)
            for link in path
        )


@given(st.data())
def test_rates_kept_up_to_date_equal_those_computed_afresh(data):
    widths = (1.0, 2.0, 3.0, 5.0)
    links, paths, rates = Links(widths), {}, {}
    for flow in range(data.draw(st.integers(1, 12))):
        if paths and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(paths)))
            del paths[gone]
            rates.pop(gone, None)
            links.remove(gone)
        else:
            path = data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))
            paths[flow] = tuple(sorted(path))
            links.add(flow, paths[flow])
        if data.draw(st.booleans()):
            rates |= links.new_rates()
            assert rates == pytest.approx(fair_rates(paths, widths), rel=1e-12)


# Closed forms.


@given(
    st.integers(1, 6), st.integers(1, 12), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3),
    st.sampled_from(["gpipe", "1f1b"]),
)  # fmt: skip
def test_equal_stages_with_free_links_take_m_plus_s_minus_1_turns(
    num_stages, num_microbatches, forward_s, backward_s, schedule
):
    graph = chain(num_stages)
    cuts, widths = range(1, num_stages), [1] * num_stages
    lists = program(split(graph, cuts, widths, num_microbatches, schedule), graph)
    found = simulate(lists, costs(lists, forward_s, backward_s), mesh(num_stages, FREE))
    turns = num_microbatches + num_stages - 1
    assert found.iteration_s == pytest.approx(turns * (forward_s + backward_s), rel=1e-12)


def iteration_s(widths, num_microbatches):
    """Of stages that take 1 s per replica that they have, a third of it forward, free links."""
    graph = chain(len(widths))
    strategy = split(graph, range(1, len(widths)), widths, num_microbatches)
    lists = program(strategy, graph)
    devices = [(s, d) for s, stage in enumerate(strategy.stages) for d in stage.devices]
    forward_s = {(s, d): widths[s] / 3 for s, d in devices}
    backward_s = {(s, d): widths[s] * 2 / 3 for s, d in devices}
    equal = costs(lists)
    found = ActionCosts(forward_s, backward_s, equal.tensor_bytes, equal.sum_s, equal.step_s)
    return simulate(lists, found, mesh(sum(widths), FREE)).iteration_s


@pytest.mark.parametrize("num_stages", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_uneven_replication_reaches_the_bottleneck_for_all_vectors_of_widths(num_stages):
    for widths in product(range(1, 5), repeat=num_stages):
        turn = lcm(*widths)
        few = turn * -(-16 // turn)
        period_s = (iteration_s(widths, few + turn) - iteration_s(widths, few)) / turn
        assert period_s == pytest.approx(1.0, rel=0.01), widths


# Conservation, on anything.


def simulated(case, out=3.0, into=2.0, latency_s=0.5):
    graph, strategy = case
    lists = program(strategy, graph)
    num_devices = len(lists.lists)
    topology = star([out] * num_devices, [into] * num_devices, [latency_s] * num_devices)
    return lists, simulate(lists, costs(lists, sum_s=1.5, step_s=0.5), topology), topology


@given(split_graphs())
def test_no_computation_starts_before_its_inputs_are_there(case):
    graph, strategy = case
    _, found, _ = simulated(case)
    arrived = {(f.target, f.direction, f.microbatch, f.tensor): f.end_s for f in found.transfers}
    ended = {(e.device, e.action): e.end_s for e in found.events}
    for device, event in ((e.device, e) for e in found.events if isinstance(e.action, Compute)):
        direction, s, m = event.action.direction, event.action.stage, event.action.microbatch
        if direction is Direction.BACKWARD:
            assert event.start_s >= ended[device, Compute(Direction.FORWARD, s, m)]
        for one in crossings(strategy, graph):
            if (s in one.targets) if direction is Direction.FORWARD else (s == one.source):
                assert event.start_s >= arrived[device, direction, m, one.tensor]


@given(split_graphs())
def test_no_device_does_two_things_at_once_and_all_do_what_their_lists_say(case):
    lists, found, _ = simulated(case)
    for device, actions in lists.lists.items():
        own = [e for e in found.events if e.device == device]
        assert all(a.end_s <= b.start_s for a, b in pairwise(own))
        kept = [a for a in actions if isinstance(a, Compute | AllReduce | Step)]
        assert [e.action for e in own] == kept


@given(split_graphs())
def test_every_send_has_one_flow_after_the_action_that_made_it(case):
    lists, found, _ = simulated(case)
    ended = {(e.device, e.action): e.end_s for e in found.events}
    for device, actions in lists.lists.items():
        sends = [a for a in actions if isinstance(a, Send)]
        for send in sends:
            (flow,) = [
                f for f in found.transfers
                if (f.source, f.target, f.direction, f.microbatch, f.tensor)
                == (device, send.device, send.direction, send.microbatch, send.tensor)
            ]  # fmt: skip
            made = Compute(send.direction, send.stage, send.microbatch)
            assert flow.start_s >= ended[device, made]
            assert flow.end_s >= flow.start_s + 0.5 + flow.bytes / 3.0
        assert len(sends) == sum(f.source == device for f in found.transfers)


@given(split_graphs())
def test_transfers_of_a_pair_do_not_overlap_and_no_link_carries_more_than_it_can(case):
    _, found, topology = simulated(case)
    loads = dict.fromkeys(range(len(topology.links)), 0)
    last = {}
    for flow in found.transfers:
        pair = flow.source, flow.target
        assert flow.start_s >= last.get(pair, 0.0)
        last[pair] = flow.end_s
        for link in routes(topology)[pair]:
            loads[link] += flow.bytes
    for link, load in loads.items():
        assert load <= topology.links[link].bandwidth_bytes_per_s * found.iteration_s


@given(split_graphs(), st.sampled_from(Sharing))
def test_as_many_bytes_are_received_as_sent(case, sharing):
    graph, strategy = case
    lists = program(strategy, graph)
    count = len(lists.lists)
    topology = with_sharing(star([3.0] * count, [2.0] * count), sharing)
    found = simulate(lists, costs(lists), topology)
    sizes = {one.tensor: one.bytes for one in crossings(strategy, graph)}
    for device, actions in lists.lists.items():
        for kind, end in ((Send, "source"), (Receive, "target")):
            due = sum(sizes[a.tensor] for a in actions if isinstance(a, kind))
            assert due == sum(f.bytes for f in found.transfers if getattr(f, end) == device)


@given(split_graphs())
def test_an_exclusive_link_carries_one_transfer_at_a_time_at_full_speed(case):
    graph, strategy = case
    lists = program(strategy, graph)
    count = len(lists.lists)
    topology = with_sharing(star([3.0] * count, [2.0] * count, [0.5] * count), ALONE)
    found = simulate(lists, costs(lists), topology)
    on = {}
    for flow in found.transfers:
        assert flow.end_s == flow.start_s + 0.5 + flow.bytes / 2.0
        for link in routes(topology)[flow.source, flow.target]:
            on.setdefault(link, []).append((flow.start_s, flow.end_s))
    for times in on.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(times)))


def test_a_ring_all_reduce_at_the_end_of_data_parallelism_by_hand():
    # 3 replicas, 2 microbatches each of 3 s; 2 (3 - 1) messages of 12 / 3 bytes at 2 B/s, 1 s
    # apart; and the step.
    graph = chain(1)
    lists = program(split(graph, [], [3], 6), graph)
    topology = mesh(3, bandwidth=2.0, latency_s=1.0)
    sum_s = allreduce_s(topology, (0, 1, 2), 12)
    assert sum_s == 4 * (1.0 + 4 / 2.0)
    found = simulate(lists, costs(lists, sum_s=sum_s, step_s=0.5), topology)
    assert found.iteration_s == 2 * 3.0 + 12.0 + 0.5


@often(60, 200, split_graphs(max_warmup=4))
def test_the_simulation_ends_exactly_if_the_dry_run_does(case):
    graph, strategy = case
    if dry_run(program(strategy, graph)) is None:
        assert simulated(case)[1].iteration_s > 0
    else:
        with pytest.raises(ValueError, match="the schedule blocks"):
            simulated(case)


@given(split_graphs())
def test_compute_communication_and_idle_time_make_up_the_iteration(case):
    lists, found, _ = simulated(case)
    for device in lists.lists:
        parts = [compute_s(found, device), communication_s(found, device), idle_s(found, device)]
        assert min(parts) >= -1e-12
        assert sum(parts) == pytest.approx(found.iteration_s, rel=1e-12)


@given(split_graphs())
def test_the_same_input_gives_the_same_timeline(case):
    assert simulated(case)[1] == simulated(case)[1]


# Sums beside the backward.


def test_buckets_are_summed_while_the_backward_runs_by_hand():
    # A backward of 6 s has the gradients of A0 2 s and those of A1 5 s after its start. The first
    # sum runs from 3 to 7, the second waits for it: device 1 begins its backward 1 s later.
    lists = written("0F0 0B0 A0 A1 O", "0F1 0B1 A0 A1 O", sums=[(0, 1), (0, 1)])
    found = ActionCosts(
        {(0, 0): 1.0, (0, 1): 2.0}, {(0, 0): 6.0, (0, 1): 6.0}, {}, (3.0, 1.0), {0: 0.5, 1: 0.5},
        {(0, 0): 4.0, (0, 1): 4.0, (1, 0): 1.0, (1, 1): 1.0},
    )  # fmt: skip
    assert events(simulate(lists, found, mesh(2))) == (
        "0F0[0,1] 0B0[1,7] A0[4,7] A1[7,8] O[8,8.5]\n0F1[0,2] 0B1[2,8] A0[4,7] A1[7,8] O[8,8.5]"
    )


def test_a_sum_that_is_ready_early_waits_for_the_one_before_it():
    # The gradients of A1 are there at the start of the backward, those of A0 only at its end.
    lists = written("0F0 0B0 A0 A1 O", "0F1 0B1 A0 A1 O", sums=[(0, 1), (0, 1)])
    found = ActionCosts(
        {(0, 0): 1.0, (0, 1): 1.0}, {(0, 0): 2.0, (0, 1): 2.0}, {}, (1.0, 1.0), {0: 0.0, 1: 0.0},
        {(1, 0): 2.0, (1, 1): 2.0},
    )  # fmt: skip
    assert events(simulate(lists, found, mesh(2))) == (
        "0F0[0,1] 0B0[1,3] A0[3,4] A1[4,5] O[5,5]\n0F1[0,1] 0B1[1,3] A0[3,4] A1[4,5] O[5,5]"
    )


def test_a_crowd_that_computes_slowly_comes_to_its_cuts_later():
    # Together a second takes two. The cut is after 1 s of work, 2 s after the start.
    lists = written("0B0 A0 O", "0B1 A0 O", sums=[(0, 1)])
    found = ActionCosts(
        {}, {(0, 0): 3.0, (0, 1): 3.0}, {}, (1.0,), {0: 0.0, 1: 0.0}, {(0, 0): 2.0, (0, 1): 2.0},
        contention=(ContentionGroup((0, 1), (1.0, 1.0, 2.0)),),
    )  # fmt: skip
    assert events(simulate(lists, found, mesh(2))) == (
        "0B0[0,6] A0[2,3] O[6,6]\n0B1[0,6] A0[2,3] O[6,6]"
    )


# Against the simulator in plain Python.


@st.composite
def timed_cases(draw):
    """A program with costs that often coincide, on a mesh or on a star of narrow links."""
    graph, strategy = draw(split_graphs(max_warmup=4))
    lists = in_buckets(strategy, graph, draw(st.sampled_from([4, 8, 2**20])))
    size = max(lists.lists) + 1
    some = st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0, 3.0])
    width = st.sampled_from([0.3, 1.0, 2.0, 3.0, 7.0])
    each = [draw(st.lists(one, min_size=size, max_size=size)) for one in (width, width, some)]
    topology = star(*each) if draw(st.booleans()) else mesh(size, draw(width), draw(some))
    kinds = draw(st.sampled_from([[Sharing.FAIR], [Sharing.EXCLUSIVE], [*Sharing]]))
    topology = with_sharing(topology, [draw(st.sampled_from(kinds)) for _ in topology.links])
    equal = costs(lists)
    extras = [{d: draw(st.sampled_from([0.0, 0.1, 1.0])) for d in lists.lists} for _ in range(2)]
    extras = extras if draw(st.booleans()) else [{}, {}]
    found = ActionCosts(
        {key: draw(some) for key in sorted(equal.forward_s)},
        {key: draw(some) for key in sorted(equal.backward_s)},
        {name: draw(st.sampled_from([0, 1, 4, 9])) for name in sorted(equal.tensor_bytes)},
        tuple(draw(some) for _ in lists.sums),
        {device: draw(some) for device in lists.lists},
        {
            (index, device): draw(some)
            for index, one in enumerate(lists.sums)
            for device in one.devices
            if draw(st.booleans())
        },
        *extras,
        contention=draw(contention_groups(sorted(lists.lists))),
    )
    return lists, found, topology


@st.composite
def contention_groups(draw, devices):
    """None, or some of the devices in groups, which have speeds that often coincide."""
    slow = st.sampled_from([1.0, 1.0, 1.3, 1.5, 2.0, 3.0])
    number = {d: draw(st.sampled_from([-1, 0, 0, 1])) for d in devices if draw(st.booleans())}
    members = [tuple(d for d, n in number.items() if n == one) for one in (0, 1)]
    return tuple(
        ContentionGroup(some, (1.0, 1.0, *(draw(slow) for _ in some[1:])))
        for some in members
        if some
    )


def test_computations_at_the_same_time_slow_each_other_down_by_hand():
    # Both compute until device 1, after 1 s in 1.5 s and its step of 2 s in 3 s, is done at 4.5.
    # Device 0 has done 3 of its 4 s by then, and goes on alone: 1 s, and 2 s for its step.
    lists = written("0F0 O", "1F0 O")
    found = ActionCosts(
        {(0, 0): 4.0, (1, 1): 1.0}, {}, {}, (), {0: 2.0, 1: 2.0},
        contention=(ContentionGroup((0, 1), (1.0, 1.0, 1.5)),),
    )  # fmt: skip
    ended = {(e.device, type(e.action)): e.end_s for e in simulate(lists, found, mesh(2)).events}
    assert ended == {(1, Compute): 1.5, (1, Step): 4.5, (0, Compute): 5.5, (0, Step): 7.5}


def test_an_all_reduce_in_a_crowd_is_as_fast_as_alone_and_slows_no_one():
    lists = written("A0 O", "A0 O", sums=[(0, 1)])
    found = ActionCosts(
        {}, {}, {}, (3.0,), {0: 1.0, 1: 2.0}, contention=(ContentionGroup((0, 1), (1.0, 1.0, 2.0)),)
    )
    ends = [e.end_s for e in simulate(lists, found, mesh(2)).events if e.action == Step()]
    assert ends == [5.0, 6.0]


def or_error(simulator, case):
    try:
        return simulator(*case)
    except ValueError as error:
        assert "the schedule blocks" in str(error)
        return "blocks"


@often(100, 300, timed_cases())
def test_every_time_equals_that_of_the_simulator_in_plain_python(case):
    found = or_error(simulate, case)
    assert found == or_error(slow_simulator.simulate, case)
    if isinstance(found, Timeline):
        devices = sorted(case[0].lists)
        for all_of_it, one in zip(
            shares_s(run(*case)), (compute_s, communication_s, idle_s), strict=True
        ):
            assert all_of_it.tolist() == [one(found, device) for device in devices]


@often(100, 300, timed_cases(), st.data())
def test_the_dry_run_says_what_the_simulator_in_plain_python_comes_to(case, data):
    lists = disturbed(data.draw, case[0])
    case = lists, *case[1:]
    expected = or_error(slow_simulator.simulate, case)
    assert or_error(simulate, case) == expected
    assert (dry_run(lists) is None) == (expected != "blocks")


def test_a_cluster_of_64_devices_that_shares_network_cards_equals_it_too():
    # 4 stages of 16 replicas; 8 devices share one link into and one out of their host.
    graph = chain(4)
    lists = program(split(graph, [1, 2, 3], [16] * 4, 192, warmups=[6, 5, 3, 1]), graph)
    case = lists, costs(lists, 1.0, 2.1, sum_s=3.0, step_s=0.1), hosts(8, 8)
    found = simulate(*case)
    assert found == slow_simulator.simulate(*case)
    assert len(found.transfers) == 2 * 3 * 192
    assert max(flow.end_s - flow.start_s for flow in found.transfers) > 2 * (4 / 10.0)


# Timeline and trace.


def flow(source, target, start_s, end_s):
    return Transfer(source, target, Direction.FORWARD, 0, "x", start_s, end_s, 4)


def test_communication_counts_overlapping_transfers_once_and_not_beside_computation():
    timeline = Timeline(
        10.0,
        (
            Event(0, Compute(Direction.FORWARD, 0, 0), 0.0, 2.0),
            Event(0, AllReduce(0), 7.0, 8.0),
            Event(0, Step(), 8.0, 9.0),
        ),
        (flow(0, 1, 1.0, 4.0), flow(2, 0, 3.0, 5.0), flow(1, 2, 0.0, 9.0), flow(0, 1, 9.5, 11.0)),
    )
    assert compute_s(timeline, 0) == 3.0
    assert communication_s(timeline, 0) == 4.5
    assert idle_s(timeline, 0) == 2.5


def traced():
    lists = written(
        "0F0 0>1:0:x 0<1:0:d/x 0B0 A0 O", "1<0:0:x 1F0 1B0 1>0:0:d/x A0 O", sums=[(0, 1)]
    )
    found = simulate(lists, costs(lists, sum_s=1.0, step_s=0.5), mesh(2, bandwidth=2.0))
    memory = {0: ((0.0, 100), (1.0, 200))}
    return Timeline(found.iteration_s, found.events, found.transfers, memory)


def test_a_trace_has_a_process_per_device_and_a_track_per_peer_and_direction():
    trace = chrome_trace(traced(), {0: "gpu0", 1: "gpu1"})
    tracks = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            tracks.setdefault(event["pid"], []).append(event["args"]["name"])
    assert list(tracks.values()) == [
        ["gpu0", "compute", "sums", "to gpu1", "from gpu1"],
        ["gpu1", "compute", "sums", "to gpu0", "from gpu0"],
    ]


def test_a_trace_keeps_the_rules_of_its_format():
    events = chrome_trace(traced(), {0: "gpu0", 1: "gpu1"})["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and "tid" in e}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 4 + 2 + 2 + 4
    assert all((e["pid"], e["tid"]) in tracks and e["dur"] >= 0 for e in slices)
    assert len({tid for _, tid in tracks}) == len(tracks)
    by_track = {t: [e for e in slices if (e["pid"], e["tid"]) == t] for t in tracks}
    for track in by_track.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(track))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2
    for arrow in [*starts.values(), *ends.values()]:
        inside = by_track[arrow["pid"], arrow["tid"]]
        assert any(e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in inside)


def test_a_trace_counts_in_microseconds_and_shows_memory():
    events = chrome_trace(traced(), {0: "gpu0", 1: "gpu1"})["traceEvents"]
    forward = next(e for e in events if e["ph"] == "X" and e["name"] == "1F0")
    assert (forward["ts"], forward["dur"]) == (3e6, 1e6)
    counted = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counted == [(0, 100), (1e6, 200)]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(traced(), {0: "gpu0", 1: "gpu1"}, path)
    assert json.loads(path.read_text()) == chrome_trace(traced(), {0: "gpu0", 1: "gpu1"})
    with pytest.raises(KeyError):
        write_trace(traced(), {0: "gpu0"}, path)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
