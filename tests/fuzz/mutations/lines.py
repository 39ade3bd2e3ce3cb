"""Mutations of text in lines and words."""

import re
from random import Random

from tests.fuzz.mutations.values import FIGURES, quantity, text

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\W\d][\w.]*")
_MARK = re.compile(r"[^\w\s]+")


def mutated_lines(random: Random, content: bytes) -> tuple[bytes, str]:
    """A text with one to three changes of its lines, numbers, words or marks."""
    whole, words = content.decode(), []
    for _ in range(random.choice((1, 1, 2, 3))):
        kind = random.choice(("line", "number", "number", "word", "mark", "rename", "indent"))
        change = {"line": _line, "rename": _rename, "indent": _indent}.get(kind)
        whole = change(random, whole) if change else _part(random, whole, kind)
        words.append(kind)
    return whole.encode("utf-8", "surrogatepass"), ", ".join(words)


def _line(random: Random, whole: str) -> str:
    """A line that is gone, there twice, elsewhere, strange, or there very often."""
    lines = whole.splitlines(keepends=True) or [""]
    at, to = random.randrange(len(lines)), random.randrange(len(lines) + 1)
    match random.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, lines[at])
        case 2:
            lines.insert(min(to, len(lines) - 1), lines.pop(at))
        case 3:
            lines.insert(to, text(random, (lines[at],)) + "\n")
        case _:
            lines[at] *= random.choice((100, 3000))
    return "".join(lines)


def _part(random: Random, whole: str, kind: str) -> str:
    """Another number, word or mark in one place."""
    pattern = {"number": _NUMBER, "word": _WORD, "mark": _MARK}[kind]
    places = list(pattern.finditer(whole))
    if not places:
        return whole + text(random)
    place = random.choice(places)
    if kind == "number":
        new = random.choice((random.choice(FIGURES), quantity(random), "999999999", "-1"))
        if whole[: place.start()].endswith("="):  # elsewhere it may be part of a name
            new = random.choice((new, "nan", "inf"))
    else:
        new = text(random, (random.choice(places)[0],))
    return whole[: place.start()] + new + whole[place.end() :]


def _rename(random: Random, whole: str) -> str:
    """Another name for a word, everywhere."""
    words = _WORD.findall(whole)
    if not words:
        return whole
    word = random.choice(words)
    new = text(random, (word,))
    return re.sub(rf"\b{re.escape(word)}\b", lambda _: new, whole)


def _indent(random: Random, whole: str) -> str:
    """A line that begins elsewhere."""
    lines = whole.splitlines(keepends=True) or [""]
    at = random.randrange(len(lines))
    lines[at] = random.choice((" ", "\t", "    ", "- ", "? ", "")) + lines[at].lstrip(
        random.choice((" ", "\t", ""))
    )
    return "".join(lines)
