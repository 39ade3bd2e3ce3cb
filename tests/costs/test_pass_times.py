"""Passes on two streams: beside figures that follow by hand, and beside the longest path through a
graph of what waits for what.
"""

from dataclasses import replace
from random import Random

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.segments import Segment
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import Host
from planner.costs.local_stage import local_stage
from planner.costs.overlap import evaluated_with_overlap, with_overlap
from planner.costs.pass_times import (
    SideDurations,
    TimedGather,
    alone_times,
    backward_times,
    forward_times,
)
from planner.costs.stage_pass import gather_beside_s, stage_pass
from planner.resharding.over_replicas import over_replicas
from planner.resharding.overlap import held_ahead_bytes, pass_order
from tests.costs.test_overlap import MB, problem_of, replicas_of
from tests.resharding.test_overlap import random_stages
from tests.support.split_models import MODELS
from tests.support.split_profiles import profiled

times = st.integers(0, 5)
GATHER_S, COUNT = 0.02, 5  # half of 40 MB at 1 GB/s


def sharing(time_s, prefetch):
    """Five operators of equal times with 40 MB each, in parts over two devices: the pass."""
    problem = problem_of([40] * COUNT, 2, times=[time_s] * COUNT)
    stage = replace(replicas_of(problem.profile.graph, 2).stages[0], over=2, zero=3)
    return stage_pass(problem, replace(stage, prefetch=prefetch), 0)


@pytest.mark.parametrize("time_s", [0.05, 0.02, 0.007])
def test_a_pass_in_parts_is_a_flow_shop(time_s):
    """Of equal jobs on two machines: the first gather, then the slower of both."""
    one = sharing(time_s, 40 * MB)
    assert one.forward_s == pytest.approx(GATHER_S + 4 * max(GATHER_S, time_s) + time_s)
    in_line = sharing(time_s, None)
    assert in_line.forward_s == pytest.approx(COUNT * (GATHER_S + time_s))
    assert in_line.backward_s == pytest.approx(COUNT * 2 * time_s + (4 + COUNT) * GATHER_S)


def test_gathers_and_scatters_of_a_backward_hide_behind_computation():
    """Twice 50 ms per operator: only the first gather and the last scatter stand alone."""
    one = sharing(0.05, 40 * MB)
    assert one.backward_s == pytest.approx(COUNT * 0.1 + 2 * GATHER_S)


def test_where_collectives_take_longer_the_queue_is_never_empty():
    one = sharing(0.001, 200 * MB)
    assert one.forward_s == pytest.approx(COUNT * GATHER_S + 0.001)
    assert one.backward_s == pytest.approx((4 + COUNT) * GATHER_S, rel=0.05)


def test_on_a_host_without_a_core_to_spare_all_times_add_up():
    problem = problem_of([40] * COUNT, 2, times=[0.05] * COUNT)
    devices = tuple(replace(one, host="h") for one in problem.topology.devices)
    crowded = replace(problem.topology, devices=devices, hosts=(Host("h", cores=2),))
    there = replace(problem, topology=crowded)
    strategy = replicas_of(problem.profile.graph, 2)
    stage = replace(strategy.stages[0], over=2, zero=3, prefetch=40 * MB)
    assert stage_pass(there, stage, 0).forward_s == pytest.approx(COUNT * (GATHER_S + 0.05))
    plain = replace(strategy, stages=(replace(stage, prefetch=None),))
    assert with_overlap(there, plain) == plain
    assert with_overlap(problem, plain).stages[0].prefetch == 40 * MB


def test_a_stage_with_room_keeps_what_it_holds_ahead_where_another_one_has_none():
    problem = problem_of([40, 40, 40, 4000], 4, times=[0.05] * 4)
    names = tuple(one.name for one in problem.profile.graph.operators)
    cut, whole = Stage.whole(names[:3], (0, 1), 2, False), Stage.whole(names[3:], (2, 3), 1, False)
    cut = replace(cut, over=2, zero=3, prefetch=40 * MB)
    strategy = Strategy((cut, whole), ScheduleName.ONE_F_ONE_B, 4)
    training = replace(problem.training, device_memory=2000 * MB)
    short = replace(problem, training=training)
    kept, evaluation = evaluated_with_overlap(short, strategy)
    assert kept == strategy
    assert evaluation.shortage.startswith("stage 1")


@pytest.mark.parametrize(("time_s", "in_order_s"), [(0.007, 0.107), (0.05, 0.27)])
def test_what_is_gathered_behind_a_step_waits_where_a_forward_needs_another_collective(
    time_s, in_order_s
):
    """Four operators' parameters are gathered behind the step, those of the fourth operator in each
    forward: before those of the last one, if these take longer than what is computed.
    """
    problem = problem_of([40] * COUNT, 2, times=[time_s] * COUNT)
    strategy = replicas_of(problem.profile.graph, 2)
    name = problem.profile.graph.parameters[3].name
    plain = replace(strategy.stages[0], over=2, zero=1, zero_of={name: 3})
    found = with_overlap(problem, replace(strategy, stages=(plain,))).stages[0]
    all_at_once = replace(found, gathered_ahead=None)

    def first_s(stage):
        return stage_pass(problem, stage, 0).forward_s + gather_beside_s(
            problem, over_replicas(stage, problem.profile.graph), (0, 1), 0
        )

    assert first_s(found) == pytest.approx(in_order_s)
    assert (found.gathered_ahead is None) == (first_s(all_at_once) == first_s(found))


@settings(max_examples=50)
@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=6), st.data())
def test_a_pass_of_whole_operators_takes_the_longer_of_both_clocks(all_s, data):
    """Beside a clock that ticks kernel by kernel."""
    device_s, host_s = (np.array(all_s).T[a : a + 2].astype(float) for a in (0, 2))
    count = len(all_s)
    first = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(first + 1, count))
    segments = data.draw(st.sampled_from([(), (Segment(first, end, end - 1),)]))
    there, back = alone_times(device_s, host_s, segments)
    run = [(0, v) for v in range(count)]
    back_run = [(1, v) for v in reversed(range(count))]
    if segments:
        at = back_run.index((1, end - 1))
        back_run[at:at] = [(0, v) for v in range(first, end)]
    for side, (found, passes) in enumerate(((there, run), (back, back_run))):
        clock = host = 0.0
        ends = {}
        for one in passes:
            host += host_s[one]
            clock = max(clock + device_s[one], host)
            ends[one] = clock
        assert found.end == pytest.approx([ends[side, v] for v in range(count)])
        assert found.total == pytest.approx(clock)
        sums = [sum(kind[one] for one in passes) for kind in (device_s, host_s)]
        alone_s = sum(max(device_s[one], host_s[one]) for one in passes)
        assert max(sums) - 1e-9 <= found.total <= alone_s + 1e-9


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_pass_is_the_longest_path_through_what_waits_for_what(tmp_path, name):
    random = Random(7)
    for stage, model in random_stages(name, 3, tmp_path):
        profile, most = profiled(model), held_ahead_bytes(stage, model.graph)[1]
        local = local_stage(profile, stage)
        for prefetch in (None, 0, most // 3, 10 * most + 1):
            order = pass_order(replace(stage, prefetch=prefetch), model.graph)
            sides = [_random(local, order, random, side) for side in range(2)]
            gathers = _random_gathers(len(local.operator_rows), random)
            forward = forward_times(local, order, sides[0], beside=True, gathers=gathers).total
            backward = backward_times(local, order, sides[1], beside=True).total
            assert forward == pytest.approx(_longest(_forward(local, order, sides[0], gathers)))
            assert backward == pytest.approx(_longest(_backward(local, order, sides[1])))


def _random(local, order, random, side):
    """Durations; only what there is takes time."""
    rows = len(local.graph_index)
    again = {local.operator_rows[j] for places in order.again.values() for j in places}
    moving = {*local.copy_rows, *(again if side else ())}
    compute = [random.random() * (v >= 0) for v in local.graph_index]
    late = {local.operator_rows[j] for places in order.late.values() for j in places}
    return SideDurations(
        compute,
        [0.1 + random.random() * (i in moving) if i in moving else 0.0 for i in range(rows)],
        [random.random() * (i in local.statistics) for i in range(rows)],
        [0.4 * t * (i in late) for i, t in enumerate(compute)],
        [random.random() * (v >= 0) for v in local.graph_index],
    )


def _random_gathers(count, random):
    readers = sorted(random.choices(range(count), k=random.randrange(6)))
    starts = sorted(random.choice([0, random.randrange(one + 1)]) for one in readers)
    return [TimedGather(min(start, reader), reader, random.random())
            for start, reader in zip(starts, readers, strict=True)]  # fmt: skip


class Waits(networkx.DiGraph):
    """Tasks with durations and what they wait for; tasks of the device, of the queue and of the
    host, each for the one before.
    """

    def __init__(self):
        super().__init__()
        self.latest = {"main": None, "queue": None, "host": None}

    def put(self, stream, name, duration, *after):
        self.add_node(name, duration=duration)
        for one in (self.latest[stream], *after):
            if one is not None:
                self.add_edge(one, name)
        self.latest[stream] = name

    def start(self, name, duration):
        """A collective that the thread puts into the queue where it stands."""
        self.put("queue", name, duration, self.latest["main"])

    def run(self, place, duration, host):
        """An operator, which has not ended before the host has started its kernels."""
        self.put("host", ("started", place), host)
        self.put("main", ("run", place), duration)
        self.put("main", ("done", place), 0.0, ("started", place))

    def stop(self, name, duration):
        """A collective that the thread waits for on the spot."""
        if duration:
            self.start(name, duration)
            self.put("main", ("waited", name), 0.0, name)


def _longest(waits):
    end = {}
    for name in networkx.topological_sort(waits):
        before = (end[one] for one in waits.predecessors(name))
        end[name] = max(before, default=0.0) + waits.nodes[name]["duration"]
    return max(end.values())


def _forward(local, order, known, gathers):
    waits = Waits()
    for place in range(len(local.operator_rows) + 1):
        for i, one in enumerate(gathers):
            if one.start == place:
                waits.start(("gather", i), one.duration)
        for c in [c for c in order.order if order.start[c] == place]:
            waits.start(("copy", c), known.moved[local.copy_rows[c]])
        read = [("copy", c) for c in range(len(order.first)) if order.first[c] == place]
        if place == len(local.operator_rows):
            waits.put("main", "end", 0.0, *read)
            break
        row = local.operator_rows[place]
        there = [("gather", i) for i, one in enumerate(gathers) if one.reader == place]
        waits.put("main", ("read", place), 0.0, *read, *there)
        if row not in local.losses:
            waits.stop(("asked", place), known.asked[row])
        waits.run(place, known.compute[row], known.host[row])
        if row in local.losses:
            waits.stop(("asked", place), known.asked[row])
    return waits


def _backward(local, order, known):
    waits = Waits()
    late = {j: c for c, places in order.late.items() for j in places}
    count = len(local.operator_rows)
    for place in reversed(range(count + 1)):
        if place < count:
            row = local.operator_rows[place]
            for other in order.again.get(place, ()):
                waits.start(("again", other), known.moved[local.operator_rows[other]])
            waits.put("main", ("ready", place), 0.0, *_there(waits, ("again", place)))
            waits.stop(("asked", place), known.asked[row])
            own = known.compute[row] - (known.weights[row] if place in late else 0.0)
            waits.run(place, own, known.host[row])
        for c in [c for c in reversed(order.order) if order.first[c] == place]:
            waits.start(("gradient", c), known.moved[local.copy_rows[c]])
            for other in order.late.get(c, ()):
                weights = known.weights[local.operator_rows[other]]
                waits.put("main", ("weights", other), weights)
        home = [("gradient", c) for c in range(len(order.start)) if order.start[c] == place]
        waits.put("main", ("home", place), 0.0, *home)
    return waits


def _there(waits, name):
    return [name] if name in waits else []
