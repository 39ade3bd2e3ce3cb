"""Traces by the rules of their format."""

import json

import pytest
from hypothesis import given, settings

from planner.costs.evaluate import evaluate
from planner.schedules.actions import Compute, Direction
from planner.simulator.account import account
from planner.simulator.timeline import Event, Timeline
from planner.simulator.traces.write import TRACE_FILE, chrome_trace
from planner.support.errors import OptionError
from planner.support.outputs import check_outputs
from planner.support.reading import MAX_TEXT_BYTES
from tests.simulator.test_events import or_error, simulate, timed_cases, traced
from tests.support.programs import problems_and_strategies
from tests.support.trace_rules import broken

NAMES = {device: f"gpu{device}" for device in range(64)}


def test_a_trace_that_is_larger_than_other_files_may_be_is_overwritten(tmp_path):
    """A trace of many actions has more than 64 MiB."""
    path = tmp_path / "trace.json"
    timeline = Timeline(1.0, (Event(0, Compute(Direction.FORWARD, 0, 0), 0.0, 1.0),), ())
    content = json.dumps(chrome_trace(timeline, NAMES))
    path.write_text(content + " " * MAX_TEXT_BYTES)
    check_outputs([(path, TRACE_FILE)], {})
    path.write_text("{}" + " " * MAX_TEXT_BYTES)
    with pytest.raises(OptionError, match="expected a trace of the planner to overwrite"):
        check_outputs([(path, TRACE_FILE)], {})


@settings(max_examples=60)
@given(timed_cases())
def test_every_simulated_trace_keeps_the_rules_of_the_format(case):
    found = or_error(simulate, case)
    if isinstance(found, Timeline):
        assert broken(chrome_trace(found, NAMES)) == []


@settings(max_examples=40)
@given(problems_and_strategies())
def test_so_do_traces_with_memory_and_every_device_has_a_counter(case):
    problem, strategy = case
    try:
        evaluate(problem, strategy)
    except ValueError:
        return
    found = account(problem, strategy)
    trace = chrome_trace(found.timeline, NAMES)
    assert broken(trace) == []
    counted = {e["pid"]: [] for e in trace["traceEvents"] if e["ph"] == "C"}
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counted[event["pid"]].append(event["args"]["bytes"])
    assert [max(counted[pid]) for pid in sorted(counted)] == [
        parts.total_bytes for parts in evaluate(problem, strategy).memory.values()
    ]


def spoiled(change):
    """A sound trace after a change of its events."""
    trace = chrome_trace(traced(), NAMES)
    events = trace["traceEvents"]
    pick = {p: next(e for e in events if e["ph"] == p) for p in "XMCsf"}
    change(events, pick)
    return broken(trace)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda events, one: one["X"].pop("dur"), "X: ['dur'] missing"),
        (lambda events, one: one["X"].update(dur=-1.0), "X: dur is -1.0"),
        (lambda events, one: one["X"].update(ts="0"), "X: ts is '0'"),
        (lambda events, one: one["X"].update(ph="Z"), "unknown phase 'Z'"),
        (lambda events, one: one["X"].update(dur=9.5e6), "overlaps the one before it in part"),
        (lambda events, one: one["X"].update(tid=99), "is on a thread without a name"),
        (lambda events, one: one["M"].update(args={}), "M: process_name with {}"),
        (lambda events, one: events.remove(one["s"]), "arrows with one end"),
        (lambda events, one: one["f"].update(ts=0.0), "ends before it starts"),
        (lambda events, one: one["f"].update(ts=9e9), "has an end in no slice"),
        (lambda events, one: events.append(dict(one["s"])), "has two ends s"),
        (lambda events, one: one["C"].update(ts=5e6), "goes back in time"),
        (lambda events, one: one["C"]["args"].update(bytes=-1), "counts -1"),
    ],
)
def test_the_rules_find_what_is_wrong(change, wrong):
    assert any(wrong in line for line in spoiled(change))
