"""Text from files for people to read: names of initializers, operators, hosts and files may hold
anything, and must neither move the cursor nor turn the line around nor pretend to be other lines.
"""

import unicodedata
from collections.abc import Sequence

# Control codes (ESC and C1 among them), formats (bidi overrides, invisible spaces), surrogates and
# line separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""The text with every character that cannot be seen written as its escape.

    >>> printable("conv1 \x1b[2J\u202e\n\ud800 Größe")
    'conv1 \\x1b[2J\\u202e\\n\\ud800 Größe'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSEEN else c
        for c in text
    )


def printable_lines(text: str) -> str:
    r"""The same for a text of several lines, which stay.

    >>> printable_lines("two\nlines\r\x9b")
    'two\nlines\\r\\x9b'
    """
    return "\n".join(map(printable, text.split("\n")))


def few(names: Sequence[str], most: int = 3) -> str:
    """A few of the names for a message.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
