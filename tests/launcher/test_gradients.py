"""When the sums of gradients start, and in which order."""

import pytest
import torch
from torch.nn import Parameter

from planner.artefacts.strategy import GradientSum
from planner.launcher import clocks
from planner.launcher.gradients import GradientBuckets, closing_backwards
from planner.launcher.mesh.queue import Done
from planner.schedules.actions import Compute, Direction, parse

LAST = Compute(Direction.BACKWARD, 0, 1)


class Sum:
    """Stands for a sum that runs; it is over at the time `ended_s`."""

    def __init__(self, posted_s, ended_s):
        self.posted_s, self.ended_s = posted_s, ended_s


class Others:
    """Stands for the other devices: the n-th sum starts at n s and takes a second."""

    device = 0

    def __init__(self):
        self.started = []

    def start_sum(self, buffer, index):
        self.started.append((index, buffer.tolist()))
        return Sum(len(self.started), len(self.started) + 1.0)

    def finish(self, one):
        return one.ended_s

    def sums_parts(self, index):
        return False


def actions(line):
    return [parse(word) for word in line.split()]


@pytest.fixture
def three():
    """Parameters a, b and c of one number each, in the buckets A0 of c and b, and A1 of a."""
    parameters = {name: Parameter(torch.ones(1)) for name in "abc"}
    sums = (GradientSum((0, 1), ("c", "b"), 8), GradientSum((0, 1), ("a",), 4))
    world = Others()
    gradients = GradientBuckets(parameters, sums, world)
    gradients.follow(actions("0F0 0F1 0B0 0B1 A0 A1 O"))
    return parameters, gradients, world


def test_a_sum_starts_when_all_gradients_of_its_bucket_are_there(three):
    parameters, sums, world = three
    sums.begin(LAST)
    parameters["c"].sum().backward()
    assert world.started == []
    (2 * parameters["b"]).sum().backward()
    assert world.started == [(0, [2.0, 1.0])]  # by name in the buffer
    parameters["a"].sum().backward()
    assert [index for index, _ in world.started] == [0, 1]
    assert [sums.finish(0), sums.finish(1)] == [(1, 2.0), (2.0, 3.0)]


def test_only_the_last_backward_starts_sums(three):
    parameters, sums, world = three
    sums.begin(Compute(Direction.BACKWARD, 0, 0))
    sum(p.sum() for p in parameters.values()).backward()
    assert world.started == []
    sums.begin(LAST)
    sum(p.sum() for p in parameters.values()).backward()
    assert world.started == [(0, [2.0, 2.0]), (1, [2.0])]


def test_sums_start_in_their_order_whatever_is_ready_first(three):
    parameters, sums, world = three
    sums.begin(LAST)
    parameters["a"].sum().backward()
    assert world.started == []
    (parameters["b"] + parameters["c"]).sum().backward()
    assert [index for index, _ in world.started] == [0, 1]


def test_a_bucket_without_some_gradient_is_summed_when_the_device_comes_to_it(three):
    parameters, sums, world = three
    sums.begin(LAST)
    (parameters["a"] + parameters["b"]).sum().backward()
    assert world.started == []
    sums.finish(0)
    assert world.started == [(0, [1.0, 0.0])]
    sums.finish(1)
    assert [index for index, _ in world.started] == [0, 1]


def test_each_step_sums_anew(three):
    parameters, sums, world = three
    for _ in range(2):
        sums.begin(LAST)
        sum(p.sum() for p in parameters.values()).backward()
        sums.finish(0), sums.finish(1)
    assert [index for index, _ in world.started] == [0, 1, 0, 1]


class Parts:
    """Stands for shards: the n-th scatter ends at 10 n s."""

    scattered = {}  # noqa: RUF012

    def __init__(self, *, runs_beside):
        self.runs_beside, self.started = runs_beside, []

    def scatter(self, names):
        self.started.append(names)
        return Done(clocks.now_s() + 10.0 * len(self.started))


@pytest.mark.parametrize("runs_beside", [True, False])
def test_a_sum_in_parts_starts_within_the_backward_where_it_runs_beside_it(runs_beside):
    parameters = {name: Parameter(torch.ones(1)) for name in "abc"}
    both = ((0,), (1,))
    sums = (GradientSum((0, 1), ("c", "b"), 8, both), GradientSum((0, 1), ("a",), 4, both))
    world, shards = Others(), Parts(runs_beside=runs_beside)
    gradients = GradientBuckets(parameters, sums, world, shards)
    gradients.follow(actions("0F0 0F1 0B0 0B1 A0 A1 O"))
    gradients.begin(LAST)
    parameters["a"].sum().backward()
    assert shards.started == []
    (parameters["b"] + parameters["c"]).sum().backward()
    assert shards.started == ([("c", "b"), ("a",)] if runs_beside else [])
    (_, first_end), (second_start, second_end) = gradients.finish(0), gradients.finish(1)
    assert shards.started == [("c", "b"), ("a",)] and world.started == []
    assert second_start == first_end < second_end


def test_sums_belong_to_the_last_backward_before_them():
    line = "0F0 0B0 A0 A1 O 0F1 0B1 A2 O"
    assert closing_backwards(actions(line)) == {
        Compute(Direction.BACKWARD, 0, 0): (0, 1), Compute(Direction.BACKWARD, 0, 1): (2,),
    }  # fmt: skip
    assert closing_backwards(actions("0F0 2F0 2B0 0B0 A0 O")) == {}
