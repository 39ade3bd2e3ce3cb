"""Pictures of timelines, as text and as SVG."""

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.reports.drawing.gantt import Activity, gantt
from planner.reports.drawing.gantt_svg import gantt_svg
from planner.schedules.actions import AllReduce, Compute, Direction, Step
from planner.simulator.timeline import Event, Timeline, Transfer
from tests.simulator.test_account import pipeline
from tests.simulator.test_events import or_error, simulate, timed_cases

NAMES = {device: f"gpu{device}" for device in range(64)}


def text_of(row):
    return "".join(text for _, text in row)


def test_a_gantt_chart_of_a_pipeline_in_cells_of_half_a_second():
    _, _, timeline = pipeline()
    assert [text_of(row) for row in gantt(timeline, 24).values()] == [
        "0-1-          0===  1===",
        "  0-1-    0===  1===    ",
        "    0-0===1-1===        ",
    ]


def test_a_gantt_chart_has_spans_by_kind_and_shows_transfers_where_nothing_else_is():
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
    first, second = gantt(timeline, 8).values()
    assert list(first) == [
        (Activity.FORWARD, "-"),
        (Activity.TRANSFER, "~"),
        (Activity.IDLE, " "),
        (Activity.BACKWARD, "11="),
        (Activity.SUM, "+"),
        (Activity.STEP, "o"),
    ]
    assert text_of(second) == " ~      "


def test_where_a_device_runs_several_stages_cells_say_which():
    events = [Event(0, Compute(Direction.FORWARD, s, 3), float(s), s + 1.0) for s in range(2)]
    assert text_of(gantt(Timeline(2.0, tuple(events), ()), 8)[0]) == "0:3-1:3-"


@given(timed_cases(), st.integers(1, 50))
def test_all_rows_are_as_wide_as_the_picture(case, width):
    found = or_error(simulate, case)
    if isinstance(found, Timeline):
        assert all(len(text_of(row)) == width for row in gantt(found, width).values())


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


def test_transfers_that_overlap_are_drawn_once():
    work = (Event(0, Compute(Direction.FORWARD, 0, 0), 0.0, 1.0),)
    ends = ((1.0, 4.0), (2.0, 3.0), (2.0, 6.0))
    moves = tuple(Transfer(0, 1, Direction.FORWARD, 0, "x", *span, 4) for span in ends)
    text = gantt_svg(Timeline(8.0, work, moves), NAMES, width=800)
    boxes = [r for r in ElementTree.fromstring(text).iter() if r.get("fill") == "#8c6d31"]
    thin = [box.get("width") for box in boxes if box.get("height") == "5"]
    assert thin == ["300", "200"] * 2
