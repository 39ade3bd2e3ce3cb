"""Plots of measurements over two logarithmic axes, as SVG: no plotting library is needed."""

from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 300, 62, 48, 30, 14
COLORS = ("#1f5fa8", "#c2511d", "#3a7d3a")


def panel(title, x_label, y_label, series):
    """One plot.

    series: by its name in the legend, points (x, y), both above 0.
    """
    points = [point for some in series.values() for point in some]
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _span([y for _, y in points])

    def place(x, y):
        across = (log10(x) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (log10(y) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-size="13">'
             f"{escape(title)}</text>"]  # fmt: skip
    parts += _grid(place, (x_low, x_high), (y_low, y_high))
    parts += [_label(WIDTH / 2, HEIGHT - 10, x_label), _label(14, HEIGHT / 2, y_label, -90)]
    for index, (name, some) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        placed = [place(*point) for point in sorted(some)]
        line = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in placed]
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 16 + 15 * index}" fill="{color}">'
                     f"{escape(name)}</text>")  # fmt: skip
    return "\n".join(parts)


def figure(panels):
    """Panels two by two, as the text of an SVG file."""
    rows = -(-len(panels) // 2)
    size = f'width="{2 * WIDTH}" height="{rows * HEIGHT}"'
    body = "\n".join(
        f'<g transform="translate({WIDTH * (i % 2)},{HEIGHT * (i // 2)})">\n{one}\n</g>'
        for i, one in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _span(values):
    """Whole powers of ten around the values, and a bit of room for the legend above."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)


def _grid(place, across, up):
    corner, end = place(10 ** across[0], 10 ** up[0]), place(10 ** across[1], 10 ** up[1])
    for power in range(across[0], across[1] + 1):
        x, _ = place(10**power, 10 ** up[0])
        yield f'<line x1="{x}" y1="{corner[1]}" x2="{x}" y2="{end[1]}" stroke="#ddd"/>'
        yield _label(x, corner[1] + 15, f"{10.0**power:g}")
    for power in range(up[0], up[1] + 1):
        _, y = place(10 ** across[0], 10**power)
        yield f'<line x1="{corner[0]}" y1="{y}" x2="{end[0]}" y2="{y}" stroke="#ddd"/>'
        yield (
            f'<text x="{corner[0] - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>'
        )  # fmt: skip


def _label(x, y, text, turned=0):
    turn = f' transform="rotate({turned} {x} {y})"' if turned else ""
    return f'<text x="{x}" y="{y}" text-anchor="middle"{turn}>{escape(text)}</text>'
