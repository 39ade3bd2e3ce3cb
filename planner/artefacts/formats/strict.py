"""Strict reading of foreign JSON: no conversions, no unknown fields, every problem at once."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.artefacts.files import complaint
from planner.support.errors import FileError
from planner.support.reading import read_text

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_strict(kind: Any, path: Path, form: str, text: str | None = None) -> Any:
    """A frozen dataclass, strict by its `__pydantic_config__`, from a JSON file.

    Args:
        kind: the dataclass; a field's alias is its name in the file.
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
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        raise complaint(path, error) from None
