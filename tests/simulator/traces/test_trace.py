"""Traces by the rules of their format, and pictures of timelines."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.evaluate import evaluate
from planner.reports.drawing.gantt import Activity, gantt
from planner.reports.drawing.gantt_svg import gantt_svg
from planner.schedules.actions import AllReduce, Compute, Direction, Step
from planner.simulator.account import account
from planner.simulator.timeline import Event, Timeline, Transfer
from planner.simulator.traces.write import TRACE_FILE, chrome_trace
from planner.support.errors import OptionError
from planner.support.outputs import check_outputs
from planner.support.reading import MAX_TEXT_BYTES
from tests.simulator.test_account import pipeline
from tests.simulator.test_delta import problems_and_strategies
from tests.simulator.test_events import or_error, simulate, timed_cases, traced
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


# Gantt charts.


def test_a_gantt_chart_of_a_pipeline_in_cells_of_half_a_second():
    _, _, timeline = pipeline()
    assert [row.text for row in gantt(timeline, 24)] == [
        "0-1-          0===  1===",
        "  0-1-    0===  1===    ",
        "    0-0===1-1===        ",
    ]


def test_a_gantt_chart_has_segments_by_kind_and_shows_transfers_where_nothing_else_is():
    timeline = Timeline(
        8.0,
        (
            Event(0, Compute(Direction.FORWARD, 0, 11), 0.0, 1.0),
            Event(0, Compute(Direction.BACKWARD, 0, 11), 3.0, 6.0),
            Event(0, AllReduce(0), 6.0, 7.0),
            Event(0, Step(), 7.0, 8.0),
        ),
        (Transfer(0, 1, Direction.FORWARD, 0, "x", 1.0, 2.0, 4),),
    )
    first, second = gantt(timeline, 8)
    assert [(one.kind, one.text) for one in first.segments] == [
        (Activity.FORWARD, "-"),
        (Activity.TRANSFER, "~"),
        (Activity.IDLE, " "),
        (Activity.BACKWARD, "11="),
        (Activity.SUM, "+"),
        (Activity.STEP, "o"),
    ]
    assert second.text == " ~      "


def test_where_a_device_runs_several_stages_cells_say_which():
    events = [Event(0, Compute(Direction.FORWARD, s, 3), float(s), s + 1.0) for s in range(2)]
    assert gantt(Timeline(2.0, tuple(events), ()), 8)[0].text == "0:3-1:3-"


@given(timed_cases(), st.integers(1, 50))
def test_all_rows_are_as_wide_as_the_picture(case, width):
    found = or_error(simulate, case)
    if isinstance(found, Timeline):
        assert all(len(row.text) == width for row in gantt(found, width))


@settings(max_examples=40)
@given(timed_cases())
def test_a_picture_is_sound_and_as_long_as_what_it_shows(case):
    found = or_error(simulate, case)
    if not isinstance(found, Timeline) or found.iteration_s == 0:
        return
    picture = ElementTree.fromstring(gantt_svg(found, NAMES, width=1000))
    assert picture.tag.endswith("svg")
    boxes = [r for r in picture.iter() if r.tag.endswith("rect") and r.get("stroke") != "none"]
    assert all(float(box.get("width")) >= 0 for box in boxes)


def test_a_picture_names_devices_microbatches_and_kinds():
    _, _, timeline = pipeline()
    text = gantt_svg(timeline, NAMES)
    words = [one.text for one in ElementTree.fromstring(text).iter() if one.tag.endswith("text")]
    assert {"gpu0", "gpu1", "gpu2", "forward", "backward", "2 s"} <= set(words)
    assert words.count("0") == 1 + 6  # The start of the axis, and both directions on 3 devices.
    assert text == gantt_svg(timeline, NAMES)


def test_what_is_too_narrow_for_a_pixel_is_drawn_together():
    events = [Event(0, Compute(Direction.FORWARD, 0, m), m, m + 1.0) for m in range(10_000)]
    assert gantt_svg(Timeline(1e4, tuple(events), ()), NAMES, width=100).count("<rect") < 10
