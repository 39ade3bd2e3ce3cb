"""A timeline as SVG: a lane of actions per device, a thin one of its transfers below, time to the
right. Bars narrower than half a pixel are drawn together with their neighbours of the same kind.
"""

from collections.abc import Iterable, Iterator, Mapping

from planner.reports.drawing.gantt import Activity, Bar, lanes
from planner.reports.drawing.svg import INK, PAPER, document, element, rectangle, text_width, words
from planner.simulator.timeline import Timeline
from planner.support.units import format_seconds

# For people who see colours differently: Okabe and Ito, 2008.
COLOURS: Mapping[Activity, str] = {
    Activity.FORWARD: "#56b4e9", Activity.BACKWARD: "#009e73", Activity.SUM: "#e69f00",
    Activity.STEP: "#cc79a7", Activity.POST: "#999999", Activity.TRANSFER: "#8c6d31",
}  # fmt: skip
LANE = "#f1f3f5"
HEIGHT, THIN, GAP, MARGIN = 22.0, 5.0, 8.0, 12.0
LETTERS = 10.0
# (kind, left, right, label) in pixels from the left end of the lanes.
_Bar = tuple[Activity, float, float, str]


def gantt_svg(timeline: Timeline, names: Mapping[int, str], width: int = 1200) -> str:
    """The picture: a whole SVG file, the same for the same timeline.

    Args:
        names: of all devices in the timeline, by index.
        width: of the lanes, in pixels.
    """
    shown = lanes(timeline)
    left = MARGIN + GAP + max((text_width(names[x.device], LETTERS) for x in shown), default=0.0)
    step = HEIGHT + THIN + GAP
    axis = MARGIN + step * len(shown)
    scale = width / timeline.iteration_s if timeline.iteration_s > 0 else 0.0
    body = []
    for row, lane in enumerate(shown):
        top = MARGIN + step * row
        body.append(rectangle(left, top, width, HEIGHT + THIN, LANE))
        body.append(words(names[lane.device], left - GAP, top + HEIGHT / 2 + 4, LETTERS, "end"))
        for bar in _merged(_pixels(lane.actions, scale)):
            body += _drawn(bar, left, top, HEIGHT - 1)
        for bar in _merged(_apart(_pixels(lane.transfers, scale))):
            body += _drawn(bar, left, top + HEIGHT, THIN)
    body += _axis(timeline.iteration_s, left, axis, width)
    kinds = {bar.kind for lane in shown for bar in (*lane.actions, *lane.transfers)}
    body += _legend(kinds, left, axis + 34)
    title = f"{len(shown)} devices, {format_seconds(timeline.iteration_s)} per iteration"
    return document(title, left + width + MARGIN + 30, axis + 50, body)


def _pixels(bars: Iterable[Bar], scale: float) -> list[_Bar]:
    """The bars by their start, in pixels from the left end of the lanes."""
    spans = sorted(bars, key=lambda bar: (bar.start_s, bar.end_s))
    return [(bar.kind, bar.start_s * scale, bar.end_s * scale, bar.label) for bar in spans]


def _apart(bars: Iterable[_Bar]) -> Iterator[_Bar]:
    """Bars that may overlap, without the parts that an earlier one covers."""
    reached = 0.0
    for kind, start, end, label in bars:
        if end > reached:
            yield kind, max(start, reached), end, label
            reached = end


def _merged(bars: Iterable[_Bar]) -> Iterator[_Bar]:
    """The bars with neighbours of one kind joined, where one of them is too narrow to be seen and
    so is the gap between them.
    """
    last: _Bar | None = None
    for bar in bars:
        if last is not None:
            kind, left, right, _ = last
            narrow = min(bar[2] - bar[1], right - left) < 0.5
            if kind is bar[0] and bar[1] - right < 0.5 and narrow:
                last = kind, left, max(right, bar[2]), ""
                continue
            yield last
        last = bar
    if last is not None:
        yield last


def _drawn(bar: _Bar, left: float, top: float, height: float) -> Iterator[str]:
    kind, start, end, label = bar
    outline: dict[str, float | str] = {"stroke": PAPER, "stroke_width": 0.5}
    width = max(end - start, 0.2)
    yield rectangle(left + start, top, width, height, COLOURS[kind], **outline)
    if label and text_width(label, LETTERS) + 3 < end - start:
        yield words(label, left + (start + end) / 2, top + height / 2 + 4, LETTERS)


def _axis(iteration_s: float, left: float, top: float, width: float) -> Iterator[str]:
    """Times below the lanes, at a round distance."""
    yield element("line", x1=left, y1=top, x2=left + width, y2=top, stroke=INK)
    if iteration_s <= 0:
        return
    tick_s = _round_step(iteration_s / 8)
    for i in range(int(iteration_s / tick_s) + 1):
        x = left + i * tick_s / iteration_s * width
        yield element("line", x1=x, y1=top, x2=x, y2=top + 4, stroke=INK)
        yield words(format_seconds(i * tick_s) if i else "0", x, top + 15, LETTERS)


def _round_step(least_s: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least this.

    >>> _round_step(0.3), _round_step(2.0)
    (0.5, 2.0)
    """
    power = 1.0
    while power > least_s:
        power /= 10
    while power * 10 <= least_s:
        power *= 10
    return next(power * k for k in (1, 2, 5, 10) if power * k >= least_s)


def _legend(kinds: set[Activity], left: float, top: float) -> Iterator[str]:
    x = left
    for kind in Activity:
        if kind in kinds:
            yield rectangle(x, top - 9, 12, 10, COLOURS[kind])
            yield words(kind.value, x + 16, top, LETTERS, "start")
            x += 34 + text_width(kind.value, LETTERS)
