"""Charts of lines, with the elements of the planner's pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from planner.reports.drawing.svg import INK, document, element, text_width, words

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 250, 58, 14, 32, 42
GRID, SIZE, LEGEND = "#dddddd", 11, 22
MAX_POWERS = 7


@dataclass(frozen=True)
class Look:
    """How the lines of one name are drawn, in all charts.

    Attributes:
        color: of the stroke.
        width: of the stroke; wide ones go below narrow ones that lie on them.
        dashes: lengths of dashes and gaps, as SVG has them; empty draws it through.
    """

    color: str
    width: float = 1.5
    dashes: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        across: of the horizontal axis.
        lines: by name, the points (x, y).
        up: the least and the largest y; both above 0 where the axis is logarithmic.
        logarithmic: whether the vertical axis has powers of ten.
        mark: a y with a line of its own, and the name of it.
    """

    title: str
    across: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    up: tuple[float, float]
    logarithmic: bool = False
    mark: tuple[float, str] | None = None


def picture(title: str, rows: Sequence[Sequence[Chart]], looks: Mapping[str, Look]) -> str:
    """Charts in rows, with one legend below, as the text of an SVG file."""
    width = max(map(len, rows)) * WIDTH
    body = [
        element(
            "g", "\n".join(_chart(chart, looks)), transform=f"translate({x * WIDTH},{y * HEIGHT})"
        )
        for y, row in enumerate(rows)
        for x, chart in enumerate(row)
    ]
    bottom = len(rows) * HEIGHT + LEGEND / 2
    legend = _legend(looks, width)
    for row, parts in enumerate(legend):
        place = f"translate(0,{bottom + row * LEGEND})"
        body.append(element("g", "\n".join(parts), transform=place))
    return document(title, width, bottom + len(legend) * LEGEND, body)


def _chart(chart: Chart, looks: Mapping[str, Look]) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    most = max(x for x, _ in points)
    low, high = (_level(chart, y) for y in chart.up)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (_level(chart, min(max(y, chart.up[0]), chart.up[1])) - low) / (high - low)
        across = x / most * (WIDTH - LEFT - RIGHT)
        return LEFT + across, HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [words(chart.title, WIDTH / 2, 20, 13)]
    for y, text in _ticks(chart):
        parts += _rule(place(0, y), place(most, y), GRID)
        parts.append(words(text, LEFT - 6, place(0, y)[1] + 4, SIZE, "end"))
    for x in _steps(0, most):
        parts.append(words(f"{x:g}", place(x, chart.up[0])[0], HEIGHT - BOTTOM + 15, SIZE))
    parts.append(words(chart.across, (WIDTH + LEFT - RIGHT) / 2, HEIGHT - 8, SIZE))
    if chart.mark is not None:
        y, text = chart.mark
        parts += _rule(place(0, y), place(most, y), INK)
        parts.append(words(text, WIDTH - RIGHT, place(most, y)[1] - 5, SIZE, "end"))
    for name in sorted(chart.lines, key=lambda n: -looks[n].width):
        parts.append(_line([place(*point) for point in chart.lines[name]], looks[name]))
    return parts


def _level(chart: Chart, y: float) -> float:
    return log10(y) if chart.logarithmic else y


def _ticks(chart: Chart) -> list[tuple[float, str]]:
    """Places of the vertical axis, with their texts."""
    low, high = chart.up
    if not chart.logarithmic:
        return [(y, f"{y:g}") for y in _steps(low, high)]
    powers = range(ceil(log10(low)), floor(log10(high)) + 1)
    every = ceil(len(powers) / MAX_POWERS)
    return [(10.0**power, f"1e{power}") for power in powers if power % every == 0]


def _steps(low: float, high: float) -> list[float]:
    """Round numbers between two others, with four to ten steps.

    >>> _steps(0, 40)
    [0, 10, 20, 30, 40]
    """
    power = 10 ** floor(log10((high - low) / 4))
    step = max(f * power for f in (1, 2, 5) if f * power <= (high - low) / 4)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(i * step, 9) for i in range(first, last + 1)]


def _rule(start: tuple[float, float], end: tuple[float, float], color: str) -> list[str]:
    return [element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=color)]


def _line(points: Sequence[tuple[float, float]], look: Look) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=text, fill="none", **_stroke(look))


def _stroke(look: Look) -> dict[str, str | float]:
    dashes = {"stroke_dasharray": look.dashes} if look.dashes else {}
    return {"stroke": look.color, "stroke_width": look.width, **dashes}


def _legend(looks: Mapping[str, Look], width: float) -> list[list[str]]:
    """Lines and their names, in rows that are filled from the left."""
    rows: list[list[str]] = [[]]
    x = float(LEFT)
    for name, look in looks.items():
        needed = 60 + text_width(name, SIZE)
        if x + needed > width:
            rows.append([])
            x = LEFT
        rows[-1].append(element("line", x1=x, y1=0, x2=x + 26, y2=0, **_stroke(look)))
        rows[-1].append(words(name, x + 34, 4, SIZE, "start"))
        x += needed
    return rows
