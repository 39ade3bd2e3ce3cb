"""The prices of a search along one axis, beside those of the cost model."""

from dataclasses import replace
from itertools import permutations

import pytest

from planner.artefacts.profile import PartTime
from planner.costs.transfers import conversion_s
from planner.resharding.conversion import conversion
from planner.solvers.sharded.along import Policy
from planner.solvers.sharded.layout import axis_of, chosen
from planner.solvers.sharded.rules import named
from tests.costs.test_split_bounds import with_rules
from tests.support.builders import cluster, unit_type
from tests.support.split import mlp
from tests.support.split_profiles import problem

PARTS = ("R", "P", "S0", "S1", "S1/3")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("old", "new"), [*permutations(PARTS, 2)])
def test_a_conversion_takes_as_long_as_on_its_line(size, old, new):
    """On a ring with latencies: all-gathers, all-to-alls, sums, and local steps."""
    given = problem(mlp(), size, bandwidth=1e6)
    axis = axis_of(given, [range(size)], (size,), 0, 1)
    shape, item_bytes = (48, 96), 4
    steps = conversion(shape, item_bytes, (size,), (old,), (new,))
    cost_s = conversion_s(given.topology, tuple(range(size)), (size,), steps)
    assert axis.converted_s(48 * 96 * item_bytes, old, new) == pytest.approx(cost_s)


def test_a_part_counts_at_its_measured_time_on_the_type_that_was_measured():
    """As halves, products by columns and by samples take as long. By samples, whole weights have
    gradients to be added up, and that is not worth it.
    """
    known = with_rules(mlp())
    parts = (PartTime((2,), ("S0,R->S0",), 0.1, 0.1),)
    operators = tuple(
        replace(one, parts=parts) if one.name == "up" else one for one in known.operators
    )
    rules = {}
    for name, operators_of in (("plain", known.operators), ("measured", operators)):
        for kind in (known.device_type, "another"):
            profile = replace(known, operators=operators_of)
            given = problem(profile, bandwidth=1e15)
            devices = replace(given.topology, **cluster_of(kind))
            given = replace(given, topology=devices)
            axis = replace(axis_of(given, [(0, 1)], (2,), 0, 1), latency_s=0.0)
            about = dict(named(profile.graph))
            rules[name, kind] = chosen(given, about, axis, Policy(), 0)[1].line
    assert rules.pop(("measured", known.device_type)) == "S0,R->S0"
    assert set(rules.values()) == {"R,S1->S1"}


def cluster_of(kind):
    """Fields of a topology of two devices of a type."""
    made = cluster([unit_type(kind, bandwidth=1e12)] * 2, 1e15, 1e-7)
    return {"device_types": made.device_types, "devices": made.devices}


@pytest.mark.parametrize("beam", [1, 24])
def test_where_no_conversion_is_allowed_that_is_needed_all_are(beam):
    """The first operator is cut though the second one has to be whole. With one path there is no
    way on but a conversion; with more there is one in which the first is whole, too.
    """
    given = problem(with_rules(mlp()), bandwidth=1e15)
    axis = replace(axis_of(given, [(0, 1)], (2,), 0, 1), latency_s=0.0)
    policy = Policy(rule=lambda v, _: v == 0, conversion=lambda *_: False)
    rules = chosen(given, dict(named(given.profile.graph)), axis, policy, 0, beam=beam)
    assert [one.rule.cuts for one in rules] == [beam == 1, False, False, False]
