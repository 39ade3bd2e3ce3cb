"""Strict reading and plain writing: JSON <-> frozen dataclasses, without conversions and without
unknown fields. Every problem of a file is reported at once, with the path of the field.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NewType

from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.artefacts.graph import LEFT_OUT_AS_DEFAULT
from planner.support.errors import FileError, shown
from planner.support.reading import read_text

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# The latest files, which are parsed once even if several steps read them.
MAX_FILES = 8


# ---- reading


@cache
def reader(kind: Any) -> TypeAdapter[Any]:
    """A strict reader of one kind of artefact.

    Args:
        kind: its frozen dataclass; a field's alias is its name in the file.
    """
    # Pydantic takes a configuration for anything but a dataclass, and hands it on to those inside
    # that have none of their own.
    return TypeAdapter(NewType("Artefact", kind), config=STRICT)  # type: ignore[arg-type]


def read_strict(kind: Any, path: Path, form: str, text: str | None = None) -> Any:
    """An artefact from a JSON file of another program, whose format stands nowhere in it.

    Args:
        kind: its frozen dataclass; a field's alias is its name in the file.
        form: a name of the format, for messages.
        text: of the file, if it was read already.

    Raises:
        FileError: if it is missing, no JSON, or malformed; with every problem of its fields.
    """
    content = read_text(path, form, "give another file") if text is None else text
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected {form}, this is no JSON: {error}") from None
    try:
        return reader(kind).validate_json(content)
    except ValidationError as error:
        raise file_error(path, error) from None


def _field(location: tuple[int | str, ...]) -> str:
    """`links[1].bandwidth` from ("links", 1, "bandwidth")."""
    path = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in location)
    return path.lstrip(".")


# By pydantic's type of an error.
_WORDS = {
    "missing": "missing",
    "extra_forbidden": "unknown field",
    "unexpected_keyword_argument": "unknown field",
    "model_type": "expected a mapping",
    "dataclass_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "finite_number": "expected a finite number",
}
_SELF_SAID = frozenset({"missing", "extra_forbidden", "unexpected_keyword_argument", "value_error"})
# A message of `__post_init__` that begins with a field of the part.
_OWN_FIELD = re.compile(r"[a-z_]+[\w.\[\]-]*: ")


def file_error(path: Path, error: ValidationError) -> FileError:
    """All problems that the schema found in a file, a line each."""
    lines = []
    for one in error.errors():
        place = _field(one["loc"])
        actual = "" if one["type"] in _SELF_SAID else f", got {shown(one['input'])}"
        message = one["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        for line in _WORDS.get(one["type"], message).splitlines():
            joint = "." if one["type"] == "value_error" and _OWN_FIELD.match(line) else ": "
            lines.append(f"{path}: {place + joint if place else ''}{line}{actual}")
    return FileError("\n".join(lines))


@lru_cache(maxsize=MAX_FILES)
def json_of(text: str) -> Any:
    """The value that a text in JSON stands for: the same object each time, so leave it unchanged.

    Raises:
        ValueError, RecursionError: if it is no JSON.
    """
    return parsed_json(text)


def parsed_json(text: str) -> Any:
    """The value that a text in JSON stands for, refused where no other JSON and no terminal could
    show it again.

    Raises:
        ValueError, RecursionError: if it is no JSON, or has halves of a character.
    """
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises where it is half a character
    return value


# ---- writing


_AS_THEY_ARE = frozenset({str, int, float, bool, type(None)})


@cache
def _absent(kind: Any) -> tuple[tuple[str, object], ...]:
    """The fields of a dataclass, each with the value that files leave out; MISSING for none."""
    return tuple(
        (one.name, one.default if LEFT_OUT_AS_DEFAULT.items() <= one.metadata.items() else MISSING)
        for one in fields(kind)
    )


def plain_of(value: Any, forms: Mapping[type, Callable[[Any], Mapping[str, Any]]]) -> Any:
    """An artefact as JSON's mappings, lists, strings and numbers.

    Args:
        forms: by class, the function that gives the fields of those that files have in another
            form.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind in forms:
        value = forms[kind](value)
    elif is_dataclass(value):
        known = ((name, getattr(value, name), absent) for name, absent in _absent(value.__class__))
        value = {name: own for name, own, absent in known if absent is MISSING or own != absent}
    if isinstance(value, Mapping):
        return {str(name): plain_of(one, forms) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain_of(one, forms) for one in value]
    return value.value if isinstance(value, Enum) else value
