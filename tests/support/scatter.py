"""Predicted over measured figures as points, with the elements of the planner's pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from planner.reports.drawing.svg import INK, document, element, text_width, words

WIDTH, MARGIN, TOP, BOTTOM, LEGEND = 400, 54, 46, 46, 20
GRID, SIZE, RADIUS = "#dddddd", 11, 2.5
# For people who see colours differently: Okabe and Ito, 2008; the last one is for all others.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#999999")
OTHERS = "others"


@dataclass(frozen=True)
class Scatter:
    """One plot, over two logarithmic axes of the same powers of ten.

    Attributes:
        title: above it.
        unit: of both axes.
        points: by name, (measured, predicted), all above 0.
    """

    title: str
    unit: str
    points: Mapping[str, Sequence[tuple[float, float]]]


def picture(title: str, plots: Sequence[Scatter]) -> str:
    """Plots side by side, with one legend below, as the text of an SVG file. The names with the
    most points have colours of their own. Places are whole pixels.
    """
    sizes: dict[str, int] = {}
    for plot in plots:
        for name, some in plot.points.items():
            sizes[name] = sizes.get(name, 0) + len(some)
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[: len(COLOURS) - 1]
    colours = dict(zip(largest, COLOURS, strict=False))
    body = [
        element("g", "\n".join(_plot(plot, colours)), transform=f"translate({i * WIDTH},0)")
        for i, plot in enumerate(plots)
    ]
    if len(sizes) > len(largest):
        colours[OTHERS] = COLOURS[-1]
    rows = list(_legend(colours, WIDTH * len(plots)))
    body += [part for row in rows for part in row]
    return document(title, WIDTH * len(plots), WIDTH + LEGEND * (len(rows) + 0.5), body)


def _plot(plot: Scatter, colours: Mapping[str, str]) -> Iterator[str]:
    figures = [figure for some in plot.points.values() for point in some for figure in point]
    low, high = floor(log10(min(figures))), ceil(log10(max(figures)))
    left, right, top, bottom = MARGIN, WIDTH - 20, TOP, WIDTH - BOTTOM

    def place(measured: float, predicted: float) -> tuple[int, int]:
        x, y = ((log10(one) - low) / (high - low) for one in (measured, predicted))
        return round(left + x * (right - left)), round(bottom - y * (bottom - top))

    yield words(plot.title, WIDTH / 2, 20, 13)
    for power in range(low, high + 1):
        x, y = place(10.0**power, 10.0**power)
        yield _rule((x, top), (x, bottom), GRID)
        yield _rule((left, y), (right, y), GRID)
        yield words(f"{10.0**power:g}", x, bottom + 15, SIZE)
        yield words(f"{10.0**power:g}", left - 6, y + 4, SIZE, "end")
    yield _rule((left, bottom), (right, top), INK)
    yield words(f"measured, {plot.unit}", (left + right) / 2, WIDTH - 12, SIZE)
    yield words(f"predicted, {plot.unit}", left, top - 6, SIZE, "start")
    for name in sorted(plot.points, key=lambda one: (one in colours, one)):
        for x, y in sorted({place(*point) for point in plot.points[name]}):
            fill = colours.get(name, COLOURS[-1])
            yield element("circle", cx=x, cy=y, r=RADIUS, fill=fill, fill_opacity=0.7)


def _rule(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=colour)


def _legend(colours: Mapping[str, str], width: float) -> Iterator[list[str]]:
    """Points and their names, in rows that are filled from the left."""
    row: list[str] = []
    x, y = float(MARGIN), WIDTH + LEGEND / 2
    for name, colour in colours.items():
        needed = 30 + text_width(name, SIZE)
        if row and x + needed > width:
            yield row
            row, x, y = [], float(MARGIN), y + LEGEND
        row.append(element("circle", cx=x, cy=y, r=4, fill=colour))
        row.append(words(name, x + 9, y + 4, SIZE, "start"))
        x += needed
    yield row
