"""The elements of the pictures: rectangles, text and the file around them, as SVG."""

import re
from collections.abc import Iterable
from html import escape as escaped

from planner.support.outputs import FileKind, head_of
from planner.support.printable import printable

# Colours that all pictures share.
INK, PAPER, PLAIN = "#1a1a1a", "#ffffff", "#c9cfd6"
# Width of a letter, as a share of the size of the font: somewhat more than most letters have.
LETTER = 0.62


# How `document` begins, with any size of the picture.
_HEAD = re.compile(
    r"<svg xmlns='http://www\.w3\.org/2000/svg' width='\d+' height='\d+' viewBox='[\d ]+'"
    r" role='img' font-family='Helvetica, Arial, sans-serif'>\n<title>"
)
PICTURE_FILE = FileKind("a picture", lambda path: _HEAD.match(head_of(path)) is not None)


def escape(text: str) -> str:
    r"""Text as SVG holds it. XML has no control characters, not even escaped ones.

    >>> escape("a < b\x1b")
    'a &lt; b\\x1b'
    """
    return escaped(printable(text))


def text_width(text: str, size: float) -> float:
    """Room that a line of text takes, in pixels, for a size of the font."""
    return LETTER * size * len(text)


def element(tag: str, content: str = "", /, **attributes: float | str) -> str:
    """One element.

    Args:
        content: SVG inside it, escaped already.
        attributes: an underscore stands for a hyphen; numbers are written with two digits behind
            the point at most, which is finer than any screen.

    >>> element("line", x1=1.0, y1=0.12345, stroke_width=2)
    "<line x1='1' y1='0.12' stroke-width='2'/>"
    >>> element("text", escape("a < b"), fill="red")
    "<text fill='red'>a &lt; b</text>"
    """
    fields = "".join(
        f" {name.replace('_', '-')}='{_written(value)}'" for name, value in attributes.items()
    )
    return f"<{tag}{fields}>{content}</{tag}>" if content else f"<{tag}{fields}/>"


def _written(value: float | str) -> str:
    if isinstance(value, str):
        return escape(value)
    # Adding 0 turns a negative zero, which small numbers round to, into zero.
    return f"{round(value, 2) + 0.0:.15g}"


def rectangle(
    left: float, top: float, width: float, height: float, fill: str, **more: float | str
) -> str:
    """A filled rectangle, without an outline unless `more` has a `stroke`."""
    return element("rect", x=left, y=top, width=width, height=height, fill=fill, **more)


def words(
    text: str, x: float, y: float, size: float, anchor: str = "middle", **more: float | str
) -> str:
    """A line of text whose start, middle or end is at x; y is its baseline."""
    content = escape(text)
    return element("text", content, x=x, y=y, font_size=size, fill=INK, text_anchor=anchor, **more)


def document(title: str, width: float, height: float, body: Iterable[str]) -> str:
    """A whole file. The picture has paper of its own, so that it reads on light and dark pages."""
    whole, high = f"{width:.0f}", f"{height:.0f}"
    paper = rectangle(0, 0, round(width), round(height), PAPER)
    lines = ["", element("title", escape(title)), paper, *body, ""]
    return (
        element(
            "svg",
            "\n".join(lines),
            xmlns="http://www.w3.org/2000/svg",
            width=whole,
            height=high,
            viewBox=f"0 0 {whole} {high}",
            role="img",
            font_family="Helvetica, Arial, sans-serif",
        )
        + "\n"
    )
