"""The constraint model: both engines against brute force, co-placement, memory."""

import itertools
from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.options import Objective, Optimizer
from planner.artefacts.problem import Status
from planner.artefacts.topology import Sharing
from planner.clusters.routes import fastest_way_s
from planner.solvers.engines.mip import EngineUnavailableError
from planner.solvers.netsplit import bottleneck as netsplit_bottleneck
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit import gurobi as netsplit_gurobi
from planner.solvers.netsplit.jobs import schedule_of
from planner.solvers.netsplit.model import (
    LOSS,
    canonical,
    grouped,
    instance_of,
    overflow,
    ticks_by_way,
    transfer_ticks,
)
from planner.solvers.placement.coplacement import coplaced, kept_bytes
from planner.solvers.placement.problem import SharedBytes, placement_problem_of, transfer_s
from planner.solvers.placement.timetable import latency_s
from tests.support.builders import KB, changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.netsplit_instances import problem_from
from tests.support.strategies import dags

LIMIT_S = 30.0
ENGINES = {"cp-sat": netsplit_cpsat.solve, "gurobi": netsplit_gurobi.solve}


def placement_problem_from(feeds, forward, sizes=None, count=2, **options):
    """A placement problem whose transfers take 1 s per KB."""
    profile = profile_of(graph_of(feeds, sizes), forward)
    topology = options.pop("topology", None) or cluster([unit_type()] * count, bandwidth=KB)
    return placement_problem_of(problem_of(profile, topology, **options))


def alone(problem, **options):
    """The model with every operator by itself."""
    return instance_of(problem, [(i,) for i in range(problem.num_operators)], **options)


def need_bytes(kept, operators):
    """The bytes that a device with these operators keeps."""
    return sum(size for needing, size in kept.items() if not set(operators).isdisjoint(needing))


@st.composite
def placement_problems(draw, max_nodes=4, max_devices=3):
    """Small problems with uneven devices, links and memory; sources and sinks as they come."""
    feeds = draw(dags(min_nodes=2, max_nodes=max_nodes))
    size = len(feeds)
    lists = lambda values: st.lists(values, min_size=size, max_size=size)  # noqa: E731
    times, sizes = st.integers(1, 9), st.integers(1, 9).map(lambda x: x * KB)
    profile = profile_of(
        graph_of(feeds, draw(lists(sizes)), draw(lists(sizes))),
        draw(lists(times)),
        draw(lists(times)),
        work=draw(lists(st.sampled_from([(10**9, 1), (1, 10**6)]))),
    )
    kinds = [unit_type(bandwidth=1e9), unit_type("other", flops=4e12, bandwidth=0.25e9)]
    count = draw(st.integers(1, max_devices))
    types = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    fast = draw(st.sampled_from([(), ((0, 1, 10 * KB),)])) if count > 1 else ()
    topology = cluster(types, draw(st.sampled_from([KB, 3 * KB])), 0.25, fast)
    if draw(st.booleans()):
        links = (replace(link, sharing=Sharing.EXCLUSIVE) for link in topology.links)
        topology = replace(topology, links=tuple(links))
    problem = problem_of(profile, topology, measured_on=unit_type(bandwidth=1e9))
    need = sum(kept_bytes(placement_problem_of(problem)).values())
    share = draw(st.sampled_from([2.0, 1.0, 0.7, 0.5, 0.2]))
    memory = max(1, int(need * share))
    return placement_problem_of(changed(problem, device_memory=memory))


@st.composite
def partly_trained(draw, *sizes):
    """The same, and some tensors have no gradient, so that backwards wait for less."""
    problem = draw(placement_problems(*sizes))
    flags = [draw(st.booleans()) for _ in problem.tensors]
    tensors = [replace(t, gradient=flag) for t, flag in zip(problem.tensors, flags, strict=True)]
    return replace(problem, tensors=tuple(tensors))


# ------------------------------------------------------------------------------------ brute force


def jobs_of(instance, device_of):
    """Everything that has to be run for a placement: (ticks, ticks that it occupies each of its
    resources, indices of jobs before it). Resources are devices (p, p), channels (p, q) and the
    links of the topology that several pairs share.
    """
    problem, num = instance.problem, instance.problem.num_operators

    def transfer(size_bytes, p, q, before):
        ticks = transfer_ticks(instance, size_bytes, p, q)
        busy = {(p, q): ticks}
        for k, link in enumerate(problem.shared):
            if (p, q) in link.pairs:
                own = round(size_bytes * link.seconds_per_byte / instance.tick_s)
                busy["link", k] = ticks if link.exclusive else own
        return [ticks, busy, before]

    def operator(ticks, p, before):
        return [int(ticks), {(p, p): int(ticks)}, before]

    jobs = [operator(instance.forward[i, p], p, []) for i, p in enumerate(device_of)]
    jobs += [operator(instance.backward[i, p], p, [*range(num)]) for i, p in enumerate(device_of)]
    for tensor in problem.tensors:
        home = device_of[tensor.producer]
        for q in dict.fromkeys(device_of[j] for j in tensor.consumers):
            readers = [j for j in tensor.consumers if device_of[j] == q]
            before, after = tensor.producer, tensor.producer + num
            if q != home:
                jobs.append(transfer(tensor.bytes, home, q, [before]))
                before = len(jobs) - 1
            for j in readers:
                jobs[j][2].append(before)
            if tensor.gradient:
                ends = [j + num for j in readers]
                if q != home:
                    jobs.append(transfer(tensor.bytes, q, home, ends))
                    ends = [len(jobs) - 1]
                jobs[after][2].extend(ends)
    return jobs


def shortest(jobs, best):
    """The least time for all jobs, or anything from `best` on if there is no better: every order is
    tried, every job goes as soon as it can.
    """
    seen = set()

    def go(end, free):
        nonlocal best
        if len(end) == len(jobs):
            best = min(best, max(end.values()))
            return
        state = (tuple(sorted(end.items())), tuple(sorted(free.items(), key=str)))
        if state in seen or max(end.values(), default=0) >= best:
            return
        seen.add(state)
        for k, (ticks, busy, before) in enumerate(jobs):
            if k not in end and all(b in end for b in before):
                start = max([0, *(free.get(one, 0) for one in busy), *(end[b] for b in before)])
                taken = {one: start + length for one, length in busy.items()}
                go({**end, k: start + ticks}, {**free, **taken})

    go({}, {})
    return best


def placements(instance):
    """All that fit, with groups together."""
    devices = range(instance.problem.num_devices)
    for where in itertools.product(devices, repeat=len(instance.groups)):
        device_of = tuple(where[g] for g in instance.group_of)
        if overflow(instance, device_of) <= 0:
            yield device_of


def brute_force(instance):
    """Ticks of the least latency over all placements and orders; inf if none fits."""
    best = np.inf
    for device_of in placements(instance):
        best = shortest(jobs_of(instance, device_of), best)
    return best


@st.composite
def published_problems(draw):
    """The same with all that (5-18) sees or leaves out: frozen and shared parameters, stash besides
    tensors, inputs with several readers. Memory is short by its count.
    """
    problem = draw(partly_trained(5))
    num, sizes = problem.num_operators, st.integers(0, 9).map(lambda x: x * KB)
    some = st.sets(st.integers(0, num - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    shared = st.builds(SharedBytes, some, sizes, st.booleans())
    problem = replace(
        problem,
        trainable_bytes=problem.parameter_bytes * draw(st.integers(0, 1)),
        private_bytes=np.array(draw(st.lists(sizes, min_size=num, max_size=num))),
        shared_parameters=tuple(draw(st.lists(shared, max_size=2))),
        inputs=tuple(draw(st.lists(st.builds(SharedBytes, some, sizes), max_size=2))),
    )
    everything = published_use(problem, (0,) * num)[0]
    share = draw(st.sampled_from([2.0, 1.0, 0.8, 0.6, 0.4]))
    room = np.full(problem.num_devices, int(share * everything))
    return replace(problem, capacity_bytes=room)


def published_use(problem, device_of):
    """The right-hand side of (5-18) on each device, from its formula."""
    alpha, use = 2 + problem.moments, []
    results = [(i,) for i in range(problem.num_operators)]
    variables = [
        *((tensor.bytes, (tensor.producer, *tensor.consumers)) for tensor in problem.tensors),
        *((one.bytes, one.operators) for one in problem.inputs),
        *zip(problem.result_bytes, results, strict=True),
    ]
    weights = [
        *zip(problem.parameter_bytes, results, strict=True),
        *((one.bytes, one.operators) for one in problem.shared_parameters),
    ]
    for p in range(problem.num_devices):
        here = {i for i, q in enumerate(device_of) if q == p}
        use.append(
            alpha * sum(size for size, touching in weights if here & {*touching})
            + 2 * sum(size for size, touching in variables if here & {*touching})
        )
    return use


def published_placements(problem):
    """All placements that (5-15) and (5-18) allow."""
    devices = range(problem.num_devices)
    for device_of in itertools.product(devices, repeat=problem.num_operators):
        pairs = zip(published_use(problem, device_of), problem.capacity_bytes, strict=True)
        if all(use <= room for use, room in pairs):
            yield device_of


def published_s(problem, device_of):
    """The published model's makespan of a placement, in s, from its formulas."""
    f = [problem.forward_s[i, p] for i, p in enumerate(device_of)]
    b = [problem.backward_s[i, p] for i, p in enumerate(device_of)]
    edges = {}
    for tensor in problem.tensors:
        for j in tensor.consumers:
            edges[tensor.producer, j] = edges.get((tensor.producer, j), 0) + tensor.bytes

    def commu(i, j):
        p, q = device_of[i], device_of[j]
        return transfer_s(problem, edges[i, j], p, q) if p != q else 0.0

    @cache
    def forward_start(j):
        ends = [forward_start(i) + f[i] + commu(i, k) for i, k in edges if k == j]
        return max(ends, default=0.0)

    @cache
    def backward_start(i):
        after = [backward_start(j) + b[j] + commu(k, j) for k, j in edges if k == i]
        return max(after) if after else forward_start(i) + f[i]

    return max(backward_start(i) + b[i] for i in range(len(f)))


# ---------------------------------------------------------------------------------------- engines


@settings(max_examples=25)
@given(placement_problems() | partly_trained())
def test_both_engines_find_the_latency_that_brute_force_finds(problem):
    instance = alone(problem)
    expected = brute_force(instance)
    for name, solve in ENGINES.items():
        answer = solve(instance, LIMIT_S, None)
        if expected == np.inf:
            assert (answer.status, answer.device_of) == (Status.INFEASIBLE, None), name
            continue
        assert answer.status is Status.OPTIMAL, name
        assert round(answer.latency_s / instance.tick_s) == expected, name
        assert overflow(instance, answer.device_of) <= 0, name
        assert answer.bound_s <= answer.latency_s, name


@settings(max_examples=15)
@given(placement_problems(max_nodes=5, max_devices=2), st.data())
def test_groups_stay_together_and_their_operators_run_one_by_one(problem, data):
    count = data.draw(st.integers(1, problem.num_operators))
    where = data.draw(
        st.lists(
            st.integers(0, count - 1),
            min_size=problem.num_operators, max_size=problem.num_operators,
        )
    )  # fmt: skip
    sets = {g: tuple(i for i, h in enumerate(where) if h == g) for g in where}
    instance = instance_of(problem, sorted(sets.values()))
    expected = brute_force(instance)
    answer = netsplit_cpsat.solve(instance, LIMIT_S, None)
    assert (answer.device_of is None) == (expected == np.inf)
    if answer.device_of is not None:
        assert round(answer.latency_s / instance.tick_s) == expected
        assert grouped(instance, answer.device_of) == answer.device_of


@settings(max_examples=25)
@given(published_problems())
def test_the_relaxed_model_is_the_published_one(problem):
    """(5-11) to (5-18), memory included, by enumeration."""
    instance = alone(problem, relaxed=True)
    allowed = published_placements(problem)
    expected = min((published_s(problem, one) for one in allowed), default=np.inf)
    for name, solve in ENGINES.items():
        answer = solve(instance, LIMIT_S, None)
        if expected == np.inf:
            assert answer.status is Status.INFEASIBLE, name
            continue
        assert answer.status is Status.OPTIMAL, name
        assert answer.latency_s == pytest.approx(expected, rel=LOSS), name
        assert published_s(problem, answer.device_of) == pytest.approx(expected, rel=LOSS), name
        assert answer.device_of in {*published_placements(problem)}, name


@given(placement_problems(max_nodes=6), st.data())
def test_a_list_schedule_in_ticks_is_feasible_and_as_long_as_in_seconds(problem, data):
    instance = alone(problem)
    devices = st.integers(0, problem.num_devices - 1)
    size = problem.num_operators
    device_of = data.draw(st.lists(devices, min_size=size, max_size=size))
    schedule = schedule_of(instance, device_of)
    length_s = schedule.latency * instance.tick_s
    assert length_s == pytest.approx(latency_s(problem, device_of), abs=instance.lost_s)


@settings(max_examples=10)
@given(placement_problems(), st.data())
def test_a_known_placement_changes_no_optimum(problem, data):
    instance = alone(problem)
    fitting = list(placements(instance))
    if not fitting:
        return
    known = data.draw(st.sampled_from(fitting))
    for relaxed in (False, True):
        instance = alone(problem, relaxed=relaxed)
        expected = netsplit_cpsat.solve(instance, LIMIT_S, None).latency_s
        for name, solve in ENGINES.items():
            answer = solve(instance, LIMIT_S, known)
            assert answer.status is Status.OPTIMAL, name
            assert answer.latency_s == pytest.approx(expected, abs=2 * instance.tick_s), name


# Two sources and two sinks:   0 -> 2
#                              1 -> 3
def test_two_sources_and_two_sinks_wait_for_each_other_on_one_device():
    problem = placement_problem_from([[], [], [0], [1]], [1, 2, 3, 4], count=1)
    for solve in ENGINES.values():
        answer = solve(alone(problem), LIMIT_S, None)
        assert answer.latency_s == pytest.approx(30, rel=LOSS)
        published = solve(alone(problem, relaxed=True), LIMIT_S, None)
        assert published.latency_s == pytest.approx(18, rel=LOSS)


def test_two_sources_and_two_sinks_part_where_there_are_two_devices():
    problem = placement_problem_from([[], [], [0], [1]], [1, 2, 3, 4], count=2)
    for solve in ENGINES.values():
        answer = solve(alone(problem), LIMIT_S, None)
        assert answer.latency_s == pytest.approx(18, rel=LOSS)
        assert answer.device_of == (0, 1, 0, 1)


#   0 -> 1, 2, 3: one tensor of 2 KB for three readers of 10 s; 2 s to send, once per device.
#   Two readers on the device of 0, one elsewhere: 1 + 20 there, and 1 + 2 + 10 elsewhere.
def test_a_tensor_is_sent_once_to_each_device():
    problem = placement_problem_from([[], [0], [0], [0]], [1, 10, 10, 10], [2 * KB] * 4, count=2)
    for solve in ENGINES.values():
        answer = solve(alone(problem), LIMIT_S, None)
        assert answer.latency_s == pytest.approx((1 + 20) + (40 + 2), rel=LOSS)


# 0 and 1 each feed one of two far readers; 3 s per message, and one channel.
#   0 -> 2, 1 -> 3; 0 and 1 fit device 0 only, with both outputs; 2 and 3 go to the other.
def test_messages_between_two_devices_wait_for_each_other():
    feeds, sizes = [[], [], [0, 1]], [3 * KB, 3 * KB, KB]
    problem = placement_problem_from(feeds, [1, 1, 1], sizes, count=2)
    instance = instance_of(problem, [(0, 1), (2,)])
    jobs = jobs_of(instance, (0, 0, 1))
    # 1 for 0; its message until 4; that of 1 until 7; 2 until 8. Back: 2 s, 3 s, 3 s, 2 s.
    assert shortest(jobs, np.inf) * instance.tick_s == pytest.approx(8 + 10, rel=LOSS)


# Devices 1 and 2 read from 0, over one link out of it, 3 s per message: 1 for the producers until
# 2; the messages until 5 and 8; the readers until 9. Back, the link into device 0 has both.
#   0 -> 2 (device 1), 1 -> 3 (device 2)
def test_messages_to_two_devices_wait_for_each_other_on_a_link_that_they_share():
    feeds, sizes = [[], [], [0], [1]], [3 * KB, 3 * KB, KB, KB]
    problem = placement_problem_from(feeds, [1, 1, 1, 1], sizes, count=3)
    instance = instance_of(problem, [(0, 1), (2,), (3,)])
    jobs = jobs_of(instance, (0, 0, 1, 2))
    # 0 until 1, its message until 4; the other one leaves then, arrives at 7; 3 ends at 8. Back:
    # 2 s for both readers at once, the gradients until 5 and 8, and 2 s for the last producer.
    assert shortest(jobs, np.inf) * instance.tick_s == pytest.approx(8 + 10, rel=LOSS)
    assert schedule_of(instance, (0, 0, 1, 2)).latency == shortest(jobs, np.inf)
    apart = instance_of(replace(problem, shared=()), instance.groups)
    # Without the link: the messages leave at 1 and 2, and 3 ends at 6; back 2 + 3 + 2 + 2.
    assert schedule_of(apart, (0, 0, 1, 2)).latency * apart.tick_s == pytest.approx(6 + 9, rel=LOSS)


def test_both_engines_keep_messages_on_a_shared_link_apart():
    """Each device has room for one operator, and the three messages of one leave over one link."""
    feeds, sizes = [[], [0], [0], [0]], [3 * KB] * 4
    problem = placement_problem_from(feeds, [1, 9, 9, 9], sizes, count=3)
    instance, least = alone(problem), {}
    for shared in (problem.shared, ()):
        one = alone(replace(problem, shared=shared))
        least[shared] = brute_force(one)
        for name, solve in ENGINES.items():
            answer = solve(one, LIMIT_S, None)
            assert answer.status is Status.OPTIMAL, name
            assert round(answer.latency_s / instance.tick_s) == least[shared], name
    assert least[()] < least[problem.shared]


def test_gradients_take_the_way_back():
    """There is a fast path from 0 to 1 and a slow one back."""
    problem = placement_problem_from([[], [0]], [1, 1], [4 * KB, KB], count=2)
    rate = np.array([[0, 1 / KB], [2 / KB, 0]])
    memory = int(np.max([need_bytes(kept_bytes(problem), [i]) for i in (0, 1)]))
    tight = replace(
        problem, seconds_per_byte=rate, capacity_bytes=np.array([memory, memory]),
        parameter_bytes=np.array([KB, KB]),
    )  # fmt: skip
    assert not list(alone(tight).alike[0][1:])
    for solve in ENGINES.values():
        answer = solve(alone(tight), LIMIT_S, None)
        assert answer.latency_s == pytest.approx((1 + 4 + 1) + (2 + 8 + 2), rel=LOSS)


def test_a_model_too_large_for_the_licence_says_so():
    instance = alone(placement_problem_of(problem_from(0, 2, num_operators=40)))
    with pytest.raises(EngineUnavailableError, match="licence"):
        netsplit_gurobi.solve(instance, 1.0, None)


def test_the_same_problem_gives_the_same_placement():
    instance = alone(placement_problem_of(problem_from(3, 2, num_operators=9)))
    answers = {netsplit_cpsat.solve(instance, LIMIT_S, None).device_of for _ in range(2)}
    assert len(answers) == 1


@pytest.mark.slow
@settings(max_examples=10)
@given(placement_problems(max_nodes=6))
def test_six_operators_on_three_devices_as_by_brute_force(problem):
    instance = alone(problem)
    expected = brute_force(instance)
    answer = netsplit_cpsat.solve(instance, LIMIT_S, None)
    latency = np.inf if answer.device_of is None else round(answer.latency_s / instance.tick_s)
    assert latency == expected


# ------------------------------------------------------------------------------------- bottleneck


def contiguous(problem, device_of):
    return all(device_of[f.producer] <= device_of[j] for f in problem.tensors for j in f.consumers)


@settings(max_examples=30)
@given(placement_problems(max_nodes=5), st.booleans())
def test_the_smallest_bottleneck_is_that_of_brute_force(problem, whole):
    instance = alone(problem)
    order = range(problem.num_devices) if whole else None
    expected = min(
        (
            netsplit_bottleneck.bottleneck_s(problem, one)
            for one in placements(instance)
            if not whole or contiguous(problem, one)
        ),
        default=np.inf,
    )
    answer = netsplit_bottleneck.solve(instance, LIMIT_S, None, order)
    if expected == np.inf:
        assert answer.status is Status.INFEASIBLE
        return
    assert answer.status is Status.OPTIMAL
    assert answer.latency_s == pytest.approx(expected, rel=1e-5)
    assert answer.bound_s == pytest.approx(expected, rel=1e-5)
    assert not whole or contiguous(problem, answer.device_of)


#   0 (1 s) -> 1 (1 s), 3 KB between: together 6 s; apart 3 s each, 3 s there and 3 s back.
def test_computation_and_both_directions_overlap_in_a_bottleneck():
    problem = placement_problem_from([[], [0]], [1, 1], [3 * KB, KB])
    assert netsplit_bottleneck.bottleneck_s(problem, (0, 0)) == 6
    assert netsplit_bottleneck.bottleneck_s(problem, (0, 1)) == 3


# ------------------------------------------------------------------------------------ co-placement


#   0 --9--> 1 --1--> 2 --5--> 3 (KB)
CHAIN = ([[], [0], [1], [2]], [1, 1, 1, 1], [9 * KB, KB, 5 * KB, KB])


def test_the_heaviest_edges_are_merged_first():
    problem = placement_problem_from(*CHAIN)
    assert coplaced(problem, 4) == ((0, 1), (2,), (3,))
    assert coplaced(problem, 3) == ((0, 1), (2, 3))
    assert coplaced(problem, 2) == ((0, 1, 2, 3),)


def test_co_placement_ends_without_edges():
    problem = placement_problem_from([[], [], [0], [1]], [1] * 4)
    assert coplaced(problem, 1) == ((0, 2), (1, 3))


# 0 and 1 together keep 2 KB of parameters and gradients each, 2 x 1 KB of the input, 2 x 9 of
# tensor 0 and 2 x 1 of tensor 1: 26 KB. 2 and 3 keep 2 + 2 + 2 x 1 + 2 x 5 and the result, 2 x 1:
# 18 KB. With 1 to them it is 2 + 2 x 9 more.
def test_a_union_that_is_too_large_is_skipped_and_the_walk_goes_on():
    problem = placement_problem_from(*CHAIN, device_memory=26 * KB)
    kept = kept_bytes(problem)
    assert need_bytes(kept, (0, 1)) == 26 * KB
    assert need_bytes(kept, (2, 3)) == 18 * KB
    assert coplaced(problem, 1) == ((0, 1), (2, 3))
    smaller = placement_problem_from(*CHAIN, device_memory=25 * KB)
    assert coplaced(smaller, 1) == ((0,), (1,), (2, 3))


@given(placement_problems(max_nodes=6), st.integers(1, 6))
def test_groups_fit_the_smallest_device_and_have_every_operator_once(problem, least):
    groups, kept = coplaced(problem, least), kept_bytes(problem)
    assert sorted(i for group in groups for i in group) == [*range(problem.num_operators)]
    for group in groups:
        assert len(group) == 1 or need_bytes(kept, group) <= problem.capacity_bytes.min()


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("optimizer", "alpha"), [(Optimizer.SGD, 2), (Optimizer.MOMENTUM, 3), (Optimizer.ADAM, 4)]
)
def test_parameters_count_alpha_times_and_tensors_twice(optimizer, alpha):
    problem = placement_problem_from([[], [0]], [1, 1], [3 * KB, 5 * KB], optimizer=optimizer)
    kept = kept_bytes(problem)
    # The input, a parameter of 1 KB each, tensor 0 on both, the result on the second.
    assert need_bytes(kept, (0,)) == 2 * KB + alpha * KB + 6 * KB
    assert need_bytes(kept, (1,)) == alpha * KB + 6 * KB + 10 * KB
    assert need_bytes(kept, (0, 1)) == 2 * KB + 2 * alpha * KB + 6 * KB + 10 * KB


def test_as_published_it_makes_no_difference_whether_there_is_a_gradient_or_a_stash():
    problem = placement_problem_from([[], [0]], [1, 1], [3 * KB, 5 * KB], optimizer=Optimizer.ADAM)
    frozen = replace(
        problem,
        tensors=tuple(replace(tensor, gradient=False) for tensor in problem.tensors),
        trainable_bytes=0 * problem.trainable_bytes,
        private_bytes=7 + problem.private_bytes,
        workspace_bytes=7 + problem.workspace_bytes,
    )
    assert kept_bytes(frozen) == kept_bytes(problem)


@given(placement_problems(max_nodes=6), st.data())
def test_groups_need_what_their_operators_need(problem, data):
    size = problem.num_operators
    devices = st.integers(0, problem.num_devices - 1)
    device_of = data.draw(st.lists(devices, min_size=size, max_size=size))
    kept = kept_bytes(problem)
    use = [
        need_bytes(kept, [i for i in range(size) if device_of[i] == p])
        for p in range(problem.num_devices)
    ]
    over = [used - room for used, room in zip(use, problem.capacity_bytes.tolist(), strict=True)]
    assert overflow(alone(problem), device_of) == max(over)


# --------------------------------------------------------------------------------------- symmetry


def test_equal_devices_are_alike_and_uneven_links_part_them():
    feeds, times = [[], [0]], [1, 1]
    assert alone(placement_problem_from(feeds, times, count=3)).alike == ((0, 1, 2),)
    near = cluster([unit_type()] * 3, bandwidth=KB, links=[(0, 1, 10 * KB)])
    assert alone(placement_problem_from(feeds, times, topology=near)).alike == ((0, 1), (2,))


def test_devices_of_a_class_are_named_in_the_order_of_the_groups():
    near = cluster([unit_type()] * 3, bandwidth=KB, links=[(0, 1, 10 * KB)])
    instance = alone(placement_problem_from([[], [0], [1]], [1, 1, 1], topology=near))
    assert canonical(instance, (2, 1, 0)) == (2, 0, 1)


# ------------------------------------------------------------------------------------- generator


def test_the_benchmark_is_what_its_page_says():
    problem = problem_from(0, 4)
    placement_problem = placement_problem_of(problem)
    assert problem.training.objective is Objective.LATENCY
    assert placement_problem.num_operators == 100
    need = sum(kept_bytes(placement_problem).values())
    assert placement_problem.capacity_bytes.sum() == pytest.approx(1.5 * need, rel=1e-6)
    mean_s = np.mean(
        [transfer_s(placement_problem, tensor.bytes, 0, 1) for tensor in placement_problem.tensors]
    )
    assert mean_s / placement_problem.forward_s[:, 0].mean() == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("problem", [problem_from(0, 5, 12), problem_from(3, 1, 6)])
def test_the_ways_between_devices_are_told_apart_once(problem):
    instance = alone(placement_problem_of(problem))
    devices, tensors = range(instance.problem.num_devices), instance.problem.tensors
    way, ticks = ticks_by_way(instance)
    assert ticks[:, way].tolist() == [
        [[transfer_ticks(instance, one.bytes, p, q) for q in devices] for p in devices]
        for one in tensors
    ]
    fastest = [
        min((transfer_s(instance.problem, one.bytes, *ends) for ends in permutations(devices, 2)),
            default=np.inf)
        for one in tensors
    ]  # fmt: skip
    tables = instance.problem.latency_s, instance.problem.seconds_per_byte
    sizes = np.array([one.bytes for one in tensors])
    assert fastest_way_s(*tables, sizes) == pytest.approx(fastest)
