"""Bars of text: figures beside each other, for the eye."""

from collections.abc import Sequence

EIGHTHS = " ▏▎▍▌▋▊▉█"
BOUND = "│"


def bars(
    figures: Sequence[tuple[str, float, str]], width: int, bound: float = 0.0
) -> tuple[str, ...]:
    """A line per figure: its name, a bar, and the figure as it is written.

    Args:
        figures: name, figure of at least 0, and the text behind the bar.
        width: of the longest bar, in columns.
        bound: a lower bound of the figures, which is marked; 0 for none.

    >>> bars([("a", 2.0, "2 s"), ("bb", 1.0, "1 s")], 4)
    ('a   ████  2 s', 'bb  ██    1 s')
    >>> bars([("a", 2.0, "2 s")], 4, bound=1.0)
    ('a  ██│█  2 s',)
    """
    longest = max((figure for _, figure, _ in figures), default=0.0) or 1.0
    names = max((len(name) for name, _, _ in figures), default=0)
    mark = int(width * bound / longest)
    lines = []
    for name, figure, text in figures:
        bar = _bar(width * figure / longest).ljust(width)
        if 0 < mark < width:
            bar = bar[:mark] + BOUND + bar[mark + 1 :]
        lines.append(f"{name.ljust(names)}  {bar}  {text}")
    return tuple(lines)


def _bar(length: float) -> str:
    """A bar of this length in columns, to an eighth of one; at least an eighth above 0."""
    eighths = max(round(8 * length), 1 if length > 0 else 0)
    whole, rest = divmod(eighths, 8)
    return EIGHTHS[8] * whole + (EIGHTHS[rest] if rest else "")
